"""Bulk imports: their reports as the storage keeps them, and how their jobs stand now."""

from typing import NamedTuple

from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.states import PENDING, State
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import DONE, FAILED, PUBLISHING, UNFINISHED, BulkWriteReport

from . import jobsearch, queries, rights
from .snapshot import snapshots

LENGTH = 50
"""Reports of a page."""
MOST_PAGES = 100
"""Pages that are read to find the reports that the user may see."""
FEW = 3
"""Queues that the list names."""
LOOKED_AT = 10_000
"""Jobs that are looked at to say how those of an import stand."""
FEWEST = 50
"""Of these at least in each queue and state."""
FRESH = 5_000
"""Milliseconds for which that is shown again."""
AHEAD = (State.BLOCKED, State.DELAYED, State.WAITING)
"""Pending states in the order in which a job passes them: one that goes on meanwhile is met again."""
assert set(AHEAD) == set(PENDING)


ENQUEUE = "enqueue"
"""The operation of a write that brings jobs."""
LABELS = {
    PUBLISHING: gettext_lazy("publishing"),
    DONE: gettext_lazy("done"),
    FAILED: gettext_lazy("failed"),
    UNFINISHED: gettext_lazy("interrupted"),
}


class BulkWriteView(NamedTuple):
    """A report as the pages show it."""

    report: BulkWriteReport
    state: str
    """As `BulkWriteReport.state_at` says."""

    @property
    def label(self) -> str:
        """The state in words."""
        return str(LABELS.get(self.state, self.state))

    @property
    def queues(self) -> tuple[str, ...]:
        """The first of its queues."""
        return self.report.queues[:FEW]

    @property
    def more_queues(self) -> int:
        """How many others there are."""
        return max(0, len(self.report.shares) - FEW)

    @property
    def share(self) -> float | None:
        """How much is published, from 0 to 1; None: nothing was to be."""
        total = self.report.total
        return min(1.0, total.published / total.chunks) if total.chunks else None

    @property
    def rejected(self) -> int:
        """Rows that are no jobs."""
        return sum(self.report.rejected.values())

    @property
    def brings(self) -> bool:
        """Whether it brings jobs; else it changes such as were there, which have no tag of it."""
        return self.report.operation == ENQUEUE

    @property
    def is_left(self) -> bool:
        """Whether the next write of its application goes on with it."""
        return self.state == UNFINISHED and self.report.app != self.report.write

    @property
    def is_open(self) -> bool:
        """Whether more of its jobs come."""
        return self.state == PUBLISHING

    @property
    def is_bad(self) -> bool:
        """Whether it did not come to its end."""
        return self.state in (FAILED, UNFINISHED)


class BulkWritePage(NamedTuple):
    """Some reports, and the write behind which older ones are; None if there is no place for reports."""

    shown: list[BulkWriteView] | None
    older: str


class BulkWriteJobs(NamedTuple):
    """How the jobs of an import stand: as many of its jobs, by state, as were found."""

    counts: dict[State, int]
    capped: bool
    """Whether there are more jobs in its queues than were looked at."""
    may_rest: bool
    """Whether jobs of its queues are pending, of which some may be its own; `may_fail`: are dead letters."""
    may_fail: bool

    @property
    def total(self) -> int:
        """All that were found."""
        return sum(self.counts.values())

    @property
    def ended(self) -> int:
        """Those of which nothing more is to come."""
        return self.total - self.pending - self.counts.get(State.ACTIVE, 0)

    @property
    def pending(self) -> int:
        """Those that have not started."""
        return sum(self.counts.get(state, 0) for state in AHEAD)


def listed(request: HttpRequest, after: str) -> BulkWritePage:
    """Those about queues that the user sees, the one that changed last first.

    A page begins behind a report that is shown, and hidden ones do not count for its length.
    """
    kept = get_storage().capabilities.bulk_writes
    if kept is None:
        return BulkWritePage(None, "")
    if not rights.hides_queues():
        found = kept.page(LENGTH, after or None)
        return BulkWritePage([_shown(report) for report in found.imports], found.next or "")
    start = kept.get(after) if after else None
    if after and (start is None or not sees(request, start)):
        return BulkWritePage([], "")  # as of one that is not there
    shown: list[BulkWriteReport] = []
    cursor = after or None
    for _read in range(MOST_PAGES):
        found = kept.page(LENGTH, cursor)
        shown += [report for report in found.imports if sees(request, report)]
        cursor = found.next
        if cursor is None or len(shown) > LENGTH:
            break
    older = shown[LENGTH - 1].write if len(shown) > LENGTH else ""
    return BulkWritePage([_shown(report) for report in shown[:LENGTH]], older)


def one(write: str) -> BulkWriteView | None:
    """The report of a write, which the caller checks with `sees`."""
    kept = get_storage().capabilities.bulk_writes
    found = None if kept is None else kept.get(write)
    return None if found is None else _shown(found)


def sees(request: HttpRequest, report: BulkWriteReport) -> bool:
    """Whether the user is to know of it: of one without queues only who sees all of them."""
    if not report.shares:
        return get_settings().dashboard.queue_filter is None
    return rights.sees_each(request, report.shares)


def standing(request: HttpRequest, report: BulkWriteReport) -> BulkWriteJobs:
    """How its jobs stand, as far as that is found among the newest of its queues."""
    storage = get_storage()
    mine = report.shares if report.operation == ENQUEUE else {}
    lines = [line for line in queries.board(request).value.lines if line.name in mine]
    places = [(line.name, state) for line in lines for state in State if line.count(state)]
    most = max(FEWEST, LOOKED_AT // max(1, len(places)))
    left_out = places[LOOKED_AT // FEWEST :]
    places = places[: LOOKED_AT // FEWEST]
    capped = bool(left_out) or any(line.count(state) > most for line in lines for state in State)
    key = ("standing", report.tag, *places)
    counts = snapshots.read(key, lambda: _count(storage, report.tag, places, most), fresh=FRESH).value
    may_rest = any(line.count(state) for line in lines for state in AHEAD)
    return BulkWriteJobs(counts, capped, may_rest, any(line.count(State.FAILED) for line in lines))


def selection(kind: str, report: BulkWriteReport) -> bulk.Selection:
    """The jobs that are meant by cancelling the rest, or by replaying what failed."""
    states = tuple(state.value for state in AHEAD) if kind == BulkKind.CANCEL else ()
    return bulk.Selection(report.queues, states=states, tag=report.tag)


def has_rows(state: State) -> bool:
    """Whether the list of jobs can be asked for a tag."""
    return state in jobsearch.states_with_rows(get_storage())


def _count(storage: Storage, tag: str, places: list[tuple[str, State]], most: int) -> dict[State, int]:
    with_rows = jobsearch.states_with_rows(storage)
    counts = jobsearch.tagged(tag, [place for place in places if place[1] in with_rows], most)
    for queue, state in places:
        if state not in with_rows:
            counts[state] += _walked(storage, tag, queue, state, most)
    return dict(counts)


def _walked(storage: Storage, tag: str, queue: str, state: State, most: int) -> int:
    found, cursor, left = 0, None, most
    while left > 0:
        page = storage.reads.cursor_page(queue, state, min(left, bulk.PART), cursor)
        found += sum(tag in record.options.tags for record in page.jobs)
        left -= len(page.jobs)
        cursor = page.next
        if cursor is None:
            break
    return found


def _shown(report: BulkWriteReport) -> BulkWriteView:
    return BulkWriteView(report, report.state_at(SYSTEM_CLOCK.now()))
