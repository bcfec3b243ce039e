"""Small rows that carry the state of live jobs, beside the one `Job` row that is written when a job is
enqueued and when it ends.

A live job has exactly one row in one of `ReadyJob`, `DelayedJob`, `HeldJob`, `ClaimedJob`, all under the
primary key of its `Job` row, or it is blocked: then it has rows in `JobDependency`, or waits for a
`UniqueKey`.
"""

from django.db import models
from django.db.models import Q

from djqueue.fields import NAME_LENGTH


class ReadyJob(models.Model):
    """A job that may be claimed now."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.CharField(max_length=NAME_LENGTH)
    rank = models.IntegerField(help_text="The negated priority: lower runs first.")
    seq = models.BigIntegerField(help_text="Order of arrival; negative in front of the others.")
    name = models.CharField(max_length=NAME_LENGTH)
    concurrency_key = models.CharField(max_length=NAME_LENGTH, null=True)
    weight = models.IntegerField(default=1)
    stalls = models.IntegerField(default=0)
    expires_at = models.BigIntegerField(null=True, help_text="When its ttl expires, if it has not started.")

    class Meta:
        db_table = "djqueue_ready"
        default_permissions = ()
        indexes = (
            models.Index(fields=["queue", "rank", "seq"], name="djqueue_ready_order"),
            models.Index(
                fields=["queue", "concurrency_key"],
                name="djqueue_ready_group",
                condition=Q(concurrency_key__isnull=False),
            ),
            models.Index(fields=["queue"], name="djqueue_ready_stalled", condition=Q(stalls__gt=0)),
        )

    def __str__(self) -> str:
        return str(self.id)


class DelayedJob(models.Model):
    """A job that is not due yet."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.CharField(max_length=NAME_LENGTH)
    run_at = models.BigIntegerField(help_text="UTC milliseconds.")

    class Meta:
        db_table = "djqueue_delayed"
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "run_at", "id"], name="djqueue_delayed_due"),)

    def __str__(self) -> str:
        return str(self.id)


