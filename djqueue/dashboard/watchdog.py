"""Ends queries that a PostgreSQL server does not answer, so that a page can respond in time.

A query sent to a frozen server has no timeout: `statement_timeout` is the server's, and `connect_timeout` is
over. A thread of the process shuts down the socket of such a query at the page's deadline. The driver then
raises OperationalError at once in the thread of the request.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.threads import after_fork

ACTIVE = 1
"""Transaction status of libpq: a query was sent and its result has not arrived."""
AGAIN = 0.05
"""Seconds between two checks of a request past its deadline."""
IDLE = 30.0
"""Seconds after which the idle thread ends."""


class QueryWatch:
    """Watches the queries of one thread on its PostgreSQL connections until `release`."""

    def __init__(self, owner: "Watchdog", wrappers: list[Any], until: float) -> None:
        self.until = until
        """Monotonic seconds."""
        self.cut: list[str] = []
        """Aliases of the databases whose connections were shut down."""
        self._owner = owner
        self._wrappers = wrappers

    def release(self) -> None:
        """Stop watching the thread."""
        self._owner.release(self)

    def end_queries(self) -> None:
        """Shut down each connection that waits for the result of a query."""
        for wrapper in self._wrappers:
            if _shut_down(wrapper):
                self.cut.append(wrapper.alias)


class Watchdog:
    """The watched threads of this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._watches: set[QueryWatch] = set()
        self._thread: threading.Thread | None = None
        self._next: float = 0
        self._current = threading.local()

    @property
    def has_cut(self) -> bool:
        """Whether a connection of this thread was shut down since its watch began."""
        watch: QueryWatch | None = getattr(self._current, "watch", None)
        return watch is not None and bool(watch.cut)

    @contextmanager
    def within(self, seconds: float) -> Iterator[QueryWatch]:
        """End queries of this thread that are not answered within `seconds`."""
        watch = QueryWatch(self, postgresql_connections(), _now() + seconds)
        outer: QueryWatch | None = getattr(self._current, "watch", None)
        self._current.watch = watch
        if watch._wrappers:
            self._add(watch)
        try:
            yield watch
        finally:
            self.release(watch)
            self._current.watch = outer

    def release_current(self) -> None:
        """Stop watching the current thread."""
        watch: QueryWatch | None = getattr(self._current, "watch", None)
        if watch is not None:
            watch.release()

    def release(self, watch: QueryWatch) -> None:
        """End a watch. No connection is shut down for it after this returns."""
        with self._changed:
            self._watches.discard(watch)

    def _add(self, watch: QueryWatch) -> None:
        with self._changed:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djqueue-query-watchdog", daemon=True)
                self._thread.start()
            elif watch.until < self._next:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                now = _now()
                for watch in self._watches:
                    if watch.until <= now:
                        watch.end_queries()
                is_idle = not self._watches
                wait = min((max(AGAIN, watch.until - now) for watch in self._watches), default=IDLE)
                self._next = now + wait
                if not self._changed.wait(wait) and is_idle and not self._watches:
                    self._thread = None
                    return


def postgresql_connections() -> list[Any]:
    """Return this thread's connections to PostgreSQL, open or not."""
    return [wrapper for wrapper in connections.all() if wrapper.vendor == "postgresql"]


def _shut_down(wrapper: Any) -> bool:
    """Shut down a connection that waits for a result. Called from another thread than the connection's."""
    driver = wrapper.connection
    if driver is None:
        return False
    try:
        if driver.info.transaction_status != ACTIVE:
            return False
        number = driver.fileno()
        copy = socket.socket(fileno=os.dup(number))
    except (OSError, wrapper.Database.Error):
        return False  # closed in the meantime
    with copy:
        try:
            # If the owner closed it before it was duplicated, the number may belong to another file.
            if driver.fileno() != number:
                return False
            copy.shutdown(socket.SHUT_RDWR)
        except (OSError, wrapper.Database.Error):
            return False
    return True


def _now() -> float:
    return SYSTEM_CLOCK.monotonic() / 1_000


watchdog = Watchdog()
"""The watchdog of this process."""
