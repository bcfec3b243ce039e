"""The list of jobs by state, filter and ID, and actions on selected jobs."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage, registry
from djqueue.client.deadletters import read_filter
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import OptionError
from djqueue.core.job import JobRecord
from djqueue.core.states import State
from djqueue.dashboard import (
    argumentfilter,
    deadletters,
    deletions,
    freshness,
    jobactions,
    jobsearch,
    payloadscan,
    queries,
    requestcache,
    rights,
    selection,
    subjects,
)
from djqueue.dashboard.inputs import DateTimeInput, TimeField, check_hidden, read_state
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.jobsearch import JobFilter
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite, is_partial
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, Job, JobState
from djqueue.operations.mirror import is_mirrored
from djqueue.storage.tables import leaderlease

from . import bulkjobs
from .job import OFFERS, Offer

pages = Pages()

LENGTH = 50
"""Jobs per page."""
QUEUES = jobsearch.QUEUES
ANY = "any"
"""Any state, if jobs are stored in tables."""
BUSY = "busy"
"""The window of a list that was not read because another search of the user was running."""
ALWAYS = ("queue", "id", "error")
"""Filters that every storage supports."""


class FilterForm(forms.Form):
    """The filter of the list."""

    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=255)
    id = forms.CharField(label=gettext_lazy("ID or ID prefix"), required=False, max_length=255)
    name = forms.CharField(label=gettext_lazy("Job"), required=False, max_length=255)
    tag = forms.CharField(label=gettext_lazy("Tag"), required=False, max_length=255)
    worker = forms.CharField(label=gettext_lazy("Worker"), required=False, max_length=255)
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), required=False, min_value=-(2**31), max_value=2**31 - 1
    )
    since = TimeField(label=gettext_lazy("Enqueued after"), required=False, widget=DateTimeInput)
    until = TimeField(label=gettext_lazy("Enqueued before"), required=False, widget=DateTimeInput)
    argument = forms.CharField(
        label=gettext_lazy("Argument"),
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "order_id:7"}),
    )
    error = forms.CharField(required=False, max_length=64, widget=forms.HiddenInput)

    def __init__(self, *args: Any, queues: Sequence[str], has_rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["queue"].widget = forms.Select(
            choices=[("", _("all")), *((name, name) for name in queues)]
        )
        self.fields["name"].widget.attrs["list"] = "djq-names"
        self.fields["id"].widget.attrs["data-djq-filter"] = True
        for name, field in self.fields.items():
            field.disabled = not has_rows and name not in ALWAYS
        if not has_rows:
            self.fields["id"].label = _("Full ID")

    def clean_argument(self) -> argumentfilter.Argument | None:
        try:
            return argumentfilter.read(self.cleaned_data["argument"])
        except OptionError:
            raise forms.ValidationError(_("Use the form order_id:7, order.id:7 or args.0:7.")) from None

    def wanted(self, state: State | None) -> JobFilter:
        """Return the filter, ignoring fields that are not valid."""
        given = {name: value for name, value in self.cleaned_data.items() if value not in (None, "")}
        given.pop("error", None)
        for name in ("since", "until"):
            if name in given:
                given[name] = to_milliseconds(given[name])
        return JobFilter(**given, state=state)


class Tab(NamedTuple):
    """A state with the number of its jobs and the URL of their list."""

    value: str
    label: str
    jobs: int | None
    """None if unknown without counting."""
    url: str


class Listed(NamedTuple):
    """A page of the list."""

    jobs: Sequence[JobRecord]
    newer: str = ""
    """Position of the newer page; `older` is that of the older one."""
    older: str = ""
    window: str = "all"
    """See `JobSearchPage.window`; `each`: the newest of every queue; `dead_letters`; or `BUSY`."""


def _parts(request: HttpRequest) -> Hashable:
    return (deletions.parts(request), _rows_version(request))


def _rows_version(request: HttpRequest) -> Hashable:
    """Return the version of mirrored rows, which are written later than the jobs change; read once."""

    def read() -> Hashable:
        return leaderlease.version(alias_of(Job)) if is_mirrored(get_storage()) else None

    return requestcache.cached(request, "rows_version", read)


@pages.show("jobs", "jobs/", rights.VIEW, gettext_lazy("Jobs"), _parts)
def jobs(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List matching jobs of a state, newest first."""
    if subject := request.GET.get("subject"):
        freshness.limit(request, 0)  # the project may change the object
        return _object_jobs(request, site, subject)
    cached = queries.board(request)
    board = cached.value
    given = request.GET.get("state", "")
    state = read_state(given)
    with_rows = jobsearch.states_with_rows(get_storage())
    if state is None and (given != ANY or not with_rows):
        state = State.ACTIVE
    has_rows = bool(with_rows) if state is None else state in with_rows
    form = FilterForm(request.GET, queues=[line.name for line in board.lines], has_rows=has_rows)
    form.is_valid()
    check_hidden(form)
    error = form.cleaned_data.get("error", "")
    state = State.FAILED if error else state
    wanted = form.wanted(state)
    found = _named(request, site, wanted) if wanted.id else []
    if len(found) == 1:
        return HttpResponseRedirect(found[0][2])
    usable = [name for name, field in form.fields.items() if not field.disabled]
    query = {name: request.GET[name] for name in usable if request.GET.get(name)}
    at = request.GET.get("at", "")
    listed = (
        _dead_letters(request, wanted.queue, error, at)
        if error
        else _listed(request, board, wanted, has_rows, at)
    )
    if listed.window == BUSY and is_partial(request):
        return HttpResponse(status=204)  # the open page stays as it is
    word = ANY if state is None else state.value
    context = {
        "form": form,
        "state": word,
        "tabs_of_states": _tabs(site, board, wanted, query, bool(with_rows)),
        "lines": [] if wanted.queue or state is None else _lines(board, state),
        "jobs": listed.jobs,
        "window": listed.window,
        "newest": site.url("jobs", **query, state=word) if listed.newer else "",
        "newer": listed.newer and site.url("jobs", **query, state=word, at=listed.newer),
        "older": listed.older and site.url("jobs", **query, state=word, at=listed.older),
        "found": found,
        "term": wanted.id,
        "query": query,
        "has_rows": has_rows,
        "is_filtered": bool(query),
        "names": registry.names(),
        "menus": menus(request, site),
        "bulk_actions": _bulk_actions(request, site, listed.jobs),
        "matching_actions": _matching_actions(request, site, wanted, listed.jobs),
    }
    status = 400 if form.errors else 429 if listed.window == BUSY else 200
    return site.render(request, "jobs.html", _("Jobs"), context, tab="jobs", read=cached, status=status)


