"""The tables: with the database storage the journal of the engine, else a mirror to look at.

Rows are written by the storage, by raw SQL over these tables' columns; times are UTC milliseconds in
the columns and aware datetimes in Python. A job is named by (queue, job_id).
"""

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from .conf import get_settings
from .core.clock import SYSTEM_CLOCK
from .core.durations import to_datetime, to_milliseconds
from .core.errors import OptionError
from .core.states import State
from .fields import MillisecondsField
from .schedule import check_expression, next_run, parse_timezone

NAME = 255


class JobState(models.TextChoices):
    """The states of `djqueue.core.states`, with labels."""

    WAITING = State.WAITING.value, _("waiting")
    DELAYED = State.DELAYED.value, _("delayed")
    BLOCKED = State.BLOCKED.value, _("blocked")
    ACTIVE = State.ACTIVE.value, _("active")
    COMPLETED = State.COMPLETED.value, _("completed")
    FAILED = State.FAILED.value, _("failed")
    CANCELLED = State.CANCELLED.value, _("cancelled")


class Job(models.Model):
    """One job, as the engine last wrote it."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    state = models.CharField(_("state"), max_length=16, choices=JobState.choices)
    priority = models.IntegerField(_("priority"), default=0, help_text=_("Higher runs first."))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=100)
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    unique_key = models.CharField(_("unique key"), max_length=NAME, null=True, blank=True)
    group = models.CharField(_("group"), max_length=NAME, null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))
    run_at = MillisecondsField(_("not before"))
    started_at = MillisecondsField(_("started"), null=True, blank=True)
    finished_at = MillisecondsField(_("finished"), null=True, blank=True)
    expires_at = MillisecondsField(
        _("kept until"), null=True, blank=True, help_text=_("When this row is removed.")
    )
    attempts = models.IntegerField(_("attempts"), default=0, help_text=_("Runs begun."))
    failures = models.IntegerField(_("failures"), default=0)
    stalls = models.IntegerField(_("stalls"), default=0, help_text=_("Runs lost with their worker."))
    worker = models.CharField(_("worker"), max_length=NAME, blank=True, default="")
    reason = models.CharField(_("reason"), max_length=NAME, blank=True, default="")
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")
    progress = models.BinaryField(_("progress"), null=True, blank=True)
    inbox = models.BooleanField(
        _("in the inbox"), default=False, help_text=_("Not yet taken in by the scheduler.")
    )

    class Meta:
        db_table = "djqueue_job"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        permissions = (
            ("cancel_job", "Can cancel job"),
            ("promote_job", "Can promote job"),
            ("retry_job", "Can retry job"),
        )
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_job_key"),)
        indexes = (
            models.Index(fields=["queue", "state"], name="djqueue_job_state"),
            models.Index(fields=["id"], name="djqueue_job_inbox", condition=Q(inbox=True)),
            models.Index(
                fields=["run_at"], name="djqueue_job_run_at", condition=Q(state=State.DELAYED.value)
            ),
            models.Index(
                fields=["queue", "unique_key"],
                name="djqueue_job_unique",
                condition=Q(unique_key__isnull=False),
            ),
            models.Index(
                fields=["expires_at"],
                name="djqueue_job_expires",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"


class JobResult(models.Model):
    """What a completed job returned."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    content_type = models.CharField(_("content type"), max_length=100)
    result = models.BinaryField(_("result"))
    completed_at = MillisecondsField(_("completed"))
    expires_at = MillisecondsField(_("kept until"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_job_result"
        verbose_name = _("result")
        verbose_name_plural = _("results")
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_result_key"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_result_expires",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class JobAttempt(models.Model):
    """A run that ended without completing its job."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    attempt = models.IntegerField(_("attempt"))
    worker = models.CharField(_("worker"), max_length=NAME)
    started_at = MillisecondsField(_("started"))
    finished_at = MillisecondsField(_("finished"))
    outcome = models.CharField(_("outcome"), max_length=16)
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")

    class Meta:
        db_table = "djqueue_job_attempt"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_attempt_job"),)

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"


class JobLog(models.Model):
    """A line that a handler logged for its job."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    at = MillisecondsField(_("at"))
    line = models.TextField(_("line"))

    class Meta:
        db_table = "djqueue_job_log"
        verbose_name = _("log line")
        verbose_name_plural = _("log lines")
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_log_job"),)

    def __str__(self) -> str:
        return self.line


class DeadLetter(models.Model):
    """A job that failed for good; the rest of it is in its `Job` row."""

    queue = models.CharField(_("queue"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    reason = models.CharField(_("reason"), max_length=64)
    error_type = models.CharField(_("error type"), max_length=NAME, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    entered_at = MillisecondsField(_("entered"))
    expires_at = MillisecondsField(_("kept until"))
    retries = models.IntegerField(_("retries by itself"), default=0)
    next_retry_at = MillisecondsField(_("next retry by itself"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_dead_letter"
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")
        permissions = (("retry_deadletter", "Can retry dead letter"),)
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_dead_key"),)

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}: {self.reason}"


class OutboxJob(models.Model):
    """A job on its way to Redis: enqueued in a transaction, or while Redis was away."""

    queue = models.CharField(_("queue"), max_length=NAME)
    name = models.CharField(_("job name"), max_length=NAME)
    job_id = models.CharField(_("job id"), max_length=NAME)
    fresh = models.BooleanField(
        _("new id"), default=False, help_text=_("Whether the id was made for this job, and not given.")
    )
    payload = models.BinaryField(_("payload"))
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    run_at = MillisecondsField(_("not before"), null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))

    class Meta:
        db_table = "djqueue_outbox_job"
        verbose_name = _("job on its way to Redis")
        verbose_name_plural = _("jobs on their way to Redis")

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"


class CronJob(models.Model):
    """A job enqueued again and again by a schedule."""

    # The ids of its jobs hold the name and the time, and an id is no longer than NAME.
    name = models.CharField(_("name"), max_length=200, unique=True)
    queue = models.CharField(_("queue"), max_length=NAME, blank=True, default="")
    job_name = models.CharField(_("job name"), max_length=NAME)
    schedule = models.CharField(
        _("schedule"),
        max_length=200,
        help_text=_("Five or six cron fields, or @hourly and the like."),
    )
    timezone = models.CharField(_("time zone"), max_length=64, default="UTC")
    args = models.JSONField(_("positional arguments"), default=list, blank=True)
    kwargs = models.JSONField(_("keyword arguments"), default=dict, blank=True)
    enabled = models.BooleanField(_("enabled"), default=True)
    next_run_at = MillisecondsField(_("next run"), null=True, blank=True, editable=False)
    last_run_at = MillisecondsField(_("last run"), null=True, blank=True, editable=False)
    executions = models.BigIntegerField(_("executions"), default=0, editable=False)

    class Meta:
        db_table = "djqueue_cron_job"
        verbose_name = _("cron job")
        verbose_name_plural = _("cron jobs")

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Check what only this package knows: the schedule, the zone, the queue, the arguments."""
        self.args = [] if self.args is None else self.args
        self.kwargs = {} if self.kwargs is None else self.kwargs
        wrong: dict[str, Any] = {}
        for field, check in (("schedule", check_expression), ("timezone", parse_timezone)):
            try:
                check(getattr(self, field))
            except OptionError as error:
                wrong[field] = str(error)
        settings = get_settings()
        if self.queue and settings.strict_queues and self.queue not in settings.queues:
            wrong["queue"] = _("The settings list the queues, and this is not one of them.")
        if not isinstance(self.args, list):
            wrong["args"] = _("Expected a list, such as [1, 2].")
        if not isinstance(self.kwargs, dict):
            wrong["kwargs"] = _('Expected an object, such as {"key": 1}.')
        if not wrong and self._next_run(SYSTEM_CLOCK.now()) is None:
            wrong["schedule"] = _("No such time comes within fifty years.")
        if wrong:
            raise ValidationError(wrong)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save, with the next run worked out anew; not if only some fields are saved.

        A run that is overdue stays due. Raises OptionError for a bad schedule or time zone.
        """
        if kwargs.get("update_fields") is None:
            after = SYSTEM_CLOCK.now()
            if self.next_run_at is not None:
                after = min(after, to_milliseconds(self.next_run_at) - 1)
            at = self._next_run(after) if self.enabled else None
            self.next_run_at = None if at is None else to_datetime(at)
        super().save(*args, **kwargs)

    def _next_run(self, after: int) -> int | None:
        return next_run(self.schedule, self.timezone, after)


class QueueState(models.Model):
    """What was said to a queue while it ran."""

    name = models.CharField(_("name"), max_length=NAME, unique=True)
    paused = models.BooleanField(_("paused"), default=False)
    rate_capacity = models.IntegerField(_("starts"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("per milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("active at once"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_queue_state"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        permissions = (("pause_queuestate", "Can pause and resume queue"),)

    def __str__(self) -> str:
        return self.name


class GroupState(models.Model):
    """What was said to a group of a queue while it ran; without a group's name, to every group, and the
    mode of the queue, if it is not the default.
    """

    queue = models.CharField(_("queue"), max_length=NAME)
    group = models.CharField(_("group"), max_length=NAME, blank=True)
    concurrency = models.IntegerField(_("active at once"), null=True, blank=True)
    paused = models.BooleanField(_("paused"), default=False)
    mode = models.CharField(_("mode"), max_length=16, blank=True)

    class Meta:
        db_table = "djqueue_group_state"
        verbose_name = _("group")
        verbose_name_plural = _("groups")
        constraints = (models.UniqueConstraint(fields=("queue", "group"), name="djqueue_group_state_key"),)

    def __str__(self) -> str:
        return f"{self.queue}: {self.group}"


class WorkerState(models.Model):
    """A worker, as it last reported itself."""

    worker_id = models.CharField(_("worker id"), max_length=NAME, unique=True)
    host = models.CharField(_("host"), max_length=NAME)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), null=True, blank=True)
    names = models.JSONField(_("job names"), default=list)
    concurrency = models.IntegerField(_("slots"))
    started_at = MillisecondsField(_("started"))
    seen_at = MillisecondsField(_("last seen"))
    active = models.IntegerField(_("active jobs"), default=0)
    state = models.CharField(_("state"), max_length=16)

    class Meta:
        db_table = "djqueue_worker_state"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return self.worker_id


class SchedulerLease(models.Model):
    """Which process is the scheduler of this database: one row."""

    name = models.CharField(max_length=32, primary_key=True)
    holder = models.CharField(max_length=NAME)
    host = models.CharField(max_length=NAME)
    pid = models.IntegerField()
    address = models.CharField(max_length=NAME, help_text="Where its socket listens.")
    generation = models.BigIntegerField(default=0, help_text="Raised by each new holder.")
    renewed_at = MillisecondsField()
    expires_at = MillisecondsField()

    class Meta:
        db_table = "djqueue_scheduler_lease"

    def __str__(self) -> str:
        return f"{self.holder} at {self.address}"
