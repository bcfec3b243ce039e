"""The engine alone: for tests, development and queues inside one process. Nothing survives it."""

from collections.abc import Mapping
from random import Random

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics, workers_line
from djqueue.core.engine import DEFAULT_POLICY, Engine
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.metricstore import MetricStore
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy

from .engined import EngineStorage


class MemoryStorage(EngineStorage):
    """Jobs in this process's memory.

    policies: of single queues; `default_policy` is for the others.
    limiters: that queues may share.
    cores: see `Engine`.
    metrics: for how long they are kept.
    """

    in_process = True

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
            incidents=self.told,
        )

    def diagnostics(self) -> Diagnostics:
        """See `Storage.diagnostics`."""
        names = self.engine.queues()
        jobs = sum(sum(one.counts.values()) for one in self.engine.overview(names).queues)
        lines = [
            DiagnosticLine("storage.where", "Storage", "Location", self.describe()),
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(names):,}"),
            DiagnosticLine("storage.jobs", "Storage", "Jobs", f"{jobs:,}"),
            workers_line(len(self.workers())),
        ]
        return Diagnostics("memory", self.engine.clock.now(), lines)

    def describe(self) -> str:
        """See `Storage.describe`."""
        return "memory (this process only; nothing survives it)"
