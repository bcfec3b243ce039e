"""Dead letters: grouped by error, listed, retried, deleted and exported."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage
from djqueue.client.deadletters import fingerprint, read_filter
from djqueue.core.errors import OptionError
from djqueue.core.job import DEAD_LETTER_REASONS, DeadLetterRecord
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.dashboard import actions, boards, rendering, rights
from djqueue.dashboard.actions import RateForm, act_on_selection, delete_selection
from djqueue.dashboard.forms import check_hidden
from djqueue.dashboard.reading import CachedRead, read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.problems import DeadLetterSample, sample_dead_letters
from djqueue.storage.actions import REMOVE, RETRY

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
DAY = 86_400_000
GROUPS_LISTED = 50
"""Maximum groups listed, the largest."""


class FailureGroup(NamedTuple):
    """Dead letters with the same error, regardless of numbers in the message."""

    fingerprint: str
    error_type: str
    error_message: str
    """Message of the newest dead letter."""
    size: int
    first: int
    """Time of the oldest dead letter, in UTC milliseconds."""
    last: int
    queues: list[str]
    names: list[str]
    days: list[int]
    """Dead letters per day, oldest day first."""


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
    context = {
        "groups": grouped(matching, sample.at)[:GROUPS_LISTED],
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


def error_text(request: HttpRequest, queue: str, mark: str) -> str:
    """Return the error with a fingerprint as text; the fingerprint if no dead letter has it."""
    found = read_dead_letters(request, queue).value.matching(read_filter(fingerprint=mark))
    newest = next(found, None)
    return mark if newest is None else rendering.error_line(newest)


def grouped(sampled: Sequence[DeadLetterRecord], at: int) -> list[FailureGroup]:
    """Group dead letters by fingerprint, largest group first."""
    groups: dict[str, list[DeadLetterRecord]] = {}
    for dead_letter in sampled:
        groups.setdefault(fingerprint(dead_letter), []).append(dead_letter)
    return [_group(*group, at) for group in sorted(groups.items(), key=lambda group: -len(group[1]))]


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


def _group(key: str, members: Sequence[DeadLetterRecord], at: int) -> FailureGroup:
    newest, oldest = members[0], members[-1]
    ages = Counter((at - member.entered_at) // DAY for member in members)
    queues = Counter(member.queue for member in members)
    names = Counter(member.name for member in members)
    return FailureGroup(
        key,
        newest.error_type,
        newest.error_message,
        len(members),
        oldest.entered_at,
        newest.entered_at,
        [name for name, _count in queues.most_common()],
        [name for name, _count in names.most_common()],
        [ages[day] for day in reversed(range(DAYS))],
    )


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
