"""Entries of bulk calls, in the portions that one call of the storage takes."""

from collections.abc import Iterable, Sized
from itertools import islice
from typing import Any

from djqueue.core.job import Batch

BULK = 1_000
"""Jobs of `enqueue_many` in one call of the storage."""


def chunks(entries: Iterable[Any], size: int = BULK) -> Iterable[list[Any]]:
    """Yield lists of at most `size` entries."""
    source = iter(entries)
    while chunk := list(islice(source, size)):
        yield chunk


def checked_first(batches: Iterable[Batch], *sources: object) -> Iterable[Batch]:
    """Return batches all of which are made now if their sources have lengths, and each when needed if not.

    Then no job of a list is stored if one is wrong, and an iterator needs no memory for its payloads.
    """
    return list(batches) if all(isinstance(source, Sized) for source in sources) else batches
