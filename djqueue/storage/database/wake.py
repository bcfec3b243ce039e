"""Wake-ups: workers learn that jobs may have become claimable, whatever process has seen to that.

On PostgreSQL, the transaction that makes a job claimable notifies the others; on SQLite, a thread polls the
version of the file every few milliseconds. On PostgreSQL, it also looks now and then, in case a notification
was lost. It delivers events and commands, too.
"""

import selectors
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadlines import GrowingPause
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.threads import after_fork, fork_lock, resources_for, start_daemon
from djqueue.storage.facets import Unsubscribe
from djqueue.storage.tables.dberrors import unavailable

from .connections import create_connection
from .stored import NEXT_DUE, used_queues
from .transaction import Database, Tx

logger = Log("djqueue.storage")
Listener = tuple[frozenset[str] | None, Callable[[], None]]

CLAIMABLE, EVENTS = "djqueue:", "djqueue-events:"
"""Prefixes of the channels of PostgreSQL; the payload is the name of a queue."""
NOTIFY_EVERY = 0.02
"""Seconds between two notifications of a queue by one process: each makes all commits wait for each other."""
MAX_NAMES = 10_000
"""Queues whose last notifications are remembered."""


def channel(prefix: str) -> str:
    """Return the expression for a channel's name, of at most 63 bytes."""
    schema = "current_schema()"
    return f"'{prefix}' || CASE WHEN octet_length({schema}) > 40 THEN md5({schema}) ELSE {schema} END"


