"""Errors, which users resolve and ignore; dead letters, which are listed, retried, deleted and exported."""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage
from djqueue.client.deadletters import (
    DeadLetterFilter,
    find_dead_letters,
    fingerprint,
    is_of_type,
    read_filter,
)
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.job import DEAD_LETTER_REASONS, DeadLetterRecord, JobFailure
from djqueue.core.metrics import HOUR
from djqueue.core.options import DAY
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.dashboard import actions, audit, boards, charts, rendering, rights
from djqueue.dashboard.actions import RateForm, act_on_selection, delete_selection
from djqueue.dashboard.forms import BadInputError, check_hidden
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import BulkKind, ErrorGroup
from djqueue.operations import bulk, errorgroups
from djqueue.operations.problems import MAX_ERRORS
from djqueue.storage.actions import REMOVE, RETRY
from djqueue.storage.base import Storage

pages = Pages()
MAX_EXAMINED = 10_000
"""Maximum dead letters examined: the default limit of one queue."""
DEAD_LETTERS_FRESH = 5_000
"""Milliseconds before dead letters are read again."""
DEAD_LETTERS_LISTED = 50
"""Dead letters per page."""
FILTERS = ("reason", "name", "error_type", "fingerprint")
"""Filters in query strings, named like the arguments of `Queue.retry_dead`."""
DAYS = 14
"""Days in the chart of a group."""
CHART_HOURS = 7 * 24
"""Hours in the chart on a group's page."""
STATES: dict[str, Any] = {
    "open": gettext_lazy("Open"),
    "back": gettext_lazy("Came back"),
    "resolved": gettext_lazy("Resolved"),
    "ignored": gettext_lazy("Ignored"),
}
"""Labels of the states of groups."""
SHOWN = ("open", "resolved", "ignored")
"""States that the list can be narrowed to; groups that came back are open."""
IGNORED_FOR = ((1, gettext_lazy("1 hour")), (24, gettext_lazy("1 day")), (168, gettext_lazy("7 days")))
"""Hours for which groups can be ignored, with labels."""
GROUPS_LISTED = 50
"""Maximum groups listed, the largest."""


@dataclass(frozen=True, slots=True)
class DeadLetterSample:
    """Dead letters, newest first."""

    dead_letters: tuple[DeadLetterRecord, ...]
    at: int
    capped: bool
    """Whether there are more than were examined."""

    def matching(self, wanted: DeadLetterFilter) -> Iterator[DeadLetterRecord]:
        """Yield the dead letters that match a filter."""
        return (dead_letter for dead_letter in self.dead_letters if wanted.matches(dead_letter, self.at))


@dataclass(frozen=True, slots=True)
class ErrorHour:
    """The failed attempts of a group in one hour."""

    start: int
    step: int
    attempts: int


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A group of errors as pages show it."""

    group: ErrorGroup
    state: str
    """One of `STATES`."""
    at: int
    """UTC milliseconds."""

    @property
    def days(self) -> list[int]:
        """Failed attempts per day, oldest day first."""
        hours = errorgroups.hours_until(self.group, self.at, DAYS * 24)
        return [sum(hours[at : at + 24]) for at in range(0, len(hours), 24)]

    @property
    def today(self) -> int:
        """Failed attempts of the last 24 hours."""
        return sum(errorgroups.hours_until(self.group, self.at, 24))

    @property
    def fingerprints(self) -> str:
        """The fingerprints of the group, as filters of dead letters take them."""
        return ",".join(self.group.fingerprints)

    @property
    def text(self) -> str:
        """The error in one line."""
        return error_line(self.group)

    @property
    def label(self) -> str:
        """Label of its state."""
        return str(STATES[self.state])

    @property
    def is_open(self) -> bool:
        return self.state in ("open", "back")

    @property
    def versions(self) -> list[tuple[str, int, int, int]]:
        """Version, failed attempts, first and last time of each version, the one seen last first."""
        known: dict[str, tuple[int, int, int]] = self.group.versions
        found = [(version, count, first, last) for version, (count, first, last) in known.items()]
        return sorted(found, key=itemgetter(3), reverse=True)


class ResolveForm(forms.Form):
    """The version in which an error is resolved; empty for the next one."""

    version = forms.CharField(required=False, max_length=255)


class IgnoreForm(forms.Form):
    """Hours for which an error is ignored."""

    hours = forms.IntegerField(min_value=1, max_value=24 * 365)


class BeginForm(RateForm):
    """The action on the matching dead letters, and its rate."""

    kind = forms.ChoiceField(choices=[(one, one) for one in (BulkKind.RETRY, BulkKind.PURGE)])
    queue = forms.CharField(required=False, max_length=255)


@pages.show("errors", "errors/", rights.VIEW, gettext_lazy("Errors"), actions.deletion_parts)
def dead_letters(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List groups by error, and the matching dead letters."""
    queue = request.GET.get("queue", "")
    try:
        query, problem = read_query(request.GET), ""
    except OptionError as error:
        query, problem = {}, str(error)
    cached = read_dead_letters(request, queue)
    sample = cached.value
    # With an invalid filter nothing matches, so that no button acts on all dead letters.
    matching = [] if problem else list(sample.matching(read_filter(**query)))  # type: ignore[arg-type]
    after = request.GET.get("after", "")
    shown, older = page_of(matching, after)
    here = {**query, "queue": queue}
    show = request.GET.get("show", "open")
    rows = [] if problem or "reason" in query else error_rows(request, queue, query)
    context = {
        "groups": [row for row in rows if show in (row.state, "open" if row.is_open else "")][:GROUPS_LISTED],
        "shown": [
            (name, STATES[name], sum(name in (row.state, "open" if row.is_open else "") for row in rows))
            for name in SHOWN
        ],
        "show": show,
        "dead_letters": shown,
        "older": older and site.url("errors", **here, after=older),
        "newest": site.url("errors", **here) if after or older else "",
        "matching": len(matching),
        "capped": sample.capped,
        "query": query,
        "queue": queue,
        "problem": problem,
        "reasons": [(word, rendering.reason(word)) for word in DEAD_LETTER_REASONS],
        "queues": boards.board(request).value.names_with(State.FAILED),
        "retry_url": site.url("errors_preview", **here, kind=BulkKind.RETRY),
        "purge_url": site.url("errors_preview", **here, kind=BulkKind.PURGE),
        "export_url": site.url("errors_export", **here),
        "days": [sample.at - (DAYS - 1 - day) * DAY for day in range(DAYS)],
    }
    return site.render(
        request,
        "errors.html",
        _("Errors"),
        context,
        tab="errors",
        read=cached,
        status=400 if problem else 200,
    )


