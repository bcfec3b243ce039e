"""The engine alone, for tests, development and queues inside one process. Nothing survives the process."""

from collections.abc import Callable, Mapping
from random import Random

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics, workers_line
from djqueue.core.engine import DEFAULT_POLICY, Engine
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.metricstore import MetricStore
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.engined import (
    EngineEvents,
    EngineJobs,
    EngineLimiters,
    EngineQueues,
    EngineReads,
    EngineWorkers,
)

from .engined import EngineStorage


class MemoryStorage(EngineStorage):
    """Jobs in this process's memory.

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
        self.metrics = MetricStore(metrics)
        self.engine = Engine(
            clock=clock,
            random=random,
            policies=policies,
            default_policy=default_policy,
            limiters=limiters,
            cores=cores,
            incidents=self.notify_incidents,
        )
        self.jobs = EngineJobs(self.engine)
        self.queues = EngineQueues(self.engine, self.metrics)
        self.limiters = EngineLimiters(self.engine)
        self.workers = EngineWorkers(self.engine, self.metrics)
        self.reads = MemoryReads(self.engine, self.metrics, self.describe)
        self.events = EngineEvents(self.engine)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(in_process=True)

    def describe(self) -> str:
        return "memory (this process only; nothing survives it)"


class MemoryReads(EngineReads):
    """Reads of the engine."""

    def __init__(self, engine: Engine, metrics: MetricStore, describe: Callable[[], str]) -> None:
        super().__init__(engine, metrics)
        self._describe = describe

    def diagnostics(self) -> Diagnostics:
        names = self._engine.queues()
        jobs = sum(sum(one.counts.values()) for one in self._engine.overview(names).queues)
        lines = [
            DiagnosticLine("storage.where", "Storage", "Location", self._describe()),
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(names):,}"),
            DiagnosticLine("storage.jobs", "Storage", "Jobs", f"{jobs:,}"),
            workers_line(len(self._engine.workers())),
        ]
        return Diagnostics("memory", self._engine.clock.now(), lines)
