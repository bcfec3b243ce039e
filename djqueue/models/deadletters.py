"""Jobs that failed for good."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


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
