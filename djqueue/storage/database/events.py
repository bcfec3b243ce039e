"""Events of jobs, as they happen: in the process of the transition at once, in others soon afterwards.

A subscription to a queue makes the queue observed: as long as some process renews that, every transaction
writes its events to a table, which the subscribers' processes read. A subscription to one job costs other
processes nothing: its own process looks at the row of the job whenever the database has changed.
"""

import threading
from collections.abc import Sequence
from secrets import token_hex
from time import monotonic
from typing import NamedTuple
from weakref import WeakSet

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadlines import remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Event
from djqueue.core.logs import Log
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, PENDING, TERMINAL, State
from djqueue.core.threads import after_fork
from djqueue.storage.facets import EventHandler, Events, Unsubscribe

from .connections import as_current, is_in_transaction
from .dialects import Row
from .stored import ids_by_queue
from .transaction import Database, Tx, Unpublished
from .wake import Follower

Change = tuple[str, State, int]
"""An event, the state after it, and the number of items so far."""


class Seen(NamedTuple):
    """A job as it was seen in its row, or in an event; an event leaves some fields None."""

    state: State
    items: int = 0
    pk: int | None = None
    token: int | None = None
    failures: int | None = None
    stalls: int | None = None
    progress: bytes | None = None
    run_at: int | None = None


def seen_after(seen: Seen | None, event: str, state: State, items: int) -> Seen | None:
    """Return what is known of a job after an event."""
    if event == "removed":
        return None
    if event == "item":
        return Seen(state, items)
    keeps_items = seen is not None and state not in PENDING and event != "started"
    return Seen(state, seen.items if seen is not None and keeps_items else 0)


def changes_between(old: Seen | None, new: Seen | None) -> list[Change]:
    """Return the events between two looks at a job, as far as the later one shows them."""
    if new is None:
        return [] if old is None else [("removed", old.state, 0)]
    if old is not None and old.pk is not None and old.pk != new.pk:
        # Another job has the id of one that was removed.
        return [*changes_between(old, None), *changes_between(None, new)]
    found: list[Change] = []
    waits = new.state if new.state in PENDING else State.WAITING
    if old is None:
        found.append(("enqueued", waits, 0))
        old = Seen(waits, 0, new.pk, 0, 0, 0)
    state, items = old.state, old.items
    is_claimed = old.token is not None and old.token != new.token
    """Whether an attempt has begun since."""
    if state is State.ACTIVE and (is_claimed or new.state in PENDING):
        found.append((_put_back(old, new), waits, 0))
        state, items = waits, 0
    if state in TERMINAL and (is_claimed or new.state in LIVE):
        found.append(("requeued", waits, 0))
        state, items = waits, 0
    if state in PENDING and (is_claimed or new.state in (State.ACTIVE, State.COMPLETED)):
        found.append(("started", State.ACTIVE, 0))
        state, items = State.ACTIVE, 0
    if new.items > items:
        found.append(("item", State.ACTIVE, new.items))
    is_known = old.pk is not None
    if new.state is State.ACTIVE and is_known and new.progress not in (None, old.progress):
        found.append(("progress", State.ACTIVE, new.items))
    if state is not new.state:
        word = _moved(state, new.state)
        if word:
            found.append((word, new.state, new.items))
    elif not found and state is State.DELAYED and old.run_at not in (None, new.run_at):
        found.append(("rescheduled", state, new.items))
    return found


def _put_back(old: Seen, new: Seen) -> str:
    if (new.failures or 0) > (old.failures or 0):
        return "retried"
    return "stalled" if (new.stalls or 0) > (old.stalls or 0) else "released"


def _moved(old: State, new: State) -> str:
    """Return the event of a change of state without an attempt."""
    if new in TERMINAL:
        return new.value
    if old is State.BLOCKED:
        return "unblocked"
    return {State.WAITING: "promoted", State.DELAYED: "rescheduled"}.get(new, "")


logger = Log("djqueue.storage")