class Wake:
    """The listeners of this process, and its notifications of others."""

    def __init__(self, database: Database, follower: "Follower", background: "Background") -> None:
        self._database = database
        self._follower = follower
        self._background = background
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Listener] = []
        self._sent: dict[tuple[str, str], float] = {}
        """When a notification of a channel and queue was sent, in monotonic seconds."""
        self._due: dict[str, int] = {}
        """When the first delayed jobs of queues are due, as far as the listeners know."""

    @property
    def is_needed(self) -> bool:
        """Whether there are listeners."""
        return bool(self._listeners)

    def close(self) -> None:
        """Forget the listeners."""
        with self._lock:
            self._listeners = []

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: of any) may be claimable."""
        entry = (None if queues is None else frozenset(queues), wake)
        with self._lock:
            self._listeners = [*self._listeners, entry]
        try:
            self._follower.follow()
        except BaseException:
            self._forget(entry)
            raise
        return lambda: self._forget(entry)

    def _forget(self, entry: Listener) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not entry]

    # Other processes.

    def send(self, tx: Tx, observed: Collection[str]) -> None:
        """Notify the other processes, as part of the transaction; at most once in a while for each queue.

        Args:
            tx: The transaction.
            observed: Queues with events for other processes.
        """
        if not tx.dialect.has_clock or not self._database.notify:
            return
        for prefix, names in ((CLAIMABLE, tx.woken - tx.noticed), (EVENTS, observed)):
            if sent := self._now(tx, prefix, names):
                _notify(tx, prefix, sent)

    def notice(self, tx: Tx) -> tuple[str, Sequence[Any]]:
        """Return the end of a statement that notifies other processes of jobs so far, and its parameters."""
        if not tx.dialect.has_clock or not self._database.notify:
            return "", ()
        sent = self._now(tx, CLAIMABLE, tx.woken)
        tx.noticed = frozenset(tx.woken)
        if not sent:
            return "", ()
        listed, values = tx.listed(sent)
        # NULL, since the function returns an empty text.
        notified = f"NULLIF(CAST(pg_notify({channel(CLAIMABLE)}, q.name) AS text), '')"
        return f" UNION ALL SELECT {notified} FROM {listed} q", (values,)

    def _now(self, tx: Tx, prefix: str, names: Collection[str]) -> list[str]:
        """Return the queues of which a transaction notifies others; the rest follows after a pause."""
        now = monotonic()
        sent = {queue for queue in names if self._may_send((prefix, queue), now)}
        late = [(prefix, queue) for queue in sorted(names) if queue not in sent]
        if late:
            tx.then(lambda: self._send_later(late))
        return sorted(sent)

    def _may_send(self, key: tuple[str, str], now: float) -> bool:
        """Return whether a queue was not notified lately, and record that it is now."""
        with self._lock:
            if now - self._sent.get(key, 0) < NOTIFY_EVERY:
                return False
            if len(self._sent) >= MAX_NAMES:
                self._sent.clear()
            self._sent[key] = now
            return True

    def _send_later(self, keys: Sequence[tuple[str, str]]) -> None:
        """Notify once more after the pause, for all commits within it."""
        for key in keys:
            when = self._sent.get(key, 0) + NOTIFY_EVERY
            try:
                self._background.at(when, key, partial(self._send_now, key))
            except StorageUnavailableError as error:
                self._report(key, error)

    def _send_now(self, key: tuple[str, str]) -> None:
        prefix, queue = key
        with self._lock:
            self._sent[key] = monotonic()
        try:
            self._database.write(lambda tx: _notify(tx, prefix, [queue]))
        except Exception as error:
            self._report(key, error)

    def _report(self, key: tuple[str, str], error: Exception) -> None:
        logger.warning("Could not notify other processes, which will poll queue %r: %s", key[1], error)

    def look(self, tx: Tx) -> None:
        """Wake the listeners of queues with claimable jobs, after a change of the database."""
        listeners = self._listeners
        if not listeners:
            return
        names: set[str] = set()
        for queues, _ in listeners:
            if queues is None:
                names.update(used_queues(tx, "djqueue_ready"))
                names.update(used_queues(tx, "djqueue_delayed"))
            else:
                names |= queues
        if names:
            self.local(self._claimable(tx, sorted(names)))

    def _claimable(self, tx: Tx, names: Sequence[str]) -> set[str]:
        """Return the queues with ready jobs, or with a delayed job that is due before all that were known."""
        listed, values = tx.listed(names)
        rows = tx.rows(
            "SELECT q.name, EXISTS (SELECT 1 FROM djqueue_ready WHERE queue = q.name), "
            f"({NEXT_DUE.format('q.name')}) FROM {listed} q",
            values,
        )
        claimable = set()
        for name, is_ready, due in rows:
            known = self._due.get(name)
            if is_ready or (due is not None and (known is None or due < known)):
                claimable.add(name)
            if due is None:
                self._due.pop(name, None)
            else:
                self._due[name] = due
        return claimable

    # This process.

    def local(self, woken: set[str]) -> None:
        """Call the listeners of this process for queues in which jobs may have become claimable."""
        if not woken:
            return
        self._database.ready_queues.forget(woken)
        for queues, wake in self._listeners:
            if queues is None or not queues.isdisjoint(woken):
                try:
                    wake()
                except Exception:
                    # The operation itself succeeded, and must not fail now.
                    logger.exception(
                        "A wake-up callback raised an exception; the storage operation itself succeeded."
                    )


def _notify(tx: Tx, prefix: str, queues: Sequence[str]) -> None:
    listed, values = tx.listed(queues)
    tx.rows_with_inserts(f"SELECT pg_notify({channel(prefix)}, q.name) FROM {listed} q", values)


# The thread that notices what other processes have committed.


VERSION_POLL = 0.004
"""Seconds between two looks at the version of a SQLite file, which take 6 µs each."""
POLL = (1.0, 2.0)
"""Seconds between two looks behind notifications."""
POLL_ALONE = (0.15, 0.25)
"""Seconds between two looks without notifications."""
LINGER = 10.0
"""Seconds for which the thread stays without listeners and subscriptions, because more of them may come."""
RETRY = (0.1, 5.0)
"""Seconds between attempts to connect: the first, and the longest."""


class WakeSignal:
    """Ends the wait of a thread, from any thread."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._near, selectors.EVENT_READ)

    def set(self) -> None:
        """End the current wait, or the next one."""
        try:
            self._far.send(b".")
        except (BlockingIOError, OSError):
            pass  # There are enough signals, or the thread has ended.

    def wait(self, seconds: float, file: int | None = None) -> None:
        """Wait for a signal, or for something to read from a file."""
        if file is not None:
            self._selector.register(file, selectors.EVENT_READ)
        try:
            self._selector.select(max(0, seconds))
        finally:
            if file is not None:
                self._selector.unregister(file)
        try:
            while self._near.recv(1024):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the sockets."""
        self._selector.close()
        self._near.close()
        self._far.close()


class FollowerThread:
    """One life of the thread."""

    def __init__(self) -> None:
        self.signal = WakeSignal()
        self.is_closing = False
        self.thread: threading.Thread | None = None
        self.busy = fork_lock()
        """Held except in `wait`: SQLite has locks of its own."""

    def wait(self, seconds: float, file: int | None = None) -> None:
        """Wait for a signal, or for something to read from a file."""
        self.busy.release()
        try:
            self.signal.wait(seconds, file)
        finally:
            self.busy.acquire()


class CommandLooks(Protocol):
    """Follows the commands for workers; `SqlWorkers`."""

    @property
    def is_needed(self) -> bool:
        """Whether workers of this process wait for commands."""

    def look(self, tx: Tx) -> None:
        """Wake the workers for which a command waits."""


class EventLooks(Protocol):
    """Follows the events of other processes; `SqlEvents`."""

    @property
    def is_needed(self) -> bool:
        """Whether there are subscriptions."""

    @property
    def is_due(self) -> bool:
        """Whether to look now, although nothing may have changed."""

    def look_at(self, now: float) -> float:
        """Return when to look, in monotonic seconds, where changes of jobs are not noticed."""

    def look(self, tx: Tx, wrapper: BaseDatabaseWrapper) -> None:
        """Read what other processes have committed, and deliver it."""

    def refuse(self, error: StorageUnavailableError) -> None:
        """Let subscriptions that wait for their confirmation fail."""


class Looks(NamedTuple):
    """The parts that look at the changes of other processes."""

    wake: Wake
    events: EventLooks
    workers: CommandLooks


class Follower:
    """Starts the thread with the first listener or subscription, and ends it some time after the last one."""

    looks: "Looks"

    def __init__(self, database: Database) -> None:
        self._database = database
        self._inherited: list[FollowerThread | None] = []
        self._run: FollowerThread | None = None
        self._lock = threading.Lock()
        after_fork(self._forget)

    def _forget(self) -> None:
        self._inherited.append(self._run)
        self._run = None
        self._lock = threading.Lock()

    @property
    def is_possible(self) -> bool:
        """Whether other processes can use the database: not one in memory."""
        wrapper: Any = connections[self._database.alias]
        return wrapper.vendor != "sqlite" or not wrapper.is_in_memory_db()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the thread."""
        run = self._run
        return run is not None and run.thread is threading.current_thread()

    def follow(self) -> None:
        """Start the thread if it is not running, and let it look now."""
        if not self.is_possible:
            return
        with self._lock:
            run = self._run
            if run is not None:
                run.signal.set()
                return
            with resources_for("the thread that follows the database"):
                run = FollowerThread()
            try:
                run.thread = start_daemon("djqueue-follower", self._live, run)
            except BaseException:
                run.signal.close()
                raise
            self._run = run

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            run.is_closing = True
            run.signal.set()
            if run.thread is not None and run.thread is not threading.current_thread():
                run.thread.join()

    def _live(self, run: FollowerThread) -> None:
        database = self._database
        followed = (_Notified if database.dialect.has_clock else _Watched)(database, self.looks, run)
        run.busy.acquire()
        try:
            pause = GrowingPause(*RETRY)
            wait = 0.0
            while not self._has_ended(run, followed):
                try:
                    if wait:
                        run.wait(wait)
                    wrapper = create_connection(database.alias, database.dialect)
                    try:
                        with wrapper.wrap_database_errors:
                            followed.begin(wrapper)
                            pause.succeeded()
                            while not self._has_ended(run, followed):
                                followed.step()
                    finally:
                        wrapper.close()
                except BaseException as error:
                    # SystemExit, too, which a handler may raise in any thread.
                    self._report(error, is_first=not pause.failures)
                    wait = pause.failed()
        finally:
            run.signal.close()
            connections[database.alias].close()
            run.busy.release()

    def _has_ended(self, run: FollowerThread, followed: "Followed") -> bool:
        if run.is_closing:
            return True
        now = monotonic()
        if self._is_needed():
            followed.needed_at = now
        if now - followed.needed_at < LINGER:
            return False
        with self._lock:
            if self._is_needed():
                return False
            if self._run is run:
                self._run = None
            return True

    def _is_needed(self) -> bool:
        return any(look.is_needed for look in self.looks)

    def _report(self, error: BaseException, *, is_first: bool) -> None:
        if isinstance(error, Error):
            known = unavailable(self._database.alias, error)
        elif isinstance(error, StorageUnavailableError):
            known = error
        else:
            if is_first:
                logger.error("Following the changes of other processes failed, retrying.", exc_info=error)
            known = StorageUnavailableError(f"the changes of other processes cannot be followed: {error!r}")
        self.looks.events.refuse(known)
        if is_first:
            logger.warning(
                "Could not follow the changes of other processes, retrying: %s", in_one_line(known)
            )