def read_dead_letters(
    request: HttpRequest, queue: str = "", fresh: int = DEAD_LETTERS_FRESH
) -> CachedRead[DeadLetterSample]:
    """Return the dead letters of a queue, or of all queues that the user can see.

    Args:
        fresh: Milliseconds before they are read again.
    """
    board = boards.board(request).value
    names = board.names_with(State.FAILED, queue)
    key = ("failures", *names)

    def read() -> DeadLetterSample:
        return sample_dead_letters(get_storage(), names, board.at, MAX_EXAMINED)

    return read_cache.read(key, read, fresh=fresh, versioned=True)


def read_query(given: Mapping[str, str]) -> dict[str, str]:
    """Return the filters of a query string.

    Raises:
        OptionError: A filter has an unknown value.
    """
    query = {name: given[name] for name in FILTERS if given.get(name)}
    read_filter(**query)  # type: ignore[arg-type]
    return query


def sample_dead_letters(storage: Storage, names: Sequence[str], at: int, limit: int) -> DeadLetterSample:
    """Read dead letters of queues in turns, so that a queue with many hides no error of another one."""
    everything: Any = read_filter()
    unread = deque(find_dead_letters(storage, name, everything) for name in names)
    collected: list[DeadLetterRecord] = []
    capped = False
    while unread and not capped:
        queue = unread.popleft()
        if (dead_letter := next(queue, None)) is None:
            continue
        capped = len(collected) == limit
        if not capped:
            collected.append(dead_letter)
            unread.append(queue)
    collected.sort(key=lambda dead_letter: (-dead_letter.entered_at, dead_letter.queue, dead_letter.id))
    return DeadLetterSample(tuple(collected), at, capped)


def error_rows(
    request: HttpRequest,
    queue: str = "",
    query: Mapping[str, str] | None = None,
    fresh: int = DEAD_LETTERS_FRESH,
) -> list[ErrorRow]:
    """Return the groups of a queue, or of all queues that the user can see, those seen last first.

    Args:
        query: Filters as in a query string.
        fresh: Milliseconds before they are read again.
    """
    names = tuple(one.name for one in boards.board(request).value.lines if queue in ("", one.name))
    wanted = query or {}
    marks = set(wanted.get("fingerprint", "").split(",")) - {""}
    now = SYSTEM_CLOCK.now()

    def read() -> list[ErrorGroup]:
        return errorgroups.newest(alias_of(ErrorGroup), MAX_ERRORS, names)

    return [
        row_of(group, now)
        for group in read_cache.read(("error groups", *names), read, fresh=fresh).value
        if wanted.get("name", group.name) == group.name
        and ("error_type" not in wanted or is_of_type(group.error_type, wanted["error_type"]))
        and (not marks or not marks.isdisjoint(group.fingerprints))
    ]


def row_of(group: ErrorGroup, now: int) -> ErrorRow:
    """Return a group as pages show it."""
    return ErrorRow(group, errorgroups.state_of(group, now), now)


