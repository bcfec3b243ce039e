"""Limits and pauses set at run time."""

from django.db import models
from django.utils.translation import gettext_lazy as _

from djqueue.fields import NAME_LENGTH


class QueueState(models.Model):
    """Pause and limits of a queue that were set at run time."""

    name = models.CharField(_("name"), max_length=NAME_LENGTH, unique=True)
    paused = models.BooleanField(_("paused"), default=False)
    rate_capacity = models.IntegerField(_("starts per period"), null=True, blank=True)
    rate_per = models.BigIntegerField(_("period in milliseconds"), null=True, blank=True)
    concurrency = models.IntegerField(_("maximum active jobs"), null=True, blank=True)
    limits_set = models.BooleanField(default=False, db_default=False)
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
