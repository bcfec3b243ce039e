"""The engine alone, for tests, development and queues inside one process. Nothing survives the process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.engine import Engine, EngineReads
from djqueue.core.engine.metricstore import MetricStore
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
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.overview import Diagnostics
from djqueue.core.policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy

from . import backpressure
from .base import P, Storage, T
from .capabilities import Capabilities
from .enginesnapshots import EngineSnapshots
from .facets import WORKER_TTL, Unsubscribe


class MemoryStorage(Storage):
    """Jobs in this process's memory. The engine answers at once, so that async methods need no thread.

    Args:
        policies: the policies of single queues; `default_policy` applies to the others.
        limiters: limiters that queues may share.
        cores: decides the number of shards: see `Engine`.
        metrics: how long metrics are kept.
    """

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy = DEFAULT_POLICY,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
        cores: int | None = None,
        metrics: Tiers = DEFAULT_TIERS,
    ) -> None:
        self.engine = Engine(
            clock=clock,
            random=random,
            policies=policies,
            default_policy=default_policy,
            limiters=limiters,
            cores=cores,
            metrics=MetricStore(metrics),
            incidents=self.notify_incidents,
        )
        self.jobs = self.engine.jobs
        self.queues = self.engine.queues
        self.limiters = self.engine.limiters
        self.workers = self.engine.workers
        self.reads = MemoryReads(self.engine, self.describe)
        self.events = self.engine.events
        self.snapshots = EngineSnapshots(self.engine)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(in_process=True)

    def describe(self) -> str:
        return "memory (this process only, not persistent)"

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

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self.finish(outcomes, then)

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


class MemoryReads(EngineReads):
    """Reads of the engine."""

    def __init__(self, engine: Engine, describe: Callable[[], str]) -> None:
        super().__init__(engine.context, engine.workers)
        self._describe = describe

    def diagnostics(self) -> Diagnostics:
        return Diagnostics("memory", self._context.clock.now(), self.storage_lines(self._describe()))
