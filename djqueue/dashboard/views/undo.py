"""Undoing a deletion that has not begun."""

from collections.abc import Collection

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _

from djqueue.dashboard import audit, rights
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import BulkKind, BulkOperation
from djqueue.operations import bulk

from . import operations

pages = Pages()


@pages.act("undo", "operations/<int:pk>/undo/", rights.DELETE)
def undo(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """Jobs stay."""
    return _undo(request, site, "undo", pk, (BulkKind.DELETE, BulkKind.PURGE))


@pages.act("undo_clean", "operations/<int:pk>/undo-clean/", rights.DRAIN)
def undo_clean(request: HttpRequest, site: DashboardSite, pk: int) -> HttpResponse:
    """What is in a queue stays."""
    return _undo(request, site, "undo_clean", pk, bulk.WHOLE)


def _undo(
    request: HttpRequest, site: DashboardSite, page: str, pk: int, kinds: Collection[BulkKind]
) -> HttpResponse:
    row = rows_of(BulkOperation).filter(pk=pk).first()
    if row is None:
        return operations.none(request, site)
    detail = {"operation": pk, "queues": row.filter["queues"]}
    if not rights.sees_each(request, row.filter["queues"]):
        audit.note(request, page, refused=True, detail=detail)
        return operations.none(request, site)
    if row.kind not in kinds:
        audit.note(request, page, refused=True, detail=detail)
        raise PermissionDenied
    if bulk.undo(alias_of(BulkOperation), pk):
        audit.note(request, page, queue=row.filter["queues"][0], detail=detail)
        messages.success(request, _("Undone. No jobs were deleted."))
    else:
        messages.warning(request, _("Too late to undo: the deletion has started or was already undone."))
    return site.back(request, "operation", pk)
