"""Jobs and what they leave behind: results, attempts, log lines and items."""

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
    stalls = models.IntegerField(_("stalls"), default=0, help_text=_("Attempts whose worker was lost."))
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
