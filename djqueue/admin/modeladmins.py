"""The admin's lists of jobs, results, dead letters and schedules."""

from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import mark_safe
from django.utils.translation import gettext as _now
from django.utils.translation import gettext_lazy as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError
from djqueue.core.headers import Headers
from djqueue.core.options import MSGPACK
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import rendering, rights
from djqueue.dashboard.tables import rows_of
from djqueue.models import CronJob, DeadLetter, Job, JobAttempt, JobLog, JobResult

from .lists import (
    JobRowAdmin,
    NameFilter,
    QueueFilter,
    ReadOnlyAdmin,
    ReasonFilter,
    time_column,
    visible_schedules,
)

ID_OR_NAME = _("Search by job ID or, among the newest 100,000 rows, by the beginning of a job ID or name.")
MAX_ENTRIES = 200
"""Attempts, and log lines, that a job's page shows: the newest."""
INTERNAL_OPTIONS = frozenset({"rejected"})
"""Options that are never shown: the values of a row that a bulk write rejected."""
FOREIGN_OPTIONS = frozenset({"depends_on", "dependents"})
"""Options that name jobs of other queues, which are not shown if queues may be hidden from the user."""
NEXT_RUNS = 5
"""Next runs that a page shows."""


@admin.register(Job)
class JobAdmin(JobRowAdmin):
    """Jobs in every state."""

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
            _("Attempts"),
            {"fields": ("attempts", "failures", "stalls", "worker", "items", "attempts_shown", "log_shown")},
        ),
        (
            _("Options"),
            {
                "fields": (
                    "priority",
                    "unique_key",
                    "concurrency_key",
                    "subject",
                    "content_type",
                    "options_shown",
                )
            },
        ),
    )

    created = time_column(Job, "created_at")
    not_before = time_column(Job, "run_at")
    started = time_column(Job, "started_at")
    finished = time_column(Job, "finished_at")
    kept_until = time_column(Job, "expires_at")

    def get_fieldsets(self, request: HttpRequest, obj: Job | None = None) -> Any:
        """Return the fieldsets, without the error if the job has none."""
        fieldsets = super().get_fieldsets(request, obj)
        if obj is not None and not (obj.error_type or obj.error_message or obj.traceback):
            return [entry for entry in fieldsets if "error_shown" not in entry[1]["fields"]]
        return fieldsets

    @admin.display(description=_("state"))
    def state_shown(self, job: Job) -> str:
        """Show the state, and whether no handler for the job is registered in this process."""
        return rendering.job_state(job)

    @admin.display(description=_("reason"))
    def reason_shown(self, job: Job) -> str:
        """Show why the job failed or was cancelled."""
        return rendering.reason(job.reason) or rendering.NOTHING

    @admin.display(description=_("error"))
    def error_short(self, job: Job) -> str:
        """Show the exception's class, without its module."""
        return job.error_type.rpartition(".")[2] or rendering.NOTHING

    @admin.display(description=_("dead letter"))
    def dead_letter(self, job: Job) -> str:
        """Show why the job failed for good, with a link to its dead letter."""
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
        """Show the exception's message."""
        return rendering.preformatted(job.error_message)

    @admin.display(description=_("traceback"))
    def traceback_shown(self, job: Job) -> str:
        """Show the exception's traceback."""
        return rendering.preformatted(job.traceback, end=True)

    @admin.display(description=_("payload"))
    def payload_shown(self, job: Job) -> str:
        """Show the payload without its hidden values."""
        return self.value_shown(job.name, "payload", job.payload, job.content_type)

    @admin.display(description=_("result"))
    def result_shown(self, job: Job) -> str:
        """Show the result without its hidden values."""
        if job.state != State.COMPLETED:
            return rendering.NOTHING
        row = rows_of(JobResult).filter(queue=job.queue, job_id=job.job_id).first()
        if row is None:
            return _now("no longer kept")
        return self.value_shown(job.name, "result", row.result, row.content_type)

    @admin.display(description=_("progress"))
    def progress_shown(self, job: Job) -> str:
        """Show the progress that the handler reported last."""
        return rendering.decoded(job.progress, MSGPACK)

    @admin.display(description=_("options that differ from their defaults"))
    def options_shown(self, job: Job) -> str:
        """Show the job's own options, with times in milliseconds."""
        from djqueue.codecs import decode

        options = bytes(job.options)
        omitted = INTERNAL_OPTIONS | FOREIGN_OPTIONS if rights.hides_queues() else INTERNAL_OPTIONS
        return rendering.shown(lambda: _with_headers(_without(decode(options, MSGPACK), omitted)))

    @admin.display(description=_("unsuccessful attempts"))
    def attempts_shown(self, job: Job) -> str:
        """Show the attempts that did not complete the job, newest first."""
        attempts = rows_of(JobAttempt).filter(queue=job.queue, job_id=job.job_id)
        return rendering.attempts(
            list(attempts.defer("traceback").order_by("-id")[:MAX_ENTRIES]), MAX_ENTRIES
        )

    @admin.display(description=_("log"))
    def log_shown(self, job: Job) -> str:
        """Show the lines that handlers logged for the job, oldest first."""
        lines = rows_of(JobLog).filter(queue=job.queue, job_id=job.job_id)
        return rendering.log(list(lines.order_by("-id")[:MAX_ENTRIES])[::-1], MAX_ENTRIES)


