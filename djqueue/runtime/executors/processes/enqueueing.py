"""The worker's side of enqueues from sandboxed processes: check the request, call the storage, announce."""

import asyncio
import logging
from functools import partial

from djqueue.client.announcing import announcer
from djqueue.core.errors import DjqueueError, QueueFullError, StorageError
from djqueue.core.job import Batch, Claimed, EnqueueResult
from djqueue.core.messages import ThrottledLog
from djqueue.core.permissions import Permissions
from djqueue.runtime.context import WorkerContext
from djqueue.signals import job_enqueued

from .batches import read_request

SMALL_REQUEST = 4_096
"""Bytes of a request that is read on the loop; larger ones could delay it."""
BEHIND = 0.05
"""Seconds between two checks whether receivers of signals have caught up."""

logger = logging.getLogger("djqueue.worker")
failures = ThrottledLog(logger, 10.0)


class JobEnqueuer:
    """Enqueues jobs for the processes of some permissions."""

    def __init__(self, worker: WorkerContext, permissions: Permissions) -> None:
        self._storage = worker.storage
        self._settings = worker.settings
        self._permissions = permissions

    async def enqueue(self, claimed: Claimed, request: bytes) -> list[EnqueueResult]:
        """Enqueue the jobs of a request that a process sent while it ran a job.

        Raises the errors of `read_request`, and StorageError.
        """
        read = partial(read_request, request, claimed, self._permissions, self._settings)
        is_small = len(request) <= SMALL_REQUEST
        batches = read() if is_small else await asyncio.get_running_loop().run_in_executor(None, read)
        try:
            results = await self._storage.aenqueue(batches)
        except Exception as error:
            if isinstance(error, QueueFullError) or (
                isinstance(error, DjqueueError) and not isinstance(error, StorageError)
            ):
                raise
            # The text may name servers and users, which are not the handler's to know.
            failures.log(
                logging.ERROR,
                (claimed.name, type(error)),
                "Could not enqueue jobs for job %s (%s).",
                claimed.id,
                claimed.name,
                exc_info=error,
            )
            kind = type(error) if isinstance(error, StorageError) else StorageError
            raise kind(f"the storage of the worker failed: {type(error).__name__}") from error
        left = iter(results)
        for batch in batches:
            answers = [next(left) for _ in batch.payloads]
            self._announce(batch, answers)
        while announcer.is_behind:  # noqa: ASYNC110 - a thread sends them, without an event
            # A handler must not fill the memory with signals that wait for their receivers.
            await asyncio.sleep(BEHIND)
        return results

    def _announce(self, batch: Batch, answers: list[EnqueueResult]) -> None:
        if not job_enqueued.receivers:
            return
        about = {"queue": batch.queue, "options": batch.options}
        for answer in answers:
            if answer.status == "queued":
                announcer.announce(job_enqueued, batch.name, job_id=answer.id, **about)
