"""The claims, leases and maintenance of one storage, shared by all transports of a process."""

import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from djqueue._version import __version__
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Batch, Claimed, ClaimRequest, Claims, JobFailure, Lease, Outcome
from djqueue.core.logs import Log
from djqueue.core.options import MAX_INTEGER, JobOptions
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
from djqueue.runtime.loops import Periodic
from djqueue.storage.base import Storage

from .routing import Routing
from .values import MESSAGE

logger = Log("djqueue.celery")

MAINTENANCE_INTERVAL = 1.0
"""Seconds between two rounds of maintenance."""
CLEANING = 5_000
"""Milliseconds between two searches for expired queues."""
BEAT = 5_000
"""Milliseconds between two heartbeats."""
RENEWALS = 3
"""Renewals within the length of a lease, or the expiry of a queue."""
RENEWED_LONG_AGO = 3_600_000
"""Milliseconds after which the time of a renewal is forgotten."""
NAMES = frozenset({MESSAGE})


class Consumer(Protocol):
    """A connection that may consume messages; see `Transport`."""

    @property
    def is_consuming(self) -> bool:
        """Whether it consumes a queue."""

    def expiring_queues(self) -> dict[str, int]:
        """Return the queues that it consumes and that would expire, with their expiry in milliseconds."""

    def lasting_queues(self) -> list[str]:
        """Return the queues that it consumes and that do not expire."""

    def declare_again(self, queue: str) -> None:
        """Declare a queue that expired while this process did not run."""