def error_line(group: ErrorGroup) -> str:
    """Return an error in one line."""
    return rendering.failure_line(JobFailure(group.error_type, group.message))


def error_text(request: HttpRequest, queue: str, marks: str) -> str:
    """Return the error with fingerprints as text; the fingerprints if they have none."""
    found = error_rows(request, queue, {"fingerprint": marks})
    return found[0].text if found else marks


def page_of(found: Sequence[DeadLetterRecord], after: str) -> tuple[list[DeadLetterRecord], str]:
    """Return the page after a cursor, and the cursor of the next page if there is one."""
    start = 0
    if after:
        start = next((at for at, dead_letter in enumerate(found, 1) if cursor_of(dead_letter) == after), 0)
    shown = list(found[start : start + DEAD_LETTERS_LISTED])
    return shown, cursor_of(shown[-1]) if len(found) > start + DEAD_LETTERS_LISTED else ""


def cursor_of(dead_letter: DeadLetterRecord) -> str:
    """Return the cursor that identifies a dead letter in a URL."""
    return f"{dead_letter.entered_at}:{dead_letter.queue}:{dead_letter.id}"


@pages.show("errors_preview", "errors/begin/", rights.DEAD_LETTERS)
def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show how many dead letters match."""
    return _preview_bulk(request, site, BeginForm(request.GET), request.GET)


@pages.act("errors_begin", "errors/begin/now/", rights.DEAD_LETTERS)
def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Start the operation."""
    form = BeginForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview_bulk(request, site, form, request.POST)
    selection = _bulk_selection(request, request.POST, form.cleaned_data["queue"])
    kind = form.cleaned_data["kind"]
    return actions.begin_bulk(request, site, "errors_begin", kind, selection, form)


@pages.act("errors_retry", "errors/selected/", RETRY.permission)
def selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Retry the selected dead letters."""
    act_on_selection(request, "errors_retry", RETRY)
    return site.back(request, "errors")


@pages.act("errors_delete", "errors/selected/delete/", REMOVE.permission)
def delete_selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delete the selected dead letters after the undo period."""
    message = ngettext_lazy(
        "%(count)d dead letter of %(queue)s will be deleted in 30 seconds.",
        "%(count)d dead letters of %(queue)s will be deleted in 30 seconds.",
        "count",
    )
    nothing = _("No dead letters were selected.")
    delete_selection(request, "errors_delete", message, nothing, state=str(State.FAILED))
    return site.back(request, "errors")


@pages.show("errors_export", "errors/export.ndjson", rights.VIEW)
def export(request: HttpRequest, _site: DashboardSite) -> HttpResponseBase:
    """Stream the matching dead letters as NDJSON, without payloads."""
    try:
        query = read_query(request.GET)
    except OptionError as error:
        return HttpResponse(str(error), status=400, content_type="text/plain; charset=utf-8")
    sample = read_dead_letters(request, request.GET.get("queue", "")).value

    def lines() -> Iterator[str]:
        for dead_letter in sample.matching(read_filter(**query)):  # type: ignore[arg-type]
            times = {
                name: to_datetime(getattr(dead_letter, name)).isoformat()
                for name in ("entered_at", "expires_at")
            }
            yield (
                json.dumps({**dead_letter._asdict(), **times, "fingerprint": fingerprint(dead_letter)}) + "\n"
            )

    response = StreamingHttpResponse(lines(), content_type="application/x-ndjson")
    response["Content-Disposition"] = 'attachment; filename="dead-letters.ndjson"'
    return response


