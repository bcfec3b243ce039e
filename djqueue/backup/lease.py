"""One backup at a time: the lease that all hosts share, and the outcome of the last attempt."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event

from django.db import Error, connections

from djqueue.core.clock import Clock
from djqueue.core.errors import BackupError
from djqueue.core.messages import in_one_line
from djqueue.core.procfs import host_name
from djqueue.core.threads import beside
from djqueue.core.units import to_datetime
from djqueue.models import BackupState
from djqueue.operations.sweeps import alias_of
from djqueue.storage.base import Storage
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.leaderlease import (
    RENEW_EVERY,
    TTL,
    LeaderLease,
    LeaderLeaseLostError,
)

LEASE = "backup"
"""Name of the lease's row."""
LONGEST_ERROR = 1_000
"""Maximum characters of an error that are kept."""


class BackupRunningError(BackupError):
    """Another process is taking a backup."""


class BackupCancelledError(BackupError):
    """The backup was given up, because the process stops or has lost its lease."""


class BackupLease:
    """Lets one process at a time take a backup, and records how that ended.

    Projects without djqueue's tables have neither: `has_tables` is False for them.
    """

    def __init__(self, storage: Storage) -> None:
        self._alias = alias_of(storage)
        self.clock: Clock = DatabaseClock(self._alias)

    def has_tables(self) -> bool:
        """Return whether the tables exist. Raises the database's errors."""
        return BackupState._meta.db_table in connections[self._alias].introspection.table_names()

    @contextmanager
    def acquire(self, timeout: int, cancel: Event) -> Iterator["HeldBackupLease"]:
        """Hold the lease within the block, in which this process may take a backup.

        Args:
            timeout: Milliseconds after which the lease is given up, and `cancel` set.
            cancel: Set when the backup must end.

        Raises:
            BackupRunningError: Another process holds it.
        """
        lease = LeaderLease(self._alias, self.clock, LEASE)
        if not lease.acquire():
            raise BackupRunningError(f"a backup is being taken by {self.holder() or 'another process'}")
        held = HeldBackupLease(lease, self.clock, timeout, cancel)
        try:
            with held.renewed():
                yield held
        finally:
            # Without an answer, the lease ends when this process does, or ten seconds later.
            try:
                lease.release()
            except Error:
                connections[self._alias].close()

    def holder(self) -> str:
        """Return the process that takes a backup now, as text; empty if there is none."""
        holder = LeaderLease(self._alias, self.clock, LEASE).holder()
        return "" if holder is None else holder.describe()

    def last(self) -> BackupState | None:
        """Return the last attempt; None if none was made."""
        return BackupState.objects.using(self._alias).filter(pk=1).first()

    def note_start(self) -> None:
        """Record that this process begins to take a backup."""
        begun = {"started_at": to_datetime(self.clock.now()), "ended_at": None, "name": "", "error": ""}
        self._write(host=host_name().partition("/")[0], pid=os.getpid(), **begun)

    def note_end(self, name: str = "", error: object = "") -> None:
        """Record how it ended.

        Args:
            name: The backup; empty if there is none.
            error: What went wrong.
        """
        text = in_one_line(error)[:LONGEST_ERROR]
        self._write(ended_at=to_datetime(self.clock.now()), name=name, error=text)

    def _write(self, **values: object) -> None:
        rows = BackupState.objects.using(self._alias)
        if not rows.filter(pk=1).update(**values):
            now = to_datetime(self.clock.now())
            first = {"started_at": now, "host": host_name().partition("/")[0], "pid": os.getpid()}
            rows.create(pk=1, **{**first, **values})


class HeldBackupLease:
    """The time in which this process may take a backup."""

    def __init__(self, lease: LeaderLease, clock: Clock, timeout: int, cancel: Event) -> None:
        self._lease = lease
        self._clock = clock
        self._timeout = timeout
        self._cancel = cancel
        self._over: str | None = None

    def check(self) -> None:
        """Raise BackupCancelledError if the backup must not go on."""
        if self._over is not None:
            raise BackupCancelledError(self._over)
        if self._cancel.is_set():
            raise BackupCancelledError("the backup was cancelled, because its process stops")

    def renewed(self) -> AbstractContextManager[None]:
        """Return a context manager that renews the lease on a thread."""
        return beside(self._renew, "djqueue-backup-lease", TTL / 1_000)

    def _renew(self, stop: Event) -> None:
        begun = held = self._clock.monotonic()
        try:
            while not stop.wait(RENEW_EVERY / 1_000):
                now = self._clock.monotonic()
                if now - begun > self._timeout:
                    self._end(f"the backup took longer than {self._timeout / 1_000:g} s (BACKUP: TIMEOUT)")
                    return
                try:
                    self._lease.renew()
                    held = self._clock.monotonic()
                except LeaderLeaseLostError:
                    self._end("another process took over, because this one did not answer in time")
                    return
                except Error as error:
                    connections.close_all()
                    if now - held > TTL:
                        self._end(f"the lease could not be renewed: {in_one_line(error)}")
                        return
        finally:
            connections.close_all()

    def _end(self, reason: str) -> None:
        self._over = reason
        self._cancel.set()
