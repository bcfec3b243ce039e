"""Values in error messages: shortened if they are large, and hidden if they may contain a password."""

import re
from typing import Any

LONGEST = 200
"""Maximum number of characters of a representation in a message."""


def shown(value: Any) -> str:
    """Return the representation of a value, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:
        return f"{type(value).__name__} with too many digits to show"  # Python limits the digits.
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def in_one_line(error: object) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


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
