"""The tables in the Django admin: to look at, and to steer through the storage."""

from .about import DjqueueJobsMixin
from .base import StoredAdmin
from .cron import CronJobAdmin
from .dashboard import DashboardAdmin
from .deadletters import DeadLetterAdmin
from .jobs import JobAdmin, JobAttemptAdmin, JobLogAdmin, JobResultAdmin
from .limits import GroupStateAdmin, LimiterStateAdmin, MarkAdmin
from .outbox import OutboxJobAdmin
from .queues import QueueStateAdmin, WorkerStateAdmin

__all__ = [
    "CronJobAdmin",
    "DashboardAdmin",
    "DeadLetterAdmin",
    "DjqueueJobsMixin",
    "GroupStateAdmin",
    "JobAdmin",
    "JobAttemptAdmin",
    "JobLogAdmin",
    "JobResultAdmin",
    "LimiterStateAdmin",
    "MarkAdmin",
    "OutboxJobAdmin",
    "QueueStateAdmin",
    "StoredAdmin",
    "WorkerStateAdmin",
]
