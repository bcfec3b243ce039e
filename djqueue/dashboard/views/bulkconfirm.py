"""The confirmation page of bulk operations: shows how many jobs match, then starts the operation."""

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.core.options import MAX_INTEGER
from djqueue.dashboard import audit, jobactions
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkOperation
from djqueue.operations import bulk


class RateForm(forms.Form):
    """The rate of a bulk operation, and the number of jobs that its confirmation page showed."""

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


def confirm(
    request: HttpRequest,
    site: DashboardSite,
    form: forms.Form,
    found: bulk.Preview | None,
    title: str,
    tab: str,
    crumbs: Sequence[Crumb],
    **context: Any,
) -> HttpResponse:
    """Render the page.

    Args:
        found: Counts of the matching jobs; None if they could not be counted.
        context: See `live/bulk_confirm.html`.
    """
    shown = {
        "form": form,
        "found": found,
        "can_begin": bool(found and (found.able or found.capped)),
        "refused": jobactions.refusals(found.refused) if found else [],
        **context,
    }
    status = 400 if form.is_bound and form.errors and request.method == "POST" else 200
    return site.render(request, "bulk_confirm.html", title, shown, tab=tab, crumbs=crumbs, status=status)


def begin(
    request: HttpRequest,
    site: DashboardSite,
    page: str,
    kind: str,
    selection: bulk.Selection,
    form: forms.Form,
    **detail: Any,
) -> HttpResponse:
    """Start the operation of a valid form, record it, and redirect to its page."""
    row = bulk.begin(
        alias_of(BulkOperation),
        kind,
        selection,
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    detail = {"operation": row.pk, "kind": kind, **detail, **row.filter}
    audit.note(request, page, count=row.expected, detail=detail)
    messages.success(request, _("Bulk operation started. Workers process the jobs in the background."))
    return site.back(request, "operation", row.pk)
