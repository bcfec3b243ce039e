"""Changing when a job runs, and its priority."""

from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.core import states
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import JobRecord
from djqueue.core.options import MAX_INTEGER
from djqueue.core.states import PENDING, State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import audit, rendering, rights
from djqueue.dashboard.inputs import DateTimeInput, TimeField
from djqueue.dashboard.pages import Pages
from djqueue.dashboard.site import DashboardSite

from .responses import job_changed

pages = Pages()

LONGEST = 366 * 86_400
"""Maximum delay, in seconds."""


class TimeForm(forms.Form):
    """A time, or a delay from now."""

    run_at = TimeField(label=gettext_lazy("Run at"), required=False, widget=DateTimeInput)
    delay = forms.FloatField(
        label=gettext_lazy("Or delay from now (s)"), required=False, min_value=0, max_value=LONGEST
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zone = timezone.get_current_timezone_name()
        self.fields["run_at"].help_text = _("Time zone: %(zone)s.") % {"zone": zone}

    def clean(self) -> dict[str, Any]:
        """Require one of the two."""
        given: dict[str, Any] = self.cleaned_data
        if not self.errors and (given.get("run_at") is None) == (given.get("delay") is None):
            raise forms.ValidationError(_("Enter either a time or a delay."))
        return given

    def at(self) -> int:
        """Return the time, in UTC milliseconds."""
        run_at = self.cleaned_data["run_at"]
        if run_at is not None:
            # Without USE_TZ, the time is naive.
            return to_milliseconds(timezone.make_aware(run_at) if timezone.is_naive(run_at) else run_at)
        return SYSTEM_CLOCK.now() + int(self.cleaned_data["delay"] * 1_000)


class PriorityForm(forms.Form):
    """The priority of a job."""

    priority = forms.IntegerField(
        label=gettext_lazy("Priority"),
        min_value=-MAX_INTEGER,
        max_value=MAX_INTEGER,
        help_text=gettext_lazy("Higher values run first; the job goes behind others of the same priority."),
    )


def can_reschedule(state: State) -> bool:
    """Return whether a job in this state can be rescheduled."""
    return "reschedule" in states.actions(state)


def forms_for(record: JobRecord) -> dict[str, Any]:
    """Return the forms of a job's page, with the current values and whether they can be used."""
    # The browser's input takes a local time.
    run_at = timezone.localtime(to_datetime(record.run_at)) if record.state is State.DELAYED else None
    return {
        "time_form": TimeForm(initial={"run_at": run_at}),
        "priority_form": PriorityForm(initial={"priority": record.options.priority}),
        "can_reschedule": can_reschedule(record.state),
        "can_reprioritise": record.state in PENDING,
    }


@pages.act("reschedule", "jobs/<djq:queue>/<djq:job_id>/reschedule/", rights.EDIT)
def reschedule(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Reschedule the job."""
    form = TimeForm(request.POST)
    if not form.is_valid():
        return _wrong(request, site, form, queue, job_id)
    record = get_storage().reads.jobs(queue, [job_id])[0]
    at = form.at()
    if record is None or not get_storage().jobs.reschedule(queue, [job_id], at)[0]:
        return _changed(request, site, queue, job_id)
    shown = rendering.local(to_datetime(at))
    old, new = to_datetime(record.run_at).isoformat(), to_datetime(at).isoformat()
    audit.note(request, "reschedule", queue=queue, job_id=job_id, count=1, detail={"old": old, "new": new})
    messages.success(request, _("Rescheduled to %(at)s.") % {"at": shown})
    return site.back(request, "job", queue, job_id)


@pages.act("reprioritise", "jobs/<djq:queue>/<djq:job_id>/reprioritise/", rights.EDIT)
def reprioritise(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Change the job's priority. Among jobs with the same priority it goes last."""
    form = PriorityForm(request.POST)
    if not form.is_valid():
        return _wrong(request, site, form, queue, job_id)
    record = get_storage().reads.jobs(queue, [job_id])[0]
    new = form.cleaned_data["priority"]
    if record is None or not get_storage().jobs.update(queue, [job_id], priority=new)[0]:
        return _changed(request, site, queue, job_id)
    detail = {"old": record.options.priority, "new": new}
    audit.note(request, "reprioritise", queue=queue, job_id=job_id, count=1, detail=detail)
    messages.success(request, _("Priority changed to %(priority)d.") % {"priority": new})
    return site.back(request, "job", queue, job_id)


def _wrong(
    request: HttpRequest, site: DashboardSite, form: forms.Form, queue: str, job_id: str
) -> HttpResponse:
    for name, errors in form.errors.items():
        label = str(form.fields[name].label) if name in form.fields else ""
        for error in errors:
            messages.error(request, f"{label}: {error}" if label else str(error))
    return site.back(request, "job", queue, job_id)


def _changed(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    state = get_storage().reads.states(queue, [job_id])[0]
    return job_changed(request, site, "not_found" if state is None else str(state), queue, job_id)
