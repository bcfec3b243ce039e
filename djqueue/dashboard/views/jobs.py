"""The list of jobs by state, filter and ID, and actions on selected or all matching jobs."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage, registry
from djqueue.client.deadletters import read_filter
from djqueue.core.errorgroups import MARK_SIZE, MAX_FINGERPRINTS
from djqueue.core.errors import OptionError
from djqueue.core.job import JobRecord
from djqueue.core.states import State
from djqueue.dashboard import actions, boards, jobsearch, reading, rendering, rights, subjects
from djqueue.dashboard.actions import MatchForm, RateForm, act_on_selection, delete_selection
from djqueue.dashboard.forms import NameSelect, check_hidden, read_state
from djqueue.dashboard.jobsearch import JobFilter
from djqueue.dashboard.outages import is_partial
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of
from djqueue.dashboard.views import errors, savedviews
from djqueue.dashboard.views.job import OFFERS, Offer
from djqueue.models import BulkKind, Job, JobState
from djqueue.operations import bulk
from djqueue.operations.mirror import is_mirrored
from djqueue.storage.actions import CANCEL, PROMOTE, REMOVE, RETRY, Action
from djqueue.storage.tables import leaderlease

pages = Pages()
BULK_FILTERS = ("queue", "state", "name")
LONGEST_ERROR = MAX_FINGERPRINTS * (2 * MARK_SIZE + 1)
"""Maximum characters of the fingerprints of an error, with their commas."""
JOBS_LISTED = 50
"""Jobs per page."""
NAMED = 12
"""Queues with most jobs that the page links to."""
ANY = "any"
"""Any state, if jobs are stored in tables."""
BUSY = "busy"
"""The window of a list that was not read because another search of the user was running."""
ALWAYS = ("queue", "id", "error")
"""Filters that every storage supports."""


class BulkJobAction(NamedTuple):
    """An action on all matching jobs, with the permission that it requires for one job."""

    kind: BulkKind
    page: str
    action: Action
    label: Any
    title: Any
    button: Any


class FilterForm(MatchForm):
    """The filter of the list."""

    field_order = ("queue", "id", "name")
    queue = forms.CharField(label=gettext_lazy("Queue"), required=False, max_length=255)
    name = forms.CharField(label=gettext_lazy("Job"), required=False, max_length=255)
    argument = forms.CharField(
        label=gettext_lazy("Argument"),
        required=False,
        max_length=255,
        widget=forms.TextInput(attrs={"placeholder": "order_id:7"}),
    )
    error = forms.CharField(required=False, max_length=LONGEST_ERROR, widget=forms.HiddenInput)

    def __init__(self, *args: Any, queues: Sequence[str], has_rows: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["queue"].widget = NameSelect(choices=[("", _("all")), *((name, name) for name in queues)])
        self.fields["name"].widget.attrs["list"] = "djq-names"
        self.fields["id"].widget.attrs["data-djq-filter"] = True
        for name, field in self.fields.items():
            field.disabled = not has_rows and name not in ALWAYS
        if not has_rows:
            self.fields["id"].label = _("Full ID")

    def clean_argument(self) -> jobsearch.ArgumentFilter | None:
        try:
            return jobsearch.parse_argument(self.cleaned_data["argument"])
        except OptionError:
            raise forms.ValidationError(_("Use the form order_id:7, order.id:7 or args.0:7.")) from None

    def wanted(self, state: State | None) -> JobFilter:
        """Return the filter, ignoring fields that are not valid."""
        others = ("queue", "name", "argument")
        fields = {name: value for name in others if (value := self.cleaned_data.get(name)) not in (None, "")}
        return JobFilter(**fields, **self.given(), state=state)


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
    return (actions.deletion_parts(request), _rows_version(request))


@pages.show("jobs", "jobs/", rights.VIEW, gettext_lazy("Jobs"), _parts)
def jobs(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List matching jobs of a state, newest first."""
    if subject := request.GET.get("subject"):
        reading.expire_at(request, 0)  # the project may change the object
        return _object_jobs(request, site, subject)
    cached = boards.board(request)
    board = cached.value
    given = request.GET.get("state", "")
    state = read_state(given)
    with_rows = jobsearch.states_with_rows(get_storage())
    chosen = given if state is not None or given == ANY else ""
    is_search = any(request.GET.get(name) for name in FilterForm.base_fields if name not in ALWAYS)
    if state is None and not (with_rows and (chosen or is_search)):
        state = State.ACTIVE
    has_rows = bool(with_rows) if state is None else state in with_rows
    form = FilterForm(request.GET, queues=[line.name for line in board.lines], has_rows=has_rows)
    form.is_valid()
    check_hidden(form)
    error = form.cleaned_data.get("error", "")
    state = State.FAILED if error else state
    wanted = form.wanted(state)
    named = _jobs_with_id(request, site, wanted) if wanted.id else []
    if len(named) == 1:
        return HttpResponseRedirect(named[0][2])
    usable = [name for name, field in form.fields.items() if not field.disabled]
    query = {name: request.GET[name] for name in usable if request.GET.get(name)}
    at = request.GET.get("at", "")
    if form.errors:
        listed = Listed(())  # jobs that an invalid filter was to leave out would look like matches
    elif error:
        listed = _dead_letters(request, wanted.queue, error, at)
    else:
        listed = _listed(request, board, wanted, has_rows, at)
    if listed.window == BUSY and is_partial(request):
        return HttpResponse(status=204)  # the open page stays as it is
    word = ANY if state is None else state.value
    context = {
        "form": form,
        "state": word,
        "chosen": chosen,
        "tabs_of_states": _tabs(site, board, wanted, query, bool(with_rows)),
        "lines": [] if wanted.queue or state is None else _largest_queues(board, state)[:NAMED],
        "jobs": listed.jobs,
        "window": listed.window,
        "newest": site.url("jobs", **query, state=word) if listed.newer else "",
        "newer": listed.newer and site.url("jobs", **query, state=word, at=listed.newer),
        "older": listed.older and site.url("jobs", **query, state=word, at=listed.older),
        "found": named,
        "term": wanted.id,
        "query": query,
        "has_rows": has_rows,
        "is_filtered": bool(query),
        "has_more": any(request.GET.get(name) for name in MatchForm.base_fields if name not in ("id", "tag")),
        "names": registry.names(),
        "views": savedviews.links(request, site),
        "menus": menus(request, site),
        "bulk_actions": _selected_actions(request, site, listed.jobs),
        "matching_actions": _matching_actions(request, site, wanted, query, listed.jobs),
        "error_text": error and errors.error_text(request, wanted.queue, error),
    }
    status = 400 if form.errors else 429 if listed.window == BUSY else 200
    return site.render(request, "jobs.html", _("Jobs"), context, tab="jobs", read=cached, status=status)


