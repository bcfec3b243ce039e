"""Pages of jobs in both directions. A page begins at a mark in an order, not at a number of jobs."""

from collections.abc import Sequence
from typing import NamedTuple

from .errors import OptionError
from .job import JobRecord

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


def page_of(found: Sequence[Marked], limit: int, position: PagePosition) -> JobPage:
    """Return a page of up to `limit` jobs of those found, which include one more if there are more."""
    has_more = len(found) > limit
    some = list(found[:limit])
    if position.is_backward:
        some.reverse()
    is_last = not has_more and not position.is_backward
    is_first = not has_more if position.is_backward else position.mark is None
    if not some:
        return JobPage([], None, None)
    return JobPage(
        [record for _, record in some],
        None if is_last else FORWARD + some[-1][0],
        None if is_first else BACKWARD + some[0][0],
    )
