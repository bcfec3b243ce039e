"""Who is told of changes, and which workers there are."""

from collections.abc import Iterable

from .base import EngineBase, Unsubscribe, Wake
from .job import WorkerDump, WorkerInfo
from .queue import EventHandler
from .workercontrol import check_command


class Observers(EngineBase):
    """Subscriptions, listeners, and the registry of workers."""

    def listen(self, queues: Iterable[str] | None, wake: Wake) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: any) may be claimable."""
        entry = (None if queues is None else frozenset(queues), wake)
        with self._registry:
            self._listeners = [*self._listeners, entry]
        return lambda: self._unlisten(entry)

    def _unlisten(self, entry: tuple[frozenset[str] | None, Wake]) -> None:
        with self._registry:
            self._listeners = [other for other in self._listeners if other is not entry]

    def subscribe(self, queue_name: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one job of it."""
        shard = self.shard(queue_name)
        with shard.lock:
            queue = shard.queue(queue_name)
            if job_id is None:
                queue.handlers = [*queue.handlers, handler]
            else:
                queue.watchers[job_id] = [*queue.watchers.get(job_id, ()), handler]

        subscribed = True

        def unsubscribe() -> None:
            nonlocal subscribed
            with shard.lock:
                if not subscribed:
                    return
                subscribed = False
                queue = shard.find(queue_name)
                if job_id is None:
                    queue.handlers = _without_one(queue.handlers, handler)
                    return
                left = _without_one(queue.watchers.get(job_id, []), handler)
                if left:
                    queue.watchers[job_id] = left
                else:
                    queue.watchers.pop(job_id, None)

        return unsubscribe

    # Workers.

    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """Note a worker, or that it is alive; what it is to be told, once."""
        return self._workers.register(info)

    def unregister_worker(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""
        self._workers.unregister(worker_id)

    def workers(self) -> list[WorkerInfo]:
        """The workers that have been heard of lately."""
        return self._workers.all()

    def forget_workers(self, older_than: int) -> list[WorkerInfo]:
        """Forget those not heard of for so many milliseconds; returns them."""
        return self._workers.forget(older_than)

    def control_worker(self, worker_id: str, command: str) -> str:
        """See `Storage.control_worker`."""
        check_command(command)
        return self._workers.steer(worker_id, command)

    def on_worker_command(self, worker_id: str, wake: Wake) -> Unsubscribe:
        """Call `wake`, from any thread, when a worker is to be told something."""
        return self._workers.follow(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        """See `Storage.save_dump`."""
        return self._workers.save_dump(worker_id, text)

    def worker_dump(self, worker_id: str) -> WorkerDump | None:
        """See `Storage.worker_dump`."""
        return self._workers.dump(worker_id)


def _without_one(handlers: list[EventHandler], handler: EventHandler) -> list[EventHandler]:
    # One, as the same handler may have been subscribed more than once.
    left = list(handlers)
    if handler in left:
        left.remove(handler)
    return left
