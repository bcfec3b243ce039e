"""Source lines in tracebacks, which Python reads from whatever a frame names as its file.

Code that was compiled with the name of a pipe, a device or a huge file would hold up its reader, or fill its
memory. So would a loader that the project defines, which Python asks for the source if there is no such file.
"""

import linecache
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary, TracebackException

MAX_FILE = 2 * 1024 * 1024
"""Maximum of bytes of a file whose lines are shown."""


@contextmanager
def limited(stack: Iterable[FrameSummary]) -> Iterator[None]:
    """Within the block, show only source lines of regular files of limited size.

    stack: Frames whose lines have not been looked up.
    """
    names = {frame.filename for frame in stack if not _is_read(frame.filename)}
    # What is in the cache without a time is not looked for.
    hidden = {name: (0, None, list[str](), name) for name in names if not _is_small(name)}
    linecache.cache.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            linecache.cache.pop(name, None)


def frames_in(error: TracebackException) -> Iterator[FrameSummary]:
    """Yield all frames of an exception, its causes and the exceptions in its groups."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield from current.stack or StackSummary()
        waiting += [part for part in (current.__cause__, current.__context__) if part is not None]
        waiting += current.exceptions or []


def _is_read(name: str) -> bool:
    """Return whether the cache has the lines of a file already."""
    return len(linecache.cache.get(name, ())) > 1


def _is_small(name: str) -> bool:
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE
