"""The thread that notices what other processes have committed, for wake-ups and events.

On SQLite, it polls the version of the file: every few milliseconds after a change, then less and less often.
On PostgreSQL, it waits for notifications, and looks every second or two in case one was lost.
"""

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.forks import after_fork
from djqueue.core.shown import in_one_line
from djqueue.storage.tables.dberrors import unavailable

from .connections import create
from .transaction import Tx
from .wake import CLAIMABLE, EVENTS, channel

if TYPE_CHECKING:
    from .storage import DatabaseStorage

logger = logging.getLogger("djqueue.storage")

SHORTEST, LONGEST = 0.004, 0.05
"""Seconds between two looks at the version of a SQLite file: after a change, and long after the last."""
SLOWER = 1.3
"""Factor by which each of these pauses is longer than the one before."""
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


class Follower:
    """Starts the thread with the first listener or subscription, and ends it some time after the last one."""

    def __init__(self, storage: "DatabaseStorage") -> None:
        self._storage = storage
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
        wrapper: Any = connections[self._storage.alias]
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
            run = self._run = FollowerThread()
            run.thread = threading.Thread(
                target=self._live, args=(run,), name="djqueue-follower", daemon=True
            )
            run.thread.start()

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
        storage = self._storage
        followed = _Notified(storage, run) if storage.dialect.has_clock else _Watched(storage, run)
        try:
            pause = RETRY[0]
            while not self._has_ended(run, followed):
                try:
                    wrapper = create(storage.alias, storage.dialect)
                    try:
                        with wrapper.wrap_database_errors:
                            followed.begin(wrapper)
                            pause = RETRY[0]
                            while not self._has_ended(run, followed):
                                followed.step()
                    finally:
                        wrapper.close()
                except Exception as error:
                    self._report(error, is_first=pause == RETRY[0])
                    run.signal.wait(pause)
                    pause = min(pause * 2, RETRY[1])
        finally:
            run.signal.close()
            connections[storage.alias].close()

    def _has_ended(self, run: FollowerThread, followed: "Followed") -> bool:
        if run.is_closing:
            return True
        now = time.monotonic()
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
        storage = self._storage
        return storage.wake.is_needed or storage.events.is_needed or storage.workers.is_needed

    def _report(self, error: Exception, *, is_first: bool) -> None:
        if isinstance(error, Error):
            known = unavailable(self._storage.alias, error)
        elif isinstance(error, StorageUnavailableError):
            known = error
        else:
            if is_first:
                logger.error("Following the changes of other processes failed, retrying.", exc_info=error)
            known = StorageUnavailableError(f"the changes of other processes cannot be followed: {error!r}")
        self._storage.events.refuse(known)
        if is_first:
            logger.warning(
                "Could not follow the changes of other processes, retrying: %s", in_one_line(known)
            )


class Followed(ABC):
    """A connection on which the changes of other processes are noticed."""

    def __init__(self, storage: "DatabaseStorage", run: FollowerThread) -> None:
        self._storage, self._signal = storage, run.signal
        self.needed_at = time.monotonic()
        """Monotonic seconds at which there last were listeners or subscriptions."""

    @abstractmethod
    def begin(self, wrapper: BaseDatabaseWrapper) -> None:
        """Look for the first time on a new connection: anything may have changed."""

    @abstractmethod
    def step(self) -> None:
        """Wait a while, and look if something may have changed."""


class _Watched(Followed):
    """A SQLite file, whose version changes with each commit of another connection."""

    def begin(self, wrapper: BaseDatabaseWrapper) -> None:
        self._wrapper = wrapper
        self._cursor = self._storage.dialect.cursor(wrapper)
        self._pause = SHORTEST
        self._version = self._read_version()
        self._look()

    def step(self) -> None:
        self._signal.wait(self._pause)
        version = self._read_version()
        if version != self._version:
            self._version, self._pause = version, SHORTEST
            self._look()
        elif self._storage.events.is_due:
            self._pause = SHORTEST
            self._storage.events.look(self._tx(), self._wrapper)
        else:
            self._pause = min(self._pause * SLOWER, LONGEST)

    def _look(self) -> None:
        tx = self._tx()
        self._storage.wake.look(tx)
        self._storage.workers.look(tx)
        self._storage.events.look(tx, self._wrapper)

    def _tx(self) -> Tx:
        return Tx(self._storage, self._storage.dialect, self._cursor)

    def _read_version(self) -> int:
        version: int = self._cursor.execute("PRAGMA data_version").fetchone()[0]
        return version


class _Notified(Followed):
    """A PostgreSQL database, which passes the notifications of transactions on when they have committed."""

    def begin(self, wrapper: BaseDatabaseWrapper) -> None:
        self._wrapper = wrapper
        self._driver: Any = wrapper.connection
        self._cursor = self._storage.dialect.cursor(wrapper)
        self._claimable: set[str] = set()
        self._has_events = False
        self._channels: dict[str, str] = {}
        if self._storage.notify:
            self._driver.add_notify_handler(self._on_notify)
            for prefix in (CLAIMABLE, EVENTS):
                name = self._cursor.execute(f"SELECT {channel(prefix)}").fetchone()[0]
                self._channels[name] = prefix
                quoted = name.replace('"', '""')
                self._cursor.execute(f'LISTEN "{quoted}"')
        self._look()

    def step(self) -> None:
        events = self._storage.events
        now = time.monotonic()
        until = min(self._poll_at, events.look_at(now))
        if not self._claimable and not self._has_events and not events.is_due:
            self._signal.wait(until - now, self._driver.fileno())
        # Notifications that have arrived are passed to the handler.
        self._cursor.execute("SELECT 1")
        woken, self._claimable = self._claimable, set()
        self._storage.wake.local(woken)
        if time.monotonic() >= self._poll_at:
            self._look()
        elif self._has_events or events.is_due or time.monotonic() >= until:
            self._has_events = False
            events.look(self._tx(), self._wrapper)

    def _look(self) -> None:
        low, high = POLL if self._storage.notify else POLL_ALONE
        self._poll_at = time.monotonic() + self._storage.random.uniform(low, high)
        tx = self._tx()
        self._has_events = False
        self._storage.wake.look(tx)
        self._storage.workers.look(tx)
        self._storage.events.look(tx, self._wrapper)

    def _tx(self) -> Tx:
        return Tx(self._storage, self._storage.dialect, self._cursor)

    def _on_notify(self, notification: Any) -> None:
        if self._channels.get(notification.channel) == CLAIMABLE:
            self._claimable.add(notification.payload)
        else:
            self._has_events = True
