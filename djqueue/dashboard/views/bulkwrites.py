"""Bulk writes: their reports, the states of their jobs, and operations on the pending or failed ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.formats import number_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.core.states import State
from djqueue.dashboard import audit, bulkwrites, rendering, rights
from djqueue.dashboard.bulkwrites import BulkWriteView
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.models import BulkKind

from . import bulkconfirm
from .bulkconfirm import RateForm

pages = Pages()


class BulkWriteAction(NamedTuple):
    """An action on the jobs of a bulk write."""

    kind: BulkKind
    page: str
    route: str
    right: str
    title: Any
    button: Any
    nothing: Any


KINDS = (
    BulkWriteAction(
        BulkKind.CANCEL,
        "bulk_write_cancel",
        "cancel",
        rights.CANCEL,
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
        gettext_lazy("No jobs are dead letters."),
    ),
)


@pages.show("bulk_writes", "bulk-writes/", rights.VIEW)
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the bulk writes to queues that the user can see."""
    found = bulkwrites.listed(request, request.GET.get("after", ""))
    context = {"rows": found.shown, "older": found.older and site.url("bulk_writes", after=found.older)}
    crumbs = [site.crumb("operations")]
    return site.render(
        request, "bulk_writes.html", _("Bulk writes"), context, tab="operations", crumbs=crumbs
    )


@pages.show("bulk_write", "bulk-writes/<djq:write>/", rights.VIEW)
def one(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
    """Show a bulk write and the states of its jobs."""
    shown = _found(request, write)
    if shown is None:
        return _not_found(request, site)
    progress = bulkwrites.job_progress(request, shown.report)
    context = {
        "row": shown,
        "report": shown.report,
        "progress": progress,
        "states": _states(site, shown, progress),
        "sample_size": bulkwrites.SAMPLE_SIZE,
        "cancel_url": _url(request, site, "bulk_write_cancel", write),
        "retry_url": _url(request, site, "bulk_write_retry", write),
    }
    crumbs = _crumbs(site)
    return site.render(request, "bulk_write.html", _("Bulk write"), context, tab="operations", crumbs=crumbs)


def _register(kind: BulkWriteAction) -> None:
    @pages.show(kind.page, f"bulk-writes/<djq:write>/{kind.route}/", kind.right)
    def preview(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """Show how many jobs match."""
        shown = _found(request, write)
        return (
            _not_found(request, site) if shown is None else _preview(request, site, kind, shown, RateForm())
        )

    @pages.act(f"{kind.page}_begin", f"bulk-writes/<djq:write>/{kind.route}/now/", kind.right)
    def begin(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """Start the operation."""
        return _begin(request, site, kind, write)


for _kind in KINDS:
    _register(_kind)


def _preview(
    request: HttpRequest, site: DashboardSite, kind: BulkWriteAction, shown: BulkWriteView, form: forms.Form
) -> HttpResponse:
    report = shown.report
    found = None
    if report.shares:
        found = bulkwrites.preview(request, kind.kind, report)
    note = _("Jobs enqueued later are not affected.")
    if shown.is_open:
        publishing = _("The bulk write is still publishing jobs, which are not affected.")
        note = f"{note} {publishing}"
    is_partial = len(report.shares) > bulkwrites.SOME
    if is_partial and found is not None and found.capped:
        partial = _("Counts cover only some of the queues; the operation covers all jobs.")
        note = f"{partial} {note}"
    page_url = site.url("bulk_write", report.write)
    return bulkconfirm.confirm(
        request,
        site,
        form,
        found,
        title=str(kind.title),
        tab="operations",
        crumbs=[*_crumbs(site), Crumb(str(_("Bulk write")), page_url)],
        begin_url=site.url(f"{kind.page}_begin", report.write),
        button=kind.button,
        pairs=[(_("Bulk write"), rendering.mono(report.app)), (_("Queues"), _names(report.queues))],
        note=note,
        nothing=kind.nothing,
        back_url=page_url,
        back_label=_("Back to bulk write"),
        sample_size=found.examined if found and not is_partial else None,
    )


def _names(queues: Sequence[str]) -> str:
    """Return the names of some queues, and the number of the others."""
    names = ", ".join(queues[: bulkwrites.SOME])
    more = len(queues) - bulkwrites.SOME
    return names if more <= 0 else f"{names} +{number_format(more, force_grouping=True)}"


def _begin(request: HttpRequest, site: DashboardSite, kind: BulkWriteAction, write: str) -> HttpResponse:
    shown = bulkwrites.one(write)
    page = f"{kind.page}_begin"
    if shown is None:
        return _not_found(request, site)
    if not bulkwrites.sees(request, shown.report):
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
    selection = bulkwrites.selection(kind.kind, shown.report)
    return bulkconfirm.begin(request, site, page, kind.kind, selection, form, write=write)


def _found(request: HttpRequest, write: str) -> BulkWriteView | None:
    """Return the report of a bulk write if the user can see it."""
    shown = bulkwrites.one(write)
    return shown if shown is not None and bulkwrites.sees(request, shown.report) else None


def _not_found(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    text = _("Bulk write not found. Reports are kept for 30 days.")
    return site.not_found(request, _("Bulk write not found"), text, tab="operations", crumbs=_crumbs(site))


def _states(
    site: DashboardSite, shown: BulkWriteView, progress: bulkwrites.BulkWriteJobs
) -> list[tuple[str, int, str]]:
    """Return each state, its number of jobs, and the URL of their list if it can be filtered by tag."""
    return [
        (
            state.value,
            progress.counts.get(state, 0),
            site.url("jobs", state=state.value, tag=shown.report.tag) if bulkwrites.has_rows(state) else "",
        )
        for state in State
    ]


def _url(request: HttpRequest, site: DashboardSite, page: str, write: str) -> str:
    return site.url(page, write) if site.may_open(request, page) else ""


def _crumbs(site: DashboardSite) -> list[Crumb]:
    return [site.crumb("operations"), Crumb(str(_("Bulk writes")), site.url("bulk_writes"))]