class Broker:
    """Messages of one storage: a message is a job, and an unacknowledged message is an active one.

    While there are consumers, a thread renews the leases of their messages and the queues that would expire
    without a consumer, and sweeps the storage. If this process dies, the leases expire, and the storage
    makes the messages available again.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.routing = Routing(storage)
        self._worker = f"{socket.gethostname()}:{os.getpid()}:{MESSAGE}"
        self._lock = threading.Lock()
        self._held: dict[Lease, tuple[int, int]] = {}
        """Unacknowledged messages: when each is renewed next, in monotonic milliseconds, and the interval."""
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self._maintenance: Periodic | None = None
        self._renewed_at: dict[str, int] = {}
        self._done_at: dict[str, int] = {}
        self._failing: set[str] = set()
        self._started_at = SYSTEM_CLOCK.now()
        self._registered = False

    def check(self) -> None:
        """Raise StorageUnavailableError if the storage does not answer."""
        self.storage.reads.states(MESSAGE, [MESSAGE])

    # Messages.

    def put(self, queue: str, id: str, message: bytes, options: JobOptions) -> None:
        """Add a message to a queue."""
        self.storage.enqueue([Batch(queue, MESSAGE, options, [message], [id])])

    def claim(self, queues: Sequence[str], slots: int) -> Claims:
        """Take messages from queues. Each is held until it is acknowledged, rejected or released."""
        claims = self.storage.claim(ClaimRequest(self._worker, slots, NAMES, tuple(queues)))
        now = SYSTEM_CLOCK.monotonic()
        with self._lock:
            for job in claims.jobs:
                interval = job.lease // RENEWALS
                self._held[_lease(job)] = (now + interval, interval)
        return claims

    def acknowledge(self, jobs: Sequence[Claimed]) -> None:
        """Complete messages."""
        self._finish([Outcome(*_lease(job), "complete", result=b"null") for job in jobs])

    def reject(
        self,
        jobs: Sequence[Claimed],
        text: str = "A consumer rejected the message.",
        reason: str = "explicit_fail",
    ) -> None:
        """Move messages to the dead letters."""
        error = JobFailure("kombu.exceptions.MessageStateError", text)
        self._finish([Outcome(*_lease(job), "fail", error=error, reason=reason) for job in jobs])

    def requeue(self, jobs: Sequence[Claimed]) -> None:
        """Return messages that a consumer has seen to their queues: they are redelivered."""
        self._finish([Outcome(*_lease(job), "retry") for job in jobs])

    def release(self, jobs: Sequence[Claimed]) -> None:
        """Return messages that no consumer has seen to their queues."""
        self._finish([Outcome(*_lease(job), "release") for job in jobs])

    def _finish(self, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        accepted = self.storage.finish(outcomes).accepted
        with self._lock:
            for outcome in outcomes:
                self._held.pop(Lease(outcome.queue, outcome.id, outcome.token), None)
        for outcome, is_accepted in zip(outcomes, accepted, strict=True):
            if not is_accepted:
                logger.warning(
                    "Lost the lease on message %s of queue %s before it was acknowledged; it may be "
                    "delivered again.",
                    outcome.id,
                    outcome.queue,
                )

    def size(self, queue: str) -> int:
        """Return the number of messages that wait in a queue."""
        counts = self.storage.reads.counts(queue)
        return counts[State.WAITING] + counts[State.DELAYED]

    def purge(self, queue: str) -> int:
        """Remove the messages that wait in a queue, and return their number."""
        states = frozenset({State.WAITING, State.DELAYED})
        return self.storage.queues.clean(queue, states, SYSTEM_CLOCK.now() + MAX_INTEGER)

    # Maintenance.

    def consume(self, consumer: Consumer) -> None:
        """Begin the maintenance, which goes on while a consumer consumes or holds messages."""
        with self._lock:
            if self._maintenance is None:
                maintenance = Periodic(
                    "djqueue-celery", lambda: MAINTENANCE_INTERVAL, self._round, self.storage.resign
                )
                maintenance.start()
                self._maintenance = maintenance
            self._consumers.add(consumer)

    def leave(self, consumer: Consumer) -> None:
        """End the maintenance if this was the last consumer."""
        with self._lock:
            self._consumers.discard(consumer)
            ended = None if self._consumers else self._end()
        if ended is not None:
            ended.join(MAINTENANCE_INTERVAL)
            self._unregister()

    def _end_if_idle(self) -> bool:
        """End the maintenance if nothing is consumed: kombu keeps unused connections open."""
        with self._lock:
            if self._held:
                return False
            if any(consumer.is_consuming for consumer in self._consumers):
                return False
            self._end()
        self._unregister()
        return True

    def _end(self) -> Periodic | None:
        maintenance, self._maintenance = self._maintenance, None
        if maintenance is not None:
            maintenance.stop()
        return maintenance

    def _unregister(self) -> None:
        registered, self._registered = self._registered, False
        if not registered:
            return
        try:
            self.storage.workers.unregister(self._worker)
        except StorageUnavailableError as error:
            logger.warning("Could not unregister %s, which is forgotten soon: %s", self._worker, error)

    def _round(self) -> None:
        if self._end_if_idle():
            return
        for chore in (self.renew_leases, self.renew_queues, self.storage.maintain, self._clean, self._beat):
            try:
                chore()
            except Exception as error:
                # The next round tries again; a chore that fails must not keep the others from running.
                if chore.__name__ not in self._failing:
                    logger.warning("Maintenance (%s) failed, and is retried: %s", chore.__name__, error)
                self._failing.add(chore.__name__)
            else:
                self._failing.discard(chore.__name__)

    def _clean(self) -> None:
        if self._is_due("clean", CLEANING):
            self.routing.delete_expired()

    def _beat(self) -> None:
        if self._is_due("beat", BEAT):
            self._register()

    def _is_due(self, chore: str, interval: int) -> bool:
        now = SYSTEM_CLOCK.monotonic()
        if now - self._done_at.get(chore, now - interval) < interval:
            return False
        self._done_at[chore] = now
        return True

    def renew_leases(self) -> None:
        """Renew the leases that are due."""
        now = SYSTEM_CLOCK.monotonic()
        with self._lock:
            due = [lease for lease, (at, _) in self._held.items() if at <= now]
        if not due:
            return
        for lease, renewal in zip(due, self.storage.renew(due), strict=True):
            with self._lock:
                _, interval = self._held.pop(lease, (0, 0))
                if renewal.held and interval:
                    self._held[lease] = (now + interval, interval)

    def renew_queues(self) -> None:
        """Renew the queues that expire without a consumer."""
        now = SYSTEM_CLOCK.monotonic()
        with self._lock:
            consumers = list(self._consumers)
        expiring = {queue: at for queue, at in self._renewed_at.items() if now - at < RENEWED_LONG_AGO}
        for consumer in consumers:
            for queue, expires in consumer.expiring_queues().items():
                if queue in expiring and now - expiring[queue] < expires // RENEWALS:
                    continue
                if not self.routing.renew(queue, expires):
                    consumer.declare_again(queue)
                expiring[queue] = now
        self._renewed_at = expiring

    def _register(self) -> None:
        """Show this process among the workers. This fails while a storage that needs a scheduler has none."""
        with self._lock:
            queues = {queue for consumer in self._consumers for queue in consumer.lasting_queues()}
            held = len(self._held)
        if not queues:
            return
        info = WorkerInfo(
            self._worker,
            socket.gethostname(),
            os.getpid(),
            tuple(sorted(queues)),
            (MESSAGE,),
            held,
            self._started_at,
            active=held,
            kind="celery",
            heartbeat=BEAT,
            version=__version__,
        )
        commands = self.storage.workers.register(info)
        self._registered = True
        for command in commands:
            logger.warning(
                "Ignored the command %r: control Celery workers with `celery control` and signals.", command
            )


def _lease(job: Claimed) -> Lease:
    return Lease(job.queue, job.id, job.token)


_brokers: "weakref.WeakValueDictionary[int, Broker]" = weakref.WeakValueDictionary()
"""By the identity of their storages, which they keep alive: the transports that use a broker keep both."""
_brokers_lock = threading.Lock()


def broker_for(storage: Storage) -> Broker:
    """Return the broker of a storage, shared by all transports of this process."""
    with _brokers_lock:
        broker = _brokers.get(id(storage))
        if broker is None:
            broker = _brokers[id(storage)] = Broker(storage)
        return broker


def _after_fork() -> None:
    global _brokers_lock
    # Threads do not survive a fork, and claims belong to the parent.
    _brokers_lock = threading.Lock()
    _brokers.clear()


os.register_at_fork(after_in_child=_after_fork)
