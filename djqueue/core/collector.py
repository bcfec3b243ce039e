"""Pauses of the garbage collector while many lasting objects are created.

It starts after every few hundred allocations, which takes as long as adding a hundred thousand jobs; none of
them is garbage.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

MANY = 1_000
"""Minimum number of new objects for a pause."""

_lock = Lock()
_sparing = 0
_was_enabled = False


@contextmanager
def gc_paused(count: int) -> Iterator[None]:
    """Pause garbage collection, in all threads, while `count` lasting objects are created. May be nested."""
    if count < MANY:
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _sparing, _was_enabled
    with _lock:
        if not _sparing:
            _was_enabled = gc.isenabled()
            gc.disable()
        _sparing += 1


def _end() -> None:
    global _sparing
    with _lock:
        _sparing -= 1
        if not _sparing and _was_enabled:
            gc.enable()