OBSERVED = 30_000
"""Milliseconds for which a queue stays observed."""
RENEW = 10_000
"""Milliseconds after which that is renewed."""
EVENT_TTL = 60_000
"""Milliseconds for which an event can be read."""
PAGE = 1_000
"""Events of one read."""
MAX_GAPS = 1_000
"""Ids of events that may still be committed, after later ones."""
GAP = 300.0
"""Seconds after which such an id is given up."""
CONFIRM_TIMEOUT = 5.0
"""Seconds to wait for the confirmation of a subscription, unless the call's deadline is earlier."""
WRITERS_TIMEOUT = 0.5
"""Seconds to wait for transactions that have begun before a subscription to a queue."""
WATCH = (0.005, 0.25)
"""Seconds between two looks at jobs where their changes are not noticed, from the shortest to the longest."""
WATCH_SHARE = 0.1
"""The wait between two looks, as a share of the time for which the newest subscription has waited."""

COLUMNS = ("queue", "job_id", "name", "event", "state", "at", "items", "process")
UNKNOWN = Seen(State.WAITING)
"""A job that has not been looked at."""


class EventSubscriber:
    """A handler, and whether it misses nothing any more."""

    def __init__(self, handler: EventHandler) -> None:
        self.handler = handler
        self.caller: int | None = None
        """The session of the caller's open transaction, which ends after the subscription."""
        self.since = 0
        """Id of the last event before the subscription."""
        self.answered = threading.Event()
        self.error: StorageUnavailableError | None = None

    def answer(self, error: StorageUnavailableError | None = None) -> None:
        """End the wait for the confirmation."""
        self.error = error
        self.answered.set()


class Barrier(NamedTuple):
    """Subscribers to queues that wait for the end of transactions, which may not know of them."""

    subscribers: list[EventSubscriber]
    writers: set[str]
    until: float
    """Monotonic seconds at which the others are not waited for."""


class WatchedJob:
    """The subscribers to one job, and what they know of it."""

    def __init__(self, seen: Seen | None) -> None:
        self.seen = seen
        self.name = ""
        self.published = 0
        """Number of events that this process has delivered itself."""
        self.subscribers: list[EventSubscriber] = []


