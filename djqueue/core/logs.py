"""Loggers of djqueue. The project's handlers and filters may raise or block: djqueue's own work goes on.

    logger = Log("djqueue.worker")

The records are those of `logging.getLogger("djqueue.worker")`. While a worker or a supervisor runs, they are
passed to the handlers on a thread of its own, so that neither the worker's event loop, nor its heartbeat, nor
the supervisor waits for these.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from traceback import TracebackException
from types import TracebackType
from typing import Any

from .callqueue import CallQueue
from .messages import ThrottledLog
from .sourcelines import frames_in, limited

MAX_WAITING = 2_000
"""Records that wait for slow handlers; further ones are dropped and counted."""
FLUSH_TIMEOUT = 5.0
"""Seconds that the handlers have to process the last records of a worker."""
COMPLAINT_INTERVAL = 60.0
"""Seconds between two lines about handlers of one class."""
MAX_TRACEBACK = 20_000
"""Maximum of characters of a traceback; a longer one is cut in the middle."""
MAX_FRAMES = 500
"""Maximum of frames of each traceback: those next to the error."""
CUT = "\n[...]\n"
"""Text in place of the middle of a text that is too long."""

FRAMES = vars(BaseException)["__traceback__"]
"""The attribute itself: to read it runs no code of the exception's class."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
GivenError = bool | BaseException | ExcInfo | tuple[None, None, None] | None


