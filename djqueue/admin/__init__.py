"""The tables in the Django admin: to look at, and to steer through the storage."""

from .base import StoredAdmin
from .cron import CronJobAdmin
from .deadletters import DeadLetterAdmin
from .jobs import JobAdmin, JobAttemptAdmin, JobLogAdmin, JobResultAdmin
from .outbox import OutboxJobAdmin
from .queues import QueueStateAdmin, WorkerStateAdmin

__all__ = [
    "CronJobAdmin",
    "DeadLetterAdmin",
    "JobAdmin",
    "JobAttemptAdmin",
    "JobLogAdmin",
    "JobResultAdmin",
    "OutboxJobAdmin",
    "QueueStateAdmin",
    "StoredAdmin",
    "WorkerStateAdmin",
]
