"""The leader: the one process that sweeps, whichever of the workers it is."""

import threading
from typing import TYPE_CHECKING

from djqueue.core.threads import after_fork
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.leaderlease import LeaderLease

if TYPE_CHECKING:
    from .storage import DatabaseStorage

NAME = "leader"
"""Name of the row of the lease."""


class Leadership:
    """The lease of this process on sweeps, for all workers that share a storage.

    It saves the others the work, and protects nothing: a process that sweeps without it does no harm.
    """

    def __init__(self, storage: "DatabaseStorage") -> None:
        self._storage = storage
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._lease = LeaderLease(self._storage.alias, self._storage.clock, NAME)

    def take(self) -> bool:
        """Return whether this process leads: it did, or the last leader has released its lease, let it
        expire, or died on this machine.
        """
        with self._lock, named(self._storage.alias), self._storage.transactions.connection():
            return self._lease.take()

    def release(self) -> None:
        """Let another process lead at once."""
        with self._lock:
            if self._lease.number:
                with named(self._storage.alias), self._storage.transactions.connection():
                    self._lease.release()
