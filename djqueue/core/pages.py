"""Pages of jobs, of their summaries and of their streamed items.

A page begins at a mark in an order, not at a number of jobs.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote

from .enginejob import EngineJob
from .errors import OptionError
from .job import JobRecord
from .options import JobOptions
from .states import State

FORWARD, BACKWARD = ">", "<"
Marked = tuple[str, JobRecord]
"""A job and its mark."""


class JobPage(NamedTuple):
    """Some jobs of one state of a queue."""

    jobs: list[JobRecord]
    next: str | None
    """Cursor of the next page; None on the last page."""
    previous: str | None
    """Cursor of the previous page; None on the first page."""


class PagePosition(NamedTuple):
    """Position and direction of a page."""

    mark: str | None
    """Mark of the job next to the page; None: the page begins at the end of the order."""
    is_descending: bool
    """True if newer jobs come first."""
    is_backward: bool
    """True if the page before the mark is read, from its end on."""


def position_of(cursor: str | None, *, newest_first: bool) -> PagePosition:
    """Return the position that a cursor stands for. Raises OptionError for an invalid cursor."""
    if cursor is None:
        return PagePosition(None, newest_first, is_backward=False)
    if cursor[:1] not in (FORWARD, BACKWARD):
        raise OptionError(f"cursor: {cursor!r} is invalid; pass the cursor of an earlier page")
    is_backward = cursor[0] == BACKWARD
    return PagePosition(cursor[1:], newest_first is not is_backward, is_backward)


def mark_of(mark: str) -> tuple[int, str]:
    """Return the number and the id that a mark consists of. Raises OptionError."""
    number, colon, job_id = mark.partition(":")
    if not (colon and number.isdecimal()):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page")
    return int(number), job_id


def page_of(jobs: Sequence[Marked], limit: int, position: PagePosition) -> JobPage:
    """Return a page of the first `limit` jobs; `jobs` has one more if more follow."""
    has_more = len(jobs) > limit
    page = list(jobs[:limit])
    if position.is_backward:
        page.reverse()
    is_last = not has_more and not position.is_backward
    is_first = not has_more if position.is_backward else position.mark is None
    if not page:
        return JobPage([], None, None)
    return JobPage(
        [record for _, record in page],
        None if is_last else FORWARD + page[-1][0],
        None if is_first else BACKWARD + page[0][0],
    )


class JobSummary(NamedTuple):
    """A summary of a job about a subject."""

    queue: str
    id: str
    name: str
    """The job's name."""
    state: State
    created_at: int
    """UTC milliseconds, like every `…_at`."""
    run_at: int
    started_at: int
    """0 if it has not started."""
    finished_at: int
    """0 if it has not ended."""
    reason: str = ""
    """Reason of the failure or cancellation."""


class JobSummaryPage(NamedTuple):
    """Some jobs about a subject, newest first."""

    jobs: list[JobSummary]
    next: str | None
    """Cursor of the next page; None on the last page."""


def summary_of(record: EngineJob | JobRecord) -> JobSummary:
    """Return the summary of a job."""
    return JobSummary(
        record.queue,
        record.id,
        record.name,
        record.state,
        record.created_at,
        record.run_at,
        record.started_at,
        record.finished_at,
        record.reason,
    )


def mark_in(cursor: str | None) -> str | None:
    """Return the mark of the job before a page. Raises OptionError for an invalid cursor."""
    if cursor is None:
        return None
    if cursor[:1] != FORWARD:
        raise OptionError(f"cursor: {cursor!r} is invalid; pass the cursor of an earlier page")
    return cursor[1:]


def mark_at(created_at: int, queue: str, last: str) -> str:
    """Return the mark of a job in the order of all queues: by time, queue and position in the queue."""
    return f"{created_at}:{quote(queue, safe='')}:{last}"


def mark_before(mark: str) -> tuple[int, str, str]:
    """Return the time, queue and position that a mark consists of. Raises OptionError."""
    created_at, queue, last = [*mark.split(":", 2), "", ""][:3]
    if not (created_at.isdecimal() and queue and last):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page")
    return int(created_at), unquote(queue), last


def first_of(summaries: list[tuple[str, JobSummary]], limit: int) -> JobSummaryPage:
    """Return a page of the first `limit` summaries; `summaries` has one more if more follow."""
    page = summaries[:limit]
    following = FORWARD + page[-1][0] if page and len(summaries) > limit else None
    return JobSummaryPage([summary for _, summary in page], following)


PAGE_BYTES = 1024 * 1024
"""Bytes after which a page of items ends."""
PAGE_ITEMS = 1_000
"""Maximum number of items on a page."""


def cut(items: Iterable[bytes]) -> tuple[bytes, ...]:
    """Return the first items, as many as one page holds."""
    page: list[bytes] = []
    size = 0
    for item in items:
        page.append(item)
        size += len(item)
        if size >= PAGE_BYTES or len(page) == PAGE_ITEMS:
            break
    return tuple(page)


def are_readable(state: State, options: JobOptions, finished_at: int, now: int) -> bool:
    """Return whether a job's items can still be read: they are kept as long as its result."""
    if state is not State.COMPLETED or options.result_ttl is None:
        return True
    return finished_at + options.result_ttl > now