class Log:
    """The logger with a name, as far as djqueue uses it."""

    __slots__ = ("_logger", "isEnabledFor")

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self.isEnabledFor = self._logger.isEnabledFor
        """Returns whether records of a level are logged."""

    def debug(self, text: str, *args: object, **more: Any) -> None:
        """Log a record of level DEBUG."""
        self._log(logging.DEBUG, text, args, **more)

    def info(self, text: str, *args: object, **more: Any) -> None:
        """Log a record of level INFO."""
        self._log(logging.INFO, text, args, **more)

    def warning(self, text: str, *args: object, **more: Any) -> None:
        """Log a record of level WARNING."""
        self._log(logging.WARNING, text, args, **more)

    def error(self, text: str, *args: object, **more: Any) -> None:
        """Log a record of level ERROR."""
        self._log(logging.ERROR, text, args, **more)

    def exception(self, text: str, *args: object, **more: Any) -> None:
        """Log a record of level ERROR with the traceback of the exception that is handled."""
        self._log(logging.ERROR, text, args, exc_info=True, **more)

    def log(self, level: int, text: str, *args: object, **more: Any) -> None:
        """Log a record."""
        self._log(level, text, args, **more)

    def _log(
        self,
        level: int,
        text: str,
        args: tuple[object, ...],
        exc_info: GivenError = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        logger = self._logger
        if not logger.isEnabledFor(level):
            return
        file, line, function, _ = logger.findCaller(stacklevel=3)
        error = _exc_info(exc_info)
        record = logger.makeRecord(logger.name, level, file, line, text, args, error, function, extra)
        if error is not None:
            # Formatters use this text instead of their own, which has no limit and runs the exception's code.
            record.exc_text = traceback_text(*error).rstrip("\n")
        if _workers:
            _queue.put(partial(copy_context().run, _deliver, logger, record))
        else:
            _deliver(logger, record)


_workers = 0
"""Number of workers and supervisors that run in this process."""


@contextmanager
def handled_apart(before: Callable[[], object], idle: Callable[[], object]) -> Iterator[None]:
    """Pass the records within a block to their handlers on a thread of its own.

    Args:
        before: Called before each record on that thread, to prepare what handlers use.
        idle: Called when the thread ends, to release it.
    """
    global _workers
    _queue.before, _queue.idle = before, idle
    _workers += 1
    try:
        yield
    finally:
        _workers -= 1


def flush(timeout: float = FLUSH_TIMEOUT) -> bool:
    """Wait until the handlers have processed all records; return whether they have."""
    return _queue.flush(timeout)


def traceback_text(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> str:
    """Return a traceback as text, of limited length, whatever the exception's class does."""
    try:
        made = TracebackException(kind, error, frames, limit=-MAX_FRAMES, lookup_lines=False, compact=True)
        with limited(frames_in(made)):
            lines = list(made.format())
    except BaseException as broken:
        return f"(the traceback cannot be shown: {type_name(broken)})"
    text = "".join(lines) if len(lines) == 1 else "".join(shortened(line, MAX_TRACEBACK) for line in lines)
    return shortened(text, MAX_TRACEBACK)


def frames_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception, without a look at attributes that its class may refuse."""
    frames: TracebackType | None = FRAMES.__get__(error)
    return frames


def type_name(value: object) -> str:
    """Return the dotted name of the class of an exception, or of another object."""
    kind = type(value)
    try:
        return f"{kind.__module__}.{kind.__qualname__}"
    except BaseException:
        return "(a class without a readable name)"  # A metaclass may refuse it.


def shortened(text: str, limit: int) -> str:
    """Return a text, cut in the middle above a number of characters."""
    if len(text) <= limit:
        return text
    half = (limit - len(CUT)) // 2
    return text[:half] + CUT + text[-half:]


def storable(text: str) -> str:
    """Return text without lone surrogates and NUL, which databases reject."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _exc_info(given: GivenError) -> ExcInfo | None:
    if given is True:
        given = sys.exc_info()
    if isinstance(given, tuple):
        kind, error, frames = given
        return None if kind is None or error is None else (kind, error, frames)
    return None if given is None or given is False else (type(given), given, frames_of(given))


def _deliver(logger: logging.Logger, record: logging.LogRecord) -> None:
    """Pass a record to the handlers of a logger, as `Logger.handle` does, whatever one of them raises."""
    if logger.disabled or not _passes(logger, record):
        return
    at: logging.Logger | None = logger
    found = False
    while at is not None:
        for handler in list(at.handlers):
            found = True
            _handle(handler, record)
        at = at.parent if at.propagate else None
    if not found and logging.lastResort is not None:
        _handle(logging.lastResort, record)


def _passes(logger: logging.Logger, record: logging.LogRecord) -> bool:
    try:
        return bool(logger.filter(record))
    except Exception as error:
        _complain("filter of the logger", type(logger), error)
        return True


def _handle(handler: logging.Handler, record: logging.LogRecord) -> None:
    if record.levelno < handler.level:
        return
    try:
        handler.handle(record)
    except Exception as error:
        _complain("log handler", type(handler), error)


def _complain(what: str, kind: type, error: BaseException) -> None:
    """Write one line about the project's code to standard error, where no handler of the project is asked."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    text = "The %s %s raised %s: %s. It has missed a record of djqueue."
    _complaints.log(logging.ERROR, name, text, what, name, type_name(error), text_of(error, _in_one_line))


def _in_one_line(text: str) -> str:
    return shortened(" ".join(text.split()), 1_000)


def text_of(error: object, form: Callable[[str], str]) -> str:
    """Return the text of an error in a form, or why there is none: `str` runs code of the error's class."""
    try:
        return form(str(error))
    except BaseException as broken:
        return f"(the message cannot be shown: {type_name(broken)})"


def _on_error(error: BaseException) -> None:
    _complain("log handler", logging.Handler, error)


def _on_drop(number: int) -> None:
    """Tell that records were dropped, in their place."""
    logger = logging.getLogger("djqueue")
    text = "The log handlers are too slow: %d records of djqueue were dropped."
    _deliver(logger, logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, (number,), None))


def _after_fork() -> None:
    """Forget the workers in a forked child, which may end without waiting for another thread."""
    global _workers
    _workers = 0


class _StandardError(logging.Logger):
    """A logger that the project cannot configure."""

    def __init__(self) -> None:
        super().__init__("djqueue.logs")
        if logging.lastResort is not None:
            self.addHandler(logging.lastResort)


_complaints = ThrottledLog(_StandardError(), COMPLAINT_INTERVAL)
_queue = CallQueue("djqueue-logs", MAX_WAITING, on_error=_on_error, on_drop=_on_drop)
os.register_at_fork(after_in_child=_after_fork)
