"""Workers that run on their caller's thread, until there is nothing left to run."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.dispatch import Signal

from djqueue.client import registry
from djqueue.core.clock import Clock
from djqueue.core.deadlines import Outage
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
    Swept,
)
from djqueue.storage.base import P, Storage, T
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.facets import Unsubscribe

from .events import RunEvents
from .executors import Executor, InlineExecutor
from .executors.threads import CallerThread
from .handlers import Handlers
from .runs import Run
from .worker import Worker


class UntilIdle(Storage):
    """Another storage, whose worker stops when nothing is running and nothing was claimed."""

    worker: Worker
    wait: int | None = None
    """Milliseconds after which the next claim may find a job, as the last claim has answered."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.jobs, self.queues, self.limiters = storage.jobs, storage.queues, storage.limiters
        self.workers, self.reads, self.events = storage.workers, storage.reads, storage.events
        self.snapshots = storage.snapshots
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
        if then is not None:
            self.wait = finished.claims.wait
            if not finished.claims.jobs and not self.worker.running:
                self.worker.stop()
        return finished

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self._storage.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        return self._storage.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        return self._storage.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self._storage.listen(queues, wake)

    def sweep(self) -> Swept:
        return self._storage.sweep()


class CallersWorker(Worker):
    """A worker that runs plain functions, one at a time, on its caller's thread and connections.

    on_failure: Called with each run whose job has failed permanently.
    """

    def __init__(
        self,
        storage: UntilIdle,
        queues: Iterable[str] | str | None = None,
        handlers: Handlers | None = None,
        *,
        connect: bool = True,
        on_failure: Callable[[Run], None] | None = None,
    ) -> None:
        super().__init__(
            storage, queues, handlers, concurrency=1, maintain=False, connect=connect, inline=True
        )
        self._caller = CallerThread()
        self.events = CallersEvents(self.options.worker_id, self.clock, self._caller, on_failure)

    async def run(self) -> None:
        """Run jobs until nothing can be claimed, and the receivers of their signals."""
        await super().run()
        await self._caller.join()

    def _make_executor(self) -> Executor:
        return InlineExecutor(self, self._caller)


class CallersEvents(RunEvents):
    """Sends signals on the caller's thread, and does not log the worker's start and end."""

    def __init__(
        self,
        worker_id: str,
        clock: Clock,
        caller: CallerThread,
        on_failure: Callable[[Run], None] | None,
    ) -> None:
        super().__init__(worker_id, clock)
        self._caller = caller
        self._on_failure = on_failure

    def worker_started(self) -> None:
        """Log nothing."""

    def worker_stopped(self) -> None:
        """Log nothing."""

    def failed(self, run: Run) -> None:
        """Record that a job failed permanently."""
        super().failed(run)
        if self._on_failure is not None:
            self._on_failure(run)

    def _send_signal(self, signal: Signal, name: str, **about: Any) -> None:
        sender = registry.find(name)
        self._caller.submit(lambda _: signal.send_robust(sender=sender, name=name, **about), None)


def has_running_loop() -> bool:
    """Return whether an event loop is running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