@pages.show("error", "errors/<djq:queue>/<djq:key>/", rights.VIEW)
def error(request: HttpRequest, site: DashboardSite, queue: str, key: str) -> HttpResponse:
    """Show one error: when, in which versions and how often attempts failed with it."""
    crumbs = [site.crumb("errors")]
    group = rows_of(ErrorGroup).filter(queue=queue, key=key).first()
    if group is None:
        text = _("Errors that do not occur any more are removed when their retention ends.")
        return site.not_found(request, _("Error not found"), text, tab="errors", crumbs=crumbs)
    now = SYSTEM_CLOCK.now()
    start = (now // HOUR - CHART_HOURS + 1) * HOUR
    marks = charts.annotations_between(start, start + CHART_HOURS * HOUR)
    counts = errorgroups.hours_until(group, now, CHART_HOURS)
    row = row_of(group, now)
    filters = {"queue": queue, "fingerprint": row.fingerprints}
    context = {
        "row": row,
        "group": group,
        "hours": [ErrorHour(start + at * HOUR, HOUR, count) for at, count in enumerate(counts)],
        "annotations": marks,
        "version": row.versions[0][0] if row.versions else "",
        "periods": IGNORED_FOR,
        "is_held": _is_held(request, group),
        "retry_url": site.url("errors_preview", **filters, kind=BulkKind.RETRY),
        "purge_url": site.url("errors_preview", **filters, kind=BulkKind.PURGE),
        "jobs_url": site.url("jobs", queue=queue, error=row.fingerprints, state=State.FAILED.value),
        "letters_url": site.url("errors", **filters),
    }
    title = group.error_type.rpartition(".")[2] or _("Error")
    return site.render(request, "error.html", title, context, tab="errors", crumbs=crumbs)


def _is_held(request: HttpRequest, group: ErrorGroup) -> bool:
    """Return whether the queue holds the jobs that failed."""
    line = boards.board(request).value.line(group.queue)
    return line is not None and line.row.hold_on(group.name) is not None


@pages.act("error_resolve", "errors/<djq:queue>/<djq:key>/resolve/", rights.DEAD_LETTERS)
def resolve(request: HttpRequest, site: DashboardSite, queue: str, key: str) -> HttpResponse:
    """Resolve an error: it comes back when an attempt of this or an unknown version fails with it."""
    form = ResolveForm(request.POST)
    version = form.cleaned_data["version"] if form.is_valid() else ""
    group = errorgroups.resolve(alias_of(ErrorGroup), queue, key, version)
    return _changed(request, site, "error_resolve", group, _("The error is resolved."), version=version)


@pages.act("error_ignore", "errors/<djq:queue>/<djq:key>/ignore/", rights.DEAD_LETTERS)
def ignore(request: HttpRequest, site: DashboardSite, queue: str, key: str) -> HttpResponse:
    """Ignore an error for some hours."""
    form = IgnoreForm(request.POST)
    if not form.is_valid():
        raise BadInputError(f"hours: {' '.join(map(str, form.errors['hours']))}")
    hours = form.cleaned_data["hours"]
    group = errorgroups.ignore(alias_of(ErrorGroup), queue, key, SYSTEM_CLOCK.now() + hours * HOUR)
    return _changed(request, site, "error_ignore", group, _("The error is ignored."), hours=hours)


@pages.act("error_reopen", "errors/<djq:queue>/<djq:key>/reopen/", rights.DEAD_LETTERS)
def reopen(request: HttpRequest, site: DashboardSite, queue: str, key: str) -> HttpResponse:
    """Open an error again that was resolved or ignored."""
    group = errorgroups.reopen(alias_of(ErrorGroup), queue, key)
    return _changed(request, site, "error_reopen", group, _("The error is open again."))


def _changed(
    request: HttpRequest, site: DashboardSite, action: str, group: ErrorGroup | None, done: str, **detail: Any
) -> HttpResponse:
    """Record a change of a group, and return to its page; `group` is None if it is not there."""
    if group is None:
        messages.warning(request, _("The error no longer exists."))
        return site.back(request, "errors")
    audit.note(request, action, queue=group.queue, detail={"error": error_line(group), **detail})
    messages.success(request, done)
    return site.back(request, "error", group.queue, group.key)


def _preview_bulk(
    request: HttpRequest, site: DashboardSite, form: BeginForm, given: Mapping[str, str]
) -> HttpResponse:
    form.is_valid()
    kind = form.cleaned_data.get("kind") or BulkKind.RETRY
    queue = form.cleaned_data.get("queue") or ""
    problem, counts = "", None
    try:
        counts = bulk.preview(get_storage(), kind, _bulk_selection(request, given, queue))
    except OptionError as error:
        problem = str(error)
    is_purge = kind == BulkKind.PURGE
    title = _("Delete dead letters") if is_purge else _("Retry dead letters")
    query = {name: given[name] for name in FILTERS if given.get(name)}
    match, matches = actions.shown_match(given)
    pairs = [(_("Queue"), queue or _("all")), *matches]
    for name, value in query.items():
        if name == "fingerprint":
            value = error_text(request, queue, value)
        shown = rendering.reason(value) if name == "reason" else rendering.mono(value)
        pairs.append((rendering.criterion(name), shown))
    return actions.confirm_bulk(
        request,
        site,
        form,
        counts,
        title=title,
        tab="errors",
        crumbs=[site.crumb("errors")],
        begin_url=site.url("errors_begin"),
        button=title,
        pairs=pairs,
        note=_("Jobs that fail later are not affected."),
        nothing=_("No matching dead letters."),
        back_url=site.url("errors", queue=queue),
        back_label=_("Back to errors"),
        hidden={**query, **match, "kind": kind, "queue": queue},
        problem=problem,
        able_label=_("will be deleted") if is_purge else _("can be retried"),
        is_deletion=is_purge,
    )


def _bulk_selection(request: HttpRequest, given: Mapping[str, str], queue: str) -> bulk.Selection:
    names = boards.board(request).value.names_with(State.FAILED, queue)
    return bulk.Selection(tuple(names), read_query(given), **actions.read_match(given))