def _object_jobs(request: HttpRequest, site: DashboardSite, subject: str) -> HttpResponse:
    """List the jobs of an object, newest first, in the queues that the user can see."""
    at = request.GET.get("at") or None
    page = subjects.jobs_of(request, subject, LENGTH, at)
    context = {
        "subject": subjects.shown(request, site.site, subject),
        "jobs": page.jobs,
        "newest": site.url("jobs", subject=subject) if at else "",
        "older": site.url("jobs", subject=subject, at=page.next) if page.next else "",
    }
    title = _("Jobs for an object")
    return site.render(request, "object_jobs.html", title, context, tab="jobs", crumbs=[site.crumb("jobs")])


def _register(page: str, action: JobAction, right: str) -> None:
    @pages.act(f"selected_{page}", f"selected/{page}/", right)
    def act(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        selection.act(request, f"selected_{page}", action)
        return site.back(request, "jobs")


for _page, _action, _right in jobactions.IMMEDIATE:
    _register(_page, _action, _right)


@pages.act("selected_remove", "selected/delete/", rights.DELETE)
def remove(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delete the selected jobs after the undo period."""
    message = ngettext_lazy(
        "%(count)d job of %(queue)s will be deleted in 30 seconds.",
        "%(count)d jobs of %(queue)s will be deleted in 30 seconds.",
        "count",
    )
    selection.delete(request, "selected_remove", message, _("No jobs were selected."))
    return site.back(request, "jobs")


def menus(request: HttpRequest, site: DashboardSite) -> Mapping[str, Sequence[Offer]]:
    """Return the actions that the user may perform on a job, by state."""
    return {
        state.value: [
            Offer(page, label, legal=True, kind=kind)
            for page, action, label, kind in OFFERS
            if action.legal(state) and site.may_open(request, page)
        ]
        for state in State
    }


def _bulk_actions(request: HttpRequest, site: DashboardSite, shown: Sequence[JobRecord]) -> list[Offer]:
    """Return the actions on selected jobs that are possible for at least one job of the page."""
    states = {record.state for record in shown}
    return [
        Offer(f"selected_{page}", label, legal=True, kind=kind)
        for page, action, label, kind in OFFERS
        if any(map(action.legal, states)) and site.may_open(request, f"selected_{page}")
    ]


def _listed(request: HttpRequest, board: queries.Board, wanted: JobFilter, has_rows: bool, at: str) -> Listed:
    storage, state = get_storage(), wanted.state
    if has_rows and is_mirrored(storage) and _rows_version(request) is None:
        freshness.limit(request, board.at)  # no version tells when rows are written
    if state is None or wanted.needs_rows:
        if not has_rows:
            return Listed([])  # no job has this ID
        seen = [line.name for line in board.lines] if rights.hides_queues() else None
        if wanted.argument is None:
            found = jobsearch.search(wanted, seen, at)
            return Listed(found.jobs, found.page.newer, found.page.older, found.window)
        with payloadscan.user_scans.take(request) as is_free:
            if not is_free:
                return Listed([], window=BUSY)
            found = jobsearch.search(wanted, seen, at)
        return Listed(found.jobs, older=found.page.older, window=found.window)
    if wanted.queue:
        if not rights.sees(request, wanted.queue):
            return Listed([])
        page = storage.reads.cursor_page(wanted.queue, state, LENGTH, at or None)
        return Listed(page.jobs, page.previous or "", page.next or "")
    names = [line.name for line in _lines(board, state)]
    if has_rows:
        found = jobsearch.newest(names, state, at)
        return Listed(found.jobs, found.page.newer, found.page.older)
    records = [record for name in names for record in storage.reads.cursor_page(name, state, LENGTH).jobs]
    records.sort(key=lambda record: (-record.created_at, record.queue, record.id))
    return Listed(records[:LENGTH], window="each" if len(records) > LENGTH else "all")


def _dead_letters(request: HttpRequest, queue: str, error: str, after: str) -> Listed:
    """Return the jobs of one error, among the dead letters that are examined."""
    found = deadletters.read(request, queue).value
    matching = list(found.matching(read_filter(fingerprint=error)))
    dead_letters, older = deadletters.page(matching, after)
    by_queue: dict[str, list[str]] = {}
    for dead_letter in dead_letters:
        by_queue.setdefault(dead_letter.queue, []).append(dead_letter.id)
    records = {
        (name, record.id): record
        for name, ids in by_queue.items()
        for record in get_storage().reads.jobs(name, ids)
        if record is not None
    }
    shown = [
        records[key]
        for dead_letter in dead_letters
        if (key := (dead_letter.queue, dead_letter.id)) in records
    ]
    return Listed(shown, older=older, window="dead_letters")


def _lines(board: queries.Board, state: State) -> list[queries.QueueRow]:
    """Return the queues with most jobs in a state."""
    lines = [line for line in board.lines if line.count(state)]
    return sorted(lines, key=lambda line: (-line.count(state), line.name))[:QUEUES]


def _tabs(
    site: DashboardSite, board: queries.Board, wanted: JobFilter, query: Mapping[str, str], has_any: bool
) -> list[Tab]:
    lines = [line for line in board.lines if wanted.queue in ("", line.name)]
    kept = {name: value for name, value in query.items() if name != "error"}
    tabs = [Tab(ANY, _("any"), None, site.url("jobs", **kept, state=ANY))] if has_any else []
    for state in State:
        count = sum(line.count(state) for line in lines)
        label = str(JobState(state.value).label)
        tabs.append(Tab(state.value, label, count, site.url("jobs", **kept, state=state.value)))
    return tabs


def _matching_actions(
    request: HttpRequest, site: DashboardSite, wanted: JobFilter, shown: Sequence[JobRecord]
) -> list[tuple[Any, str]]:
    """Return the actions on all matching jobs, with URLs, if queue, state and name are the only filters."""
    state = wanted.state
    if state is None or not shown or wanted != JobFilter(queue=wanted.queue, state=state, name=wanted.name):
        return []
    here = {"queue": wanted.queue, "name": wanted.name}
    found = [
        (one.label, site.url(one.page, **here, state=state.value))
        for one in bulkjobs.KINDS
        if one.action.legal(state) and site.may_open(request, one.page)
    ]
    if jobactions.RETRY.legal(state) and site.may_open(request, "dead_letters_preview"):
        url = site.url("dead_letters_preview", **here, kind=BulkKind.RETRY)
        found.insert(0, (_("Retry all matching…"), url))
    return found


def _named(request: HttpRequest, site: DashboardSite, wanted: JobFilter) -> list[tuple[str, State, str]]:
    """Return the queue, the state and the URL of each job with this ID."""
    queues = [wanted.queue] if wanted.queue else None
    return [
        (queue, state, site.url("job", queue, wanted.id))
        for queue, state in get_storage().reads.find(wanted.id, queues)
        if rights.sees(request, queue)
    ]