class HeldJob(models.Model):
    """A waiting job that its group holds back."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.CharField(max_length=NAME_LENGTH)
    concurrency_key = models.CharField(max_length=NAME_LENGTH)
    seq = models.BigIntegerField(help_text="Order of arrival; negative in front of the others.")
    name = models.CharField(max_length=NAME_LENGTH)
    weight = models.IntegerField(default=1)

    class Meta:
        db_table = "djqueue_held"
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "concurrency_key", "seq"], name="djqueue_held_order"),)

    def __str__(self) -> str:
        return str(self.id)


class ClaimedJob(models.Model):
    """An active job."""

    id = models.BigIntegerField(primary_key=True)
    queue = models.CharField(max_length=NAME_LENGTH)
    concurrency_key = models.CharField(max_length=NAME_LENGTH, null=True)
    limiter = models.CharField(max_length=NAME_LENGTH, null=True)
    weight = models.IntegerField(default=1)
    worker = models.CharField(max_length=NAME_LENGTH)
    token = models.BigIntegerField(help_text="Fencing token of this claim.")
    attempts = models.IntegerField(help_text="Attempts started, including this one.")
    started_at = models.BigIntegerField(help_text="UTC milliseconds.")
    lease_until = models.BigIntegerField(help_text="Milliseconds by the clock of leases.")
    job_id = models.CharField(max_length=NAME_LENGTH)
    name = models.CharField(max_length=NAME_LENGTH)
    plain = models.BooleanField(
        help_text="Its completion concerns nothing but its own rows, its group and its unique key."
    )
    kept = models.BigIntegerField(null=True, help_text="Milliseconds for which its record is kept.")
    readable = models.BigIntegerField(null=True, help_text="Milliseconds for which its result is kept.")
    content_type = models.CharField(max_length=100)
    unique_key = models.CharField(max_length=NAME_LENGTH, null=True)
    cancel = models.BooleanField(default=False, help_text="Its cancellation was requested.")

    class Meta:
        db_table = "djqueue_claim"
        default_permissions = ()
        indexes = (
            models.Index(fields=["queue", "concurrency_key"], name="djqueue_claim_queue"),
            models.Index(
                fields=["limiter"], name="djqueue_claim_limiter", condition=Q(limiter__isnull=False)
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


class JobDependency(models.Model):
    """A live job's dependency on another one, until the live job ends."""

    dependent = models.BigIntegerField(help_text="Primary key of the job that depends.")
    queue = models.CharField(max_length=NAME_LENGTH)
    job_id = models.CharField(max_length=NAME_LENGTH)
    met = models.BooleanField(default=False, help_text="False while the dependent waits for it.")

    class Meta:
        db_table = "djqueue_dependency"
        default_permissions = ()
        indexes = (
            models.Index(fields=["queue", "job_id"], name="djqueue_dependency_key"),
            models.Index(fields=["dependent"], name="djqueue_dependency_job"),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class UniqueKey(models.Model):
    """The owner of a unique key, and the job that waits for the end of the active owner."""

    queue = models.CharField(max_length=NAME_LENGTH)
    key = models.CharField(max_length=NAME_LENGTH)
    owner = models.BigIntegerField(null=True, help_text="Primary key of the job that has the key.")
    expires_at = models.BigIntegerField(null=True, help_text="When the key is free although its job is live.")
    successor = models.BigIntegerField(null=True, help_text="Primary key of the job that waits for the key.")
    behind = models.BigIntegerField(null=True, help_text="Primary key of the active job it waits for.")

    class Meta:
        db_table = "djqueue_unique_key"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "key"], name="djqueue_unique_key_name"),)
        indexes = (
            models.Index(
                fields=["expires_at"],
                name="djqueue_unique_key_expires",
                condition=Q(expires_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.key}"


class RateBucket(models.Model):
    """The token bucket of a queue, of a group of a queue, or of a limiter (whose queue is empty).

    Only the time at which it will be full is kept, in parts of a millisecond: `capacity` to a millisecond.
    """

    queue = models.CharField(max_length=NAME_LENGTH)
    name = models.CharField(max_length=NAME_LENGTH, help_text="The group or limiter; empty for the queue.")
    capacity = models.IntegerField(default=0)
    per = models.BigIntegerField(default=1)
    full_at = models.CharField(max_length=40, default="0", help_text="A whole number, maybe above 64 bits.")
    rest_at = models.BigIntegerField(null=True, help_text="When the group's next job may be ready.")
    turns = models.TextField(default="", help_text="Queues of a limiter that were refused, as JSON.")

    class Meta:
        db_table = "djqueue_rate_bucket"
        default_permissions = ()
        constraints = (models.UniqueConstraint(fields=["queue", "name"], name="djqueue_rate_bucket_name"),)
        indexes = (
            models.Index(
                fields=["queue", "rest_at"],
                name="djqueue_rate_bucket_rest",
                condition=Q(rest_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.queue} {self.name}"


class QueueTally(models.Model):
    """A change of a queue's totals and counts; a sweep adds the rows of a queue up to one.

    A row without a queue and without numbers says that something else has changed.
    """

    queue = models.CharField(max_length=NAME_LENGTH)
    at = models.BigIntegerField(default=0, help_text="UTC milliseconds; 0: already in the metrics.")
    enqueued = models.BigIntegerField(default=0)
    started = models.BigIntegerField(default=0)
    completed = models.BigIntegerField(default=0)
    retried = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0)
    cancelled = models.BigIntegerField(default=0)
    stalled = models.BigIntegerField(default=0)
    in_waiting = models.BigIntegerField(default=0)
    in_delayed = models.BigIntegerField(default=0)
    in_blocked = models.BigIntegerField(default=0)
    in_active = models.BigIntegerField(default=0)
    in_completed = models.BigIntegerField(default=0)
    in_failed = models.BigIntegerField(default=0)
    in_cancelled = models.BigIntegerField(default=0)

    class Meta:
        db_table = "djqueue_tally"
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "at"], name="djqueue_tally_order"),)

    def __str__(self) -> str:
        return self.queue


