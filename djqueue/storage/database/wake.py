"""Wake-ups: workers learn that jobs may have become claimable, whatever process has seen to that.

On PostgreSQL, the transaction that makes a job claimable notifies the others; on SQLite, they notice a change
of the file. Either way, they also look now and then, in case a notification was lost.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from djqueue.core.forks import after_fork
from djqueue.storage.facets import Unsubscribe

from .transaction import Tx

if TYPE_CHECKING:
    from .storage import DatabaseStorage

logger = logging.getLogger("djqueue.storage")
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

    def __init__(self, storage: "DatabaseStorage") -> None:
        self._storage = storage
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
        self._storage.follower.follow()
        return lambda: self._forget(entry)

    def _forget(self, entry: Listener) -> None:
        with self._lock:
            self._listeners = [other for other in self._listeners if other is not entry]

    # Other processes.

    def send(self, tx: Tx, observed: Iterable[str]) -> None:
        """Notify the other processes, as part of the transaction; at most once in a while for each queue.

        Args:
            tx: The transaction.
            observed: Queues with events for other processes.
        """
        if not tx.dialect.has_clock or not self._storage.notify:
            return
        wanted = [(CLAIMABLE, queue) for queue in sorted(tx.woken)]
        wanted += [(EVENTS, queue) for queue in sorted(observed)]
        now = time.monotonic()
        late = []
        for prefix in (CLAIMABLE, EVENTS):
            queues = []
            for key in wanted:
                if key[0] != prefix:
                    continue
                if self._may_send(key, now):
                    queues.append(key[1])
                else:
                    late.append(key)
            if queues:
                _notify(tx, prefix, queues)
        if late:
            tx.then(lambda: self._send_later(late))

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
            self._storage.background.at(when, key, partial(self._send_now, key))

    def _send_now(self, key: tuple[str, str]) -> None:
        prefix, queue = key
        with self._lock:
            self._sent[key] = time.monotonic()
        try:
            self._storage.read(lambda tx: _notify(tx, prefix, [queue]), is_single=True)
        except Exception as error:
            logger.warning("Could not notify other processes, which will poll queue %r: %s", queue, error)

    def look(self, tx: Tx) -> None:
        """Wake the listeners of queues with claimable jobs, after a change of the database."""
        listeners = self._listeners
        if not listeners:
            return
        names: set[str] = set()
        for queues, _ in listeners:
            if queues is None:
                names.update(tx.storage.used_queues(tx, "djqueue_ready"))
                names.update(tx.storage.used_queues(tx, "djqueue_delayed"))
            else:
                names |= queues
        if names:
            self.local(self._claimable(tx, sorted(names)))

    def _claimable(self, tx: Tx, names: Sequence[str]) -> set[str]:
        """Return the queues with ready jobs, or with a delayed job that is due before all that were known."""
        listed, values = tx.listed(names)
        found = tx.rows(
            "SELECT q.name, EXISTS (SELECT 1 FROM djqueue_ready WHERE queue = q.name), "
            f"(SELECT MIN(run_at) FROM djqueue_delayed WHERE queue = q.name) FROM {listed} q",
            values,
        )
        claimable = set()
        for name, is_ready, due in found:
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
        self._storage.ready_queues.forget(woken)
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
    tx.rows(f"SELECT pg_notify({channel(prefix)}, q.name) FROM {listed} q", values)