@admin.register(JobResult)
class JobResultAdmin(JobRowAdmin):
    """Results of completed jobs."""

    list_display = ("job_id", "queue", "content_type", "completed", "kept_until")
    list_filter = (QueueFilter,)
    search_fields = ("job_id",)
    unlisted = ("result",)
    fields = ("job_link", "queue", "content_type", "result_shown", "completed", "kept_until")

    completed = time_column(JobResult, "completed_at")
    kept_until = time_column(JobResult, "expires_at")

    @admin.display(description=_("result"))
    def result_shown(self, row: JobResult) -> str:
        """Show the result without its hidden values; hide all of it if its job is no longer kept."""
        names = rows_of(Job).filter(queue=row.queue, job_id=row.job_id).values_list("name", flat=True)
        return self.value_shown(names.first() or "", "result", row.result, row.content_type)


@admin.register(DeadLetter)
class DeadLetterAdmin(JobRowAdmin):
    """Jobs that failed for good, with the reason."""

    dashboard_page = "errors"
    list_display = ("job_id", "name", "queue", "reason_shown", "error_line", "entered", "kept_until")
    list_filter = (ReasonFilter, QueueFilter, NameFilter)
    search_fields = ("job_id", "name")
    search_help_text = ID_OR_NAME
    fields = (
        "job_link",
        "name",
        "queue",
        "reason_shown",
        "error_type",
        "error_shown",
        "entered",
        "kept_until",
        "retries",
        "next_retry",
    )

    entered = time_column(DeadLetter, "entered_at")
    kept_until = time_column(DeadLetter, "expires_at")
    next_retry = time_column(DeadLetter, "next_retry_at")

    @admin.display(description=_("reason"))
    def reason_shown(self, letter: DeadLetter) -> str:
        """Show the reason in words."""
        return rendering.reason(letter.reason)

    @admin.display(description=_("error"))
    def error_line(self, letter: DeadLetter) -> str:
        """Show the exception's class and the first line of its message."""
        return rendering.error_line(letter)

    @admin.display(description=_("error message"))
    def error_shown(self, letter: DeadLetter) -> str:
        """Show the exception's message."""
        return rendering.preformatted(letter.error_message)


def _with_headers(options: Any) -> Any:
    """Return options with their headers decoded, and those with secret names hidden."""
    if not isinstance(options, dict) or "headers" not in options:
        return options
    from djqueue.dashboard import redaction  # with the client, which the admin's registration does not need

    return {**options, "headers": redaction.headers(Headers(options["headers"]), revealed=False)}


