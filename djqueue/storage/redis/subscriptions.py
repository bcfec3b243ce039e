"""Wake-ups and events: the channels of the queues, and the subscriptions of this process.

Scripts only publish events that are subscribed to: all of a queue, or those of one job. Subscriptions expire,
so that a process that dies leaves none behind; live processes renew theirs in time.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from djqueue.core.errors import StorageError
from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.threads import after_fork
from djqueue.storage.facets import EventHandler, Events, Unsubscribe

from . import records
from .connections import Connections
from .keys import CommonKeys, QueueKeys
from .keyspace import NameCache
from .pubsub import Listener
from .records import pack_text, text
from .roundtrips import Roundtrips, ScriptCall, Steps
from .scripts import script

SUBSCRIPTION_TTL = 30_000
"""Milliseconds until a subscription expires."""
RENEWAL_INTERVAL = 8.0
"""Seconds after which it is renewed."""
LINGERS = 60.0
"""Seconds for which a queue's channel is kept after its last subscriber: most soon subscribe again."""
ALL = b"*"

logger = Log("djqueue.redis")


class RedisEvents(Events):
    """The subscriptions of one storage in this process."""

    def __init__(
        self,
        connections: Connections,
        roundtrips: Roundtrips,
        common: CommonKeys,
        keys: Callable[[str], QueueKeys],
        queues: Callable[[], list[str]],
        names: NameCache,
        note_wake: Callable[[str], None],
    ) -> None:
        self._listener = Listener(connections)
        self._roundtrips = roundtrips
        self._common = common
        self._keys = keys
        self._queues = queues
        self._names = names
        self._note_wake = note_wake
        self._lock = threading.Lock()
        self._subscribed: Counter[tuple[str, bytes]] = Counter()
        """Number of subscribers by queue and subscription."""
        self._deferred: set[tuple[str, bytes]] = set()
        """Subscriptions that begin when their jobs are enqueued."""
        self._kept: dict[str, tuple[Unsubscribe, float]] = {}
        """Queues whose channels are kept: how to unsubscribe, and the time of the last subscription."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        after_fork(self._after_fork)

    def close(self) -> None:
        """End all subscriptions."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None
        self._stop = threading.Event()
        with self._lock:
            self._subscribed.clear()
            self._deferred.clear()
            self._kept.clear()
        self._listener.close()

    def listen(self, queues: list[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when jobs of these queues may be claimable; None: all queues, including new ones."""
        followed: dict[str, Unsubscribe] = {}
        lock = threading.Lock()
        ended = False

        def follow(queue: str) -> None:
            def woken(_: bytes) -> None:
                self._note_wake(queue)
                wake()

            with lock:
                if ended or queue in followed:
                    return
                followed[queue] = self._listener.add(self._keys(queue).wake, woken, wake)

        def unsubscribe() -> None:
            nonlocal ended
            with lock:
                if queues is None and not ended:
                    self._names.unfollow()
                ended = True
                ends = list(followed.values())
                followed.clear()
            for end in ends:
                end()

        if queues is not None:
            for queue in queues:
                follow(queue)
            return unsubscribe

        def appeared(message: bytes) -> None:
            self._names.forget()
            # Subscribing waits for a reply that this thread would have to read.
            threading.Thread(
                target=self._follow_new,
                args=(text(message), follow, wake),
                name="djqueue-redis-queue",
                daemon=True,
            ).start()

        def missed() -> None:
            self._names.forget()
            threading.Thread(
                target=self._follow_all, args=(follow, wake), name="djqueue-redis-queues", daemon=True
            ).start()

        followed[""] = self._listener.add(self._common.new_queues, appeared, missed)
        self._names.follow()
        for queue in self._queues():
            follow(queue)
        return unsubscribe

    def _follow_new(self, queue: str, follow: Callable[[str], None], wake: Callable[[], None]) -> None:
        try:
            follow(queue)
        except StorageError:
            logger.warning(
                "Could not subscribe to the new queue %r; its jobs will be found at the next poll.",
                queue,
                exc_info=True,
            )
        wake()

    def _follow_all(self, follow: Callable[[str], None], wake: Callable[[], None]) -> None:
        try:
            for queue in self._queues():
                follow(queue)
        except StorageError:
            logger.warning("Could not list new queues; they will be found at the next poll.", exc_info=True)
        wake()

    def on_worker_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when commands may wait for a worker."""
        name = pack_text(worker_id)

        def receive(message: bytes) -> None:
            if message == name:
                wake()

        return self._listener.add(self._common.commands, receive, wake)

    def subscribe(
        self, queue: str, handler: EventHandler, job_id: str | None = None, *, with_enqueue: bool = False
    ) -> Unsubscribe:
        """Call `handler` for each event of a queue, or of one job of it.

        with_enqueue: the call that enqueues the job takes the subscription along, by `take_deferred`.
        """
        subscription = ALL if job_id is None else b"=" + pack_text(job_id)
        entry = (queue, subscription)

        def received(message: bytes) -> None:
            for event in records.events(queue, message):
                if job_id is None or event.id == job_id:
                    try:
                        handler(event)
                    except Exception:
                        logger.exception(
                            "An event handler of queue %r raised an exception; the event will not be "
                            "delivered again.",
                            queue,
                        )

        remove = self._listener.add(self._keys(queue).events, received)
        self._keep(queue)
        with self._lock:
            self._subscribed[entry] += 1
            if with_enqueue:
                self._deferred.add(entry)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._renew_subscriptions,
                    args=(self._stop,),
                    name="djqueue-redis-events",
                    daemon=True,
                )
                self._thread.start()
        if not with_enqueue:
            self._roundtrips.run(self._watch(queue, [subscription]))
        ended = False

        def unsubscribe() -> None:
            nonlocal ended
            with self._lock:
                if ended:
                    return
                ended = True
                self._deferred.discard(entry)
                self._subscribed[entry] -= 1
                if self._subscribed[entry] <= 0:
                    del self._subscribed[entry]
            remove()

        return unsubscribe

    def take_deferred(self, batches: Sequence[Batch]) -> list[ScriptCall]:
        """Return the calls that begin the subscriptions to jobs that are now enqueued."""
        if not self._deferred:
            return []
        calls = []
        for batch in batches:
            for job_id in batch.ids or ():
                entry = (batch.queue, b"=" + pack_text(job_id))
                with self._lock:
                    if entry not in self._deferred:
                        continue
                    self._deferred.discard(entry)
                calls.append(self._watch_call(batch.queue, [entry[1]]))
        return calls

    def _keep(self, queue: str) -> None:
        """Keep a queue's channel: connecting for each short wait would take longer than most waits."""
        with self._lock:
            kept = self._kept.get(queue)
            if kept is not None:
                self._kept[queue] = kept[0], time.monotonic()
                return
        remove = self._listener.add(self._keys(queue).events, _nothing)
        with self._lock:
            first = self._kept.setdefault(queue, (remove, time.monotonic()))
        if first[0] is not remove:
            remove()

    def _drop_idle(self) -> None:
        until = time.monotonic() - LINGERS
        with self._lock:
            idle = [queue for queue, (_, used) in self._kept.items() if used < until]
            removed = [self._kept.pop(queue)[0] for queue in idle]
        for remove in removed:
            remove()

    def _watch(self, queue: str, subscriptions: list[bytes]) -> Steps[None]:
        yield [self._watch_call(queue, subscriptions)]

    def _watch_call(self, queue: str, subscriptions: list[bytes]) -> ScriptCall:
        return ScriptCall(
            script("watch"), self._keys(queue), [SUBSCRIPTION_TTL, *subscriptions], sequence=False
        )

    def _renew_subscriptions(self, stop: threading.Event) -> None:
        while not stop.wait(RENEWAL_INTERVAL):
            self._drop_idle()
            with self._lock:
                by_queue: dict[str, list[bytes]] = {}
                for queue, subscription in self._subscribed:
                    by_queue.setdefault(queue, []).append(subscription)
                if not by_queue and not self._kept:
                    self._thread = None
                    return
            for queue, subscriptions in by_queue.items():
                try:
                    self._roundtrips.run(self._watch(queue, subscriptions))
                except StorageError as error:
                    logger.warning(
                        "Could not renew the subscription to queue %r; events may be missed: %s", queue, error
                    )

    def _after_fork(self) -> None:
        # The thread and its subscriptions belong to the parent.
        self._lock = threading.Lock()
        self._thread = None
        self._subscribed = Counter()
        self._deferred = set()
        self._kept = {}


def _nothing(_: bytes) -> None:
    """Ignore a message."""
