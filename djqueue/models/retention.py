"""Completed and cancelled jobs of queues that bound their number or size."""

from django.db import models
from django.db.models import Q

from djqueue.fields import NAME_LENGTH


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
