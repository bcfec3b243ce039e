"""Warnings about jobs that no worker would run: logged once per process, for the job or the queue."""

import logging

from django.core.signals import setting_changed

from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError
from djqueue.core.suggest import similar
from djqueue.storage.base import Storage

from .envelope import DEFAULT_QUEUE
from .registered import registry

logger = logging.getLogger("djqueue.client")

MAX_CHECKED = 10_000
"""Queues and jobs that are remembered as checked; the ones after that are not checked."""

checked_queues: set[str] = set()
checked_jobs: set[str] = set()


def check_job(storage: Storage, name: str) -> None:
    """Warn once of a job whose module workers do not import.

    Jobs of a storage inside this process are run here, so their names are known.
    """
    if name in checked_jobs or registry.discovered is None or storage.in_process:
        return
    if len(checked_jobs) >= MAX_CHECKED:
        return
    checked_jobs.add(name)
    if name not in registry.discovered and name not in registry.served:
        logger.warning(
            "Job %r is not defined by a module that workers import, so they may not know it. Workers import "
            "jobs.py of every installed app and the modules in DJQUEUE['MODULES']: move the function, or add "
            "its module there. If its code is in another project, give @job(check_arguments=False).",
            name,
        )


def suspect(queue: str) -> str | None:
    """The declared queue that a queue's name may be a typing error of; None if it is not suspicious.

    Called once per process and queue.
    """
    if len(checked_queues) >= MAX_CHECKED:
        return None
    checked_queues.add(queue)
    known = declared_queues()
    return None if queue in known else similar(queue, known)


def check_queue(storage: Storage, queue: str) -> None:
    """Warn once of a queue that is neither declared nor served, but resembles a declared one."""
    meant = suspect(queue)
    if meant is not None and not is_served(storage, queue):
        _warn(queue, meant)


async def acheck_queue(storage: Storage, queue: str) -> None:
    """Async version of `check_queue`."""
    meant = suspect(queue)
    if meant is not None and not await storage.acall(is_served, storage, queue):
        _warn(queue, meant)


def declared_queues() -> set[str]:
    """Queues that the settings or job types name."""
    declared = {job_type.options.queue for job_type in registry.all().values()}
    return {DEFAULT_QUEUE, *get_settings().queues, *filter(None, declared)}


def is_served(storage: Storage, queue: str) -> bool:
    """Whether a live worker was started for this queue by name; True if the storage does not answer."""
    try:
        return any(queue in (worker.queues or ()) for worker in storage.workers())
    except DjqueueError as error:
        logger.debug("Could not read the workers of queue %r: %s", queue, error)
        return True


def _warn(queue: str, meant: str) -> None:
    logger.warning(
        "Queue %r is not declared, and no live worker serves it by name. Did you mean %r? If not, declare it "
        "in DJQUEUE['QUEUES'].",
        queue,
        meant,
    )


def _forget(*, setting: str, **_: object) -> None:
    if setting in ("DJQUEUE", "INSTALLED_APPS"):
        checked_queues.clear()
        checked_jobs.clear()


setting_changed.connect(_forget)
