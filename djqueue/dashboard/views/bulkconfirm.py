"""The confirmation page of bulk operations: shows how many jobs match, then starts the operation."""

from collections.abc import Mapping, Sequence
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
    *,
    title: str,
    tab: str,
    crumbs: Sequence[Crumb],
    begin_url: str,
    button: Any,
    pairs: Sequence[tuple[str, str]],
    note: str,
    nothing: Any,
    back: tuple[str, str],
    hidden: Mapping[str, str] | None = None,
    problem: str = "",
    able_label: str = "",
    can_begin: bool | None = None,
    is_deletion: bool = False,
    sample_size: int = 0,
) -> HttpResponse:
    """Render the page.

    Args:
        found: Counts of the matching jobs; None if they could not be counted.
        pairs: What the jobs are selected by: labels and values.
        nothing: Text shown if no job matches.
        back: URL and label of the button that leaves the page.
        hidden: Hidden fields of the form.
        problem: Why the filter is not valid.
        able_label: Label of the number of jobs that can be changed; empty if all matching jobs can.
        can_begin: Whether the form is shown; by default if at least one job can be changed.
        sample_size: Number of jobs that were counted, shown if more exist; 0 to leave this out.
    """
    back_url, back_label = back
    context = {
        "form": form,
        "found": found,
        "problem": problem,
        "begin_url": begin_url,
        "button": button,
        "pairs": pairs,
        "note": note,
        "nothing": nothing,
        "back_url": back_url,
        "back_label": back_label,
        "hidden": hidden or {},
        "able_label": able_label,
        "can_begin": bool(found and found.able) if can_begin is None else can_begin,
        "is_deletion": is_deletion,
        "sample_size": sample_size,
        "refused": jobactions.refusals(found.refused) if found else [],
    }
    status = 400 if form.is_bound and form.errors and request.method == "POST" else 200
    return site.render(request, "bulk_confirm.html", title, context, tab=tab, crumbs=crumbs, status=status)


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
