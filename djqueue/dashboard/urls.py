"""All pages of the dashboard, and their former addresses."""

from djqueue.dashboard.site import DashboardPage
from djqueue.dashboard.views import (
    bulkwrites,
    editing,
    errors,
    history,
    job,
    jobs,
    jobtype,
    jobtypes,
    operations,
    palette,
    queues,
    savedviews,
    scheduleform,
    schedules,
    status,
    streams,
    system,
    workers,
    workflows,
)
from djqueue.storage import sparktables

MODULES = (
    status,
    jobs,
    savedviews,
    job,
    editing,
    jobtypes,
    jobtype,
    errors,
    queues,
    workflows,
    schedules,
    scheduleform,
    workers,
    history,
    operations,
    *((bulkwrites,) if sparktables.are_installed() else ()),
    system,
    palette,
    streams,
)
MOVED = {
    "dead-letters/": "errors/",
    "cron/": "schedules/",
    "flows/": "workflows/",
    "metrics/export/": "job-types/all/export/",
    "metrics/": "job-types/",
    "enqueue/": "job-types/",
    "operations/": "history/operations/",
    "bulk-writes/": "history/bulk-writes/",
    "activity/": "history/",
    "storage/": "system/",
}
"""Beginnings of routes by the ones that they had before, so that links in tickets and chats still work."""
PAGES: tuple[DashboardPage, ...] = tuple(page for module in MODULES for page in module.pages.all)
