"""Where every thread and every task of this process is: files, lines and functions, never a value."""

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from djqueue.core.workercontrol import MAX_DUMP

DEPTH = 60
"""Frames of each stack, the innermost ones."""
NAMED = 10
"""Threads or tasks that are named where many are at the same place."""
CHAIN = 200
"""Coroutines that wait for one another, of one task."""


def stacks(heading: str, loop: asyncio.AbstractEventLoop) -> str:
    """The stacks of all threads but the one that asks, and of the loop's tasks; from any thread.

    Those that are at the same place are told of together.
    """
    frames = sys._current_frames()
    asking = threading.get_ident()
    threads = [thread for thread in threading.enumerate() if thread.ident not in (None, asking)]
    in_threads = ((thread.name, _stack(frames.get(thread.ident or 0))) for thread in threads)
    in_tasks = ((_name(task), _waiting(task)) for task in asyncio.all_tasks(loop))
    parts = [heading, *_together("Thread", in_threads), *_together("Task", in_tasks)]
    return _bounded(parts)


def _stack(frame: FrameType | None) -> str:
    if frame is None:
        return "  (it has ended meanwhile)\n"
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=DEPTH)
    found.reverse()
    return "".join(found.format())


def _name(task: "asyncio.Task[Any]") -> str:
    coroutine = task.get_coro()
    return f"{task.get_name()} {getattr(coroutine, '__qualname__', type(coroutine).__name__)}"


def _waiting(task: "asyncio.Task[Any]") -> str:
    """A task's own stack has its outermost frame alone: the others are found one by one."""
    coroutine: Any = task.get_coro()
    if getattr(coroutine, "cr_running", False):
        return "  (it runs at this moment: see the thread of its loop)\n"
    walked = [(frame, frame.f_lineno) for frame in _awaited(coroutine)]
    found = traceback.StackSummary.extract(iter(walked[-DEPTH:]))
    return "".join(found.format()) or "  (it is not at a line of Python)\n"


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


def _together(kind: str, found: Iterable[tuple[str, str]]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, stack in found:
        names.setdefault(stack, []).append(name)
    for stack, alike in sorted(names.items(), key=lambda item: (len(item[1]), item[1])):
        some = ", ".join(sorted(alike)[:NAMED])
        if len(alike) == 1:
            yield f"{kind} {some}\n{stack}"
        else:
            more = f" and {len(alike) - NAMED} more" if len(alike) > NAMED else ""
            yield f"{len(alike)} {kind.lower()}s at the same place: {some}{more}\n{stack}"


def _bounded(parts: list[str]) -> str:
    # Databases take neither lone surrogates nor NUL, which a line of a file may hold.
    text = "\n".join(parts).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    if len(text) <= MAX_DUMP:
        return text
    ending = "\n… the rest is left out\n"
    return text[: MAX_DUMP - len(ending)] + ending
