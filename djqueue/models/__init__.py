"""The tables: the journal of the database storage, or a read-only mirror of another storage.

The storages write most rows with raw SQL over the columns of these tables. Times are UTC milliseconds in the
columns and aware datetimes in Python. A job is identified by (queue, job_id).
"""

from .dashboard import AuditEvent, BulkKind, BulkOperation, BulkState, Dashboard, PayloadVersion, Revision
from .hot import (
    ClaimedJob,
    DelayedJob,
    ExpiringDetail,
    HeldJob,
    JobDependency,
    JobEvent,
    ObservedQueue,
    PinnedRecord,
    QueueTally,
    RateBucket,
    ReadyJob,
    RetentionTally,
    UniqueKey,
)
from .jobs import (
    DeadLetter,
    Job,
    JobAttempt,
    JobItem,
    JobLog,
    JobResult,
    JobState,
    OutboxJob,
    RetainedJob,
    RetainedTotal,
)
from .queues import Annotation, ErrorGroup, GroupState, LimiterState, MetricBucket, QueueState
from .schedules import CronJob, CronJobQuerySet, Missed, OnBlackout, Overlap, ScheduleSource
from .workers import BackupState, LeaderLeaseRow, WorkerState

__all__ = [
    "Annotation",
    "AuditEvent",
    "BackupState",
    "BulkKind",
    "BulkOperation",
    "BulkState",
    "ClaimedJob",
    "CronJob",
    "CronJobQuerySet",
    "Dashboard",
    "DeadLetter",
    "DelayedJob",
    "ErrorGroup",
    "ExpiringDetail",
    "GroupState",
    "HeldJob",
    "Job",
    "JobAttempt",
    "JobDependency",
    "JobEvent",
    "JobItem",
    "JobLog",
    "JobResult",
    "JobState",
    "LeaderLeaseRow",
    "LimiterState",
    "MetricBucket",
    "Missed",
    "ObservedQueue",
    "OnBlackout",
    "OutboxJob",
    "Overlap",
    "PayloadVersion",
    "PinnedRecord",
    "QueueState",
    "QueueTally",
    "RateBucket",
    "ReadyJob",
    "RetainedJob",
    "RetainedTotal",
    "RetentionTally",
    "Revision",
    "ScheduleSource",
    "UniqueKey",
    "WorkerState",
]
