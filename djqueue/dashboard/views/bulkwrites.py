"""Bulk writes: their reports, the states of their jobs, and operations on the pending or failed ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.states import PENDING, State
from djqueue.dashboard import actions, audit, boards, jobsearch, rendering, rights
from djqueue.dashboard.actions import RateForm
from djqueue.dashboard.forms import check_hidden
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import Crumb, DashboardSite, Pages
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.mirror import is_mirrored
from djqueue.storage.actions import CANCEL
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import DONE, FAILED, PUBLISHING, UNFINISHED, BulkWriteReport, QueueShare

pages = Pages()
REPORTS_LISTED = 50
"""Reports per page."""
MAX_PAGES = 100
"""Maximum pages read to find reports that the user can see."""
QUEUES_NAMED = 3
"""Queues named in the list."""
QUEUES_SHOWN = 20
"""Queues shown on the page of a write, and named when an operation on its jobs is confirmed."""
PREVIEW_CALLS = 100
"""Maximum pages of jobs read to count what an operation would change."""
SAMPLE_SIZE = 10_000
"""Maximum jobs examined to count the states of a write's jobs."""
MIN_SAMPLE = 50
"""Minimum jobs examined per queue and state."""
JOB_COUNTS_FRESH = 5_000
"""Milliseconds before the counts are read again."""
PENDING_IN_ORDER = (State.BLOCKED, State.DELAYED, State.WAITING)
"""Pending states in the order in which jobs pass them, so that a job that moves on is still found."""
ENQUEUE = "enqueue"
"""The operation of a write that enqueues jobs."""
STATE_LABELS = {
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
        return str(STATE_LABELS.get(self.state, self.state))

    @property
    def queues(self) -> tuple[str, ...]:
        """The first queues of the write."""
        return self.report.queues[:QUEUES_NAMED]

    @property
    def more_queues(self) -> int:
        """Number of other queues."""
        return max(0, len(self.report.shares) - QUEUES_NAMED)

    @property
    def shares(self) -> list[tuple[str, QueueShare]]:
        """Some queues of the write with their shares, those that are still being published first."""
        shares = self.report.shares
        return sorted(shares.items(), key=lambda one: one[1].published >= one[1].chunks)[:QUEUES_SHOWN]

    @property
    def more_shares(self) -> int:
        """Number of other queues."""
        return max(0, len(self.report.shares) - QUEUES_SHOWN)

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
        """Whether the write failed before any of its jobs was published."""
        return self.state == FAILED and self.has_jobs and not self.report.total.published

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
        return sum(self.counts.get(state, 0) for state in PENDING_IN_ORDER)


class BulkWriteAction(NamedTuple):
    """An action on the jobs of a bulk write."""

    kind: BulkKind
    page: str
    route: str
    right: str
    title: Any
    button: Any
    nothing: Any


assert set(PENDING_IN_ORDER) == set(PENDING)


def read_page(request: HttpRequest, after: str) -> BulkWritePage:
    """Return the reports about queues that the user can see, last changed first.

    A page starts after a visible report, and hidden ones do not count towards its length.
    """
    writes = get_storage().capabilities.bulk_writes
    if writes is None:
        return BulkWritePage(None, "")
    if not rights.hides_queues():
        found = writes.page(REPORTS_LISTED, after or None)
        return BulkWritePage([_shown(report) for report in found.imports], found.next or "")
    start = writes.get(after) if after else None
    if after and (start is None or not sees(request, start)):
        return BulkWritePage([], "")  # like a report that does not exist
    shown: list[BulkWriteReport] = []
    cursor = after or None
    for _read in range(MAX_PAGES):
        found = writes.page(REPORTS_LISTED, cursor)
        shown += [report for report in found.imports if sees(request, report)]
        cursor = found.next
        if cursor is None or len(shown) > REPORTS_LISTED:
            break
    older = shown[REPORTS_LISTED - 1].write if len(shown) > REPORTS_LISTED else ""
    return BulkWritePage([_shown(report) for report in shown[:REPORTS_LISTED]], older)


def find(write: str) -> BulkWriteView | None:
    """Return the report of a write, which the caller must check with `sees`."""
    writes = get_storage().capabilities.bulk_writes
    report = None if writes is None else writes.get(write)
    return None if report is None else _shown(report)


def sees(request: HttpRequest, report: BulkWriteReport) -> bool:
    """Return whether the user can see a report. One without queues is visible only without a queue filter."""
    if not report.shares:
        return not rights.hides_queues()
    return rights.sees_each(request, report.shares)


def job_progress(request: HttpRequest, report: BulkWriteReport) -> BulkWriteJobs:
    """Return the states of a write's jobs, as far as they are among the newest jobs of its queues."""
    storage = get_storage()
    shares = report.shares if report.operation == ENQUEUE else {}
    lines = [line for line in boards.board(request).value.lines if line.name in shares]
    buckets = [(line.name, state) for line in lines for state in State if line.count(state)]
    limit = max(MIN_SAMPLE, SAMPLE_SIZE // max(1, len(buckets)))
    remaining = buckets[SAMPLE_SIZE // MIN_SAMPLE :]
    buckets = buckets[: SAMPLE_SIZE // MIN_SAMPLE]
    capped = bool(remaining) or any(line.count(state) > limit for line in lines for state in State)
    key = ("bulk_write_jobs", report.tag, *buckets)
    counts = read_cache.read(
        key, lambda: _count(storage, report.tag, buckets, limit), fresh=JOB_COUNTS_FRESH
    ).value
    may_be_pending = any(line.count(state) for line in lines for state in PENDING_IN_ORDER)
    return BulkWriteJobs(counts, capped, may_be_pending, any(line.count(State.FAILED) for line in lines))


def selection_of(kind: str, report: BulkWriteReport) -> bulk.Selection:
    """Return the jobs of a write to cancel or to retry."""
    states = tuple(state.value for state in PENDING_IN_ORDER) if kind == BulkKind.CANCEL else ()
    return bulk.Selection(report.queues, states=states, tag=report.tag)


def preview_action(request: HttpRequest, kind: str, report: BulkWriteReport) -> bulk.Preview:
    """Count jobs that the operation would change, in the queues that may have such jobs first."""
    chosen = selection_of(kind, report)
    states = PENDING_IN_ORDER if kind == BulkKind.CANCEL else (State.FAILED,)
    lines = boards.board(request).value.lines
    likely = {line.name for line in lines if any(line.count(state) for state in states)}
    queues = tuple(sorted(report.queues, key=lambda name: name not in likely))
    return bulk.preview(get_storage(), kind, chosen._replace(queues=queues), calls=PREVIEW_CALLS)


def has_rows(state: State) -> bool:
    """Return whether the list of jobs in a state can be filtered by tag."""
    return state in jobsearch.states_with_rows(get_storage())


BULK_WRITE_ACTIONS = (
    BulkWriteAction(
        BulkKind.CANCEL,
        "bulk_write_cancel",
        "cancel",
        CANCEL.permission,
        gettext_lazy("Cancel remaining jobs of a bulk write"),
        gettext_lazy("Cancel jobs"),
        gettext_lazy("No jobs are pending."),
    ),
    BulkWriteAction(
        BulkKind.RETRY,
        "bulk_write_retry",
        "retry",
        rights.DEAD_LETTERS,
        gettext_lazy("Retry failed jobs of a bulk write"),
        gettext_lazy("Retry jobs"),
        gettext_lazy("None of these jobs has failed."),
    ),
)


@pages.show("bulk_writes", "history/bulk-writes/", rights.VIEW, gettext_lazy("Bulk writes"))
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the bulk writes to queues that the user can see."""
    found = read_page(request, request.GET.get("after", ""))
    context = {"rows": found.shown, "older": found.older and site.url("bulk_writes", after=found.older)}
    crumbs = [site.crumb("history")]
    return site.render(
        request, "bulk_writes.html", _("Bulk writes"), context, tab="bulk_writes", crumbs=crumbs
    )


@pages.show("bulk_write", "history/bulk-writes/<djq:write>/", rights.VIEW)
def one(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
    """Show a bulk write and the states of its jobs."""
    shown = _found(request, write)
    if shown is None:
        return _not_found(request, site)
    progress = job_progress(request, shown.report)
    context = {
        "row": shown,
        "report": shown.report,
        "progress": progress,
        "states": _states(site, shown, progress),
        "sample_size": SAMPLE_SIZE,
        "cancel_url": _url(request, site, "bulk_write_cancel", write),
        "retry_url": _url(request, site, "bulk_write_retry", write),
    }
    crumbs = _crumbs(site)
    return site.render(request, "bulk_write.html", _("Bulk write"), context, tab="bulk_writes", crumbs=crumbs)


def _register(kind: BulkWriteAction) -> None:
    @pages.show(kind.page, f"history/bulk-writes/<djq:write>/{kind.route}/", kind.right)
    def preview(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """Show how many jobs match."""
        shown = _found(request, write)
        return (
            _not_found(request, site) if shown is None else _preview(request, site, kind, shown, RateForm())
        )

    @pages.act(f"{kind.page}_begin", f"history/bulk-writes/<djq:write>/{kind.route}/now/", kind.right)
    def begin(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """Start the operation."""
        return _begin(request, site, kind, write)


for _kind in BULK_WRITE_ACTIONS:
    _register(_kind)


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
    tagged, cursor, left = 0, None, limit
    while left > 0:
        page = storage.reads.cursor_page(queue, state, min(left, bulk.JOBS_PER_CALL), cursor)
        tagged += sum(tag in record.options.tags for record in page.jobs)
        left -= len(page.jobs)
        cursor = page.next
        if cursor is None:
            break
    return tagged


def _shown(report: BulkWriteReport) -> BulkWriteView:
    return BulkWriteView(report, report.state_at(SYSTEM_CLOCK.now()))


def _preview(
    request: HttpRequest, site: DashboardSite, kind: BulkWriteAction, shown: BulkWriteView, form: forms.Form
) -> HttpResponse:
    report = shown.report
    counts = None
    if report.shares:
        counts = preview_action(request, kind.kind, report)
    note = _("Jobs enqueued later are not affected.")
    if shown.is_open:
        publishing = _("The bulk write is still publishing jobs, which are not affected.")
        note = f"{note} {publishing}"
    is_partial = len(report.shares) > QUEUES_SHOWN
    if is_partial and counts is not None and counts.capped:
        partial = _("Counts cover only some of the queues; the operation covers all jobs.")
        note = f"{partial} {note}"
    page_url = site.url("bulk_write", report.write)
    return actions.confirm_bulk(
        request,
        site,
        form,
        counts,
        title=str(kind.title),
        tab="bulk_writes",
        crumbs=[*_crumbs(site), Crumb(str(_("Bulk write")), page_url)],
        begin_url=site.url(f"{kind.page}_begin", report.write),
        button=kind.button,
        pairs=[(_("Bulk write"), rendering.mono(report.app)), (_("Queues"), _names(report.queues))],
        note=note,
        nothing=kind.nothing,
        back_url=page_url,
        back_label=_("Back to bulk write"),
        sample_size=counts.examined if counts and not is_partial else None,
    )


def _names(queues: Sequence[str]) -> str:
    """Return the names of some queues, and the number of the others."""
    names = ", ".join(queues[:QUEUES_SHOWN])
    more = len(queues) - QUEUES_SHOWN
    return names if more <= 0 else f"{names} +{rendering.number(more)}"


def _begin(request: HttpRequest, site: DashboardSite, kind: BulkWriteAction, write: str) -> HttpResponse:
    shown = find(write)
    page = f"{kind.page}_begin"
    if shown is None:
        return _not_found(request, site)
    if not sees(request, shown.report):
        if shown.report.shares:  # without queues, the entry could not be hidden from this user
            hidden = {"write": write, "queues": sorted(shown.report.shares)}
            audit.note(request, page, refused=True, detail=hidden)
        return _not_found(request, site)
    if not shown.report.shares:
        messages.warning(request, _("Bulk write not found."))
        return site.back(request, "bulk_writes")
    form = RateForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, site, kind, shown, form)
    selection = selection_of(kind.kind, shown.report)
    return actions.begin_bulk(request, site, page, kind.kind, selection, form, write=write)


def _found(request: HttpRequest, write: str) -> BulkWriteView | None:
    """Return the report of a bulk write if the user can see it."""
    shown = find(write)
    return shown if shown is not None and sees(request, shown.report) else None


def _not_found(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    text = _("Bulk write not found. Reports are kept for 30 days.")
    return site.not_found(request, _("Bulk write not found"), text, tab="bulk_writes", crumbs=_crumbs(site))


def _states(site: DashboardSite, shown: BulkWriteView, progress: BulkWriteJobs) -> list[tuple[str, int, str]]:
    """Return each state, its number of jobs, and the URL of their list if it can be filtered by tag."""
    return [
        (
            state.value,
            progress.counts.get(state, 0),
            site.url("jobs", state=state.value, tag=shown.report.tag) if has_rows(state) else "",
        )
        for state in State
    ]


def _url(request: HttpRequest, site: DashboardSite, page: str, write: str) -> str:
    return site.url(page, write) if site.may_open(request, page) else ""


def _crumbs(site: DashboardSite) -> list[Crumb]:
    return [site.crumb("history"), site.crumb("bulk_writes")]
