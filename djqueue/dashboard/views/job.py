"""The page of a job, and actions on the job."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage
from djqueue.client.info import JobInfo
from djqueue.core import states
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import SerializationError
from djqueue.core.job import JobRecord
from djqueue.core.metrics import MINUTE
from djqueue.core.options import DURATIONS, MAX_INTEGER
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import actions, audit, boards, charts, reading, redaction, rendering, rights, subjects
from djqueue.dashboard.forms import DateTimeInput, TimeField
from djqueue.dashboard.reading import FRESH_TIME
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.views import editing, workflows
from djqueue.models import BulkKind, PayloadVersion
from djqueue.storage.actions import CANCEL, PROMOTE, REMOVE, RETRY, Action

pages = Pages()
MAX_LINES = 200
"""Maximum log lines shown, newest first."""
STEPS = {
    **rendering.OUTCOMES,
    "enqueued": gettext_lazy("enqueued"),
    "started": gettext_lazy("started"),
    "completed": gettext_lazy("completed"),
    "requeued": gettext_lazy("requeued"),
}
"""Labels of events of the timeline."""
BAD_EVENTS = frozenset({"retried", "stalled", "failed"})
SHOWN_ELSEWHERE = frozenset({"headers", "subject", "rejected"})
"""Options that the page shows elsewhere; the last one as the error of a dead letter."""
OFFERS: tuple[tuple[Action, Any, str], ...] = (
    (RETRY, gettext_lazy("Retry"), "main"),
    (PROMOTE, gettext_lazy("Run now"), "main"),
    (CANCEL, gettext_lazy("Cancel"), ""),
    (REMOVE, gettext_lazy("Delete"), "danger"),
)
MAX_DELAY = 366 * 86_400
"""Maximum delay, in seconds."""


class TimelineStep(NamedTuple):
    """An event of the timeline."""

    label: str
    at: int
    """UTC milliseconds."""
    after: int | None
    """Milliseconds since the previous event."""
    level: str
    note: str


class ShownValue(NamedTuple):
    """The visible part of a job's payload or result."""

    text: str
    size: int
    """Stored size, in bytes."""
    hides: bool
    """Whether part of the value is hidden."""


class PayloadRow(NamedTuple):
    """A previous payload of the job, or of the job that it was copied from."""

    row: PayloadVersion
    payload: ShownValue | None


class Offer(NamedTuple):
    """An action that the user may perform, at least in another state of the job."""

    page: str
    label: Any
    legal: bool
    kind: str


