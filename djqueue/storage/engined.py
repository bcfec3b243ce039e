"""The hot path over an engine in this process: the memory storage's."""

from collections.abc import Callable, Iterable, Sequence

from djqueue.core.engine import Engine
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

from . import backpressure
from .base import P, Storage, T
from .facets import Unsubscribe

WORKER_TTL = 60_000
"""Milliseconds after its last heartbeat at which a worker counts as gone."""


class EngineStorage(Storage):
    """A storage whose engine answers at once: the async methods need no thread."""

    engine: Engine

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method."""
        return method(*args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        context = self.engine.context
        if context.may_block:
            return backpressure.enqueue(self.events, context.policy, batches, self.engine.enqueue)
        return self.engine.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        context = self.engine.context
        if context.may_block:
            return await backpressure.aenqueue(self, context.policy, batches, self._enqueue_soon)
        return self.enqueue(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self.engine.enqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self.engine.finish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self.engine.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        return self.engine.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        return self.engine.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self.engine.listen(queues, wake)

    def sweep(self) -> Swept:
        swept = self.engine.sweep(WORKER_TTL)
        self.engine.record_totals()
        return swept
