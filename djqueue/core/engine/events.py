"""Subscriptions to the events of jobs."""

from ..queue import EventHandler
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
            job_queue = shard.queue(queue)
            if job_id is None:
                job_queue.handlers = [*job_queue.handlers, handler]
            else:
                job_queue.watchers[job_id] = [*job_queue.watchers.get(job_id, ()), handler]

        subscribed = True

        def unsubscribe() -> None:
            nonlocal subscribed
            with shard.lock:
                if not subscribed:
                    return
                subscribed = False
                job_queue = shard.find(queue)
                if job_id is None:
                    job_queue.handlers = _without_one(job_queue.handlers, handler)
                    return
                left = _without_one(job_queue.watchers.get(job_id, []), handler)
                if left:
                    job_queue.watchers[job_id] = left
                else:
                    job_queue.watchers.pop(job_id, None)

        return unsubscribe


def _without_one(handlers: list[EventHandler], handler: EventHandler) -> list[EventHandler]:
    # Only one, because the same handler may have been subscribed more than once.
    left = list(handlers)
    if handler in left:
        left.remove(handler)
    return left
