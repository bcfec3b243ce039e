"""Jobs of all queues: by state, by what is said of them, by id; and what can be done to those ticked."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage, registry
from djqueue.client.deadletters import read_filter
from djqueue.conf import get_settings
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import OptionError
from djqueue.core.job import JobRecord
from djqueue.core.states import State
from djqueue.dashboard import (
    byargument,
    deletions,
    failures,
    freshness,
    jobactions,
    jobsearch,
    queries,
    rights,
    scanning,
    selection,
)
from djqueue.dashboard.inputs import TimeField, check_hidden
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.jobsearch import JobFilter
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite, is_partial
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, Job, JobState
from djqueue.operations import leaderlease
from djqueue.operations.mirroring import is_mirrored

from . import bulkjobs
from .about import jobs_about
from .job import OFFERS, Offer

pages = Pages()

LENGTH = 50
"""Jobs of a page."""
QUEUES = jobsearch.QUEUES
ANY = "any"
"""Of the states, where there are tables to ask."""
BUSY = "busy"
"""The window of a list that was not made, as another search of the user was under way."""
ALWAYS = ("queue", "id", "error")
"""Filters that every storage answers."""


class FilterForm(forms.Form):
    """Which jobs are listed."""

    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=255)
    id = forms.CharField(label=gettext_lazy("ID or ID prefix"), required=False, max_length=255)
    name = forms.CharField(label=gettext_lazy("Job"), required=False, max_length=255)
    tag = forms.CharField(label=gettext_lazy("Tag"), required=False, max_length=255)
    worker = forms.CharField(label=gettext_lazy("Worker"), required=False, max_length=255)
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), required=False, min_value=-(2**31), max_value=2**31 - 1
    )
    since = TimeField(label=gettext_lazy("Enqueued after"), required=False)
    until = TimeField(label=gettext_lazy("Enqueued before"), required=False)
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
        for name in ("since", "until"):
            self.fields[name].widget = forms.DateTimeInput(
                attrs={"type": "datetime-local", "step": "1"}, format="%Y-%m-%dT%H:%M:%S"
            )
        for name, field in self.fields.items():
            field.disabled = not has_rows and name not in ALWAYS
        if not has_rows:
            self.fields["id"].label = _("Full ID")

    def clean_argument(self) -> byargument.Argument | None:
        """Where a value is, and what it is."""
        try:
            return byargument.read(self.cleaned_data["argument"])
        except OptionError:
            raise forms.ValidationError(_("Use the form order_id:7, order.id:7 or args.0:7.")) from None

    def wanted(self, state: State | None) -> JobFilter:
        """What was filled in; a field that is wrong says nothing."""
        given = {name: value for name, value in self.cleaned_data.items() if value not in (None, "")}
        given.pop("error", None)
        for name in ("since", "until"):
            if name in given:
                given[name] = to_milliseconds(given[name])
        return JobFilter(**given, state=state)


class Tab(NamedTuple):
    """A state, with its jobs and its list."""

    value: str
    label: str
    jobs: int | None
    """None: it is not known without counting."""
    url: str
    capped: bool


class Listed(NamedTuple):
    """A page of the list."""

    jobs: Sequence[JobRecord]
    newer: str = ""
    """Where the newer page begins, as `older` the older one."""
    older: str = ""
    window: str = "all"
    """See `jobsearch.Found`; `each`: the newest of every queue; `letters`: dead letters; or `BUSY`."""


def _parts(request: HttpRequest) -> Hashable:
    return (deletions.parts(request), _rows_version(request))


def _rows_version(request: HttpRequest) -> Hashable:
    """Return the version of mirrored rows, which are written later than the jobs change; read once."""
    known: dict[str, Hashable] = request.__dict__.setdefault("_djqueue_rows_version", {})
    if "value" not in known:
        known["value"] = leaderlease.version(alias_of(Job)) if is_mirrored(get_storage()) else None
    return known["value"]


@pages.show("jobs", "jobs/", rights.VIEW, gettext_lazy("Jobs"), _parts)
def jobs(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Those of one state that match, the newest first."""
    if subject := request.GET.get("subject"):
        freshness.limit(request, 0)  # the object is one of the project's
        return jobs_about(request, site, subject)
    cached = queries.board(request)
    board = cached.value
    given = request.GET.get("state", "")
    state = State(given) if given in {one.value for one in State} else None
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
        _letters(request, wanted.queue, error, at) if error else _listed(request, board, wanted, has_rows, at)
    )
    if listed.window == BUSY and is_partial(request):
        return HttpResponse(status=204)  # what the open page shows stays
    word = ANY if state is None else state.value
    context = {
        "form": form,
        "state": word,
        "tabs_of_states": _tabs(site, board, wanted, query, bool(with_rows)),
        "lines": [] if wanted.queue or state is None else _lines(board, state),
        "jobs": listed.jobs,
        "window": listed.window,
        "newest": site.url("jobs", **query, state=word),
        "newer": listed.newer and site.url("jobs", **query, state=word, at=listed.newer),
        "older": listed.older and site.url("jobs", **query, state=word, at=listed.older),
        "found": found,
        "term": wanted.id,
        "query": query,
        "has_rows": has_rows,
        "is_filtered": bool(query),
        "names": registry.names(),
        "menus": menus(request, site),
        "acts": _acts(request, site, listed.jobs),
        "in_bulk": _in_bulk(request, site, wanted, listed.jobs),
    }
    status = 400 if form.errors else 429 if listed.window == BUSY else 200
    return site.render(
        request,
        "jobs.html",
        _("Jobs"),
        context,
        tab="jobs",
        as_of=board.at,
        away=cached.away,
        status=status,
    )