class SqlEvents(Events):
    """Subscriptions of this process."""

    def __init__(self, database: Database, follower: Follower) -> None:
        self._database = database
        self._follower = follower
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._process = token_hex(8)
        self._lock = threading.Lock()
        self._queues: dict[str, list[EventSubscriber]] = {}
        self._watches: dict[JobKey, WatchedJob] = {}
        self._watched_queues: dict[str, int] = {}
        """Number of watched jobs by queue."""
        self._unpublished: WeakSet[Unpublished] = WeakSet()
        """Events of transactions that are about to commit, or have just done so. Those of a caller that rolls
        back are gone with its callback."""
        self._renewed: dict[str, int] = {}
        """When each queue was last recorded as observed, in milliseconds of the storage's clock."""
        self._last: int | None = None
        """Id of the last event that was read."""
        self._gaps: dict[int, float] = {}
        """Ids below it that were missing, and when that was noticed."""
        self._barriers: list[Barrier] = []
        self._new = False
        """Whether subscribers wait for their confirmation, or a watched job was left out."""
        self._watch_at = 0.0
        """When the last subscription to a job began, in monotonic seconds."""

    # Subscriptions.

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._subscribe(queue, EventSubscriber(handler), job_id, UNKNOWN)

    def subscribe_new(self, queue: str, handler: EventHandler, job_id: str) -> Unsubscribe:
        """Subscribe to a job that does not exist yet."""
        return self._subscribe(queue, EventSubscriber(handler), job_id, None)

    def _subscribe(
        self, queue: str, subscriber: EventSubscriber, job_id: str | None, seen: Seen | None
    ) -> Unsubscribe:
        key = None if job_id is None else (queue, job_id)
        wrapper = connections[self._database.alias]
        if is_in_transaction(wrapper):
            subscriber.caller = self._database.dialect.session(wrapper)
        with self._lock:
            if key is None:
                self._queues[queue] = [*self._queues.get(queue, ()), subscriber]
            else:
                self._watch(key, subscriber, seen)
            is_confirmed = subscriber.answered.is_set()
            self._new = self._new or not is_confirmed

        def unsubscribe() -> None:
            with self._lock:
                self._forget(queue, key, subscriber)

        if self._follower.is_possible:
            try:
                self._follower.follow()
                if not is_confirmed and self._may_wait():
                    self._await(subscriber)
            except BaseException:
                unsubscribe()
                raise
        return unsubscribe

    def _watch(self, key: JobKey, subscriber: EventSubscriber, seen: Seen | None) -> None:
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = WatchedJob(seen)
            self._watched_queues[key[0]] = self._watched_queues.get(key[0], 0) + 1
        watch.subscribers = [*watch.subscribers, subscriber]
        self._watch_at = monotonic()
        if watch.seen is not UNKNOWN:
            subscriber.answer()

    def _forget(self, queue: str, key: JobKey | None, subscriber: EventSubscriber) -> None:
        if key is None:
            left = [other for other in self._queues.get(queue, ()) if other is not subscriber]
            if left:
                self._queues[queue] = left
            else:
                self._queues.pop(queue, None)
            return
        watch = self._watches.get(key)
        if watch is None or subscriber not in watch.subscribers:
            return
        watch.subscribers = [other for other in watch.subscribers if other is not subscriber]
        if not watch.subscribers:
            del self._watches[key]
            self._watched_queues[queue] -= 1
            if not self._watched_queues[queue]:
                del self._watched_queues[queue]

    def _may_wait(self) -> bool:
        """Return whether the confirmation does not wait for the caller."""
        if self._follower.is_current_thread:
            return False
        wrapper = connections[self._database.alias]
        # The one writer of SQLite may be the caller's transaction.
        return self._database.dialect.has_clock or not is_in_transaction(wrapper)

    def _await(self, subscriber: EventSubscriber) -> None:
        if not subscriber.answered.wait(remaining(CONFIRM_TIMEOUT)):
            raise StorageUnavailableError(
                f"the database {self._database.alias!r} did not confirm a subscription in time. "
                "Is it overloaded?"
            )
        if subscriber.error is not None:
            raise subscriber.error

    def close(self) -> None:
        """Stop delivering events."""
        self.refuse(StorageUnavailableError("the storage was closed before a subscription was confirmed"))
        with self._lock:
            self._queues, self._watches, self._watched_queues = {}, {}, {}

    def refuse(self, error: StorageUnavailableError) -> None:
        """Let the subscriptions fail that wait for their confirmation."""
        with self._lock:
            for subscriber in self._unconfirmed():
                subscriber.answer(error)

    def _unconfirmed(self) -> list[EventSubscriber]:
        every = [*self._queues.values(), *(watch.subscribers for watch in self._watches.values())]
        return [one for some in every for one in some if not one.answered.is_set()]

    # Transactions of this process.

    def has_subscribers(self, queue: str) -> bool:
        """Return whether this process has subscribed to events of a queue, or of one of its jobs."""
        return queue in self._queues or queue in self._watched_queues

    def store(self, tx: Tx, events: Sequence[Event]) -> None:
        """Write events for other processes, as part of the transaction."""
        tx.insert(
            "djqueue_event",
            COLUMNS,
            [
                (
                    *(event.queue, event.id, event.name, event.event, event.state.value),
                    *(event.at, event.items, self._process),
                )
                for event in events
            ],
        )

    def begin(self, events: Sequence[Event]) -> Unpublished | None:
        """Record that events are about to be committed: their jobs are not looked at until `publish`."""
        if not events:
            return None
        unpublished = Unpublished(events)
        with self._lock:
            self._unpublished.add(unpublished)
        return unpublished

    def forget(self, unpublished: Unpublished | None) -> None:
        """Record that events were rolled back."""
        if unpublished is not None:
            with self._lock:
                self._unpublished.discard(unpublished)

    def publish(self, unpublished: Unpublished) -> None:
        """Deliver committed events to the subscribers of this process."""
        with self._lock:
            self._unpublished.discard(unpublished)
            deliveries = [(event, self._note(event)) for event in unpublished.events]
        for event, subscribers in deliveries:
            self._deliver(event, subscribers)
        if self._new:
            self._follower.follow()

    def _note(self, event: Event) -> list[EventSubscriber]:
        """Return who receives an event, and record what it says of a watched job."""
        watch = self._watches.get((event.queue, event.id))
        subscribers = self._queues.get(event.queue, [])
        if watch is None:
            return subscribers
        watch.published += 1
        watch.name = event.name
        watch.seen = seen_after(watch.seen, event.event, event.state, event.items)
        self._new = True  # A look may have left it out.
        return [*subscribers, *watch.subscribers]

    def _deliver(self, event: Event, subscribers: Sequence[EventSubscriber]) -> None:
        for subscriber in subscribers:
            try:
                subscriber.handler(event)
            except Exception:
                logger.exception(
                    "An event handler of queue %r raised an exception; the event will not be "
                    "delivered again.",
                    event.queue,
                )

    # Other processes: called by the thread that follows their changes.

    @property
    def is_needed(self) -> bool:
        """Whether there are subscriptions."""
        return bool(self._queues) or bool(self._watches)

    @property
    def is_due(self) -> bool:
        """Whether to look now, although nothing may have changed."""
        return self._new or any(self._must_renew(queue) for queue in list(self._queues))

    def look_at(self, now: float) -> float:
        """Return when to look, in monotonic seconds, where changes of jobs are not noticed."""
        shortest, longest = WATCH
        if self._barriers:
            return now + shortest
        if not self._watches:
            return now + 3_600
        return now + min(max((now - self._watch_at) * WATCH_SHARE, shortest), longest)

    def look(self, tx: Tx, wrapper: BaseDatabaseWrapper) -> None:
        """Read what other processes have committed, and deliver it; confirm new subscriptions.

        Args:
            tx: Reads outside of transactions, on the connection of the thread.
            wrapper: That connection.
        """
        self._new = False
        if self._queues:
            self._observe(tx, wrapper)
            self._read_events(tx)
        else:
            self._last = None
            self._gaps.clear()
            self._renewed.clear()
            self._barriers.clear()
        if self._watches:
            self._read_jobs(tx)

    # Queues.

    def _must_renew(self, queue: str) -> bool:
        # A clock that was set back has gone as far as one that ran.
        return abs(self._database.clock.now() - self._renewed.get(queue, -RENEW)) >= RENEW

    def _observe(self, tx: Tx, wrapper: BaseDatabaseWrapper) -> None:
        """Record the queues of subscribers as observed, and confirm new subscriptions."""
        with self._lock:
            queues = [queue for queue in self._queues if self._must_renew(queue)]
            waited = {id(one) for barrier in self._barriers for one in barrier.subscribers}
            new = [
                one
                for some in self._queues.values()
                for one in some
                if not one.answered.is_set() and id(one) not in waited
            ]
        if queues:
            now = self._database.clock.now()
            with as_current(self._database.alias, wrapper):
                self._database.transactions.write_apart(lambda write: _observe(write, queues), wrapper)
            self._renewed |= dict.fromkeys(queues, now)
        if new:
            self._begin(tx, new)
        self._end_barriers(tx)

    def _begin(self, tx: Tx, subscribers: list[EventSubscriber]) -> None:
        last: int = tx.value("SELECT COALESCE(MAX(id), 0) FROM djqueue_event")
        if self._last is None:
            self._last = last
        for subscriber in subscribers:
            subscriber.since = last
        callers = [one.caller for one in subscribers if one.caller is not None]
        self._barriers.append(
            Barrier(subscribers, tx.dialect.writers(tx.rows, callers), monotonic() + WRITERS_TIMEOUT)
        )

    def _end_barriers(self, tx: Tx) -> None:
        """Confirm the subscriptions that miss no event of a transaction that began before them."""
        if not self._barriers:
            return
        now, left = monotonic(), []
        open_ones = (
            tx.dialect.writers(tx.rows, []) if any(barrier.writers for barrier in self._barriers) else set()
        )
        for barrier in self._barriers:
            writers = barrier.writers & open_ones
            if writers and now < barrier.until:
                left.append(barrier._replace(writers=writers))
                continue
            if writers:
                logger.info(
                    "A transaction that began before a subscription to events is still open. Its events "
                    "may be missed."
                )
            for subscriber in barrier.subscribers:
                subscriber.answer()
        self._barriers = left

    def _read_events(self, tx: Tx) -> None:
        if self._last is None:
            return
        while True:
            rows = self._next_events(tx)
            for row in rows:
                self._gaps.pop(row[0], None)
                if row[-1] != self._process:
                    self._pass_on(row)
            if len(rows) < PAGE:
                break

    def _next_events(self, tx: Tx) -> list[Row]:
        """Read the events behind the last one, and those that were committed late."""
        assert self._last is not None
        condition, gaps = tx.among("id", [*self._gaps, 0])
        select = f"SELECT id, {', '.join(COLUMNS)} FROM djqueue_event WHERE"
        # With OR, PostgreSQL would read all events.
        rows = tx.rows(
            f"{select} id > ? UNION ALL {select} {condition} ORDER BY id LIMIT ?",
            *(self._last, gaps, PAGE),
        )
        newest = max([self._last, *(row[0] for row in rows)])
        if tx.dialect.has_gaps:
            self._note_gaps({row[0] for row in rows}, newest)
        self._last = newest
        return rows

    def _note_gaps(self, ids: set[int], newest: int) -> None:
        """Record the ids that are missing: transactions commit in another order than they take ids."""
        assert self._last is not None
        now = monotonic()
        first = max(self._last + 1, newest - MAX_GAPS)
        self._gaps |= {id: now for id in range(first, newest) if id not in ids}
        for id, since in list(self._gaps.items()):
            if now - since > GAP or len(self._gaps) > MAX_GAPS:
                del self._gaps[id]

    def _pass_on(self, row: Row) -> None:
        id, queue, job_id, name, event, state, at, items, _ = row
        subscribers = [one for one in self._queues.get(queue, ()) if one.since < id]
        if subscribers:
            self._deliver(Event(queue, job_id, name, event, State(state), at, items), subscribers)

    # Jobs.

    def _read_jobs(self, tx: Tx) -> None:
        """Look at the watched jobs, and deliver what has happened to them elsewhere."""
        with self._lock:
            published = {key: watch.published for key, watch in self._watches.items()}
            left_out = self._unpublished_jobs()
        rows: dict[JobKey, Row] = {}
        for queue, ids in ids_by_queue(published).items():
            condition, values = tx.among("job_id", ids)
            found = tx.rows(
                "SELECT job_id, name, started_at, finished_at, state, items, id, token, failures, stalls, "
                f"progress, run_at FROM djqueue_job WHERE queue = ? AND {condition}",
                *(queue, values),
            )
            rows |= {(queue, row[0]): row for row in found}
        deliveries: list[tuple[Event, list[EventSubscriber]]] = []
        with self._lock:
            left_out |= self._unpublished_jobs()
            for key, count in published.items():
                watch = self._watches.get(key)
                if watch is None:
                    continue
                if watch.published != count or key in left_out:
                    # What this process has delivered, or will, may be in the row, or not.
                    self._new = self._new or key not in left_out
                    continue
                deliveries += self._compare(key, watch, rows.get(key), tx.now)
        for event, subscribers in deliveries:
            self._deliver(event, subscribers)

    def _unpublished_jobs(self) -> set[JobKey]:
        """Return the jobs with events that this process is about to deliver."""
        return {(event.queue, event.id) for one in list(self._unpublished) for event in one.events}

    def _compare(
        self, key: JobKey, watch: WatchedJob, row: Row | None, now: int
    ) -> list[tuple[Event, list[EventSubscriber]]]:
        seen = None if row is None else _seen(row)
        before, watch.seen = watch.seen, seen
        if row is not None:
            watch.name = row[1]
        found = [] if before is UNKNOWN else changes_between(before, seen)
        subscribers = [one for one in watch.subscribers if one.answered.is_set()]
        for one in watch.subscribers:
            one.answer()
        return [
            (Event(*key, watch.name, event, state, _time(row, event, now), items), subscribers)
            for event, state, items in found
        ]


