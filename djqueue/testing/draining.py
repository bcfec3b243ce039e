"""Run the waiting jobs of a test with a real worker."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any

from djqueue.client import get_storage
from djqueue.core.breaker import Outage
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
)
from djqueue.core.maintenance import Swept
from djqueue.runtime import Worker
from djqueue.runtime.events import Counters
from djqueue.storage.base import P, Storage, T
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.facets import Unsubscribe

LONGEST = 60.0
"""Seconds after which a drain gives up."""


def drain(
    storage: Storage | None = None,
    *,
    queues: Iterable[str] | str | None = None,
    handlers: Any = None,
    concurrency: int = 1,
) -> Counters:
    """Run all waiting jobs, and the jobs that they enqueue, until nothing can be claimed.

    Delayed jobs stay delayed, also those that wait for a retry. One job runs at a time unless `concurrency`
    is given; the other arguments are those of `djqueue.Worker`.

    Handlers run on the worker's threads, as in production. If they use the database, request pytest-django's
    `transactional_db`: they do not see rows that a test with `db` has written.

    Returns:
        The numbers of attempts claimed, completed, retried, failed, cancelled and released.

    Raises:
        AssertionError: Jobs are still running or arriving after a minute.
    """
    total = Counters()
    while True:
        watched = _UntilNothingIsClaimed(storage if storage is not None else get_storage())
        worker = watched.worker = Worker(
            watched, queues, handlers, concurrency=concurrency, maintain=False, inline=True
        )
        worker.start()
        if not worker.join(LONGEST):
            worker.stop(hurry=True)
            raise AssertionError(f"jobs are still running or being enqueued after {LONGEST:g} s")
        for field in fields(Counters):
            done = getattr(total, field.name) + getattr(worker.counters, field.name)
            setattr(total, field.name, done)
        if not worker.counters.claimed:
            return total


class _UntilNothingIsClaimed(Storage):
    """A storage that stops its worker when nothing is running and nothing was claimed."""

    worker: Worker

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.jobs, self.queues, self.limiters = storage.jobs, storage.queues, storage.limiters
        self.workers, self.reads, self.events = storage.workers, storage.reads, storage.events
        self.on_incidents = storage.on_incidents

    @property
    def capabilities(self) -> Capabilities:
        return self._storage.capabilities

    @property
    def outage(self) -> Outage | None:
        return self._storage.outage

    def connect(self) -> None:
        self._storage.connect()

    def describe(self) -> str:
        return self._storage.describe()

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method as the storage does."""
        return await self._storage.acall(method, *args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self._storage.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return await self._storage.aenqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self._storage.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """Finish and claim; stop the worker if nothing was claimed and nothing runs."""
        finished = await self._storage.afinish(outcomes, then)
        if then is not None and not finished.claims.jobs and not self.worker.running:
            self.worker.stop()
        return finished

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self._storage.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        return self._storage.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        return self._storage.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self._storage.listen(queues, wake)

    def sweep(self) -> Swept:
        return self._storage.sweep()
