"""The page of a queue, its limits, and clearing the queue."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError
from djqueue.core.states import PENDING, State
from djqueue.dashboard import annotations, audit, deletions, limits, queries, rights
from djqueue.dashboard.inputs import read_state
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite
from djqueue.models import BulkKind, JobState

pages = Pages()

LENGTH = 50
"""Jobs per page."""
FORGOTTEN = {
    "drain": tuple(sorted(PENDING)),
    "completed": (State.COMPLETED,),
    "cancelled": (State.CANCELLED,),
    "failed": (State.FAILED,),
}
"""States of the jobs to delete, by choice. Other choices delete the whole queue."""


class CleanForm(forms.Form):
    """Which jobs to delete. Entering the queue's name confirms the deletion."""

    what = forms.ChoiceField(
        label=gettext_lazy("Jobs to delete"),
        choices=[
            ("drain", gettext_lazy("Jobs that have not started")),
            ("completed", gettext_lazy("Completed jobs")),
            ("cancelled", gettext_lazy("Cancelled jobs")),
            ("failed", gettext_lazy("Failed jobs and their dead letters")),
            ("obliterate", gettext_lazy("The queue and all of its jobs")),
        ],
    )
    confirm = forms.CharField(label=gettext_lazy("Queue name, to confirm"))

    def __init__(self, queue: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue = queue

    def clean_confirm(self) -> str:
        typed: str = self.cleaned_data["confirm"]
        if typed != self._queue:
            raise forms.ValidationError(_("The name doesn't match the queue."))
        return typed


def _parts(request: HttpRequest) -> Hashable:
    return (deletions.parts(request), annotations.parts(request))


@pages.show("queue", "queues/<djq:queue>/", rights.VIEW, parts=_parts)
def queue(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Show the queue, its charts and the jobs of one state."""
    return page(request, site, queue, group=request.GET.get("group", ""))


@pages.act("limits", "queues/<djq:queue>/limits/", rights.CONFIGURE)
def set_limits(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Change the limits of the queue."""
    return change_limits(
        request,
        site,
        queue,
        "limits",
        "limits_form",
        limits.LimitsForm(request.POST),
        lambda: limits.of_queue(queue),
        Queue(queue).set_limits,
        _("Changed the limits of %(queue)s.") % {"queue": queue},
    )


@pages.act("clean", "queues/<djq:queue>/clean/", rights.DRAIN)
def clean(request: HttpRequest, site: DashboardSite, queue: str) -> HttpResponse:
    """Delete jobs of the queue, or the queue itself, after the undo period."""
    form = CleanForm(queue, request.POST)
    if not form.is_valid():
        return page(request, site, queue, clean_form=form)
    what = form.cleaned_data["what"]
    counts = get_storage().reads.counts(queue)
    if what == "obliterate" and counts.get(State.ACTIVE):
        form.add_error(None, _("The queue has active jobs. Wait until they finish."))
        return page(request, site, queue, clean_form=form)
    states = FORGOTTEN.get(what, tuple(State))
    count = sum(counts.get(state, 0) for state in states)
    message = ngettext(
        "%(count)d job will be deleted in 30 seconds.",
        "%(count)d jobs will be deleted in 30 seconds.",
        count,
    )
    if what == "obliterate":
        message = _("The queue will be deleted in 30 seconds.")
    kind = BulkKind.OBLITERATE if what == "obliterate" else BulkKind.CLEAN
    which = {} if what == "obliterate" else {"states": tuple(map(str, states))}
    row = deletions.begin(request, kind, queue, count, message % {"count": count}, **which)
    audit.note(request, "clean", queue=queue, count=count, detail={"what": what, "operation": row.pk})
    return site.back(request, "queue", queue)


def change_limits(
    request: HttpRequest,
    site: DashboardSite,
    queue: str,
    action: str,
    field: str,
    form: limits.LimitsForm | limits.GroupForm,
    read: Callable[[], dict[str, Any]],
    change: Callable[..., object],
    message: str,
    detail: Mapping[str, Any] | None = None,
    **where: str,
) -> HttpResponse:
    """Apply a form with limits, record the change and return to the queue.

    Args:
        field: Name of the form's argument of `page`, which shows a form that is not valid.
        read: Returns the current limits.
        change: Sets the limits.
        where: `group` of the page to return to.
    """
    if form.is_valid():
        given = form.given()
        if not given:
            return site.back(request, "queue", queue)
        before = read()
        try:
            change(**given)
        except DjqueueError as error:
            form.add_error(None, str(error))
        else:
            audit.note(request, action, queue=queue, detail={**(detail or {}), "old": before, "new": given})
            messages.success(request, message)
            return site.back(request, "queue", queue, **where)
    shown: dict[str, Any] = {field: form, **where}
    return page(request, site, queue, **shown)


def page(
    request: HttpRequest,
    site: DashboardSite,
    name: str,
    *,
    group: str = "",
    limits_form: forms.Form | None = None,
    clean_form: forms.Form | None = None,
    group_form: forms.Form | None = None,
    limiter_form: forms.Form | None = None,
) -> HttpResponse:
    """Render the page. Submitted forms that are not valid are shown with their errors.

    Args:
        group: The group that is looked up.
    """
    cached = queries.board(request)
    line = cached.value.line(name) or queries.empty_line(name, cached.value.at)
    state = read_state(request.GET.get("state", "")) or State.WAITING
    found = get_storage().reads.cursor_page(name, state, LENGTH, request.GET.get("at") or None)
    context = {
        "line": line,
        "series": line.buckets,
        "objective": line.objective,
        "annotations": annotations.within(line.buckets),
        "queue": name,
        "state": state.value,
        "states": [
            (
                one.value,
                str(JobState(one.value).label),
                line.count(one),
                site.url("queue", name, state=one.value),
            )
            for one in State
        ],
        "jobs": found.jobs,
        "newest": found.previous and site.url("queue", name, state=state.value),
        "newer": found.previous and site.url("queue", name, state=state.value, at=found.previous),
        "older": found.next and site.url("queue", name, state=state.value, at=found.next),
        "names": sorted(line.row.names.items(), key=lambda item: -item[1])[:10],
        "is_configured": name in get_settings().queues,
        "limits_form": limits_form or limits.LimitsForm(initial=limits.of_row(line.row)),
        "clean_form": clean_form or CleanForm(name),
        **_groups(name, group, group_form),
        **_shared(request, name, cached.value, limiter_form),
    }
    sent = (limits_form, clean_form, group_form, limiter_form)
    status = 400 if any(form is not None and form.errors for form in sent) else 200
    crumbs = [site.crumb("queues")]
    return site.render(
        request, "queue.html", name, context, tab="queues", crumbs=crumbs, read=cached, status=status
    )


def _groups(name: str, group: str, form: forms.Form | None) -> dict[str, Any]:
    found = limits.groups(name, group)
    if form is None and group:
        form = limits.OneGroupForm(initial={"name": group, **limits.of_group(found.named[0])})
    return {
        "groups": found,
        "group": group,
        "has_groups": bool(group) or limits.are_used(found, name),
        "group_form": form or limits.GroupForm(initial=limits.of_groups(found)),
    }


def _shared(request: HttpRequest, name: str, board: queries.Board, form: forms.Form | None) -> dict[str, Any]:
    shared = limits.shared(request, name, board.lines)
    if shared is None:
        return {"shared": None}
    return {
        "shared": shared,
        "limiter_form": form or limits.LimiterForm(initial=limits.of_limiter(shared.state)),
    }
