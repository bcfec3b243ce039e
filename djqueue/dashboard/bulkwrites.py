"""Bulk writes: their reports from the storage, and the current states of their jobs."""

from typing import NamedTuple

from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.states import PENDING, State
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.mirror import is_mirrored
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import DONE, FAILED, PUBLISHING, UNFINISHED, BulkWriteReport, QueueShare

from . import jobsearch, queries, rights
from .snapshot import snapshots

LENGTH = 50
"""Reports per page."""
MAX_PAGES = 100
"""Maximum pages read to find reports that the user can see."""
FEW = 3
"""Queues named in the list."""
SOME = 20
"""Queues shown on the page of a write, and named when an operation on its jobs is confirmed."""
PREVIEW_CALLS = 100
"""Maximum pages of jobs read to count what an operation would change."""
SAMPLE_SIZE = 10_000
"""Maximum jobs examined to count the states of a write's jobs."""
MIN_SAMPLE = 50
"""Minimum jobs examined per queue and state."""
FRESH = 5_000
"""Milliseconds before the counts are read again."""
AHEAD = (State.BLOCKED, State.DELAYED, State.WAITING)
"""Pending states in the order in which jobs pass them, so that a job that moves on is still found."""
assert set(AHEAD) == set(PENDING)


ENQUEUE = "enqueue"
"""The operation of a write that enqueues jobs."""
LABELS = {
    PUBLISHING: gettext_lazy("publishing"),
    DONE: gettext_lazy("done"),
    FAILED: gettext_lazy("failed"),
    UNFINISHED: gettext_lazy("unfinished"),
}


class BulkWriteView(NamedTuple):
    """A report as the pages show it."""

    report: BulkWriteReport
    state: str
    """A state of `BulkWriteReport.state_at`."""

    @property
    def label(self) -> str:
        return str(LABELS.get(self.state, self.state))

    @property
    def queues(self) -> tuple[str, ...]:
        """The first queues of the write."""
        return self.report.queues[:FEW]

    @property
    def more_queues(self) -> int:
        """Number of other queues."""
        return max(0, len(self.report.shares) - FEW)

    @property
    def shares(self) -> list[tuple[str, QueueShare]]:
        """Some queues of the write with their shares, those that are still being published first."""
        shares = self.report.shares
        return sorted(shares.items(), key=lambda one: one[1].published >= one[1].chunks)[:SOME]

    @property
    def more_shares(self) -> int:
        """Number of other queues."""
        return max(0, len(self.report.shares) - SOME)

    @property
    def is_named(self) -> bool:
        """Whether the write has a version: those without `txnAppId` don't, and streams have batches."""
        return self.report.app != self.report.write

    @property
    def is_unfinished(self) -> bool:
        """Whether workers, or the next write of the same application, publish the rest."""
        return self.state == UNFINISHED and self.has_jobs

    @property
    def is_without_jobs(self) -> bool:
        """Whether the write failed before any of its jobs was published; direct writes may leave some."""
        total = self.report.total
        return self.state == FAILED and self.has_jobs and bool(total.chunks) and not total.published

    @property
    def may_have_jobs(self) -> bool:
        """Whether operations on the write's jobs are worth offering."""
        return self.has_jobs and not self.is_without_jobs

    @property
    def share(self) -> float | None:
        """The published share, from 0 to 1; None if there was nothing to publish."""
        total = self.report.total
        return min(1.0, total.published / total.chunks) if total.chunks else None

    @property
    def rejected(self) -> int:
        """The number of rows that were not valid jobs."""
        return sum(self.report.rejected.values())

    @property
    def has_jobs(self) -> bool:
        """Whether the write enqueued jobs. Other operations change existing jobs, which don't get its tag."""
        return self.report.operation == ENQUEUE

    @property
    def is_resumable(self) -> bool:
        """Whether the next write of the same application resumes this one."""
        return self.state == UNFINISHED and self.is_named

    @property
    def is_open(self) -> bool:
        """Whether the write is still publishing jobs."""
        return self.state == PUBLISHING

    @property
    def is_bad(self) -> bool:
        """Whether the write failed or is unfinished."""
        return self.state in (FAILED, UNFINISHED)


class BulkWritePage(NamedTuple):
    """A page of reports, and the cursor of the next; None without support for bulk writes."""

    shown: list[BulkWriteView] | None
    older: str


class BulkWriteJobs(NamedTuple):
    """The number of a write's jobs found in each state."""

    counts: dict[State, int]
    capped: bool
    """Whether the queues have more jobs than were examined."""
    may_be_pending: bool
    """Whether its queues have pending jobs, which may be its own."""
    may_have_failed: bool
    """Whether its queues have dead letters, which may be its own."""

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def ended(self) -> int:
        return self.total - self.pending - self.counts.get(State.ACTIVE, 0)

    @property
    def pending(self) -> int:
        return sum(self.counts.get(state, 0) for state in AHEAD)


