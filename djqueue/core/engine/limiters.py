"""Limiters that queues share."""

from ..changes import PendingChanges
from ..limiter import UNSET, SetConcurrency, SetRate
from ..sharing import LimiterState
from ..versions import counted
from .context import EngineContext
from .settlement import Settlement


class EngineLimiters:
    """Limiters, held by the engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted
    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Change the limits of a limiter while its queues run."""
        changes = PendingChanges()
        self._context.limiter(name).change(rate, concurrency, changes.woken)
        self._settlement.settle(changes)

    def state(self, name: str) -> LimiterState:
        """Return what a limiter allows, and how much of it is in use."""
        return self._context.limiter(name).state()

    def pass_turns_on(self) -> None:
        """Give turns that a queue did not use to the next queue in line."""
        changes = PendingChanges()
        for limiter in list(self._context.limiters.values()):
            limiter.pass_on(changes.woken)
        if changes.woken:
            self._settlement.settle(changes)
