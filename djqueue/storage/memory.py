"""The engine alone, for tests, development and queues inside one process. Nothing survives the process."""

from collections.abc import Callable, Mapping
from random import Random

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics, workers_line
from djqueue.core.engine import DEFAULT_POLICY, Engine, EngineReads
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.metricstore import MetricStore
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy

from .capabilities import Capabilities
from .engined import EngineStorage
from .enginesnapshots import EngineSnapshots


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


class MemoryReads(EngineReads):
    """Reads of the engine."""

    def __init__(self, engine: Engine, describe: Callable[[], str]) -> None:
        super().__init__(engine.context, engine.workers)
        self._describe = describe

    def diagnostics(self) -> Diagnostics:
        queues = self.overview().queues
        jobs = sum(sum(queue.counts.values()) for queue in queues)
        lines = [
            DiagnosticLine("storage.where", "Storage", "Location", self._describe()),
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(queues):,}"),
            DiagnosticLine("storage.jobs", "Storage", "Jobs", f"{jobs:,}"),
            workers_line(len(self._workers.all())),
        ]
        return Diagnostics("memory", self._context.clock.now(), lines)
