"""Queues: limits and pauses set at run time, and the data of the charts."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH, MillisecondsField


class QueueState(models.Model):
    """Pause, limits and holds of a queue that were set at run time."""

    name = models.CharField(_("name"), max_length=NAME_LENGTH, unique=True)
    paused = models.BooleanField(_("paused"), default=False)
    rate_capacity = models.IntegerField(_("starts per period"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("period in milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("maximum active jobs"), null=True, blank=True)
    limits_set = models.BooleanField(default=False, db_default=False)
    # [name, since, until, reason] of each, as JSON; empty if there are none.
    holds = models.TextField(default="", db_default="", blank=True, editable=False)
    # Position and end of the search for ended jobs that the bounds of the queue do not count yet.
    counted_to = models.BigIntegerField(default=0, db_default=0)
    counted_at = models.BigIntegerField(default=0, db_default=0)

    class Meta:
        db_table = "djqueue_queue_state"
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class GroupState(models.Model):
    """Pause, limits and weight of a concurrency key that were set at run time.

    The row without a key has the defaults of all keys of the queue, and the queue's key mode.
    """

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    concurrency_key = models.CharField(_("concurrency key"), max_length=NAME_LENGTH, blank=True)
    concurrency = models.IntegerField(_("maximum active jobs"), null=True, blank=True)
    paused = models.BooleanField(_("paused"), default=False)
    mode = models.CharField(_("mode"), max_length=16, blank=True)
    rate_capacity = models.IntegerField(_("starts per period"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("period in milliseconds"), null=True, blank=True)
    weight = models.IntegerField(_("weight"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_group_state"
        verbose_name = _("concurrency key")
        verbose_name_plural = _("concurrency keys")
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("queue", "concurrency_key"), name="djqueue_group_state_key"),
        )

    def __str__(self) -> str:
        return f"{self.queue}: {self.concurrency_key}"


class LimiterState(models.Model):
    """Limits of a limiter that were set at run time."""

    name = models.CharField(_("name"), max_length=NAME_LENGTH, unique=True)
    rate_capacity = models.IntegerField(_("starts per period"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("period in milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("maximum active jobs"), null=True, blank=True)

    class Meta:
        db_table = "djqueue_limiter_state"
        verbose_name = _("limiter")
        verbose_name_plural = _("limiters")
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


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


class ErrorGroup(models.Model):
    """Failed attempts of one job type in a queue with the same error, regardless of numbers in the message.

    Workers add what they have counted. Dead letters belong to the group that has their fingerprint.
    """

    queue = models.CharField(_("queue"), max_length=NAME_LENGTH)
    key = models.CharField(max_length=16, editable=False, help_text="Fingerprint of the first attempt.")
    fingerprints = models.JSONField(default=list, editable=False)
    name = models.CharField(_("job name"), max_length=NAME_LENGTH)
    error_type = models.CharField(_("error type"), max_length=NAME_LENGTH, blank=True, default="")
    place = models.CharField(
        _("place"), max_length=NAME_LENGTH, blank=True, default="", help_text=_("Last frame of own code.")
    )
    title = models.TextField(_("message"), blank=True, default="")
    message = models.TextField(_("newest message"), blank=True, default="")
    first_seen = MillisecondsField(_("first seen"))
    last_seen = MillisecondsField(_("last seen"))
    attempts = models.BigIntegerField(_("failed attempts"), default=0)
    jobs = models.BigIntegerField(_("failed jobs"), default=0)
    versions = models.JSONField(
        default=dict, editable=False, help_text="Attempts, first and last time of each project version."
    )
    hours = models.JSONField(default=dict, editable=False, help_text="Attempts of each hour since 1970.")
    resolved_at = MillisecondsField(_("resolved"), null=True, blank=True)
    resolved_in = models.CharField(max_length=NAME_LENGTH, blank=True, default="")
    known_versions = models.JSONField(
        default=list, editable=False, help_text="Versions that failed before it was resolved."
    )
    ignored_until = MillisecondsField(_("ignored until"), null=True, blank=True)
    came_back_at = MillisecondsField(_("came back"), null=True, blank=True)
    revision = models.BigIntegerField(default=0, editable=False, help_text="Incremented by each change.")

    class Meta:
        db_table = "djqueue_error_group"
        verbose_name = _("error")
        verbose_name_plural = _("errors")
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=("queue", "key"), name="djqueue_error_group_key"),)
        indexes = (models.Index(fields=["last_seen"], name="djqueue_error_group_seen"),)

    def __str__(self) -> str:
        return f"{self.error_type.rpartition('.')[2]}: {self.title}"


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
