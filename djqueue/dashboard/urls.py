"""All pages of the dashboard, in the order of their tabs."""

from djqueue.storage import sparktables

from . import converters  # noqa: F401 - registers the converter of the routes
from .pages import DashboardPage
from .views import (
    activity,
    bulkjobs,
    bulkwrites,
    cron,
    deadletters,
    edit,
    enqueue,
    flows,
    groups,
    job,
    jobs,
    metrics,
    operations,
    overview,
    queue,
    queues,
    schedules,
    storage,
    stream,
    timing,
    workers,
)

MODULES = (
    overview,
    queues,
    queue,
    groups,
    jobs,
    bulkjobs,
    job,
    edit,
    timing,
    deadletters,
    schedules,
    cron,
    flows,
    workers,
    operations,
    bulkwrites,
    metrics,
    storage,
    activity,
    enqueue,
    stream,
)
PAGES: tuple[DashboardPage, ...] = tuple(
    page
    for module in MODULES
    if module is not bulkwrites or sparktables.are_installed()
    for page in module.pages.all
)
