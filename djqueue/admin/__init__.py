"""The Django admin: the dashboard, and read-only lists of jobs, results, dead letters and cron jobs.

Django imports this package at start-up, so nothing here imports the dashboard's views or a storage at module
level. Both are imported with the project's URLs, or by the first page.
"""

from .dashboard import DashboardAdmin
from .lists import ReadOnlyAdmin
from .modeladmins import CronJobAdmin, DeadLetterAdmin, JobAdmin, JobResultAdmin
from .panel import DjqueueJobsMixin

__all__ = [
    "CronJobAdmin",
    "DashboardAdmin",
    "DeadLetterAdmin",
    "DjqueueJobsMixin",
    "JobAdmin",
    "JobResultAdmin",
    "ReadOnlyAdmin",
]
