"""Every address of the dashboard, in the order of its navigation."""

from . import addresses  # noqa: F401 - registers the converter of the routes
from .pages import Page
from .views import (
    activity,
    bulkjobs,
    cron,
    edit,
    enqueue,
    flows,
    groups,
    imports,
    job,
    jobs,
    letters,
    metrics,
    operations,
    overview,
    queue,
    queues,
    schedules,
    storage,
    stream,
    timing,
    undo,
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
    letters,
    schedules,
    cron,
    flows,
    workers,
    operations,
    imports,
    undo,
    metrics,
    storage,
    activity,
    enqueue,
    stream,
)
PAGES: tuple[Page, ...] = tuple(page for module in MODULES for page in module.pages.all)