class TimeForm(forms.Form):
    """A time, or a delay from now."""

    run_at = TimeField(label=gettext_lazy("Run at"), required=False, widget=DateTimeInput)
    delay = forms.FloatField(
        label=gettext_lazy("Or delay from now (s)"), required=False, min_value=0, max_value=MAX_DELAY
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


def _parts(request: HttpRequest) -> Hashable:
    where = request.resolver_match
    assert where is not None
    found = editing.version_parts(where.kwargs["queue"], where.kwargs["job_id"])
    if not found:
        reading.set_for_request(request, "versions", [])
    return (actions.deletion_parts(request), found)


@pages.show("job", "jobs/<djq:queue>/<djq:job_id>/", rights.VIEW, parts=_parts)
def job(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the job, with secrets hidden."""
    return _render(request, site, queue, job_id, revealed=False)


@pages.act("reveal", "jobs/<djq:queue>/<djq:job_id>/reveal/", rights.VIEW_PAYLOAD)
def reveal(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Show the job with its secrets, and record this first."""
    return _render(request, site, queue, job_id, revealed=True)


def _register(action: Action) -> None:
    @pages.act(action.name, f"jobs/<djq:queue>/<djq:job_id>/{action.name}/", action.permission)
    def act(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
        answer = action.call(get_storage(), queue, [job_id])[0]
        if answer not in action.done:
            return actions.job_changed(request, site, answer, queue, job_id)
        audit.note(request, action.name, queue=queue, job_id=job_id, count=1)
        messages.success(request, actions.DONE[answer] % 1)
        return site.back(request, "job", queue, job_id)


for _action in actions.IMMEDIATE:
    _register(_action)


@pages.act("remove", "jobs/<djq:queue>/<djq:job_id>/delete/", REMOVE.permission)
def remove(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    """Delete the job after the undo period."""
    record = get_storage().reads.jobs(queue, [job_id])[0]
    if record is None or record.state not in REMOVE.states:
        word = "not_found" if record is None else str(record.state)
        return actions.job_changed(request, site, word, queue, job_id)
    if actions.pending_deletions(request).job(queue, job_id) is not None:
        messages.warning(request, _("The job is already marked for deletion."))
        return site.back(request, "job", queue, job_id)
    message = _("The job will be deleted in 30 seconds.")
    which = {"ids": (job_id,), "state": str(record.state)}
    row = actions.begin_deletion(request, BulkKind.DELETE, queue, 1, message, **which)
    audit.note(request, "remove", queue=queue, job_id=job_id, count=1, detail={"operation": row.pk})
    return site.back(request, "job", queue, job_id)


def can_reschedule(state: State) -> bool:
    """Return whether a job in this state can be rescheduled."""
    return "reschedule" in states.actions(state)


def timing_forms(record: JobRecord) -> dict[str, Any]:
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
        return _report_errors(request, site, form, queue, job_id)
    record = get_storage().reads.jobs(queue, [job_id])[0]
    at = form.at()
    if record is None or not get_storage().jobs.reschedule(queue, [job_id], at)[0]:
        return _report_change(request, site, queue, job_id)
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
        return _report_errors(request, site, form, queue, job_id)
    record = get_storage().reads.jobs(queue, [job_id])[0]
    new = form.cleaned_data["priority"]
    if record is None or not get_storage().jobs.update(queue, [job_id], priority=new)[0]:
        return _report_change(request, site, queue, job_id)
    detail = {"old": record.options.priority, "new": new}
    audit.note(request, "reprioritise", queue=queue, job_id=job_id, count=1, detail=detail)
    messages.success(request, _("Priority changed to %(priority)d.") % {"priority": new})
    return site.back(request, "job", queue, job_id)


def _render(
    request: HttpRequest, site: DashboardSite, queue: str, job_id: str, *, revealed: bool
) -> HttpResponse:
    record = get_storage().reads.jobs(queue, [job_id])[0]
    crumbs = site.queue_crumbs(queue)
    if record is None:
        return site.job_not_found(request, queue, job_id, "queues", crumbs)
    if revealed:
        audit.note(request, "reveal", queue=queue, job_id=job_id, count=1)
    _limit(request, record)
    info = JobInfo(record)
    payload = _shown(record, record.payload, revealed=revealed, of=redaction.payload)
    subject = record.options.subject
    result = _shown(record, record.result, revealed=revealed, of=redaction.result)
    headers = redaction.headers(record.options.headers, revealed=revealed)
    old_ones = _versions(request, record, revealed=revealed)
    context = {
        "job": record,
        "versions": old_ones,
        **timing_forms(record),
        "edit_refusal": editing.refusal(request, record.state),
        "why": _why(request, record),
        "steps": _steps(info),
        "life": _life(info),
        "runs": list(reversed(record.all_attempts())),
        "lines": record.logs[: -MAX_LINES - 1 : -1],
        "lines_cut": max(0, len(record.logs) - MAX_LINES),
        "payload": payload,
        "result": result,
        "revealed": revealed,
        "headers": {name: rendering.text(value) for name, value in headers.items()},
        "may_reveal": not revealed
        and (
            redaction.has_secrets(headers)
            or any(
                one is not None and one.hides for one in (payload, result, *(old.payload for old in old_ones))
            )
        ),
        "progress": rendering.progress(record.progress),
        "options": _options(record),
        "subject": subject and subjects.shown(request, site.site, subject),
        "flow": workflows.around(request, queue, job_id),
        "offers": _offers(request, site, record),
        "reason": rendering.reason(record.reason) if record.reason else "",
        "is_over": record.state in TERMINAL,
    }
    return site.render(request, "job.html", record.name, context, tab="queues", crumbs=crumbs)


def _limit(request: HttpRequest, record: JobRecord) -> None:
    """Limit how long the page is current without a new version of the storage."""
    now, ttl = SYSTEM_CLOCK.now(), record.options.result_ttl
    if record.options.subject is not None:
        reading.expire_at(request, now)  # the project may change the object
    if record.state in PENDING:
        reading.expire_at(
            request, now + FRESH_TIME
        )  # rates and concurrency keys let the job start as time passes
    elif record.finished_at and ttl is not None:
        reading.expire_at(request, max(now, record.finished_at + ttl))


def _why(request: HttpRequest, record: JobRecord) -> rendering.ShownExplanation | None:
    """Return why the job is not running, without naming jobs that the user can't see."""
    if record.state in TERMINAL:
        return None
    explanation = get_storage().reads.explain(record.queue, record.id)
    line = boards.board(request).value.line(record.queue)
    per_minute = 0.0
    if line is not None:
        rate = line.row.rate
        per_minute = line.leaving if rate is None else rate.capacity * MINUTE / rate.per
    return rendering.explained(explanation, lambda name: rights.sees(request, name), per_minute)


def _options(record: JobRecord) -> dict[str, Any]:
    """Return the options that the page shows, lengths of time with their units."""
    options = {name: value for name, value in record.options.as_dict().items() if name not in SHOWN_ELSEWHERE}
    options.update(
        {name: rendering.exact_duration(options[name]) for name in DURATIONS if options.get(name) is not None}
    )
    if rule := options.get("backoff"):
        lengths = {name: rendering.exact_duration(rule[name]) for name in ("base", "cap") if name in rule}
        options["backoff"] = ", ".join(f"{name} {value}" for name, value in {**rule, **lengths}.items())
    return options


def _life(info: JobInfo) -> str:
    """Return the diagram of the job's lifecycle; the timeline has the same content as text."""
    events = [(moment.event, to_milliseconds(moment.at)) for moment in info.timeline]
    return charts.life_svg(charts.life(info.record.state, events, info.record.run_at))


def _steps(info: JobInfo) -> list[TimelineStep]:
    steps: list[TimelineStep] = []
    for moment in info.timeline:
        at = to_milliseconds(moment.at)
        note = moment.worker if moment.event == "started" else ""
        if moment.error is not None:
            note = rendering.failure_line(moment.error)
        level = "bad" if moment.event in BAD_EVENTS else "ok"
        after = at - steps[-1].at if steps else None
        steps.append(TimelineStep(str(STEPS.get(moment.event, moment.event)), at, after, level, note))
    return steps


def _shown(record: JobRecord, data: bytes | None, *, revealed: bool, of: Any) -> ShownValue | None:
    if data is None:
        return None
    try:
        value = of(record, revealed=revealed)
    except SerializationError as error:
        return ShownValue(_("Unreadable: %(error)s") % {"error": error}, len(data), hides=False)
    return ShownValue(rendering.text(value), len(data), redaction.hides(record, data, value))


def _versions(request: HttpRequest, record: JobRecord, *, revealed: bool) -> list[PayloadRow]:
    """Return the previous payloads of the job, and of the job that it was copied from."""
    payloads = []
    rows = reading.once_per_request(request, "versions", lambda: editing.versions_of(record.queue, record.id))
    for row in rows:
        was = record._replace(payload=bytes(row.payload))
        payloads.append(PayloadRow(row, _shown(was, was.payload, revealed=revealed, of=redaction.payload)))
    return payloads


def _offers(request: HttpRequest, site: DashboardSite, record: JobRecord) -> list[Offer]:
    return [
        Offer(action.name, label, record.state in action.states, kind)
        for action, label, kind in OFFERS
        if site.may_open(request, action.name)
    ]


def _report_errors(
    request: HttpRequest, site: DashboardSite, form: forms.Form, queue: str, job_id: str
) -> HttpResponse:
    for name, errors in form.errors.items():
        label = str(form.fields[name].label) if name in form.fields else ""
        for error in errors:
            messages.error(request, f"{label}: {error}" if label else str(error))
    return site.back(request, "job", queue, job_id)


def _report_change(request: HttpRequest, site: DashboardSite, queue: str, job_id: str) -> HttpResponse:
    state = get_storage().reads.states(queue, [job_id])[0]
    return actions.job_changed(request, site, "not_found" if state is None else str(state), queue, job_id)
