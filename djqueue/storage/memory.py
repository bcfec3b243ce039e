"""The engine alone: for tests, development and queues inside one process. Nothing survives it."""

from collections.abc import Mapping
from random import Random

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.engine import DEFAULT_POLICY, Engine
from djqueue.core.queue import QueuePolicy

from .engined import EngineStorage


class MemoryStorage(EngineStorage):
    """Jobs in this process's memory.

    policies: of single queues; `default_policy` is for the others.
    cores: see `Engine`.
    """

    def __init__(
        self,
        *,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy = DEFAULT_POLICY,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
        cores: int | None = None,
    ) -> None:
        self.engine = Engine(
            clock=clock,
            random=random,
            policies=policies,
            default_policy=default_policy,
            cores=cores,
            incidents=self.told,
        )

    def describe(self) -> str:
        """See `Storage.describe`."""
        return "memory (this process only; nothing survives it)"
