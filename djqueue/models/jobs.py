"""Jobs, those in the outbox, and their results, attempts, log lines, items, dead letters and retention."""

from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _
from django.utils.translation import pgettext_lazy

from djqueue.core.headers import Headers
from djqueue.core.states import State
from djqueue.fields import NAME_LENGTH, MillisecondsField


class JobState(models.TextChoices):
    """The states of `djqueue.core.states`, with labels."""

    WAITING = State.WAITING.value, _("waiting")
    DELAYED = State.DELAYED.value, _("delayed")
    BLOCKED = State.BLOCKED.value, _("blocked")
    ACTIVE = State.ACTIVE.value, pgettext_lazy("job", "active")
    COMPLETED = State.COMPLETED.value, _("completed")
    FAILED = State.FAILED.value, _("failed")
    CANCELLED = State.CANCELLED.value, _("cancelled")


class Job(models.Model):
    """A job: the storage's own row, or its copy of a job in memory or on Redis."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    name = models.CharField(_("job name"), max_length=NAME_LENGTH)
    state = models.CharField(_("state"), max_length=16, choices=JobState.choices)
    priority = models.IntegerField(_("priority"), default=0, help_text=_("Higher values run first."))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=100)
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    unique_key = models.CharField(_("unique key"), max_length=NAME_LENGTH, null=True, blank=True)
    concurrency_key = models.CharField(_("concurrency key"), max_length=NAME_LENGTH, null=True, blank=True)
    subject = models.CharField(_("object"), max_length=NAME_LENGTH, null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))
    run_at = MillisecondsField(_("run at"))
    started_at = MillisecondsField(_("started"), null=True, blank=True)
    finished_at = MillisecondsField(_("finished"), null=True, blank=True)
    expires_at = MillisecondsField(
        _("kept until"), null=True, blank=True, help_text=_("When this row is removed.")
    )
    attempts = models.IntegerField(_("attempts"), default=0, help_text=_("Attempts started."))
    failures = models.IntegerField(_("failures"), default=0)
    stalls = models.IntegerField(
        _("stalled attempts"), default=0, help_text=_("Attempts whose lease expired.")
    )
    worker = models.CharField(_("worker"), max_length=NAME_LENGTH, blank=True, default="")
    reason = models.CharField(_("reason"), max_length=NAME_LENGTH, blank=True, default="")
    error_type = models.CharField(_("error type"), max_length=NAME_LENGTH, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")
    progress = models.BinaryField(_("progress"), null=True, blank=True)
    items = models.IntegerField(_("items"), default=0, help_text=_("Items sent by the latest attempt."))
    token = models.BigIntegerField(
        _("fencing token"),
        default=0,
        db_default=0,
        help_text=_("Token of the current or the latest claim."),
    )
    process = models.CharField(
        _("process"),
        max_length=NAME_LENGTH,
        blank=True,
        default="",
        db_default="",
        help_text=_("Process that holds the claim."),
    )
    retries = models.IntegerField(_("automatic retries"), default=0, db_default=0)
    kept_order = models.BigIntegerField(
        null=True, editable=False, help_text="Position among the records that its queue counts."
    )
    kept_size = models.BigIntegerField(
        null=True, editable=False, help_text="Bytes of its payload and error, if its queue counts them."
    )

    class Meta:
        db_table = "djqueue_job"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_job_key"),)
        indexes = (
            models.Index(
                fields=["queue", "state", "finished_at"],
                name="djqueue_job_ended",
                condition=Q(finished_at__isnull=False),
            ),
            models.Index(fields=["queue", "state", "id"], name="djqueue_job_state_id"),
            models.Index(
                fields=["subject", "created_at", "id"],
                name="djqueue_job_subject",
                condition=Q(subject__isnull=False),
            ),
            models.Index(
                fields=["state", "expires_at"],
                name="djqueue_job_expires",
                condition=Q(expires_at__isnull=False),
            ),
            models.Index(
                fields=["queue", "state", "kept_order"],
                name="djqueue_job_kept",
                condition=Q(kept_order__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"

    @property
    def headers(self) -> Headers:
        """Values carried with the job beside its payload, as an immutable mapping."""
        import msgpack  # Starting Django must not load it.

        options: dict[str, Any] = msgpack.unpackb(bytes(self.options))
        return Headers(options.get("headers", ""))


class JobResult(models.Model):
    """The result of a completed job."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    content_type = models.CharField(_("content type"), max_length=100)
    result = models.BinaryField(_("result"))
    completed_at = MillisecondsField(_("completed"))
    expires_at = MillisecondsField(_("kept until"), null=True, blank=True)
    kept_order = models.BigIntegerField(
        null=True, editable=False, help_text="Position among the results that its queue counts."
    )
    kept_size = models.BigIntegerField(
        null=True, editable=False, help_text="Bytes of the result, if its queue counts them."
    )

    class Meta:
        db_table = "djqueue_job_result"
        verbose_name = _("result")
        verbose_name_plural = _("results")
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_result_key"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_result_expires",
                condition=Q(expires_at__isnull=False),
            ),
            models.Index(
                fields=["queue", "kept_order"],
                name="djqueue_result_kept",
                condition=Q(kept_order__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class JobAttempt(models.Model):
    """An attempt that ended without completing its job."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    attempt = models.IntegerField(_("attempt"))
    worker = models.CharField(_("worker"), max_length=NAME_LENGTH)
    started_at = MillisecondsField(_("started"))
    finished_at = MillisecondsField(_("finished"))
    outcome = models.CharField(_("outcome"), max_length=16)
    error_type = models.CharField(_("error type"), max_length=NAME_LENGTH, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")

    class Meta:
        db_table = "djqueue_job_attempt"
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_attempt_job"),)

    def __str__(self) -> str:
        return f"{self.job_id} #{self.attempt}"


class JobLog(models.Model):
    """A line that a handler logged for its job."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    at = MillisecondsField(_("time"))
    line = models.TextField(_("line"))

    class Meta:
        db_table = "djqueue_job_log"
        verbose_name = _("log line")
        verbose_name_plural = _("log lines")
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_log_job"),)

    def __str__(self) -> str:
        return self.line


class JobItem(models.Model):
    """An item yielded by a generator. Empty with the Redis storage, whose items are not mirrored."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    number = models.IntegerField(_("number"))
    run = models.BigIntegerField(_("attempt"))
    item = models.BinaryField(_("item"))

    class Meta:
        db_table = "djqueue_job_item"
        verbose_name = _("item")
        verbose_name_plural = _("items")
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=["queue", "job_id", "number"], name="djqueue_item_key"),
        )

    def __str__(self) -> str:
        return f"{self.job_id} #{self.number}"


class DeadLetter(models.Model):
    """A job that failed for good. Its payload and options are in its `Job` row."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    name = models.CharField(_("job name"), max_length=NAME_LENGTH)
    reason = models.CharField(_("reason"), max_length=64)
    error_type = models.CharField(_("error type"), max_length=NAME_LENGTH, blank=True, default="")
    error_message = models.TextField(_("error message"), blank=True, default="")
    entered_at = MillisecondsField(_("failed"))
    expires_at = MillisecondsField(_("kept until"))
    retries = models.IntegerField(_("automatic retries"), default=0)
    next_retry_at = MillisecondsField(_("next automatic retry"), null=True, blank=True)
    unmet = models.TextField(
        _("unmet dependencies"),
        blank=True,
        default="",
        db_default="",
        help_text=_("Queue and job ID of each dependency, as JSON."),
    )
    size = models.BigIntegerField(
        null=True, editable=False, help_text="Bytes of the job, if its queue counts them."
    )

    class Meta:
        db_table = "djqueue_dead_letter"
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")
        default_permissions = ("view",)
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_dead_key"),)
        indexes = (
            models.Index(fields=["queue", "id"], name="djqueue_dead_order"),
            models.Index(fields=["expires_at"], name="djqueue_dead_expires"),
            models.Index(
                fields=["next_retry_at", "queue"],
                name="djqueue_dead_retry",
                condition=models.Q(next_retry_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}: {self.reason}"


class RetainedJob(models.Model):
    """The size of a completed or cancelled job whose queue has bounds on its retention."""

    queue = models.CharField(max_length=NAME_LENGTH)
    job_id = models.CharField(max_length=NAME_LENGTH)
    outcome = models.CharField(max_length=16)
    pinned = models.BooleanField(
        default=False, help_text="Kept for jobs that depend on it, and not counted in the totals."
    )
    ended_at = models.BigIntegerField(help_text="UTC milliseconds.")
    expires_at = models.BigIntegerField(
        help_text="UTC milliseconds; later than any other time if kept forever."
    )
    size = models.BigIntegerField(help_text="Bytes of the payload and the error.")
    result_size = models.BigIntegerField(
        default=0, help_text="Bytes of the result; 0 if there is none or it expired."
    )
    result_until = models.BigIntegerField(help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_retained_job"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "job_id"], name="djqueue_retained_key"),)
        indexes = (
            models.Index(
                fields=["queue", "outcome", "expires_at", "id"],
                name="djqueue_retained_order",
                condition=Q(pinned=False),
            ),
            models.Index(
                fields=["queue", "result_until", "id"],
                name="djqueue_retained_results",
                condition=Q(pinned=False, result_size__gt=0),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class RetainedTotal(models.Model):
    """The sums of `RetainedJob` by queue and kind, which is an outcome or `results`."""

    queue = models.CharField(max_length=NAME_LENGTH)
    kind = models.CharField(max_length=16)
    count = models.BigIntegerField(default=0)
    size = models.BigIntegerField(default=0)

    class Meta:
        db_table = "djqueue_retained_total"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "kind"], name="djqueue_total_key"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.kind}"


class OutboxJob(models.Model):
    """A job to be sent to Redis or the scheduler: enqueued in a transaction, or while that was away."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    name = models.CharField(_("job name"), max_length=NAME_LENGTH)
    job_id = models.CharField(_("job ID"), max_length=NAME_LENGTH)
    fresh = models.BooleanField(
        _("generated id"),
        default=False,
        help_text=_("True if djqueue generated the id; false if the caller chose it."),
    )
    payload = models.BinaryField(_("payload"))
    options = models.BinaryField(
        _("options"), help_text=_("Options that differ from their defaults, as MessagePack.")
    )
    run_at = MillisecondsField(_("run at"), null=True, blank=True)
    created_at = MillisecondsField(_("enqueued"))

    class Meta:
        db_table = "djqueue_outbox_job"
        verbose_name = _("outbox job")
        verbose_name_plural = _("outbox jobs")
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.name} {self.job_id}"
