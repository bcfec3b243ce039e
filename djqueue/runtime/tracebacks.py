"""From an exception to the error that is kept with a job."""

import traceback
from pathlib import Path
from types import TracebackType

from djqueue.core.job import JobFailure

MAX_MESSAGE = 10_000
"""Characters of a message."""
MAX_TRACEBACK = 20_000
"""Characters of a traceback; what is too much is left out of its middle."""
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
OWN = str(Path(__file__).parent)
"""Where this package's frames come from."""


def job_error(error: BaseException) -> JobFailure:
    """Type, message and traceback of an exception, the latter from the handler on."""
    return JobFailure(type_name(error), _message(error), _formatted(error))


def exc_info(error: BaseException | None) -> ExcInfo | None:
    """What a log record shows of an exception: its traceback, from the handler on."""
    return None if error is None else (type(error), error, _from_handler(error.__traceback__))


def type_name(error: BaseException) -> str:
    """The dotted name of an exception's class."""
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return _text(str(error), MAX_MESSAGE)
    except BaseException as broken:
        # It runs the code of the exception's class, which may do anything.
        return f"(its message cannot be shown: {type_name(broken)})"


def _formatted(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(type(error), error, _from_handler(error.__traceback__))
    except BaseException as broken:
        return f"(the traceback cannot be shown: {type_name(broken)})"
    return _text("".join(lines), MAX_TRACEBACK)


def _from_handler(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OWN):
        frames = frames.tb_next
    return frames


def _text(text: str, limit: int) -> str:
    # Databases take neither lone surrogates nor, some of them, NUL.
    clean = text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    if len(clean) <= limit:
        return clean
    half = (limit - len(CUT)) // 2
    return clean[:half] + CUT + clean[-half:]


CUT = "\n[...]\n"
