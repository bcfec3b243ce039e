"""Dead letters: what went wrong how often, and having it run again."""

import json
from collections.abc import Iterator

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseBase, QueryDict, StreamingHttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue.client import get_storage
from djqueue.client.deadletters import fingerprint, read_filter
from djqueue.core.durations import to_datetime
from djqueue.core.errors import OptionError
from djqueue.core.job import DEAD_LETTER_REASONS
from djqueue.core.options import MAX_INTEGER
from djqueue.core.states import State
from djqueue.dashboard import audit, deletions, failures, jobactions, queries, rendering, rights, selection
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, BulkOperation
from djqueue.operations import bulk

pages = Pages()

GROUPS = 50
"""Groups that are listed: the largest."""


class BeginForm(forms.Form):
    """What is done to the dead letters that match, and how fast."""

    kind = forms.ChoiceField(choices=[(one, one) for one in (BulkKind.RETRY, BulkKind.PURGE)])
    queue = forms.CharField(required=False, max_length=255)
    rate = forms.IntegerField(
        label=gettext_lazy("Jobs per second"),
        required=False,
        min_value=1,
        max_value=100_000,
        help_text=gettext_lazy("Empty: no limit."),
    )
    expected = forms.IntegerField(
        required=False, min_value=0, max_value=MAX_INTEGER, widget=forms.HiddenInput
    )


@pages.show("letters", "dead-letters/", rights.VIEW, gettext_lazy("Dead letters"), deletions.parts)
def letters(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Groups by error, and the letters of the one that is chosen."""
    queue = request.GET.get("queue", "")
    try:
        query, problem = failures.read_query(request.GET), ""
    except OptionError as error:
        query, problem = {}, str(error)
    cached = failures.failures(request, queue)
    found = cached.value
    matching = list(found.matching(read_filter(**query)))  # type: ignore[arg-type]
    shown, older = failures.page(matching, request.GET.get("after", ""))
    here = {**query, "queue": queue}
    context = {
        "groups": failures.grouped(matching, found.at)[:GROUPS],
        "letters": shown,
        "older": older and site.url("letters", **here, after=older),
        "newest": site.url("letters", **here),
        "matching": len(matching),
        "capped": found.capped,
        "query": query,
        "queue": queue,
        "problem": problem,
        "reasons": [(word, rendering.reason(word)) for word in DEAD_LETTER_REASONS],
        "queues": [line.name for line in queries.board(request).value.lines if line.count(State.FAILED)],
        "retry_url": site.url("letters_preview", **here, kind=BulkKind.RETRY),
        "purge_url": site.url("letters_preview", **here, kind=BulkKind.PURGE),
        "export_url": site.url("letters_export", **here),
        "days": [found.at - (failures.DAYS - 1 - day) * failures.DAY for day in range(failures.DAYS)],
    }
    title = _("Dead letters")
    return site.render(
        request, "letters.html", title, context, tab="letters", as_of=cached.at, away=cached.away
    )


@pages.show("letters_preview", "dead-letters/begin/", rights.LETTERS)
def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """What would be done to how many, before it is done."""
    return _preview(request, site, BeginForm(request.GET), request.GET)


@pages.act("letters_begin", "dead-letters/begin/now/", rights.LETTERS)
def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Have it done, part by part."""
    form = BeginForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, site, form, request.POST, status=400)
    kind = form.cleaned_data["kind"]
    selection = _selection(request, request.POST, form.cleaned_data["queue"])
    row = bulk.begin(
        alias_of(BulkOperation),
        kind,
        selection,
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    audit.note(
        request, "letters_begin", count=row.expected, detail={"operation": row.pk, "kind": kind, **row.filter}
    )
    messages.success(request, _("Bulk operation started. Workers process the jobs in the background."))
    return site.back(request, "operation", row.pk)


@pages.act("letters_selected", "dead-letters/selected/", rights.RETRY)
def selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Retry the letters that are ticked."""
    selection.act(request, "letters_selected", jobactions.RETRY)
    return site.back(request, "letters")


@pages.act("letters_delete", "dead-letters/selected/delete/", rights.DELETE)
def delete_selected(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Delete the letters that are ticked, when the time to undo that is over."""
    chosen = selection.ticked(request)
    for queue, ids in chosen.items():
        said = ngettext(
            "%(count)d dead letter of %(queue)s will be deleted in 30 seconds.",
            "%(count)d dead letters of %(queue)s will be deleted in 30 seconds.",
            len(ids),
        )
        about = {"count": len(ids), "queue": queue}
        which = {"ids": tuple(ids), "state": str(State.FAILED)}
        row = deletions.begin(request, BulkKind.DELETE, queue, len(ids), said % about, **which)
        detail = {"operation": row.pk, "jobs": [[queue, job_id] for job_id in ids]}
        audit.note(request, "letters_delete", queue=queue, count=len(ids), detail=detail)
    if not chosen:
        messages.warning(request, _("No dead letters were selected."))
    return site.back(request, "letters")


@pages.show("letters_export", "dead-letters/export.ndjson", rights.VIEW)
def export(request: HttpRequest, _site: DashboardSite) -> HttpResponseBase:
    """The letters that match, a JSON object a line, without payloads."""
    try:
        query = failures.read_query(request.GET)
    except OptionError as error:
        return HttpResponse(str(error), status=400, content_type="text/plain; charset=utf-8")
    found = failures.failures(request, request.GET.get("queue", "")).value

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
    request: HttpRequest, site: DashboardSite, form: BeginForm, given: QueryDict, status: int = 200
) -> HttpResponse:
    form.is_valid()
    kind = form.cleaned_data.get("kind") or BulkKind.RETRY
    queue = form.cleaned_data.get("queue") or ""
    problem, found = "", None
    try:
        selection = _selection(request, given, queue)
        found = bulk.preview(get_storage(), kind, selection)
    except OptionError as error:
        problem = str(error)
    context = {
        "form": form,
        "kind": kind,
        "is_purge": kind == BulkKind.PURGE,
        "queue": queue,
        "query": {name: given[name] for name in failures.FILTERS if given.get(name)},
        "found": found,
        "problem": problem,
        "refused": [
            str(jobactions.REFUSALS.get(word, f"%d {word}")) % count
            for word, count in (found.refused.items() if found else ())
        ],
    }
    title = _("Delete dead letters") if kind == BulkKind.PURGE else _("Retry dead letters")
    crumbs = [Crumb(str(_("Dead letters")), site.url("letters"))]
    return site.render(
        request, "letters_preview.html", title, context, tab="letters", crumbs=crumbs, status=status
    )


def _selection(request: HttpRequest, given: QueryDict, queue: str) -> bulk.Selection:
    lines = queries.board(request).value.lines
    names = [line.name for line in lines if line.count(State.FAILED) and queue in ("", line.name)]
    return bulk.Selection(tuple(names), failures.read_query(given))
