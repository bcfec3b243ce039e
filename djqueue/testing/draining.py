"""Running what is waiting, in a test, with a worker as it is in production."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, cast

from djqueue.client import get_storage
from djqueue.core.job import ClaimRequest, Finished, Outcome
from djqueue.runtime import Worker
from djqueue.runtime.events import Counters
from djqueue.storage.base import Storage

LONGEST = 60.0
"""Seconds after which a drain gives up."""


def drain(
    storage: Storage | None = None,
    *,
    queues: Iterable[str] | str | None = None,
    handlers: Any = None,
    concurrency: int = 1,
) -> Counters:
    """Run every job that is waiting now, and those that these bring, until nothing can be claimed.

    Jobs that are not due stay delayed, those that wait for a retry among them. Returns how many runs
    were claimed and completed, retried, failed, cancelled, released. The arguments are those of
    `djqueue.Worker`, except that one job runs at a time unless `concurrency` is given.

    Handlers run on the worker's threads, as they do in production: where they use the database,
    pytest-django's `transactional_db` shows them what the test has written, `db` does not.
    """
    total = Counters()
    while True:
        there = _UntilNothingIsClaimed(storage if storage is not None else get_storage())
        worker = there.worker = Worker(
            cast(Storage, there), queues, handlers, concurrency=concurrency, maintain=False
        )
        worker.start()
        if not worker.join(LONGEST):
            worker.stop(hurry=True)
            raise AssertionError(f"jobs are still running or coming in after {LONGEST:g} s")
        for field in fields(Counters):
            done = getattr(total, field.name) + getattr(worker.counters, field.name)
            setattr(total, field.name, done)
        if not worker.counters.claimed:
            return total


class _UntilNothingIsClaimed:
    """A storage that stops its worker when a claim brings nothing while nothing runs."""

    worker: Worker

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """Async version of `Storage.afinish`."""
        finished = await self._storage.afinish(outcomes, then)
        if then is not None and not finished.claims.jobs and not self.worker.running:
            self.worker.stop()
        return finished
