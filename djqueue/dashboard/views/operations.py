"""Bulk operations: how far they are, and ending them."""

from functools import partial

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.dashboard import audit, jobactions, keyset, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk
from djqueue.storage import sparktables

pages = Pages()


@pages.show("operations", "operations/", rights.VIEW, gettext_lazy("Bulk operations"))
def operations(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Those about queues that the user sees, newest first."""
    sees = partial(_sees, request) if rights.hides_queues() else None
    found = keyset.page(_rows(), request.GET.get("at", ""), sees=sees)
    has_writes = sparktables.are_installed()
    context = {"rows": found.rows, "has_writes": has_writes, **keyset.links(site, "operations", found)}
    return site.render(request, "operations.html", _("Bulk operations"), context, tab="operations")


@pages.show("operation", "operations/<int:pk>/", rights.VIEW)
def operation(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """One of them."""
    crumbs = [Crumb(str(_("Bulk operations")), site.url("operations"))]
    row = _rows().filter(pk=pk).first()
    if row is None or not _sees(request, row):
        return none(request, site)
    refused = [
        str(jobactions.REFUSALS.get(word, f"%d {word}")) % count for word, count in row.refused.items()
    ]
    context = {
        "row": row,
        "refused": refused,
        "is_planned": row.state == BulkState.PLANNED,
        "abort_url": _abort_url(request, site, row),
        "is_open": row.state in (BulkState.PLANNED, BulkState.RUNNING),
        "share": min(1.0, row.looked_at / row.expected) if row.expected else None,
    }
    title = str(row.get_kind_display()).capitalize()
    return site.render(request, "operation.html", title, context, tab="operations", crumbs=crumbs)


def none(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """Answer for an operation that does not exist, or that the user may not see."""
    crumbs = [Crumb(str(_("Bulk operations")), site.url("operations"))]
    title = _("Operation not found")
    return site.render(request, "no_operation.html", title, {}, tab="operations", crumbs=crumbs, status=404)


def _may_abort(page: str, right: str) -> None:
    @pages.act(page, f"operations/<int:pk>/{page.replace('_', '/')}/", right)
    def abort(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
        """No more of it is done; before it has begun, it never was."""
        return _abort(request, site, page, pk)


ABORTS = {
    BulkKind.RETRY: "abort",
    BulkKind.PURGE: "abort",
    BulkKind.CANCEL: "abort_cancel",
    BulkKind.DELETE: "abort_delete",
    BulkKind.PROMOTE: "abort_promote",
    BulkKind.CLEAN: "abort_clean",
    BulkKind.OBLITERATE: "abort_clean",
}
"""By what is done: the page that ends it. Who may begin it may end it."""

for _page, _right in (
    ("abort", rights.LETTERS),
    ("abort_cancel", rights.CANCEL),
    ("abort_delete", rights.DELETE),
    ("abort_promote", rights.EDIT),
    ("abort_clean", rights.DRAIN),
):
    _may_abort(_page, _right)


def _abort(request: HttpRequest, site: DashboardSite, page: str, pk: int) -> HttpResponse:
    row = _rows().filter(pk=pk).first()
    if row is None:
        return none(request, site)
    detail = {"operation": pk, "queues": row.filter["queues"]}
    if not _sees(request, row):
        audit.note(request, page, refused=True, detail=detail)
        return none(request, site)
    if ABORTS[BulkKind(row.kind)] == page and bulk.abort(alias_of(BulkOperation), pk):
        audit.note(request, page, detail=detail)
        messages.success(request, _("Operation aborted. No more jobs are changed."))
    else:
        messages.warning(request, _("The operation has already finished."))
    return site.back(request, "operation", pk)


def _abort_url(request: HttpRequest, site: DashboardSite, row: BulkOperation) -> str:
    page = ABORTS[BulkKind(row.kind)]
    return site.url(page, row.pk) if site.may_open(request, page) else ""


def _sees(request: HttpRequest, row: BulkOperation) -> bool:
    return rights.sees_each(request, row.filter["queues"])


def _rows() -> "QuerySet[BulkOperation]":
    return rows_of(BulkOperation)
