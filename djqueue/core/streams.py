"""Streamed items of jobs: the size of an answer, and how long items can be read."""

from collections.abc import Iterable

from .enginejob import EngineJob
from .job import ItemMark, ItemPage
from .options import JobOptions
from .states import State

PAGE_BYTES = 1024 * 1024
"""Bytes after which a page of items ends."""
PAGE_ITEMS = 1_000
"""Maximum number of items on a page."""


def cut(items: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the first items, as many as one page holds."""
    found: list[bytes] = []
    size = 0
    for item in items:
        found.append(item)
        size += len(item)
        if size >= PAGE_BYTES or len(found) == PAGE_ITEMS:
            break
    return tuple(found)


def are_readable(state: State, options: JobOptions, finished_at: int, now: int) -> bool:
    """Return whether a job's items can still be read: they are kept as long as its result."""
    if state is not State.COMPLETED or options.result_ttl is None:
        return True
    return finished_at + options.result_ttl > now


def item_page(job: EngineJob, mark: ItemMark, now: int) -> ItemPage | None:
    """Return the items behind a mark; None if they are no longer in memory. The caller holds the locks."""
    content_type, stream = job.options.content_type, job.stream
    if stream is None:
        return ItemPage(job.state, content_type, job.token, 0, (), 0)
    if stream.items is None:
        return None
    start = mark.start if mark.run == stream.run else 0
    readable = are_readable(job.state, job.options, job.finished_at, now)
    # Copy one page only, not all items behind the mark.
    ahead = (stream.items[at] for at in range(start, len(stream.items))) if readable else ()
    return ItemPage(job.state, content_type, stream.run, start, cut(ahead), stream.count)