class Followed(ABC):
    """A connection on which the changes of other processes are noticed."""

    def __init__(self, database: Database, looks: Looks, run: FollowerThread) -> None:
        self._database, self._looks, self._wait = database, looks, run.wait
        self.needed_at = monotonic()
        """Monotonic seconds at which there last were listeners or subscriptions."""

    def begin(self, wrapper: BaseDatabaseWrapper) -> None:
        """Look for the first time on a new connection: anything may have changed."""
        self._wrapper, self._cursor = wrapper, self._database.dialect.cursor(wrapper)
        self.prepare()
        self.look()

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the new connection."""

    @abstractmethod
    def step(self) -> None:
        """Wait a while, and look if something may have changed."""

    def look(self) -> None:
        """Look at everything that other processes may have changed."""
        tx = self.tx()
        self._looks.wake.look(tx)
        self._looks.workers.look(tx)
        self._looks.events.look(tx, self._wrapper)

    def tx(self) -> Tx:
        """Return reads outside of transactions."""
        return Tx(self._database, self._cursor)


class _Watched(Followed):
    """A SQLite file, whose version changes with each commit of another connection."""

    def prepare(self) -> None:
        self._version = self._read_version()

    def step(self) -> None:
        self._wait(VERSION_POLL)
        version = self._read_version()
        if version != self._version:
            self._version = version
            self.look()
        elif self._looks.events.is_due:
            self._looks.events.look(self.tx(), self._wrapper)

    def _read_version(self) -> int:
        version: int = self._cursor.execute("PRAGMA data_version").fetchone()[0]
        return version


class _Notified(Followed):
    """A PostgreSQL database, which passes the notifications of transactions on when they have committed."""

    def prepare(self) -> None:
        self._driver: Any = self._wrapper.connection
        self._claimable: set[str] = set()
        self._has_events = False
        self._channels: dict[str, str] = {}
        if self._database.notify:
            self._driver.add_notify_handler(self._on_notify)
            for prefix in (CLAIMABLE, EVENTS):
                name = self._cursor.execute(f"SELECT {channel(prefix)}").fetchone()[0]
                self._channels[name] = prefix
                quoted = name.replace('"', '""')
                self._cursor.execute(f'LISTEN "{quoted}"')

    def step(self) -> None:
        events = self._looks.events
        now = monotonic()
        until = min(self._poll_at, events.look_at(now))
        if not self._claimable and not self._has_events and not events.is_due:
            self._wait(until - now, self._driver.fileno())
        # Notifications that have arrived are passed to the handler.
        self._cursor.execute("SELECT 1")
        woken, self._claimable = self._claimable, set()
        self._looks.wake.local(woken)
        if monotonic() >= self._poll_at:
            self.look()
        elif self._has_events or events.is_due or monotonic() >= until:
            self._has_events = False
            events.look(self.tx(), self._wrapper)

    def look(self) -> None:
        low, high = POLL if self._database.notify else POLL_ALONE
        self._poll_at = monotonic() + self._database.random.uniform(low, high)
        self._has_events = False
        super().look()

    def _on_notify(self, notification: Any) -> None:
        if self._channels.get(notification.channel) == CLAIMABLE:
            self._claimable.add(notification.payload)
        else:
            self._has_events = True


# Work that a process does a moment later.


IDLE = 5.0
"""Seconds for which the thread waits for more work before it ends."""


class Background:
    """Calls functions at given times, one after the other."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._busy = fork_lock()

    def at(self, when: float, key: Hashable, call: Callable[[], object]) -> None:
        """Call a function at a time in monotonic seconds, unless one with this key waits already.

        Raises StorageUnavailableError if no thread can call it.
        """
        with self._changed:
            if key in self._due:
                return
            if self._thread is None:
                self._thread = start_daemon("djqueue-background", self._run)
            self._due[key] = (when, call)
            self._changed.notify()

    def close(self) -> None:
        """Call at once what waits, and end the thread."""
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._changed:
            self._is_closing = False

    def _run(self) -> None:
        try:
            while (call := self._next()) is not None:
                try:
                    with self._busy:
                        call()
                except BaseException:
                    logger.exception("A background task of the storage failed; it is not repeated.")
        finally:
            connections[self._alias].close()

    def _next(self) -> Callable[[], object] | None:
        """Return the next function when its time has come; None ends the thread."""
        until = monotonic() + IDLE
        with self._changed:
            while True:
                key = min(self._due, key=lambda key: self._due[key][0], default=None)
                now = monotonic()
                when = until if key is None else self._due[key][0]
                if key is not None and (when <= now or self._is_closing):
                    return self._due.pop(key)[1]
                if key is None and (now >= until or self._is_closing):
                    self._thread = None
                    return None
                self._changed.wait(when - now)
