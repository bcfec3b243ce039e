"""Exceptions as stored errors, and the stacks of this process's threads and tasks as text."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from djqueue.core.job import JobFailure
from djqueue.core.logs import (
    MAX_TRACEBACK,
    ExcInfo,
    frames_of,
    shortened,
    storable,
    text_of,
    traceback_text,
    type_name,
)
from djqueue.core.sourcelines import limited
from djqueue.core.workers import MAX_DUMP

from .owntasks import all_tasks

MAX_TYPE = 1_000
"""Maximum of characters of the name of a class."""
MAX_MESSAGE = 10_000
"""Maximum of characters of a message."""
DEPTH = 60
"""Maximum of frames of each stack; the outermost are left out."""
NAMED = 10
"""Maximum of names listed for threads or tasks with the same stack."""
CHAIN = 200
"""Maximum of nested coroutines of one task."""
OWN = str(Path(__file__).parent)
"""Folder of this package's own frames."""


def job_error(error: BaseException) -> JobFailure:
    """Return an exception's type, message and traceback, which begins at the handler."""
    return JobFailure(shortened(type_name(error), MAX_TYPE), message_of(error), _formatted(error))


def exc_info(error: BaseException | None) -> ExcInfo | None:
    """Return an exception for a log record, with a traceback that begins at the handler."""
    return None if error is None else (type(error), error, _from_handler(frames_of(error)))


def clean(text: str, limit: int) -> str:
    """Return text that every database accepts, cut in the middle above a number of characters."""
    # First shortened: the text may be larger than the memory for its copies.
    return shortened(storable(shortened(text, limit)), limit)


def stacks(heading: str, loop: asyncio.AbstractEventLoop) -> str:
    """Return the stacks of all threads but the caller's, and of the loop's tasks. From any thread.

    Stacks have files, lines and functions, but no values. Threads or tasks with equal stacks share an entry.
    """
    frames = sys._current_frames()
    own = threading.get_ident()
    threads = [thread for thread in threading.enumerate() if thread.ident not in (None, own)]
    in_threads = ((thread.name, _stack(frames.get(thread.ident or 0))) for thread in threads)
    in_tasks = ((_name(task), _waiting(task)) for task in all_tasks(loop))
    parts = [heading, *_grouped("Thread", in_threads), *_grouped("Task", in_tasks)]
    return _bounded(parts)


def message_of(error: object) -> str:
    """Return the text of an error, of limited length."""
    return text_of(error, lambda text: clean(text, MAX_MESSAGE))


def _formatted(error: BaseException) -> str:
    return clean(traceback_text(type(error), error, _from_handler(frames_of(error))), MAX_TRACEBACK)


def _from_handler(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(OWN):
        frames = frames.tb_next
    return frames


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "  (finished in the meantime)\n"
    walked = traceback.walk_stack(frame)
    stack = traceback.StackSummary.extract(walked, limit=DEPTH, lookup_lines=False)
    stack.reverse()
    with limited(stack):
        return "".join(stack.format())


def _name(task: "asyncio.Task[Any]") -> str:
    coroutine = task.get_coro()
    return f"{task.get_name()} {getattr(coroutine, '__qualname__', type(coroutine).__name__)}"


def _waiting(task: "asyncio.Task[Any]") -> str:
    """Return the stack of a task's nested coroutines: asyncio reports only the outermost frame."""
    coroutine: Any = task.get_coro()
    if getattr(coroutine, "cr_running", False):
        return "  (running now: see the thread of its event loop)\n"
    walked = [(frame, frame.f_lineno) for frame in _awaited(coroutine)]
    stack = traceback.StackSummary.extract(iter(walked[-DEPTH:]), lookup_lines=False)
    with limited(stack):
        return "".join(stack.format()) or "  (no Python frames)\n"


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    for _ in range(CHAIN):
        for prefix in ("cr", "gi", "ag"):
            frame = getattr(coroutine, f"{prefix}_frame", None)
            if frame is not None:
                yield frame
                break
        else:
            return
        coroutine = getattr(coroutine, "gi_yieldfrom" if prefix == "gi" else f"{prefix}_await", None)


def _grouped(kind: str, named_stacks: Iterable[tuple[str, str]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, stack in named_stacks:
        names.setdefault(stack, []).append(name)
    for stack, same in sorted(names.items(), key=lambda item: (len(item[1]), item[1])):
        listed = ", ".join(sorted(same)[:NAMED])
        if len(same) == 1:
            yield f"{kind} {listed}\n{stack}"
        else:
            more = f" and {len(same) - NAMED} more" if len(same) > NAMED else ""
            yield f"{len(same)} {kind.lower()}s with the same stack: {listed}{more}\n{stack}"


def _bounded(parts: list[str]) -> str:
    text = storable("\n".join(parts))
    if len(text) <= MAX_DUMP:
        return text
    ending = "\n… (truncated)\n"
    return text[: MAX_DUMP - len(ending)] + ending