def listed(request: HttpRequest, after: str) -> BulkWritePage:
    """Return the reports about queues that the user can see, last changed first.

    A page starts after a visible report, and hidden ones do not count towards its length.
    """
    kept = get_storage().capabilities.bulk_writes
    if kept is None:
        return BulkWritePage(None, "")
    if not rights.hides_queues():
        found = kept.page(LENGTH, after or None)
        return BulkWritePage([_shown(report) for report in found.imports], found.next or "")
    start = kept.get(after) if after else None
    if after and (start is None or not sees(request, start)):
        return BulkWritePage([], "")  # like a report that does not exist
    shown: list[BulkWriteReport] = []
    cursor = after or None
    for _read in range(MAX_PAGES):
        found = kept.page(LENGTH, cursor)
        shown += [report for report in found.imports if sees(request, report)]
        cursor = found.next
        if cursor is None or len(shown) > LENGTH:
            break
    older = shown[LENGTH - 1].write if len(shown) > LENGTH else ""
    return BulkWritePage([_shown(report) for report in shown[:LENGTH]], older)


def one(write: str) -> BulkWriteView | None:
    """Return the report of a write, which the caller must check with `sees`."""
    kept = get_storage().capabilities.bulk_writes
    found = None if kept is None else kept.get(write)
    return None if found is None else _shown(found)


def sees(request: HttpRequest, report: BulkWriteReport) -> bool:
    """Return whether the user can see a report. One without queues is visible only without a queue filter."""
    if not report.shares:
        return not rights.hides_queues()
    return rights.sees_each(request, report.shares)


def job_progress(request: HttpRequest, report: BulkWriteReport) -> BulkWriteJobs:
    """Return the states of a write's jobs, as far as they are among the newest jobs of its queues."""
    storage = get_storage()
    mine = report.shares if report.operation == ENQUEUE else {}
    lines = [line for line in queries.board(request).value.lines if line.name in mine]
    buckets = [(line.name, state) for line in lines for state in State if line.count(state)]
    limit = max(MIN_SAMPLE, SAMPLE_SIZE // max(1, len(buckets)))
    remaining = buckets[SAMPLE_SIZE // MIN_SAMPLE :]
    buckets = buckets[: SAMPLE_SIZE // MIN_SAMPLE]
    capped = bool(remaining) or any(line.count(state) > limit for line in lines for state in State)
    key = ("bulk_write_jobs", report.tag, *buckets)
    counts = snapshots.read(key, lambda: _count(storage, report.tag, buckets, limit), fresh=FRESH).value
    may_be_pending = any(line.count(state) for line in lines for state in AHEAD)
    return BulkWriteJobs(counts, capped, may_be_pending, any(line.count(State.FAILED) for line in lines))


def selection(kind: str, report: BulkWriteReport) -> bulk.Selection:
    """Return the jobs of a write to cancel or to retry."""
    states = tuple(state.value for state in AHEAD) if kind == BulkKind.CANCEL else ()
    return bulk.Selection(report.queues, states=states, tag=report.tag)


def preview(request: HttpRequest, kind: str, report: BulkWriteReport) -> bulk.Preview:
    """Count jobs that the operation would change, in the queues that may have such jobs first."""
    chosen = selection(kind, report)
    states = AHEAD if kind == BulkKind.CANCEL else (State.FAILED,)
    lines = queries.board(request).value.lines
    likely = {line.name for line in lines if any(line.count(state) for state in states)}
    queues = tuple(sorted(report.queues, key=lambda name: name not in likely))
    return bulk.preview(get_storage(), kind, chosen._replace(queues=queues), calls=PREVIEW_CALLS)


def has_rows(state: State) -> bool:
    """Return whether the list of jobs in a state can be filtered by tag."""
    return state in jobsearch.states_with_rows(get_storage())


def _count(storage: Storage, tag: str, buckets: list[tuple[str, State]], limit: int) -> dict[State, int]:
    with_rows = jobsearch.states_with_rows(storage)
    counts = jobsearch.tagged(tag, [bucket for bucket in buckets if bucket[1] in with_rows], limit)
    if is_mirrored(storage):
        # Rows are written later than jobs, and not at all before the first worker starts.
        with_rows &= set(+counts)
    for queue, state in buckets:
        if state not in with_rows:
            counts[state] += _count_tagged(storage, tag, queue, state, limit)
    return dict(counts)


def _count_tagged(storage: Storage, tag: str, queue: str, state: State, limit: int) -> int:
    found, cursor, left = 0, None, limit
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
