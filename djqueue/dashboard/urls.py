"""All pages of the dashboard, in the order of their tabs."""

from djqueue.dashboard.site import DashboardPage
from djqueue.dashboard.views import (
    activity,
    bulkwrites,
    deadletters,
    editing,
    enqueue,
    flows,
    job,
    jobs,
    metrics,
    operations,
    overview,
    queues,
    scheduleform,
    schedules,
    storage,
    streams,
    workers,
)
from djqueue.storage import sparktables

MODULES = (
    overview,
    queues,
    jobs,
    job,
    editing,
    deadletters,
    schedules,
    scheduleform,
    flows,
    workers,
    operations,
    *((bulkwrites,) if sparktables.are_installed() else ()),
    metrics,
    storage,
    activity,
    enqueue,
    streams,
)
PAGES: tuple[DashboardPage, ...] = tuple(page for module in MODULES for page in module.pages.all)
