"""The Django admin: the dashboard, and read-only lists of jobs, results, dead letters and cron jobs.

Django imports this package at start-up, so nothing here imports the dashboard's views or a storage at module
level. Both are imported with the project's URLs, or by the first page.
"""

from .about import DjqueueJobsMixin
from .base import ReadOnlyAdmin
from .cron import CronJobAdmin
from .dashboard import DashboardAdmin
from .jobs import DeadLetterAdmin, JobAdmin, JobResultAdmin

__all__ = [
    "CronJobAdmin",
    "DashboardAdmin",
    "DeadLetterAdmin",
    "DjqueueJobsMixin",
    "JobAdmin",
    "JobResultAdmin",
    "ReadOnlyAdmin",
]
