"""Increases of the queues' totals, added to the metrics."""

from collections.abc import Sequence

from ..overview import Totals
from .context import EngineContext


def record_totals(context: EngineContext) -> None:
    """Add what the totals of queues have risen by since the last call to the metrics."""
    now = context.clock.now()
    for queue in context.queue_names():
        increase = _take_increase(context, queue)
        if increase:
            try:
                context.metrics.count(queue, increase, now)
                context.changes.bump()
            except BaseException:
                _give_back(context, queue, increase)
                raise


def _take_increase(context: EngineContext, queue: str) -> list[int]:
    """Return what the totals of a queue have risen by; empty if nothing has changed."""
    shard = context.shard(queue)
    with shard.lock:
        job_queue = shard.queues.get(queue)
        if job_queue is None:
            return []
        totals, noted = job_queue.tally.totals(job_queue.finished.completions), job_queue.tally.noted
        if totals == noted:
            return []
        job_queue.tally.noted = totals
    return [now - before for now, before in zip(totals, noted, strict=True)]


def _give_back(context: EngineContext, queue: str, increase: Sequence[int]) -> None:
    """Undo `_take_increase`, so that the next call adds it again."""
    shard = context.shard(queue)
    with shard.lock:
        job_queue = shard.queues.get(queue)
        if job_queue is not None:
            noted = zip(job_queue.tally.noted, increase, strict=True)
            job_queue.tally.noted = Totals(*(now - more for now, more in noted))
