"""One job type: how its code behaves, before and after a deploy, and running it by hand."""

import inspect
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from djqueue.client import get_storage, registry
from djqueue.client.declarations import RegisteredJob
from djqueue.core.errors import DjqueueError
from djqueue.core.job import JobRecord
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.core.states import State
from djqueue.core.workers import RunningJob
from djqueue.dashboard import audit, boards, charts, jsontext, reading, rights
from djqueue.dashboard.boards import empty_bucket, jobs_ended, sum_of
from djqueue.dashboard.forms import ArgumentsField, check_arguments
from djqueue.dashboard.jsontext import MAX_LENGTH, MalformedError
from djqueue.dashboard.reading import read_cache
from djqueue.dashboard.site import DashboardSite, Pages
from djqueue.dashboard.tables import rows_of
from djqueue.dashboard.views import errors, jobtypes
from djqueue.dashboard.views.queues import HoldForm
from djqueue.dashboard.views.schedules import sees_schedule
from djqueue.dashboard.views.workers import worker_rows
from djqueue.models import CronJob

pages = Pages()
FRESH = 5_000
"""Milliseconds before counts and runs are read again."""
LISTED = 8
"""Maximum runs, errors, schedules and workers listed."""
QUEUES_READ = 5
"""Maximum queues whose records are searched for runs."""
RECORDS_READ = 100
"""Newest records of a queue and state that are searched for runs."""
PREFIX = "arg_"
"""Beginning of the names of form fields for parameters."""
NUMBERS: dict[Any, type[forms.Field]] = {int: forms.IntegerField, float: forms.FloatField}
"""Fields of parameters by their annotation."""


@dataclass(frozen=True, slots=True)
class Period:
    """The counts of a job type before or after a mark."""

    label: str
    counts: Bucket
    minutes: float

    @property
    def rate(self) -> float:
        """Jobs finished per minute."""
        return jobs_ended(self.counts) / self.minutes if self.minutes else 0.0

    @property
    def failing(self) -> float:
        """Percentage of finished jobs that failed."""
        ended = jobs_ended(self.counts)
        return self.counts.failed / ended * 100 if ended else 0.0


@dataclass(frozen=True, slots=True)
class TypeCounts:
    """The counts of a job type in a period."""

    start: int
    series: list[Bucket]
    queues: list[str]
    """Queues in which it ran, those with most finished jobs first."""

    @property
    def total(self) -> Bucket:
        return sum_of(self.series)


@dataclass(frozen=True, slots=True)
class TypeRuns:
    """Ended jobs of a job type among the newest records."""

    latest: list[JobRecord]
    slowest: list[JobRecord]


class ValueField(forms.CharField):
    """The value of a parameter: JSON, or any other text as it is."""

    def to_python(self, value: Any) -> Any:
        """Return the value; None if the field is empty."""
        text = super().to_python(value)
        if not text:
            return None
        try:
            return jsontext.read(text, {}, (), tagged=False)
        except MalformedError as error:
            if text.lstrip()[:1] in ("[", "{", '"'):
                raise forms.ValidationError(str(error)) from None
            return text


class RunForm(forms.Form):
    """The arguments of a job, with a field for each parameter of its function, and its options."""

    args = ArgumentsField(
        kind=list,
        label=gettext_lazy("Positional arguments"),
        initial="[]",
        help_text=gettext_lazy("A JSON list."),
        widget=forms.Textarea(attrs={"rows": 2, "maxlength": MAX_LENGTH}),
    )
    kwargs = ArgumentsField(
        kind=dict,
        label=gettext_lazy("Keyword arguments"),
        initial="{}",
        help_text=gettext_lazy("A JSON object."),
        widget=forms.Textarea(attrs={"rows": 2, "maxlength": MAX_LENGTH}),
    )
    queue = forms.CharField(
        label=gettext_lazy("Queue"), required=False, help_text=gettext_lazy("Empty: the job's default.")
    )
    delay = forms.FloatField(label=gettext_lazy("Delay (s)"), required=False, min_value=0)
    priority = forms.IntegerField(
        label=gettext_lazy("Priority"), required=False, help_text=gettext_lazy("Higher values run first.")
    )
    unique_key = forms.CharField(label=gettext_lazy("Unique key"), required=False, max_length=255)

    def __init__(self, name: str, function: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = name
        self._parameters = [] if function is None else parameters_of(function)
        for parameter, annotation in self._parameters:
            self.fields[f"{PREFIX}{parameter.name}"] = _field_of(parameter, annotation)
        self.order_fields([f"{PREFIX}{parameter.name}" for parameter, _annotation in self._parameters])

    @property
    def parameters(self) -> list[forms.BoundField]:
        """The fields of the function's parameters."""
        return [self[name] for name in self.fields if name.startswith(PREFIX)]

    @property
    def others(self) -> list[forms.BoundField]:
        """The other fields."""
        return [self[name] for name in self.fields if not name.startswith(PREFIX)]

    def clean(self) -> dict[str, Any]:
        """Check that the function accepts the arguments."""
        cleaned = self.cleaned_data
        if not self.errors:
            check_arguments(self._name, *self.arguments())
        return cleaned

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments."""
        positional, named = list(self.cleaned_data["args"]), dict(self.cleaned_data["kwargs"])
        for parameter, _annotation in self._parameters:
            value = self.cleaned_data.get(f"{PREFIX}{parameter.name}")
            if value in (None, ""):
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        return positional, named

    def options(self) -> dict[str, Any]:
        """Return the options that were given."""
        names = ("queue", "delay", "priority", "unique_key")
        return {name: self.cleaned_data[name] for name in names if self.cleaned_data[name] not in (None, "")}


def parameters_of(function: Any) -> list[tuple[inspect.Parameter, Any]]:
    """Return the parameters of a function that have names, each with its annotation."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # the annotations are the project's code, and may name what is not imported
        hints = {}
    named = (one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))
    return [(one, hints.get(one.name)) for one in named]


