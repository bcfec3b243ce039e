"""Bulk operations on all jobs of a state that match the filters of the job list."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from django import forms
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core.errors import OptionError
from djqueue.dashboard import jobactions, queries, rendering, rights
from djqueue.dashboard.inputs import check_hidden, read_state
from djqueue.dashboard.jobactions import JobAction
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.models import BulkKind, JobState
from djqueue.operations import bulk

from . import bulkconfirm
from .bulkconfirm import RateForm

pages = Pages()

FILTERS = ("queue", "state", "name")


class BulkJobAction(NamedTuple):
    """An action on all matching jobs, with the permission that it requires for one job."""

    kind: BulkKind
    page: str
    action: JobAction
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


def _register(one: BulkJobAction) -> None:
    @pages.show(one.page, f"all/{one.kind.value}/", one.right)
    def preview(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """Show how many jobs match."""
        return _preview(request, site, one, RateForm(), request.GET)

    @pages.act(f"{one.page}_begin", f"all/{one.kind.value}/now/", one.right)
    def begin(request: HttpRequest, site: DashboardSite) -> HttpResponse:
        """Start the operation."""
        form = RateForm(request.POST)
        if not form.is_valid():
            check_hidden(form)
            return _preview(request, site, one, form, request.POST)
        selection = _selection(request, one, request.POST)
        return bulkconfirm.begin(request, site, f"{one.page}_begin", one.kind, selection, form)


for _kind in KINDS:
    _register(_kind)


def _preview(
    request: HttpRequest, site: DashboardSite, one: BulkJobAction, form: forms.Form, given: Mapping[str, str]
) -> HttpResponse:
    problem, found = "", None
    try:
        found = bulk.preview(get_storage(), one.kind, _selection(request, one, given))
    except OptionError as error:
        problem = str(error)
    query = {name: given[name] for name in FILTERS if given.get(name)}
    pairs = [(_("Queue"), query.get("queue") or _("all"))]
    if "state" in query and not problem:
        label = str(JobState(query["state"]).label)
        pairs.append((_("State"), rendering.badge(query["state"], label)))
    if "name" in query:
        pairs.append((_("Job"), rendering.mono(query["name"])))
    return bulkconfirm.confirm(
        request,
        site,
        form,
        found,
        title=str(one.title),
        tab="jobs",
        crumbs=[site.crumb("jobs")],
        begin_url=site.url(f"{one.page}_begin"),
        button=one.button,
        pairs=pairs,
        note=_("Jobs enqueued later are not affected."),
        nothing=_("No matching jobs."),
        back_url=site.url("jobs", **query),
        back_label=_("Back to jobs"),
        hidden=query,
        problem=problem,
        is_deletion=one.kind == BulkKind.DELETE,
    )


def _selection(request: HttpRequest, one: BulkJobAction, given: Mapping[str, str]) -> bulk.Selection:
    """Return the matching jobs in the queues that the user can see.

    Raises:
        OptionError: The state does not allow the action, or no queue has such jobs.
    """
    word, queue = given.get("state", ""), given.get("queue", "")
    state = read_state(word)
    if state is None or not one.action.legal(state):
        raise OptionError(f"state: {word!r} doesn't allow this action")
    lines = queries.board(request).value.lines
    names = [line.name for line in lines if queue in ("", line.name) and (queue or line.count(state))]
    if not names:
        raise OptionError(f"queue: no matching jobs in {queue or 'any queue'!r}")
    return bulk.Selection(tuple(names), state=word, name=given.get("name", ""))
