"""Jobs, and what belongs to them."""

from collections.abc import Collection
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.codecs import MSGPACK, decode
from djqueue.core.states import State
from djqueue.dashboard import rendering, rights
from djqueue.dashboard.tables import rows_of
from djqueue.models import DeadLetter, Job, JobAttempt, JobLog, JobResult

from .base import JobRowsAdmin, time_column
from .filters import NameFilter, OutcomeFilter, QueueFilter

ID_OR_NAME = _("A job id; or the beginning of one, or of a job's name, among the newest 100,000 rows.")
BELONGINGS = 200
"""Attempts, and log lines, that a job's page shows: the newest."""
UNSHOWN = frozenset({"rejected"})
"""Options that are not shown: the values of a row that an import could not make a job of."""
OF_OTHERS = frozenset({"depends_on", "dependents"})
"""Options that name jobs of other queues, which are not shown where queues may be hidden."""


@admin.register(Job)
class JobAdmin(JobRowsAdmin):
    """Jobs in every state."""

    is_raw = False
    list_display = (
        "job_id",
        "state_shown",
        "name",
        "queue",
        "attempts",
        "error_short",
        "created",
        "finished",
    )
    list_filter = ("state", QueueFilter, NameFilter)
    search_fields = ("job_id", "name")
    search_help_text = ID_OR_NAME
    unlisted = ("payload", "options", "progress", "error_message", "traceback")
    fieldsets = (
        (None, {"fields": ("state_shown", "name", "queue", "job_id", "reason_shown", "dead_letter")}),
        (_("Error"), {"fields": ("error_type", "error_shown", "traceback_shown")}),
        (_("Payload and result"), {"fields": ("payload_shown", "result_shown", "progress_shown")}),
        (
            _("Times"),
            {"fields": ("created", "not_before", "started", "finished", "kept_until")},
        ),
        (
            _("Runs"),
            {"fields": ("attempts", "failures", "stalls", "worker", "items", "attempts_shown", "log_shown")},
        ),
        (
            _("Options"),
            {"fields": ("priority", "unique_key", "group", "subject", "content_type", "options_shown")},
        ),
    )

    created = time_column(Job, "created_at")
    not_before = time_column(Job, "run_at")
    started = time_column(Job, "started_at")
    finished = time_column(Job, "finished_at")
    kept_until = time_column(Job, "expires_at")

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        """Without the error where there is none."""
        fieldsets = super().get_fieldsets(request, obj)
        if obj is not None and not (obj.error_type or obj.error_message or obj.traceback):
            return [entry for entry in fieldsets if "error_shown" not in entry[1]["fields"]]
        return fieldsets

    @admin.display(description=_("state"))
    def state_shown(self, job: Job) -> str:
        """The state as a label, and a word if no worker here would take the job."""
        return rendering.job_state(job)

    @admin.display(description=_("reason"))
    def reason_shown(self, job: Job) -> str:
        """Why it failed, or was cancelled."""
        return rendering.reason(job.reason) or rendering.NOTHING

    @admin.display(description=_("error"))
    def error_short(self, job: Job) -> str:
        """The exception's class, without its module."""
        return job.error_type.rpartition(".")[2] or rendering.NOTHING

    @admin.display(description=_("dead letter"))
    def dead_letter(self, job: Job) -> str:
        """Why it failed for good, with a link."""
        if job.state != State.FAILED:
            return rendering.NOTHING
        letter = rows_of(DeadLetter).filter(queue=job.queue, job_id=job.job_id).first()
        if letter is None:
            return rendering.NOTHING
        reason = rendering.reason(letter.reason)
        if not self.admin_site.is_registered(DeadLetter):
            return reason
        return rendering.link(self.url("change", letter.pk, model=DeadLetter), reason)

    @admin.display(description=_("error message"))
    def error_shown(self, job: Job) -> str:
        """What the handler's exception said."""
        return rendering.preformatted(job.error_message)

    @admin.display(description=_("traceback"))
    def traceback_shown(self, job: Job) -> str:
        """Where it was raised."""
        return rendering.preformatted(job.traceback, end=True)

    @admin.display(description=_("payload"))
    def payload_shown(self, job: Job) -> str:
        """What the handler is given."""
        return self.value_shown(job.name, "payload", job.payload, job.content_type)

    @admin.display(description=_("result"))
    def result_shown(self, job: Job) -> str:
        """What the handler returned."""
        if job.state != State.COMPLETED:
            return rendering.NOTHING
        row = rows_of(JobResult).filter(queue=job.queue, job_id=job.job_id).first()
        if row is None:
            return _now("no longer kept")
        return self.value_shown(job.name, "result", row.result, row.content_type)

    @admin.display(description=_("progress"))
    def progress_shown(self, job: Job) -> str:
        """What the handler reported last."""
        return rendering.decoded(job.progress, MSGPACK)

    @admin.display(description=_("options that differ from their defaults"))
    def options_shown(self, job: Job) -> str:
        """How it is to be run; times in milliseconds."""
        options = bytes(job.options)
        left_out = UNSHOWN | OF_OTHERS if rights.hides_queues() else UNSHOWN
        return rendering.shown(lambda: _without(decode(options, MSGPACK), left_out))

    @admin.display(description=_("runs without success"))
    def attempts_shown(self, job: Job) -> str:
        """The runs that did not complete the job, newest first."""
        runs = rows_of(JobAttempt).filter(queue=job.queue, job_id=job.job_id)
        return rendering.attempts(list(runs.defer("traceback").order_by("-id")[:BELONGINGS]), BELONGINGS)

    @admin.display(description=_("log"))
    def log_shown(self, job: Job) -> str:
        """What the handlers logged for it, oldest first."""
        lines = rows_of(JobLog).filter(queue=job.queue, job_id=job.job_id)
        return rendering.log(list(lines.order_by("-id")[:BELONGINGS])[::-1], BELONGINGS)


