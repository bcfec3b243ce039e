"""Dead letters: grouped by error, listed, retried, deleted and exported."""

import json
from collections.abc import Iterator, Mapping

from django import forms
from django.http import HttpRequest, HttpResponse, HttpResponseBase, StreamingHttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from djqueue.client import get_storage
from djqueue.client.deadletters import fingerprint, read_filter
from djqueue.core.errors import OptionError
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.dashboard import deadletters, deletions, jobactions, queries, rendering, rights, selection
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.models import BulkKind
from djqueue.operations import bulk

from . import bulkconfirm
from .bulkconfirm import RateForm

pages = Pages()

GROUPS = 50
"""Maximum groups listed, the largest."""


class BeginForm(RateForm):
    """The action on the matching dead letters, and its rate."""

    kind = forms.ChoiceField(choices=[(one, one) for one in (BulkKind.RETRY, BulkKind.PURGE)])
    queue = forms.CharField(required=False, max_length=255)


@pages.show("dead_letters", "dead-letters/", rights.VIEW, gettext_lazy("Dead letters"), deletions.parts)
def letters(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List groups by error, and the matching dead letters."""
    queue = request.GET.get("queue", "")
    try:
        query, problem = deadletters.read_query(request.GET), ""
    except OptionError as error:
        query, problem = {}, str(error)
    cached = deadletters.read(request, queue)
    found = cached.value
    matching = list(found.matching(read_filter(**query)))  # type: ignore[arg-type]
    after = request.GET.get("after", "")
    shown, older = deadletters.page(matching, after)
    here = {**query, "queue": queue}
    context = {
        "groups": deadletters.grouped(matching, found.at)[:GROUPS],
        "dead_letters": shown,
        "older": older and site.url("dead_letters", **here, after=older),
        "newest": site.url("dead_letters", **here) if after or older else "",
        "matching": len(matching),
        "capped": found.capped,
        "query": query,
        "queue": queue,
        "problem": problem,
        "reasons": [(word, rendering.reason(word)) for word in DEAD_LETTER_REASONS],
        "queues": queries.board(request).value.names_with(State.FAILED),
        "retry_url": site.url("dead_letters_preview", **here, kind=BulkKind.RETRY),
        "purge_url": site.url("dead_letters_preview", **here, kind=BulkKind.PURGE),
        "export_url": site.url("dead_letters_export", **here),
        "days": [
            found.at - (deadletters.DAYS - 1 - day) * deadletters.DAY for day in range(deadletters.DAYS)
        ],
    }
    return site.render(
        request, "dead_letters.html", _("Dead letters"), context, tab="dead_letters", read=cached
    )


@pages.show("dead_letters_preview", "dead-letters/begin/", rights.DEAD_LETTERS)
def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Show how many dead letters match."""
    return _preview(request, site, BeginForm(request.GET), request.GET)


@pages.act("dead_letters_begin", "dead-letters/begin/now/", rights.DEAD_LETTERS)
def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Start the operation."""
    form = BeginForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, site, form, request.POST)
    selection = _selection(request, request.POST, form.cleaned_data["queue"])
    kind = form.cleaned_data["kind"]
    return bulkconfirm.begin(request, site, "dead_letters_begin", kind, selection, form)


@pages.act("dead_letters_retry", "dead-letters/selected/", rights.RETRY)
def selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Retry the selected dead letters."""
    selection.act(request, "dead_letters_retry", jobactions.RETRY)
    return site.back(request, "dead_letters")


@pages.act("dead_letters_delete", "dead-letters/selected/delete/", rights.DELETE)
def delete_selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delete the selected dead letters after the undo period."""
    message = ngettext_lazy(
        "%(count)d dead letter of %(queue)s will be deleted in 30 seconds.",
        "%(count)d dead letters of %(queue)s will be deleted in 30 seconds.",
        "count",
    )
    nothing = _("No dead letters were selected.")
    selection.delete(request, "dead_letters_delete", message, nothing, state=str(State.FAILED))
    return site.back(request, "dead_letters")


@pages.show("dead_letters_export", "dead-letters/export.ndjson", rights.VIEW)
def export(request: HttpRequest, _site: DashboardSite) -> HttpResponseBase:
    """Stream the matching dead letters as NDJSON, without payloads."""
    try:
        query = deadletters.read_query(request.GET)
    except OptionError as error:
        return HttpResponse(str(error), status=400, content_type="text/plain; charset=utf-8")
    found = deadletters.read(request, request.GET.get("queue", "")).value

    def lines() -> Iterator[str]:
        for dead_letter in found.matching(read_filter(**query)):  # type: ignore[arg-type]
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


def _preview(
    request: HttpRequest, site: DashboardSite, form: BeginForm, given: Mapping[str, str]
) -> HttpResponse:
    form.is_valid()
    kind = form.cleaned_data.get("kind") or BulkKind.RETRY
    queue = form.cleaned_data.get("queue") or ""
    problem, found = "", None
    try:
        found = bulk.preview(get_storage(), kind, _selection(request, given, queue))
    except OptionError as error:
        problem = str(error)
    is_purge = kind == BulkKind.PURGE
    title = _("Delete dead letters") if is_purge else _("Retry dead letters")
    query = {name: given[name] for name in deadletters.FILTERS if given.get(name)}
    pairs = [(_("Queue"), queue or _("all"))]
    for name, value in query.items():
        shown = rendering.reason(value) if name == "reason" else rendering.mono(value)
        pairs.append((rendering.criterion(name), shown))
    return bulkconfirm.confirm(
        request,
        site,
        form,
        found,
        title=title,
        tab="dead_letters",
        crumbs=[site.crumb("dead_letters")],
        begin_url=site.url("dead_letters_begin"),
        button=title,
        pairs=pairs,
        note=_("Jobs that fail later are not affected."),
        nothing=_("No matching dead letters."),
        back_url=site.url("dead_letters", queue=queue),
        back_label=_("Back to dead letters"),
        hidden={**query, "kind": kind, "queue": queue},
        problem=problem,
        able_label=_("will be deleted") if is_purge else _("can be retried"),
        is_deletion=is_purge,
    )


def _selection(request: HttpRequest, given: Mapping[str, str], queue: str) -> bulk.Selection:
    names = queries.board(request).value.names_with(State.FAILED, queue)
    return bulk.Selection(tuple(names), deadletters.read_query(given))
