"""What is done to all jobs of a state that match: first how many there are, then part by part."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.errors import OptionError
from djqueue.core.options import MAX_INTEGER
from djqueue.core.states import State
from djqueue.dashboard import audit, jobactions, queries, rights
from djqueue.dashboard.inputs import check_hidden
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import Crumb, DashboardSite
from djqueue.dashboard.tables import alias_of
from djqueue.models import BulkKind, BulkOperation
from djqueue.operations import bulk

pages = Pages()

FILTERS = ("queue", "state", "name")


class BulkJobAction(NamedTuple):
    """Something that can be done to all that match, with the right that it takes for one job."""

    kind: BulkKind
    page: str
    verb: JobAction
    right: str
    label: Any
    title: Any
    button: Any


KINDS = (
    BulkJobAction(
        BulkKind.PROMOTE,
        "all_promote",
        jobactions.PROMOTE,
        rights.EDIT,
        gettext_lazy("Run all matching now…"),
        gettext_lazy("Run delayed jobs now"),
        gettext_lazy("Run jobs now"),
    ),
    BulkJobAction(
        BulkKind.CANCEL,
        "all_cancel",
        jobactions.CANCEL,
        rights.CANCEL,
        gettext_lazy("Cancel all matching…"),
        gettext_lazy("Cancel jobs"),
        gettext_lazy("Cancel jobs"),
    ),
    BulkJobAction(
        BulkKind.DELETE,
        "all_delete",
        jobactions.REMOVE,
        rights.DELETE,
        gettext_lazy("Delete all matching…"),
        gettext_lazy("Delete jobs"),
        gettext_lazy("Delete jobs"),
    ),
)


class RateForm(forms.Form):
    """How fast."""

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


def _listed(one: BulkJobAction) -> None:
    @pages.show(one.page, f"all/{one.kind.value}/", one.right)
    def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """What would be done to how many, before it is done."""
        return _preview(request, site, one, RateForm(), request.GET)

    @pages.act(f"{one.page}_begin", f"all/{one.kind.value}/now/", one.right)
    def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """Have it done, part by part."""
        return _begin(request, site, one)


for _kind in KINDS:
    _listed(_kind)


def _preview(
    request: HttpRequest,
    site: DashboardSite,
    one: BulkJobAction,
    form: RateForm,
    given: Mapping[str, str],
    status: int = 200,
) -> HttpResponse:
    problem, found = "", None
    try:
        found = bulk.preview(get_storage(), one.kind, _selection(request, one, given))
    except OptionError as error:
        problem = str(error)
    context = {
        "form": form,
        "one": one,
        "is_deletion": one.kind == BulkKind.DELETE,
        "query": {name: given[name] for name in FILTERS if given.get(name)},
        "found": found,
        "problem": problem,
        "begin_url": site.url(f"{one.page}_begin"),
    }
    crumbs = [Crumb(str(_("Jobs")), site.url("jobs"))]
    return site.render(
        request, "bulkjobs.html", str(one.title), context, tab="jobs", crumbs=crumbs, status=status
    )


def _begin(request: HttpRequest, site: DashboardSite, one: BulkJobAction) -> HttpResponse:
    form = RateForm(request.POST)
    if not form.is_valid():
        check_hidden(form)
        return _preview(request, site, one, form, request.POST, status=400)
    row = bulk.begin(
        alias_of(BulkOperation),
        one.kind,
        _selection(request, one, request.POST),
        user=request.user.get_username(),
        rate=form.cleaned_data["rate"],
        expected=form.cleaned_data["expected"] or 0,
    )
    detail = {"operation": row.pk, "kind": one.kind, **row.filter}
    audit.note(request, f"{one.page}_begin", count=row.expected, detail=detail)
    messages.success(request, _("Bulk operation started. Workers process the jobs in the background."))
    return site.back(request, "operation", row.pk)


def _selection(request: HttpRequest, one: BulkJobAction, given: Mapping[str, str]) -> bulk.Selection:
    """The jobs of a state in the queues that the user sees. Raises OptionError."""
    word, queue = given.get("state", ""), given.get("queue", "")
    if word not in {state.value for state in State} or not one.verb.legal(State(word)):
        raise OptionError(f"state: {word!r} is none in which this can be done to a job")
    lines = queries.board(request).value.lines
    names = [line.name for line in lines if queue in ("", line.name) and (queue or line.count(State(word)))]
    if not names:
        raise OptionError(f"queue: there are no such jobs in {queue or 'any queue'!r}")
    return bulk.Selection(tuple(names), state=word, name=given.get("name", ""))