@admin.register(JobResult)
class JobResultAdmin(JobRowsAdmin):
    """What completed jobs returned."""

    is_raw = False
    list_display = ("job_id", "queue", "content_type", "completed", "kept_until")
    list_filter = (QueueFilter,)
    search_fields = ("job_id",)
    unlisted = ("result",)
    fields = ("job_link", "queue", "content_type", "result_shown", "completed", "kept_until")

    completed = time_column(JobResult, "completed_at")
    kept_until = time_column(JobResult, "expires_at")

    @admin.display(description=_("result"))
    def result_shown(self, row: JobResult) -> str:
        """The value, as far as its job's name allows to show it; without a job it is hidden."""
        names = rows_of(Job).filter(queue=row.queue, job_id=row.job_id).values_list("name", flat=True)
        return self.value_shown(names.first() or "", "result", row.result, row.content_type)


@admin.register(JobAttempt)
class JobAttemptAdmin(JobRowsAdmin):
    """Runs that did not complete their jobs."""

    list_display = (
        "job_id",
        "queue",
        "attempt",
        "outcome_shown",
        "error_type",
        "worker",
        "started",
        "finished",
    )
    list_filter = (OutcomeFilter, QueueFilter)
    search_fields = ("job_id",)
    unlisted = ("error_message", "traceback")
    fields = (
        "job_link",
        "queue",
        "attempt",
        "outcome_shown",
        "worker",
        "started",
        "finished",
        "error_type",
        "error_shown",
        "traceback_shown",
    )

    started = time_column(JobAttempt, "started_at")
    finished = time_column(JobAttempt, "finished_at")

    @admin.display(description=_("outcome"))
    def outcome_shown(self, row: JobAttempt) -> str:
        """How it ended."""
        return rendering.outcome(row.outcome)

    @admin.display(description=_("error message"))
    def error_shown(self, row: JobAttempt) -> str:
        """What the handler's exception said."""
        return rendering.preformatted(row.error_message)

    @admin.display(description=_("traceback"))
    def traceback_shown(self, row: JobAttempt) -> str:
        """Where it was raised."""
        return rendering.preformatted(row.traceback, end=True)


@admin.register(JobLog)
class JobLogAdmin(JobRowsAdmin):
    """Lines that handlers logged."""

    list_display = ("time", "line_shown", "job_id", "queue")
    list_filter = (QueueFilter,)
    search_fields = ("job_id",)
    fields = ("job_link", "queue", "time", "line_whole")

    time = time_column(JobLog, "at")

    @admin.display(description=_("line"))
    def line_shown(self, row: JobLog) -> str:
        """Its beginning."""
        return rendering.first_line(row.line)

    @admin.display(description=_("line"))
    def line_whole(self, row: JobLog) -> str:
        """All of it."""
        return rendering.preformatted(row.line)


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name not in names}
