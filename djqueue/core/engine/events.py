"""Subscriptions to the events of jobs."""

from ..shard import EventHandler
from .context import EngineContext
from .finisher import Unsubscribe


class EngineEvents:
    """Events of the engine."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one of its jobs."""
        shard = self._context.shard(queue)
        with shard.lock:
            subscribers = shard.subscribers.setdefault(queue, {})
            subscribers[job_id] = [*subscribers.get(job_id, ()), handler]
            if (job_queue := shard.queues.get(queue)) is not None:
                job_queue.observed = True

        subscribed = True

        def unsubscribe() -> None:
            nonlocal subscribed
            with shard.lock:
                if not subscribed:
                    return
                subscribed = False
                left = subscribers[job_id].copy()
                left.remove(handler)  # Only one, because it may have been subscribed more than once.
                subscribers[job_id] = left
                if not left:
                    del subscribers[job_id]
                if not subscribers:
                    del shard.subscribers[queue]
                    if (job_queue := shard.queues.get(queue)) is not None:
                        job_queue.observed = False

        return unsubscribe
