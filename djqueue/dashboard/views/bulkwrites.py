"""Bulk imports: what became of each, cancelling the rest of its jobs, and replaying those that failed."""

from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.states import State
from djqueue.dashboard import audit, bulkwrites, jobactions, rights
from djqueue.dashboard.bulkwrites import BulkWriteView
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, BulkOperation
from djqueue.operations import bulk

from .bulkjobs import RateForm

pages = Pages()


class BulkWriteAction(NamedTuple):
    """Something that can be done to the jobs of an import."""

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
        "import_cancel",
        "cancel",
        rights.CANCEL,
        gettext_lazy("Cancel remaining jobs of a bulk write"),
        gettext_lazy("Cancel jobs"),
        gettext_lazy("No jobs are pending."),
    ),
    BulkWriteAction(
        BulkKind.RETRY,
        "import_replay",
        "replay",
        rights.LETTERS,
        gettext_lazy("Retry failed jobs of a bulk write"),
        gettext_lazy("Retry jobs"),
        gettext_lazy("No jobs are dead letters."),
    ),
)


@pages.show("imports", "imports/", rights.VIEW)
def listed(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Those about queues that the user sees."""
    found = bulkwrites.listed(request, request.GET.get("after", ""))
    context = {"rows": found.shown, "older": found.older and site.url("imports", after=found.older)}
    crumbs = [_operations(site)]
    return site.render(request, "imports.html", _("Bulk writes"), context, tab="operations", crumbs=crumbs)


@pages.show("import", "imports/<djq:write>/", rights.VIEW)
def one(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
    """One of them, and how its jobs stand."""
    shown = _found(request, write)
    if shown is None:
        return _none(request, site)
    standing = bulkwrites.standing(request, shown.report)
    context = {
        "row": shown,
        "report": shown.report,
        "standing": standing,
        "states": _states(site, shown, standing),
        "looked_at": bulkwrites.LOOKED_AT,
        "cancel_url": _url(request, site, "import_cancel", write),
        "replay_url": _url(request, site, "import_replay", write),
    }
    crumbs = [_operations(site), _imports(site)]
    return site.render(request, "import.html", _("Bulk write"), context, tab="operations", crumbs=crumbs)


def _listed(kind: BulkWriteAction) -> None:
    @pages.show(kind.page, f"imports/<djq:write>/{kind.route}/", kind.right)
    def preview(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """What would be done to how many, before it is done."""
        shown = _found(request, write)
        return _none(request, site) if shown is None else _preview(request, site, kind, shown, RateForm())

    @pages.act(f"{kind.page}_begin", f"imports/<djq:write>/{kind.route}/now/", kind.right)
    def begin(request: HttpRequest, site: DashboardSite, write: str) -> HttpResponse:
        """Have it done, part by part."""
        return _begin(request, site, kind, write)


for _kind in KINDS:
    _listed(_kind)


def _preview(
    request: HttpRequest,
    site: DashboardSite,
    kind: BulkWriteAction,
    shown: BulkWriteView,
    form: RateForm,
    status: int = 200,
) -> HttpResponse:
    report = shown.report
    found = (
        bulk.preview(get_storage(), kind.kind, bulkwrites.selection(kind.kind, report))
        if report.shares
        else None
    )
    context = {
        "form": form,
        "kind": kind,
        "row": shown,
        "report": report,
        "found": found,
        "refused": [
            str(jobactions.REFUSALS.get(word, f"%d {word}")) % count
            for word, count in (found.refused.items() if found else ())
        ],
        "looked_at": bulk.COUNTED,
        "begin_url": site.url(f"{kind.page}_begin", report.write),
        "back_url": site.url("import", report.write),
    }
    crumbs = [
        _operations(site),
        _imports(site),
        Crumb(str(_("Bulk write")), site.url("import", report.write)),
    ]
    title = str(kind.title)
    return site.render(
        request, "import_act.html", title, context, tab="operations", crumbs=crumbs, status=status
    )


def _begin(request: HttpRequest, site: DashboardSite, kind: BulkWriteAction, write: str) -> HttpResponse:
    shown = bulkwrites.one(write)
    page = f"{kind.page}_begin"
    if shown is None:
        return _none(request, site)
    if not bulkwrites.sees(request, shown.report):
        if shown.report.shares:  # without queues, the entry could not be hidden from this user
            hidden = {"write": write, "queues": sorted(shown.report.shares)}
            audit.note(request, page, refused=True, detail=hidden)
        return _none(request, site)
    if not shown.report.shares:
        messages.warning(request, _("Bulk write not found."))
        return site.back(request, "imports")
    form = RateForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, site, kind, shown, form, status=400)
    row = bulk.begin(
        alias_of(BulkOperation),
        kind.kind,
        bulkwrites.selection(kind.kind, shown.report),
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    detail = {"operation": row.pk, "kind": kind.kind, "write": write, **row.filter}
    audit.note(request, page, count=row.expected, detail=detail)
    messages.success(request, _("Bulk operation started. Workers process the jobs in the background."))
    return site.back(request, "operation", row.pk)


def _found(request: HttpRequest, write: str) -> BulkWriteView | None:
    """A report that the user may see; of another one it is not said that it is there."""
    shown = bulkwrites.one(write)
    return shown if shown is not None and bulkwrites.sees(request, shown.report) else None


def _none(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    crumbs = [_operations(site), _imports(site)]
    title = _("Bulk write not found")
    return site.render(request, "no_import.html", title, {}, tab="operations", crumbs=crumbs, status=404)


def _states(
    site: DashboardSite, shown: BulkWriteView, standing: bulkwrites.BulkWriteJobs
) -> list[tuple[str, int, str]]:
    """How many of its jobs are in each state, with the list of these where that can be asked for a tag."""
    return [
        (
            state.value,
            standing.counts.get(state, 0),
            site.url("jobs", state=state.value, tag=shown.report.tag) if bulkwrites.has_rows(state) else "",
        )
        for state in State
    ]


def _url(request: HttpRequest, site: DashboardSite, page: str, write: str) -> str:
    return site.url(page, write) if site.may_open(request, page) else ""


def _operations(site: DashboardSite) -> Crumb:
    return Crumb(str(_("Bulk operations")), site.url("operations"))


def _imports(site: DashboardSite) -> Crumb:
    return Crumb(str(_("Bulk writes")), site.url("imports"))
