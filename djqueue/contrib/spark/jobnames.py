"""Warn of jobs that no worker handles, which is often a misspelled name."""

import logging

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage

from .options import WriteOptions

logger = logging.getLogger("djqueue.spark")


def warn_of_unknown_job(storage: Storage, options: WriteOptions) -> None:
    """Log a warning if workers are running, but none that serves the queue handles the job."""
    if options.job is None:
        return
    try:
        workers = storage.workers.all()
    except StorageUnavailableError:
        return  # The write does not fail for a warning; its own calls are repeated.
    known = {
        name
        for worker in workers
        if options.queue is None or worker.queues is None or options.queue in worker.queues
        for name in worker.names
    }
    if known and options.job not in known:
        logger.warning(
            "job: no running worker handles %r%s Its jobs wait until a worker does.",
            options.job,
            nearest(options.job, known) or ".",
        )