def registered(request: HttpRequest, name: str) -> RegisteredJob | None:
    """Return a registered job whose queue the user can see."""
    job_type = registry.find(name)
    return job_type if job_type is not None and jobtypes.sees_type(request, job_type) else None


@pages.show("job_type", "job-types/<djq:name>/", rights.VIEW)
def type_page(request: HttpRequest, site: DashboardSite, name: str) -> HttpResponse:
    """Show a job type."""
    job_type = registered(request, name)
    function = None if job_type is None else job_type.function
    initial = {key: value for key, value in request.GET.items() if key.startswith(PREFIX)}
    return _page(request, site, name, RunForm(name, function, initial=initial))


@pages.act("enqueue_now", "job-types/<djq:name>/run/", rights.ENQUEUE)
def run(request: HttpRequest, site: DashboardSite, name: str) -> HttpResponse:
    """Enqueue a job by hand."""
    job_type = registered(request, name)
    form = RunForm(name, None if job_type is None else job_type.function, request.POST)
    if job_type is None:
        form.add_error(None, _("No job of this name is registered, or you don't have access to its queue."))
    if not form.is_valid() or job_type is None:
        return _page(request, site, name, form)
    queue = form.cleaned_data["queue"] or jobtypes.queue_of(job_type)
    if not rights.sees(request, queue):
        form.add_error("queue", _("The queue doesn't exist or you don't have access."))
        return _page(request, site, name, form)
    args, kwargs = form.arguments()
    try:
        result = registry.get(name).using(**form.options()).enqueue(*args, **kwargs)
    except DjqueueError as error:
        form.add_error(None, rights.reason(error))
        return _page(request, site, name, form)
    if result.status == "queued":
        audit.note(
            request,
            "enqueue_now",
            queue=result.queue,
            job_id=result.id,
            count=1,
            detail={"name": name, "options": json.loads(json.dumps(form.options(), default=str))},
        )
        messages.success(request, _("Enqueued as %(id)s.") % {"id": result.id})
    else:
        messages.warning(request, _("The job already exists: %(id)s.") % {"id": result.id})
    return site.back(request, "job", result.queue, result.id)


def counts_of(name: str, queues: Sequence[str], window: jobtypes.MetricWindow, at: int) -> TypeCounts:
    """Read the counts of a job type in some queues."""
    end = at // window.step * window.step + window.step
    start = end - window.length
    found = get_storage().reads.series(queues, start, end, window.step, by_name=True) if queues else []
    steps = {at: [empty_bucket("", at, window.step)] for at in range(start, end, window.step)}
    ended: dict[str, int] = {}
    for bucket in found:
        if bucket.name == name:
            steps[bucket.start].append(bucket)
            ended[bucket.queue] = ended.get(bucket.queue, 0) + jobs_ended(bucket)
    return TypeCounts(
        start, [sum_of(buckets) for buckets in steps.values()], sorted(ended, key=lambda one: -ended[one])
    )


def periods(series: Sequence[Bucket], mark: int) -> list[Period]:
    """Return the counts before and after a mark. The step that contains it belongs to neither."""
    before = [bucket for bucket in series if bucket.start + bucket.step <= mark]
    after = [bucket for bucket in series if bucket.start > mark]
    return [
        Period(label, sum_of(buckets), len(buckets) * buckets[0].step / MINUTE)
        for label, buckets in ((_("before"), before), (_("after"), after))
        if buckets
    ]