BULK_ACTIONS = (
    BulkJobAction(
        BulkKind.PROMOTE,
        "all_promote",
        PROMOTE,
        gettext_lazy("Run all matching now…"),
        gettext_lazy("Run delayed jobs now"),
        gettext_lazy("Run jobs now"),
    ),
    BulkJobAction(
        BulkKind.CANCEL,
        "all_cancel",
        CANCEL,
        gettext_lazy("Cancel all matching…"),
        gettext_lazy("Cancel jobs"),
        gettext_lazy("Cancel jobs"),
    ),
    BulkJobAction(
        BulkKind.DELETE,
        "all_delete",
        REMOVE,
        gettext_lazy("Delete all matching…"),
        gettext_lazy("Delete jobs"),
        gettext_lazy("Delete jobs"),
    ),
)


def _register_bulk(one: BulkJobAction) -> None:
    @pages.show(one.page, f"all/{one.kind.value}/", one.action.permission)
    def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """Show how many jobs match."""
        return _preview_bulk(request, site, one, RateForm(), request.GET)

    @pages.act(f"{one.page}_begin", f"all/{one.kind.value}/now/", one.action.permission)
    def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """Start the operation."""
        form = RateForm(request.POST)
        if not form.is_valid():
            check_hidden(form)
            return _preview_bulk(request, site, one, form, request.POST)
        selection = _bulk_selection(request, one, request.POST)
        return actions.begin_bulk(request, site, f"{one.page}_begin", one.kind, selection, form)


for _bulk_action in BULK_ACTIONS:
    _register_bulk(_bulk_action)