def _observe(tx: Tx, queues: Sequence[str]) -> None:
    tx.many(
        "INSERT INTO djqueue_observed (name, until) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET "
        "until = excluded.until",
        [(queue, tx.now + OBSERVED) for queue in sorted(queues)],
    )


def forget_old(tx: Tx, limit: int) -> int:
    """Delete up to `limit` events that every subscriber has read, and queues without subscribers.

    Returns the number of deleted events.
    """
    tx.run("DELETE FROM djqueue_observed WHERE until < ?", tx.now - EVENT_TTL)
    return tx.run(
        "DELETE FROM djqueue_event WHERE id "
        + tx.dialect.once(
            f"SELECT id FROM djqueue_event WHERE at < ? ORDER BY at LIMIT ?{tx.dialect.skip_locked}"
        ),
        *(tx.now - EVENT_TTL, limit),
    )


def _seen(row: Row) -> Seen:
    _, _, _, _, state, items, pk, token, failures, stalls, progress, run_at = row
    told = None if progress is None else bytes(progress)
    return Seen(State(state), items, pk, token, failures, stalls, told, run_at)


def _time(row: Row | None, event: str, now: int) -> int:
    if row is not None and event == "started":
        return row[2] or now
    if row is not None and row[3] and event == row[4]:
        return int(row[3])
    return now