def _without(value: Any, names: Collection[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if name not in names}


@admin.register(CronJob)
class CronJobAdmin(ReadOnlyAdmin):
    """Schedules, with their next and last runs."""

    visible_rows = staticmethod(visible_schedules)
    dashboard_page = "schedules"
    list_display = (
        "name",
        "enabled",
        "schedule_shown",
        "next_run",
        "last_run",
        "executions",
        "job_name",
        "queue",
        "source",
    )
    list_filter = ("enabled", "source")
    search_fields = ("name", "job_name")
    ordering = ("name",)
    fieldsets = (
        (None, {"fields": ("name", "job_name", "queue", "enabled")}),
        (_("Schedule"), {"fields": ("schedule", "every", "timezone", "jitter")}),
        (_("Limits"), {"fields": ("start_at", "end_at", "max_executions")}),
        (_("Options"), {"fields": ("overlap", "missed", "missed_window", "blackouts", "on_blackout")}),
        (_("Arguments"), {"fields": ("args_shown", "kwargs_shown")}),
        (_("Runs"), {"fields": ("next_runs", "last_run", "executions", "last_skipped", "source")}),
    )

    last_run = time_column(CronJob, "last_run_at")

    def row_url(self, request: HttpRequest, row: CronJob) -> str:
        """Return the URL of the schedule's page on the dashboard."""
        return self.dashboard_url(request, "schedule", row.pk)

    @admin.display(description=_("schedule"))
    def schedule_shown(self, row: CronJob) -> str:
        """Show the cron expression or the interval, and the time zone below."""
        return format_html("{}<br><small>{}</small>", row.schedule or f"every {row.every}", row.timezone)

    @admin.display(description=_("next run"), ordering="next_run_at")
    def next_run(self, row: CronJob) -> str:
        """Show the next run, with its jitter."""
        at = row.next_run_at
        try:
            fires = None if at is None else row.timing().fires_at(to_milliseconds(at), row.name)
        except DjqueueError as error:
            return str(error)
        return rendering.NOTHING if fires is None else _due_or(rendering.moment, to_datetime(fires))

    @admin.display(description=_("next runs"))
    def next_runs(self, row: CronJob) -> str:
        """Show the next runs, with their jitter, in the schedule's time zone."""
        from djqueue.operations.cronjobs import next_runs

        if not row.enabled:
            return rendering.NOTHING
        try:
            shown = partial(rendering.moment_in, zone=row.timezone)
            runs = [(_due_or(shown, at),) for at in islice(next_runs(row), NEXT_RUNS)]
        except DjqueueError as error:
            return str(error)
        return format_html_join(mark_safe("<br>"), "{}", runs) or rendering.NOTHING

    @admin.display(description=_("last skipped run"))
    def last_skipped(self, row: CronJob) -> str:
        """Show the last run that enqueued no job, and why."""
        if row.skipped_at is None:
            return rendering.NOTHING
        return format_html("{}: {}", rendering.moment_in(row.skipped_at, row.timezone), row.skip_reason)

    @admin.display(description=_("positional arguments"))
    def args_shown(self, row: CronJob) -> str:
        """Show the positional arguments without their hidden values."""
        return _arguments(row, "args")

    @admin.display(description=_("keyword arguments"))
    def kwargs_shown(self, row: CronJob) -> str:
        """Show the keyword arguments without their hidden values."""
        return _arguments(row, "kwargs")


def _due_or(shown: Callable[[datetime], str], at: datetime) -> str:
    return str(_("due, waits for a worker")) if at <= to_datetime(SYSTEM_CLOCK.now()) else shown(at)


def _arguments(row: CronJob, name: str) -> str:
    from djqueue.dashboard.views.scheduleform import shown_arguments

    return rendering.preformatted(rendering.text(shown_arguments(row)[name]))
