"""Bulk operations: their progress, aborting them, and undoing deletions that have not started."""

from collections.abc import Collection
from functools import partial
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.units import to_milliseconds
from djqueue.dashboard import actions, audit, rights, tables
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import BulkKind, BulkOperation, BulkState
from djqueue.operations import bulk

pages = Pages()


@pages.show("operations", "history/operations/", rights.VIEW, gettext_lazy("Bulk operations"))
def operations(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    """List the operations on queues that the user can see, newest first."""
    sees = partial(_sees, request) if rights.hides_queues() else None
    page = tables.page(rows_of(BulkOperation), request.GET.get("at", ""), sees=sees)
    context = {"rows": page.rows, **site.page_links("operations", page)}
    return site.render(request, "operations.html", _("Bulk operations"), context, tab="operations")


@pages.show("operation", "history/operations/<int:pk>/", rights.VIEW)
def operation(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Show an operation."""
    row = rows_of(BulkOperation).filter(pk=pk).first()
    if row is None or not _sees(request, row):
        return _not_found(request, site)
    context = {
        "row": row,
        "refused": actions.refusals(row.refused),
        "is_planned": row.state == BulkState.PLANNED,
        "has_begun": to_milliseconds(row.start_at) <= SYSTEM_CLOCK.now(),
        "match": actions.stored_match(row.filter),
        "abort_url": _abort_url(request, site, row),
        "is_open": row.state in (BulkState.PLANNED, BulkState.RUNNING),
        "share": min(1.0, row.looked_at / row.expected) if row.expected else None,
    }
    title = str(row.get_kind_display()).capitalize()
    crumbs = [site.crumb("history"), site.crumb("operations")]
    return site.render(request, "operation.html", title, context, tab="operations", crumbs=crumbs)


def _may_abort(page: str, right: str) -> None:
    @pages.act(page, f"history/operations/<int:pk>/{page.replace('_', '/')}/", right)
    def abort(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
        """Abort the operation."""
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
"""The page that aborts each kind of operation. It requires the same permission as starting one."""

for _page, _right in (
    ("abort", rights.DEAD_LETTERS),
    ("abort_cancel", rights.CANCEL),
    ("abort_delete", rights.DELETE),
    ("abort_promote", rights.EDIT),
    ("abort_clean", rights.CLEAR),
):
    _may_abort(_page, _right)


@pages.act("undo", "history/operations/<int:pk>/undo/", rights.DELETE)
def undo(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Undo a deletion of jobs that has not started."""
    return _undo(request, site, "undo", pk, (BulkKind.DELETE, BulkKind.PURGE))


@pages.act("undo_clean", "history/operations/<int:pk>/undo-clean/", rights.CLEAR)
def undo_clean(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Undo deleting jobs of a queue that has not started."""
    return _undo(request, site, "undo_clean", pk, bulk.QUEUE_KINDS)


def _abort(request: HttpRequest, site: DashboardSite, page: str, pk: int) -> HttpResponse:
    row = _visible(request, page, pk)
    if row is None:
        return _not_found(request, site)
    if ABORTS[BulkKind(row.kind)] == page and bulk.abort(alias_of(BulkOperation), pk):
        audit.note(request, page, detail=_detail(row))
        messages.success(request, _("Operation aborted. No more jobs are changed."))
    else:
        messages.warning(request, _("The operation has already finished."))
    return site.back(request, "operation", pk)


def _undo(
    request: HttpRequest, site: DashboardSite, page: str, pk: int, kinds: Collection[BulkKind]
) -> HttpResponse:
    row = _visible(request, page, pk)
    if row is None:
        return _not_found(request, site)
    if row.kind not in kinds:
        audit.note(request, page, refused=True, detail=_detail(row))
        raise PermissionDenied
    if bulk.undo(alias_of(BulkOperation), pk):
        audit.note(request, page, queue=row.filter["queues"][0], detail=_detail(row))
        messages.success(request, _("Undone. No jobs were deleted."))
    else:
        messages.warning(request, _("Too late to undo: the deletion has started or was already undone."))
    return site.back(request, "operation", pk)


def _visible(request: HttpRequest, page: str, pk: int) -> BulkOperation | None:
    """Return an operation to change; record the attempt if one of its queues is hidden from the user."""
    row = rows_of(BulkOperation).filter(pk=pk).first()
    if row is not None and not _sees(request, row):
        audit.note(request, page, refused=True, detail=_detail(row))
        return None
    return row


def _detail(row: BulkOperation) -> dict[str, Any]:
    return {"operation": row.pk, "queues": row.filter["queues"]}


def _not_found(request: HttpRequest, site: DashboardSite) -> HttpResponse:
    title, crumbs = _("Operation not found"), [site.crumb("history"), site.crumb("operations")]
    return site.not_found(request, title, _("Operation not found."), tab="operations", crumbs=crumbs)


def _abort_url(request: HttpRequest, site: DashboardSite, row: BulkOperation) -> str:
    page = ABORTS[BulkKind(row.kind)]
    return site.url(page, row.pk) if site.may_open(request, page) else ""


def _sees(request: HttpRequest, row: BulkOperation) -> bool:
    return rights.sees_each(request, row.filter["queues"])
