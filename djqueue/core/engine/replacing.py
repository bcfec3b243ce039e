"""Replace everything that an engine holds, in one step."""

import copy
from collections.abc import Callable
from contextlib import ExitStack

from ..changes import PendingChanges
from ..enginejob import EngineJob
from ..queue import ProcessingShard
from ..shard import Shard
from ..sharing import SharedLimiter
from .context import EngineContext
from .finisher import Settlement
from .persistence import PersistentEngine


class EngineReplacement:
    """An empty copy of an engine to be filled, and put in place of the engine's contents.

    It has the configuration, the clocks and the tokens of the engine, and sends no events.
    """

    def __init__(self, context: EngineContext) -> None:
        self._live = context
        self.context = twin = copy.copy(context)
        twin.limiters = {
            name: SharedLimiter(limiter.policy, context.clock) for name, limiter in context.limiters.items()
        }
        twin.shards = [Shard(None, twin.new_queue) for _ in context.shards]
        twin.processing = [ProcessingShard() for _ in context.processing]
        self.settlement = Settlement(twin)
        self.persistence = PersistentEngine(twin, self.settlement)

    def replace(self, settlement: Settlement, is_allowed: Callable[[], bool]) -> bool:
        """Put the contents in place, unless `is_allowed` returns False: it is called under all locks.

        Claims of the engine end: their outcomes are refused.

        Args:
            settlement: That of the engine; workers are woken.
        """
        live, twin = self._live, self.context
        changes = PendingChanges()
        with ExitStack() as held:
            for shard in live.shards:
                held.enter_context(shard.lock)
            for processing in live.processing:
                held.enter_context(processing.lock)
            if not is_allowed():
                return False
            for old, new in zip(live.shards, twin.shards, strict=True):
                old.replace(new)
                changes.woken.update(old.queues)
            for mine, other in zip(live.processing, twin.processing, strict=True):
                mine.active, mine.counts, mine.extra = other.active, other.counts, other.extra
            # The same dict, because queues that are made later look limiters up in it.
            live.limiters.clear()
            live.limiters.update(twin.limiters)
            twin.limiters = live.limiters
        live.changes.bump()
        settlement.settle(changes)
        return True


def all_jobs(context: EngineContext) -> list[EngineJob]:
    """Return all jobs as of one moment. The caller changes none of them."""
    with ExitStack() as held:
        for shard in context.shards:
            held.enter_context(shard.lock)
        return [
            job for shard in context.shards for queue in shard.queues.values() for job in queue.jobs.values()
        ]