class RetentionTally(models.Model):
    """A change of what a queue with bounds keeps; a sweep adds the rows of a queue up to one.

    Records that live jobs depend on are not counted.
    """

    queue = models.CharField(max_length=NAME_LENGTH)
    completed = models.BigIntegerField(default=0, help_text="Records of completed jobs.")
    completed_bytes = models.BigIntegerField(default=0, help_text="Their bytes without the results.")
    cancelled = models.BigIntegerField(default=0, help_text="Records of cancelled jobs.")
    cancelled_bytes = models.BigIntegerField(default=0)
    result_bytes = models.BigIntegerField(default=0)
    letter_bytes = models.BigIntegerField(default=0, help_text="Bytes of the jobs with dead letters.")

    class Meta:
        db_table = "djqueue_retention_tally"
        default_permissions = ()
        indexes = (models.Index(fields=["queue"], name="djqueue_retention_queue"),)

    def __str__(self) -> str:
        return self.queue


class PinnedRecord(models.Model):
    """A record, or a result, that has outlived its time because live jobs depend on it.

    Its own expiry is kept here meanwhile, so that no sweep meets it again.
    """

    id = models.BigIntegerField(primary_key=True, help_text="Primary key of the job.")
    queue = models.CharField(max_length=NAME_LENGTH)
    job_id = models.CharField(max_length=NAME_LENGTH)
    expires_at = models.BigIntegerField(null=True, help_text="When the record expires, in UTC milliseconds.")
    result_expires_at = models.BigIntegerField(null=True)

    class Meta:
        db_table = "djqueue_pinned"
        default_permissions = ()
        indexes = (models.Index(fields=["queue", "job_id"], name="djqueue_pinned_key"),)

    def __str__(self) -> str:
        return f"{self.queue} {self.job_id}"


class ExpiringDetail(models.Model):
    """Attempts, log lines or items of an ended job that expire before its record."""

    at = models.BigIntegerField(help_text="UTC milliseconds.")
    job = models.BigIntegerField(help_text="Primary key of the job.")
    queue = models.CharField(max_length=NAME_LENGTH)
    ended_at = models.BigIntegerField(help_text="The end of the job that it is about.")
    kind = models.CharField(max_length=16, help_text="Which of the three.")

    class Meta:
        db_table = "djqueue_expiring"
        default_permissions = ()
        indexes = (models.Index(fields=["at"], name="djqueue_expiring_at"),)

    def __str__(self) -> str:
        return f"{self.kind} of {self.job}"


class JobEvent(models.Model):
    """An event of a queue that another process has subscribed to."""

    id = models.BigAutoField(primary_key=True)
    queue = models.CharField(max_length=NAME_LENGTH)
    job_id = models.CharField(max_length=NAME_LENGTH)
    name = models.CharField(max_length=NAME_LENGTH)
    event = models.CharField(max_length=32)
    state = models.CharField(max_length=16)
    at = models.BigIntegerField()
    items = models.IntegerField(default=0)
    process = models.CharField(max_length=64, help_text="The process that has delivered it to itself.")

    class Meta:
        db_table = "djqueue_event"
        default_permissions = ()
        indexes = (models.Index(fields=["at"], name="djqueue_event_at"),)

    def __str__(self) -> str:
        return f"{self.event} {self.job_id}"


class ObservedQueue(models.Model):
    """A queue whose events some process has subscribed to."""

    name = models.CharField(max_length=NAME_LENGTH, primary_key=True)
    until = models.BigIntegerField(help_text="UTC milliseconds; the process renews it.")

    class Meta:
        db_table = "djqueue_observed"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