@pages.act("ticked_retry", "ticked/retry/", rights.RETRY)
def retry(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Failed ones run again."""
    return _act(request, site, "ticked_retry", jobactions.RETRY)


@pages.act("ticked_promote", "ticked/promote/", rights.EDIT)
def promote(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delayed ones run now."""
    return _act(request, site, "ticked_promote", jobactions.PROMOTE)


@pages.act("ticked_cancel", "ticked/cancel/", rights.CANCEL)
def cancel(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Pending ones never start, running ones are asked to stop."""
    return _act(request, site, "ticked_cancel", jobactions.CANCEL)


@pages.act("ticked_remove", "ticked/delete/", rights.DELETE)
def remove(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """They are forgotten, when the time to undo that is over."""
    selection.delete(request, "ticked_remove")
    return site.back(request, "jobs")


def _act(request: HttpRequest, site: DashboardSite, page: str, verb: JobAction) -> HttpResponse:
    selection.act(request, page, verb)
    return site.back(request, "jobs")


def menus(request: HttpRequest, site: DashboardSite) -> Mapping[str, Sequence[Offer]]:
    """By state: what the user may do to a job that is in it."""
    return {
        state.value: [
            Offer(page, label, legal=True, kind=kind)
            for page, verb, label, kind in OFFERS
            if verb.legal(state) and site.may_open(request, page)
        ]
        for state in State
    }


def _acts(request: HttpRequest, site: DashboardSite, shown: Sequence[JobRecord]) -> list[Offer]:
    """What can be done to those of a page that are ticked: what is legal for one of them at least."""
    states = {record.state for record in shown}
    return [
        Offer(f"ticked_{page}", label, legal=True, kind=kind)
        for page, verb, label, kind in OFFERS
        if any(map(verb.legal, states)) and site.may_open(request, f"ticked_{page}")
    ]


def _listed(request: HttpRequest, board: queries.Board, wanted: JobFilter, has_rows: bool, at: str) -> Listed:
    storage, state = get_storage(), wanted.state
    if has_rows and is_mirrored(storage) and _rows_version(request) is None:
        freshness.limit(request, board.at)  # nothing tells when rows come
    if state is None or wanted.needs_rows:
        if not has_rows:
            return Listed([])  # of a whole id that nobody has
        hides = get_settings().dashboard.queue_filter is not None
        seen = [line.name for line in board.lines] if hides else None
        if wanted.argument is None:
            found = jobsearch.search(wanted, seen, at)
            return Listed(found.jobs, found.page.newer, found.page.older, found.window)
        with scanning.turns.take(request) as is_free:
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


def _letters(request: HttpRequest, queue: str, error: str, after: str) -> Listed:
    """Jobs of one error, as far as dead letters are looked at."""
    found = failures.failures(request, queue).value
    matching = list(found.matching(read_filter(fingerprint=error)))
    letters, older = failures.page(matching, after)
    by_queue: dict[str, list[str]] = {}
    for dead_letter in letters:
        by_queue.setdefault(dead_letter.queue, []).append(dead_letter.id)
    records = {
        (name, record.id): record
        for name, ids in by_queue.items()
        for record in get_storage().reads.jobs(name, ids)
        if record is not None
    }
    shown = [
        records[key] for dead_letter in letters if (key := (dead_letter.queue, dead_letter.id)) in records
    ]
    return Listed(shown, older=older, window="letters")


def _lines(board: queries.Board, state: State) -> list[queries.QueueRow]:
    """The queues with most jobs in a state."""
    lines = [line for line in board.lines if line.count(state)]
    return sorted(lines, key=lambda line: (-line.count(state), line.name))[:QUEUES]


def _tabs(
    site: DashboardSite, board: queries.Board, wanted: JobFilter, query: Mapping[str, str], has_any: bool
) -> list[Tab]:
    lines = [line for line in board.lines if wanted.queue in ("", line.name)]
    kept = {name: value for name, value in query.items() if name != "error"}
    tabs = [Tab(ANY, _("any"), None, site.url("jobs", **kept, state=ANY), capped=False)] if has_any else []
    for state in State:
        count = sum(line.count(state) for line in lines)
        # Without a scheduler a queue's number ends there.
        capped = board.capped and any(line.count(state) >= queries.CAP for line in lines)
        label = str(JobState(state.value).label)
        tabs.append(Tab(state.value, label, count, site.url("jobs", **kept, state=state.value), capped))
    return tabs


def _in_bulk(
    request: HttpRequest, site: DashboardSite, wanted: JobFilter, shown: Sequence[JobRecord]
) -> list[tuple[Any, str]]:
    """What can be done to all that match, with addresses, where queue, state and name alone say which."""
    state = wanted.state
    if state is None or not shown or wanted != JobFilter(queue=wanted.queue, state=state, name=wanted.name):
        return []
    here = {"queue": wanted.queue, "name": wanted.name}
    found = [
        (one.label, site.url(one.page, **here, state=state.value))
        for one in bulkjobs.KINDS
        if one.verb.legal(state) and site.may_open(request, one.page)
    ]
    if jobactions.RETRY.legal(state) and site.may_open(request, "letters_preview"):
        found.insert(0, (_("Retry all matching…"), site.url("letters_preview", **here, kind=BulkKind.RETRY)))
    return found


def _named(request: HttpRequest, site: DashboardSite, wanted: JobFilter) -> list[tuple[str, State, str]]:
    """Where a whole id is: queue, state, address."""
    queues = [wanted.queue] if wanted.queue else None
    return [
        (queue, state, site.url("job", queue, wanted.id))
        for queue, state in get_storage().reads.find(wanted.id, queues)
        if rights.sees(request, queue)
    ]