def _register(action: Action) -> None:
    @pages.act(f"selected_{action.name}", f"selected/{action.name}/", action.permission)
    def act(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        act_on_selection(request, f"selected_{action.name}", action)
        return site.back(request, "jobs")


for _action in actions.IMMEDIATE:
    _register(_action)


@pages.act("selected_remove", "selected/delete/", REMOVE.permission)
def remove(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delete the selected jobs after the undo period."""
    message = ngettext_lazy(
        "%(count)d job of %(queue)s will be deleted in 30 seconds.",
        "%(count)d jobs of %(queue)s will be deleted in 30 seconds.",
        "count",
    )
    delete_selection(request, "selected_remove", message, _("No jobs were selected."))
    return site.back(request, "jobs")


def menus(request: HttpRequest, site: DashboardSite) -> Mapping[str, Sequence[Offer]]:
    """Return the actions that the user may perform on a job, by state."""
    return {
        state.value: [
            Offer(action.name, str(label), legal=True, kind=kind)
            for action, label, kind in OFFERS
            if state in action.states and site.may_open(request, action.name)
        ]
        for state in State
    }


def _preview_bulk(
    request: HttpRequest, site: DashboardSite, one: BulkJobAction, form: forms.Form, given: Mapping[str, str]
) -> HttpResponse:
    problem, counts = "", None
    try:
        counts = bulk.preview(get_storage(), one.kind, _bulk_selection(request, one, given))
    except OptionError as error:
        problem = str(error)
    match, matches = actions.shown_match(given)
    query = {name: given[name] for name in BULK_FILTERS if given.get(name)}
    pairs = [(_("Queue"), query.get("queue") or _("all")), *matches]
    if "state" in query and not problem:
        label = str(JobState(query["state"]).label)
        pairs.append((_("State"), rendering.badge(query["state"], label)))
    if "name" in query:
        pairs.append((_("Job"), rendering.mono(query["name"])))
    return actions.confirm_bulk(
        request,
        site,
        form,
        counts,
        title=str(one.title),
        tab="jobs",
        crumbs=[site.crumb("jobs")],
        begin_url=site.url(f"{one.page}_begin"),
        button=one.button,
        pairs=pairs,
        note=_("Jobs enqueued later are not affected."),
        nothing=_("No matching jobs."),
        back_url=site.url("jobs", **query, **match),
        back_label=_("Back to jobs"),
        hidden={**query, **match},
        problem=problem,
        is_deletion=one.kind == BulkKind.DELETE,
    )


def _bulk_selection(request: HttpRequest, one: BulkJobAction, given: Mapping[str, str]) -> bulk.Selection:
    """Return the matching jobs in the queues that the user can see.

    Raises:
        OptionError: The state does not allow the action, or no queue has such jobs.
    """
    word, queue = given.get("state", ""), given.get("queue", "")
    state = read_state(word)
    if state is None or state not in one.action.states:
        raise OptionError(f"state: {word!r} doesn't allow this action")
    lines = boards.board(request).value.lines
    names = [line.name for line in lines if queue in ("", line.name) and (queue or line.count(state))]
    if not names:
        raise OptionError(f"queue: no matching jobs in {queue or 'any queue'!r}")
    return bulk.Selection(tuple(names), state=word, name=given.get("name", ""), **actions.read_match(given))


def _rows_version(request: HttpRequest) -> Hashable:
    """Return the version of mirrored rows, which are written later than the jobs change; read once."""

    def read() -> Hashable:
        return leaderlease.version(alias_of(Job)) if is_mirrored(get_storage()) else None

    return reading.once_per_request(request, "rows_version", read)


def _object_jobs(request: HttpRequest, site: DashboardSite, subject: str) -> HttpResponse:
    """List the jobs of an object, newest first, in the queues that the user can see."""
    at = request.GET.get("at") or None
    page = subjects.jobs_of(request, subject, JOBS_LISTED, at)
    context = {
        "subject": subjects.shown(request, site.site, subject),
        "jobs": page.jobs,
        "newest": site.url("jobs", subject=subject) if at else "",
        "older": site.url("jobs", subject=subject, at=page.next) if page.next else "",
    }
    title = _("Jobs for an object")
    return site.render(request, "object_jobs.html", title, context, tab="jobs", crumbs=[site.crumb("jobs")])


def _selected_actions(request: HttpRequest, site: DashboardSite, shown: Sequence[JobRecord]) -> list[Offer]:
    """Return the actions on selected jobs that are possible for at least one job of the page."""
    states = {record.state for record in shown}
    return [
        Offer(f"selected_{action.name}", label, legal=True, kind=kind)
        for action, label, kind in OFFERS
        if states & action.states and site.may_open(request, f"selected_{action.name}")
    ]


def _listed(request: HttpRequest, board: boards.Board, wanted: JobFilter, has_rows: bool, at: str) -> Listed:
    storage, state = get_storage(), wanted.state
    if has_rows and is_mirrored(storage) and _rows_version(request) is None:
        reading.expire_at(request, board.at)  # no version tells when rows are written
    if state is None or wanted.needs_rows:
        if not has_rows:
            return Listed([])  # no job has this ID
        seen = [line.name for line in board.lines] if rights.hides_queues() else None
        if wanted.argument is None:
            result = jobsearch.search(wanted, seen, at)
            return Listed(result.jobs, result.page.newer, result.page.older, result.window)
        with jobsearch.user_scans.take(request) as is_free:
            if not is_free:
                return Listed([], window=BUSY)
            result = jobsearch.search(wanted, seen, at)
        return Listed(result.jobs, older=result.page.older, window=result.window)
    if wanted.queue:
        if not rights.sees(request, wanted.queue):
            return Listed([])
        page = storage.reads.cursor_page(wanted.queue, state, JOBS_LISTED, at or None)
        return Listed(page.jobs, page.previous or "", page.next or "")
    names = [line.name for line in _largest_queues(board, state)]
    if has_rows:
        result = jobsearch.newest(names, state, at)
        return Listed(result.jobs, result.page.newer, result.page.older)
    records = [
        record for name in names for record in storage.reads.cursor_page(name, state, JOBS_LISTED).jobs
    ]
    records.sort(key=lambda record: (-record.created_at, record.queue, record.id))
    return Listed(records[:JOBS_LISTED], window="each" if len(records) > JOBS_LISTED else "all")


def _dead_letters(request: HttpRequest, queue: str, error: str, after: str) -> Listed:
    """Return the jobs of one error, among the dead letters that are examined."""
    sample = errors.read_dead_letters(request, queue).value
    matching = list(sample.matching(read_filter(fingerprint=error)))
    dead_letters, older = errors.page_of(matching, after)
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


def _largest_queues(board: boards.Board, state: State) -> list[boards.QueueRow]:
    """Return the queues with most jobs in a state."""
    lines = [line for line in board.lines if line.count(state)]
    return sorted(lines, key=lambda line: (-line.count(state), line.name))[: jobsearch.QUEUES]


def _tabs(
    site: DashboardSite, board: boards.Board, wanted: JobFilter, query: Mapping[str, str], has_any: bool
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
    request: HttpRequest,
    site: DashboardSite,
    wanted: JobFilter,
    query: Mapping[str, str],
    shown: Sequence[JobRecord],
) -> list[tuple[Any, str]]:
    """Return the actions on all matching jobs of a state, with URLs.

    None if arguments are searched: the workers do not know which of them the user can see. Jobs of one error
    are chosen as dead letters: the other actions know no error.
    """
    state = wanted.state
    if state is None or not shown or wanted.argument is not None:
        return []
    here = {name: value for name, value in query.items() if name != "error"}
    error = query.get("error", "")
    if error:
        here["fingerprint"] = error
    links = [
        (one.label, site.url(one.page, **here, state=state.value))
        for one in BULK_ACTIONS
        if not error and state in one.action.states and site.may_open(request, one.page)
    ]
    if state in RETRY.states and site.may_open(request, "errors_preview"):
        url = site.url("errors_preview", **here, kind=BulkKind.RETRY)
        links.insert(0, (_("Retry all matching…"), url))
        if error:
            url = site.url("errors_preview", **here, kind=BulkKind.PURGE)
            links.append((_("Delete all matching…"), url))
    return links


def _jobs_with_id(
    request: HttpRequest, site: DashboardSite, wanted: JobFilter
) -> list[tuple[str, State, str]]:
    """Return the queue, the state and the URL of each job with this ID."""
    queues = [wanted.queue] if wanted.queue else None
    return [
        (queue, state, site.url("job", queue, wanted.id))
        for queue, state in get_storage().reads.find(wanted.id, queues)
        if rights.sees(request, queue)
    ]