def _runs(name: str, queues: Sequence[str]) -> TypeRuns:
    found = [
        job
        for queue in queues[:QUEUES_READ]
        for state in (State.COMPLETED, State.FAILED)
        for job in get_storage().reads.cursor_page(queue, state, RECORDS_READ).jobs
        if job.name == name and job.started_at and job.finished_at
    ]
    latest = sorted(found, key=lambda job: -job.finished_at)
    return TypeRuns(latest[:LISTED], sorted(found, key=lambda job: job.started_at - job.finished_at)[:LISTED])


def _page(request: HttpRequest, site: DashboardSite, name: str, form: RunForm) -> HttpResponse:
    cached = boards.board(request)
    board = cached.value
    window = jobtypes.window_of(request)
    visible = [line.name for line in board.lines]
    counts = read_cache.read(
        ("job_type", name, window.word, *visible),
        lambda: counts_of(name, visible, window, board.at),
        fresh=FRESH,
        versioned=True,
    ).value
    job_type = registered(request, name)
    waiting = [line.name for line in board.lines if name in line.row.names]
    own = [] if job_type is None else [jobtypes.queue_of(job_type)]
    held = {line.name: hold for line in board.lines if (hold := line.row.hold_on(name))}
    queues = list(dict.fromkeys([*counts.queues, *waiting, *held, *(one for one in own if one)]))
    schedules = [
        row
        for row in rows_of(CronJob).filter(job_name=name).order_by("name")[:LISTED]
        if sees_schedule(request, row)
    ]
    if not queues and not schedules and not form.is_bound:
        text = _("No job of this name has run in this period, or is registered in this process.")
        return site.not_found(
            request, _("Job type not found"), text, tab="job_types", crumbs=[site.crumb("job_types")]
        )
    runs = read_cache.read(
        ("runs", name, *queues), lambda: _runs(name, queues), fresh=FRESH, versioned=True
    ).value
    marks = charts.annotations_within(counts.series)
    mark = _mark(request, marks)
    seen = worker_rows(request).value.rows
    running = [(job, worker.id) for worker in seen for job in worker.jobs if job.name == name]
    total = counts.total
    context: dict[str, Any] = {
        "name": name,
        "window": window,
        "windows": jobtypes.WINDOWS,
        "whole": Period("", total, window.length / MINUTE),
        "series": counts.series,
        "annotations": marks,
        "mark": mark,
        "periods": [] if mark is None else periods(counts.series, mark),
        "groups": [one for one in errors.error_rows(request, query={"name": name}) if one.is_open][:LISTED],
        "runs": runs,
        "running": sorted(running, key=_started)[:LISTED],
        "queues": queues,
        "holds": [(queue, held.get(queue)) for queue in queues],
        "hold_form": HoldForm(),
        "schedules": schedules,
        "workers": [one for one in seen if name in one.info.names][:LISTED],
        "signature": _signature(name, job_type),
        "doc": "" if job_type is None else inspect.getdoc(job_type.function) or "",
        "form": form if job_type is not None or form.is_bound else None,
    }
    if running:
        reading.expire_at(request, board.at + FRESH)
    status = 400 if form.is_bound and form.errors else 200
    crumbs = [site.crumb("job_types")]
    return site.render(
        request, "job_type.html", name, context, tab="job_types", crumbs=crumbs, read=cached, status=status
    )


def _started(running: tuple[RunningJob, str]) -> int:
    return running[0].started_at


def _mark(request: HttpRequest, marks: Sequence[charts.ChartAnnotation]) -> int | None:
    """Return the time of the chosen mark, or of the last one."""
    chosen = request.GET.get("mark", "")
    if any(str(one.at) == chosen for one in marks):
        return int(chosen)
    return marks[-1].at if marks else None


def _signature(name: str, job_type: RegisteredJob | None) -> str:
    if job_type is None:
        return ""
    try:
        return f"{name.rpartition('.')[2]}{inspect.signature(job_type.function)}"
    except (TypeError, ValueError):
        return ""


def _field_of(parameter: inspect.Parameter, annotation: Any) -> forms.Field:
    """Return the form field of a parameter. An empty one leaves the parameter out."""
    kind = annotation
    if (parts := [one for one in typing.get_args(annotation) if one is not NoneType]) and len(parts) == 1:
        kind = parts[0] if NoneType in typing.get_args(annotation) else annotation
    is_required = parameter.default is parameter.empty
    known: Mapping[str, Any] = {
        "label": parameter.name,
        "required": False,
        "help_text": _("required") if is_required else _("default: %s") % repr(parameter.default)[:80],
    }
    if kind is bool:
        choices = [("", "-"), ("true", _("yes")), ("false", _("no"))]
        return forms.TypedChoiceField(
            choices=choices, coerce=lambda text: text == "true", empty_value=None, **known
        )
    if isinstance(kind, type) and kind in NUMBERS:
        return NUMBERS[kind](**known)
    if kind is str:
        return forms.CharField(strip=False, max_length=MAX_LENGTH, **known)
    return ValueField(max_length=MAX_LENGTH, **known)
