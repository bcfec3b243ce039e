"""Data of the charts: metrics and annotations."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


class MetricBucket(models.Model):
    """Counts and durations of a queue, or of its jobs of one name, in one minute, hour or day."""

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    name = models.CharField(
        _("job name"), max_length=NAME_LENGTH, blank=True, help_text=_("Empty for all jobs of the queue.")
    )
    tier = models.IntegerField(_("bucket length"), help_text=_("In milliseconds: one minute, hour or day."))
    start = MillisecondsField(_("start"))
    enqueued = models.BigIntegerField(_("enqueued"), default=0)
    started = models.BigIntegerField(_("started"), default=0)
    completed = models.BigIntegerField(_("completed"), default=0)
    retried = models.BigIntegerField(_("retried"), default=0)
    failed = models.BigIntegerField(_("failed"), default=0)
    cancelled = models.BigIntegerField(_("cancelled"), default=0)
    stalled = models.BigIntegerField(_("stalled"), default=0)
    wait = models.BinaryField(_("waiting times"), help_text=_("Histogram, as MessagePack."))
    run = models.BinaryField(_("run times"), help_text=_("Histogram, as MessagePack."))

    class Meta:
        db_table = "djqueue_metric_bucket"
        verbose_name = _("metrics bucket")
        verbose_name_plural = _("metrics buckets")
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("queue", "name", "tier", "start"), name="djqueue_metric_key"),
        )
        indexes = (
            models.Index(fields=["tier", "start"], name="djqueue_metric_start"),
            models.Index(fields=["queue", "tier", "start"], name="djqueue_metric_queue"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.start:%Y-%m-%d %H:%M}"


class Annotation(models.Model):
    """An event shown in charts, such as a deploy."""

    at = MillisecondsField(_("time"))
    label = models.CharField(_("label"), max_length=NAME_LENGTH)
    follows = models.BigIntegerField(
        unique=True,
        null=True,
        blank=True,
        editable=False,
        help_text=_("For a version recorded by a worker: ID of the previous one, or 0."),
    )

    class Meta:
        db_table = "djqueue_annotation"
        verbose_name = _("annotation")
        verbose_name_plural = _("annotations")
        default_permissions = ()
        indexes = (models.Index(fields=["at"], name="djqueue_annotation_at"),)

    def __str__(self) -> str:
        return self.label
