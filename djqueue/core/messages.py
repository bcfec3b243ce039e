"""Texts of errors and log lines: values shortened or hidden, numbers with units, and log lines about
events that may occur by the thousand.
"""

import re
from collections.abc import Callable, Hashable
from threading import Lock
from time import monotonic
from typing import Any, Protocol

LONGEST = 200
"""Maximum number of characters of a representation in a message."""


def gettext_noop(text: str) -> str:
    """Mark a text that the dashboard translates."""
    return text


def shown(value: Any) -> str:
    """Return the representation of a value, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} with too many digits to show"  # Python limits the digits.
    except Exception:  # Nested too deeply, or its class is broken.
        return kind_of(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def in_one_line(error: object) -> str:
    """Return the text of an error in one line."""
    if isinstance(error, Exception):
        hide_row(error)
    return " ".join(str(error).split())


def hide_row(error: BaseException) -> None:
    """Remove what PostgreSQL adds to the message of an error: the row, for example, with a job's payload."""
    driver_error = error.__cause__ or error
    about = getattr(driver_error, "diag", None)
    # Of a deadlock, these are the processes.
    if about is not None and about.message_primary and not (about.sqlstate or "").startswith("40"):
        text = " ".join(filter(None, (about.message_primary, about.message_hint)))
        if error.args == driver_error.args:
            error.args = (text,)
        driver_error.args = (text,)


CREDENTIALS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)\S*@")
"""Credentials of a URL: everything up to the last @, since a password may hold any character."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""A dotted path, for example."""
SHOWN = re.compile(r"[^:/@=\s]{1,100}")
"""A text that is neither a URL nor a part of one with a password."""


class HiddenOptions(dict[str, Any]):
    """Options of a storage whose representation shows only their names."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{shown_name(name)}: …" for name in self) + "}"

    __str__ = __repr__


def numbered(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 job` or `2,000 jobs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def without_credentials(text: str) -> str:
    """Return a text without the user names and passwords of its URLs."""
    return CREDENTIALS.sub(r"\1…@", text) if "://" in text else text


def shown_name(value: object) -> str:
    """Return the representation of a name or a number; of what may be a URL, only its type."""
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str) and SHOWN.fullmatch(value):
        return repr(value)
    return kind_of(value)


def kind_of(value: object) -> str:
    """Return what a value is, without its content."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def size(number: float) -> str:
    """Return a number of bytes in readable form."""
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1_000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1_000
    return f"{number:.1f} TB"


class Logs(Protocol):
    """A logger."""

    def log(self, level: int, msg: str, /, *args: object, exc_info: BaseException | None = None) -> None:
        """Log a record."""


class ThrottledLog:
    """A log that shows each kind of event at most once in `interval` seconds, and counts the events in
    between.

    One entry is kept for each kind, so there must be few.
    """

    def __init__(self, logger: Logs, interval: float, clock: Callable[[], float] = monotonic) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """Time of the last line and number of events since, by kind."""

    def log(
        self, level: int, kind: Hashable, message: str, *args: Any, exc_info: BaseException | None = None
    ) -> bool:
        """Log an event unless a line about its kind was logged a moment ago; return whether it was logged."""
        now = self._clock()
        with self._lock:
            last, skipped = self._kinds.get(kind, (None, 0))
            if last is not None and now - last < self._interval:
                self._kinds[kind] = last, skipped + 1
                return False
            self._kinds[kind] = now, 0
        if skipped:
            message += " (%d similar events since the last line)"
            args = (*args, skipped)
        self._logger.log(level, message, *args, exc_info=exc_info)
        return True
