"""Jobs waiting to be sent to Redis, or to the scheduler."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


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
