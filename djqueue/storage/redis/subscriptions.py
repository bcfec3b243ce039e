"""Wake-ups and events: the channels of the queues, and the subscriptions of this process.

Scripts only publish events that are subscribed to: all of a queue, or those of one job. Subscriptions expire,
so that a process that dies leaves none behind; live processes renew theirs in time.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic

from djqueue.core.job import Batch
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog, in_one_line
from djqueue.core.threads import after_fork, start_daemon
from djqueue.storage.facets import EventHandler, Events, Unsubscribe

from . import records
from .connections import Connections
from .keys import CommonKeys, QueueKeys
from .keyspace import NameCache
from .pubsub import Listener
from .records import pack_text
from .roundtrips import Roundtrips, ScriptCall, Steps
from .scripts import script

SUBSCRIPTION_TTL = 30_000
"""Milliseconds until a subscription expires."""
RENEWAL_INTERVAL = 8.0
"""Seconds after which it is renewed."""
LINGERS = 60.0
"""Seconds for which a queue's channel is kept after its last subscriber: most soon subscribe again."""
ALL = b"*"

FOLLOW_AGAIN = 2.0
"""Seconds until channels of queues that could not be subscribed to are tried again."""

logger = Log("djqueue.redis")
malformed = ThrottledLog(logger, 60.0)


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

        def follow(queue: str) -> Unsubscribe:
            def woken(_: bytes) -> None:
                self._note_wake(queue)
                wake()

            return self._listener.add(self._keys(queue).wake, woken, wake)

        if queues is not None:
            return _all_of([follow(queue) for queue in dict.fromkeys(queues)])
        following = AllQueues(self._queues, follow, wake)

        def appeared(_: bytes = b"") -> None:
            self._names.forget()
            following.refresh()

        stop = self._listener.add(self._common.new_queues, appeared, appeared)
        self._names.follow()

        def unsubscribe() -> None:
            if following.end():
                self._names.unfollow()
                stop()

        try:
            following.begin()
        except BaseException:
            unsubscribe()
            raise
        return unsubscribe

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
            try:
                events = records.events(queue, message)
            except (ValueError, TypeError) as error:
                malformed.log(
                    logging.WARNING,
                    "event",
                    "Dropped a malformed message on the channel of events of queue %r: %s",
                    queue,
                    in_one_line(error),
                )
                return
            for event in events:
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
        try:
            self._keep(queue)
            self._ensure_renewals()
        except BaseException:
            remove()
            raise
        with self._lock:
            self._subscribed[entry] += 1
            if with_enqueue:
                self._deferred.add(entry)
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

        if not with_enqueue:
            try:
                self._roundtrips.run(self._watch(queue, [subscription]))
            except BaseException:
                unsubscribe()
                raise
        return unsubscribe

    def _ensure_renewals(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = start_daemon("djqueue-redis-events", self._renew_subscriptions, self._stop)

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
                self._kept[queue] = kept[0], monotonic()
                return
        remove = self._listener.add(self._keys(queue).events, _nothing)
        with self._lock:
            first = self._kept.setdefault(queue, (remove, monotonic()))
        if first[0] is not remove:
            remove()

    def _drop_idle(self) -> None:
        until = monotonic() - LINGERS
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
                except Exception as error:
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


def _all_of(ends: list[Unsubscribe]) -> Unsubscribe:
    """Return the function that ends all these subscriptions."""

    def unsubscribe() -> None:
        for end in ends:
            end()

    return unsubscribe


def _nothing(_: bytes) -> None:
    """Ignore a message."""


class AllQueues:
    """The wake-up channels of all queues, for a worker that serves all.

    Args:
        names: Returns the names of all queues.
        follow: Subscribes to the channel of a queue.
        wake: Called when the queues may have changed.
    """

    def __init__(
        self, names: Callable[[], list[str]], follow: Callable[[str], Unsubscribe], wake: Callable[[], None]
    ) -> None:
        self._names = names
        self._follow = follow
        self._wake = wake
        self._lock = threading.Lock()
        self._ends: dict[str, Unsubscribe] = {}
        """Functions that end the subscriptions, by queue; only the thread that follows adds to them."""
        self._ended = threading.Event()
        self._is_due = False
        self._is_running = False

    def begin(self) -> None:
        """Subscribe to the channels. Raises the first error if not even one can be subscribed to."""
        if (error := self._follow_all()) is not None:
            if not self._ends:
                raise error
            self.refresh()

    def refresh(self) -> None:
        """Compare the channels with the queues, soon.

        Subscribing waits for a reply that the calling thread may have to read, so that another one does it,
        the same one for any number of messages.
        """
        with self._lock:
            self._is_due = True
            if self._is_running or self._ended.is_set():
                return
            start_daemon("djqueue-redis-queues", self._run)
            self._is_running = True

    def end(self) -> bool:
        """Unsubscribe; return whether this is the first call."""
        with self._lock:
            is_first = not self._ended.is_set()
            self._ended.set()
            ends = list(self._ends.values())
            self._ends.clear()
        for end in ends:
            end()
        return is_first

    def _run(self) -> None:
        error: Exception | None = None
        while True:
            with self._lock:
                if self._ended.is_set() or not (self._is_due or error is not None):
                    self._is_running = False
                    return
                self._is_due = False
            was_fine, error = error is None, self._follow_all()
            self._wake()
            if error is not None:
                if was_fine:
                    logger.warning(
                        "Could not follow all queues; new jobs there will be found at the next poll: %s",
                        error,
                    )
                self._ended.wait(FOLLOW_AGAIN)

    def _follow_all(self) -> Exception | None:
        """Follow new queues, and no longer those that are gone; return the first error."""
        try:
            names = self._names()
        except Exception as error:
            return error
        failure: Exception | None = None
        for queue in names:
            if queue in self._ends or self._ended.is_set():
                continue
            try:
                end = self._follow(queue)
            except Exception as error:
                failure = failure or error
                continue
            with self._lock:
                is_wanted = not self._ended.is_set()
                if is_wanted:
                    self._ends[queue] = end
            if not is_wanted:
                end()
        for queue in self._ends.keys() - set(names):
            with self._lock:
                gone = self._ends.pop(queue, None)
            if gone is not None:
                gone()
        return failure
