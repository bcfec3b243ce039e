"""Warnings of jobs that no worker would run.

Each job and queue is checked once per process.
"""

from functools import partial

from django.apps import apps
from django.core.signals import setting_changed
from django.db import transaction

from djqueue.conf import get_settings
from djqueue.core.errors import DjqueueError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.suggest import similar
from djqueue.storage.base import Storage

from .declarations import registry
from .envelope import DEFAULT_QUEUE
from .transactions import open_block

logger = Log("djqueue.client")

MAX_CHECKED = 10_000
"""Maximum number of queues and jobs that are checked."""

checked_queues: set[str] = set()
checked_jobs: set[str] = set()
checked_names: set[str] = set()


def check_job(storage: Storage, name: str) -> None:
    """Warn once of a job whose module workers do not import.

    Jobs of a storage inside this process are run here, so their names are known.
    """
    if apps.apps_ready and not apps.ready and name not in checked_jobs:
        checked_jobs.add(name)
        logger.warning(
            "Job %r is enqueued while Django starts, so every process that starts enqueues it: workers, web "
            "servers and commands of manage.py. Enqueue it in a view, a job or a command, or schedule it.",
            name,
        )
    if name in checked_jobs or registry.discovered is None:
        return
    if storage.capabilities.in_process or storage.capabilities.relayed:
        return
    if len(checked_jobs) >= MAX_CHECKED:
        return
    checked_jobs.add(name)
    if name not in registry.discovered and name not in registry.served:
        logger.warning(
            "Job %r is defined in a module that workers do not import, so they may have no handler for "
            "it. Workers import jobs.py of every installed app and the modules in DJQUEUE['MODULES']: "
            "move the function, or add its module to MODULES. If the code is in another project, use "
            "@job(check_arguments=False).",
            name,
        )


def is_new(batch: Batch) -> bool:
    """Return whether the queue or the job name of a batch has not been checked yet."""
    return batch.queue not in checked_queues or batch.name not in checked_names


def check(storage: Storage, batch: Batch) -> None:
    """Warn once of a queue and of a job name that resemble a known one, and that no live worker serves.

    In a transaction of the caller, after its commit: reading the workers takes time, and an error would break
    the transaction.
    """
    if storage.capabilities.relayed:
        return
    queue = suspect(batch.queue) if batch.queue not in checked_queues else None
    name = suspect_name(batch.name) if batch.name not in checked_names else None
    if queue is None and name is None:
        return
    warn = partial(_warn_if_unserved, storage, batch, queue, name)
    if storage.capabilities.in_process or (alias := open_block()) is None:
        warn()
    else:
        transaction.on_commit(warn, using=alias, robust=True)


async def acheck(storage: Storage, batch: Batch) -> None:
    """Async version of `check`."""
    if storage.capabilities.relayed:
        return
    queue = suspect(batch.queue) if batch.queue not in checked_queues else None
    name = suspect_name(batch.name) if batch.name not in checked_names else None
    if queue is not None or name is not None:
        await storage.acall(_warn_if_unserved, storage, batch, queue, name)


def suspect_name(name: str) -> str | None:
    """Return the job that an unknown name may be a typo of, or None.

    Called once per process and name.
    """
    if len(checked_names) >= MAX_CHECKED:
        return None
    checked_names.add(name)
    known = registry.names()
    return None if name in known else similar(name, known)


def suspect(queue: str) -> str | None:
    """Return the declared queue that an unknown name may be a typo of, or None.

    Called once per process and queue.
    """
    if len(checked_queues) >= MAX_CHECKED:
        return None
    checked_queues.add(queue)
    known = declared_queues()
    return None if queue in known else similar(queue, known)


def declared_queues() -> set[str]:
    """Queues that the settings or job types name."""
    declared = {job_type.options.queue for job_type in registry.all().values()}
    return {DEFAULT_QUEUE, *get_settings().queues, *filter(None, declared)}


def is_served(storage: Storage, queue: str) -> bool:
    """Return whether a live worker serves this queue by name; True if the storage does not answer."""
    try:
        return any(queue in (worker.queues or ()) for worker in storage.workers.all())
    except DjqueueError as error:
        logger.debug("Could not read the workers of queue %r: %s", queue, error)
        return True


def is_handled(storage: Storage, name: str) -> bool:
    """Return whether a live worker has a handler of this name; True if the storage does not answer."""
    try:
        return any(name in worker.names for worker in storage.workers.all())
    except DjqueueError as error:
        logger.debug("Could not read the workers that handle job %r: %s", name, error)
        return True


def _warn_if_unserved(storage: Storage, batch: Batch, queue: str | None, name: str | None) -> None:
    """Warn of a queue or a job name that may be meant for another one, unless a worker serves it."""
    if queue is not None and not is_served(storage, batch.queue):
        _warn_of_queue(batch.queue, queue)
    if name is not None and not is_handled(storage, batch.name):
        _warn_of_job(batch.name, name)


def _warn_of_job(name: str, meant: str) -> None:
    logger.warning(
        "No live worker has a handler for %r, and this process registers no job of that name. Did you "
        "mean %r? The job waits in its queue until a worker with a handler starts.",
        name,
        meant,
    )


def _warn_of_queue(queue: str, meant: str) -> None:
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
        checked_names.clear()


setting_changed.connect(_forget)
