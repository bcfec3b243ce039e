"""Tables of the Spark connector: staged writes, reports of bulk writes, and hourly rollups."""

from django.db import models
from django.db.models import Q

from djqueue.fields import NAME_LENGTH, MillisecondsField


class StagedPart(models.Model):
    """The jobs that one attempt of a Spark task staged for a write; see `djqueue.storage.staging`."""

    queue = models.CharField(max_length=NAME_LENGTH)
    write = models.CharField(max_length=NAME_LENGTH)
    part = models.CharField(max_length=NAME_LENGTH)
    expires_at = models.BigIntegerField(help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_staged_part"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "write", "part"], name="djqueue_part_key"),)
        indexes = (models.Index(fields=["expires_at"], name="djqueue_part_expires"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.write} {self.part}"


class StagedChunk(models.Model):
    """Jobs that are published in one transaction, and the counts of their outcomes afterwards."""

    part = models.ForeignKey(StagedPart, on_delete=models.CASCADE, db_index=False)
    number = models.IntegerField()
    jobs = models.BinaryField(
        help_text="Batches in the format of the scheduler's socket; empty once published."
    )
    queued = models.IntegerField(null=True, help_text="Empty until published, as the next three.")
    duplicates = models.IntegerField(null=True)
    completed = models.IntegerField(null=True)
    rejected = models.IntegerField(null=True)

    class Meta:
        db_table = "djqueue_staged_chunk"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["part", "number"], name="djqueue_chunk_key"),)

    def __str__(self) -> str:
        return f"{self.part_id} #{self.number}"


class Publication(models.Model):
    """The current or the latest write of an application to a queue."""

    queue = models.CharField(max_length=NAME_LENGTH)
    app = models.CharField(max_length=NAME_LENGTH)
    version = models.BigIntegerField()
    write = models.CharField(max_length=NAME_LENGTH)
    parts = models.BinaryField(help_text="Parts to publish, in order, as MessagePack; empty once done.")
    done = models.BooleanField(default=False)
    queued = models.BigIntegerField(default=0)
    duplicates = models.BigIntegerField(default=0)
    completed = models.BigIntegerField(default=0)
    rejected = models.BigIntegerField(default=0)
    lifetime = models.BigIntegerField(
        null=True, help_text="Milliseconds for which a finished write is remembered."
    )
    expires_at = models.BigIntegerField(null=True, help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_publication"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "app"], name="djqueue_publication_key"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_publication_ends",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.app} {self.version}"


class StagedWrite(models.Model):
    """The current or the latest committed write of an application; see `djqueue.storage.staging.Plan`."""

    app = models.CharField(max_length=NAME_LENGTH)
    target = models.CharField(
        max_length=NAME_LENGTH, blank=True, help_text="Queue; empty if the rows name their queues."
    )
    version = models.BigIntegerField()
    write = models.CharField(max_length=NAME_LENGTH)
    queues = models.BinaryField(help_text="Parts to publish by queue, as MessagePack; empty once done.")
    limit = models.BigIntegerField(null=True, help_text="Pending jobs above which publishing waits.")
    is_batch = models.BooleanField(default=False, help_text="True for a batch of a stream.")
    done = models.BooleanField(default=False)
    counts = models.BinaryField(default=b"", help_text="Counts by queue, as MessagePack; empty until done.")
    lifetime = models.BigIntegerField(
        null=True, help_text="Milliseconds for which a finished write is remembered."
    )
    touched_at = models.BigIntegerField(
        null=True, help_text="UTC milliseconds; empty if no sweep has to publish the rest."
    )
    adopted = models.BooleanField(default=False, help_text="True once a sweep publishes the rest.")
    left_at = models.BigIntegerField(
        null=True, help_text="UTC milliseconds; when a sweep found that staged jobs are missing."
    )
    expires_at = models.BigIntegerField(null=True, help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_staged_write"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["app", "target"], name="djqueue_stagedwrite_key"),)
        indexes = (
            models.Index(
                fields=["touched_at"],
                name="djqueue_stagedwrite_open",
                condition=Q(touched_at__isnull=False),
            ),
            models.Index(
                fields=["expires_at"],
                name="djqueue_stagedwrite_ends",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.app} {self.target} {self.version}"


class BulkWrite(models.Model):
    """The report of a bulk write; see `djqueue.storage.bulkwrites`."""

    write = models.CharField(max_length=NAME_LENGTH, unique=True)
    updated_at = MillisecondsField()
    revision = models.IntegerField(
        default=1, editable=False, help_text="Number of times the report was written."
    )
    report = models.JSONField(default=dict)

    class Meta:
        db_table = "djqueue_bulk_write"
        verbose_name = "bulk write"
        verbose_name_plural = "bulk writes"
        default_permissions = ()
        indexes = (models.Index(fields=["updated_at", "id"], name="djqueue_bulkwrite_updated"),)

    def __str__(self) -> str:
        return self.write


class Rollup(models.Model):
    """Counts and percentiles of one hour, queue and job name, computed by Spark."""

    hour = MillisecondsField()
    queue = models.CharField(max_length=NAME_LENGTH)
    name = models.CharField(max_length=NAME_LENGTH, blank=True, default="")
    enqueued = models.BigIntegerField(default=0)
    completed = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0)
    cancelled = models.BigIntegerField(default=0)
    retried = models.BigIntegerField(default=0, help_text="Attempts.")
    stalled = models.BigIntegerField(default=0)
    wait_p50 = models.BigIntegerField(null=True, blank=True, help_text="Milliseconds.")
    wait_p95 = models.BigIntegerField(null=True, blank=True)
    wait_p99 = models.BigIntegerField(null=True, blank=True)
    run_p50 = models.BigIntegerField(null=True, blank=True)
    run_p95 = models.BigIntegerField(null=True, blank=True)
    run_p99 = models.BigIntegerField(null=True, blank=True)
    reasons = models.JSONField(default=dict, blank=True, help_text="Number of failed jobs by reason.")
    written_at = MillisecondsField()

    class Meta:
        db_table = "djqueue_rollup"
        verbose_name = "rollup"
        verbose_name_plural = "rollups"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=("hour", "queue", "name"), name="djqueue_rollup_key"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.name} {self.hour:%Y-%m-%d %H:%M}"
