"""Leader leases: rows that say which process does some work alone, until it releases or no longer renews it.

The works are the scheduler, sweeps, the mirror, backups, and the search of each user. The mirror's row also
has the version of the mirrored jobs, until whose change a page of them is cached.
"""

import os
import secrets
from collections.abc import Hashable
from contextlib import AbstractContextManager
from datetime import datetime
from threading import Event
from typing import Any, NamedTuple

from django.db import Error, IntegrityError, connections, transaction
from django.db.models import QuerySet

from djqueue import models
from djqueue.core import procfs
from djqueue.core.clock import Clock
from djqueue.core.errors import StorageError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.threads import beside
from djqueue.core.units import EPOCH, to_milliseconds
from djqueue.storage.tables.clock import set_right

logger = Log("djqueue.storage")
SCHEDULER, MIRROR = "scheduler", "mirror"
TTL = 10_000
"""Milliseconds for which the lease holds unless renewed."""
RELEASED, ABANDONED = 0, 1
"""Expiry times of a lease that was released, and of one whose process was killed."""
RENEW_EVERY = 3_000
"""Milliseconds after which the lease is renewed outside of transactions."""
STOP_TIMEOUT = 5.0
"""Seconds that the end of `kept` waits for a renewal under way."""


class LeaseHolder(NamedTuple):
    """The process that has a lease, as its row names it."""

    holder: str
    host: str
    pid: int
    address: str
    generation: int = 0
    renewed_at: datetime = EPOCH
    expires_at: datetime = EPOCH

    def describe(self) -> str:
        """Return the process and its host as text."""
        return f"process {self.pid} on {self.host.partition('/')[0]}"


def version(alias: str) -> Hashable:
    """Return a value that changes with each change of mirrored rows; None if none was ever written.

    Read it before the rows: a transaction that changes rows changes both at once.
    """
    rows = models.LeaderLeaseRow.objects.using(alias).filter(name=MIRROR)
    found: Hashable = rows.values_list("generation", "renewed_at").first()
    return found


class LeaderLeaseLostError(StorageError):
    """Another process has taken over."""


class LeaderLease:
    """The lease of this process on some work: `acquire` it, `renew` it in time, and `release` it.

    Each new holder raises its `number`, and each transaction of the mirror begins with `renew`, which fails
    if the number has changed. A job is read from Redis after the lease was taken and written before it is
    lost, so an older state never overwrites a newer one, however long a process was suspended.

    Args:
        alias: The database with the row.
        clock: The clock that all processes of the database share.
        name: The work.
    """

    def __init__(self, alias: str, clock: Clock, name: str) -> None:
        self._name = name
        self.number = 0
        """0 if this process does not hold the lease."""
        self._alias = alias
        self._clock = clock
        self._holder = secrets.token_hex(8)
        self._held = 0
        self._written = 0

    def acquire(self, *, by_force: bool = False) -> bool:
        """Return whether this process may write from now on.

        It takes over if the last holder has released the lease, let it expire, or died on this machine.

        Args:
            by_force: Take over from a live holder, too, which notices with its next transaction.
        """
        if self.number and not by_force:
            try:
                self.renew_if_due()
                return True
            except LeaderLeaseLostError:
                pass
        set_right(self._clock)
        tick = self._clock.monotonic()
        row = self._rows().first()
        if row is None:
            self.number = self._create()
        elif by_force or self._is_free(row):
            self.number = self._take_from(row)
        else:
            self.number = 0  # nothing was written: any number of processes may look
        self._held = tick
        return bool(self.number)

    def renew_if_due(self) -> None:
        """Renew the lease if it is time to, outside of transactions. Raises LeaderLeaseLostError if another
        process has it.
        """
        if self._clock.monotonic() - self._held > RENEW_EVERY:
            self.renew()

    def renew(self, *, changes_jobs: bool = False) -> None:
        """Renew the lease. Raises LeaderLeaseLostError if another process has it.

        Args:
            changes_jobs: The transaction changes rows of jobs, so `version` must change.
        """
        set_right(self._clock)
        tick = self._clock.monotonic()
        renewed = {"expires_at": self._clock.now() + TTL}
        if changes_jobs:
            # Larger each time, even if two transactions share a millisecond or the clock was set back.
            self._written = max(self._clock.now(), self._written + 1)
            renewed["renewed_at"] = self._written
        if not self._mine().update(**renewed):
            self.number = 0
            raise LeaderLeaseLostError
        self._held = tick

    def kept(self) -> AbstractContextManager[None]:
        """Context manager: renew the lease on a thread within the block, which may take longer."""
        return beside(self._keep, "djqueue-lease", STOP_TIMEOUT)

    def _keep(self, stop: Event) -> None:
        try:
            while not stop.wait(RENEW_EVERY / 1_000):
                try:
                    self.renew()
                except LeaderLeaseLostError:
                    return  # The next write of the holder raises it, too.
                except Error as error:
                    logger.warning(
                        "The lease %r could not be renewed, retrying: %s", self._name, in_one_line(error)
                    )
                    connections[self._alias].close()
        finally:
            connections[self._alias].close()

    def release(self) -> None:
        """Release the lease if this process still holds it."""
        if self.number:
            self._mine().update(expires_at=0)
            self.number = 0

    def delete(self) -> None:
        """Delete the row if this process still holds it."""
        if self.number:
            self._mine().delete()
            self.number = 0

    def holder(self) -> LeaseHolder | None:
        """Return the process that holds the lease; None if it is free."""
        row = self._rows().first()
        if row is None or self._is_free(row):
            return None
        return LeaseHolder(*(getattr(row, name) for name in LeaseHolder._fields))

    def _is_free(self, row: models.LeaderLeaseRow) -> bool:
        left = to_milliseconds(row.expires_at) - self._clock.now()
        # More is left than a holder ever writes if the wall clock was set back.
        is_over = not 0 < left <= 2 * TTL
        return is_over or procfs.died_here(row.pid, row.host)

    def _take_from(self, row: models.LeaderLeaseRow) -> int:
        last = self._rows().filter(holder=row.holder, generation=row.generation)
        number = row.generation + 1
        return number if last.update(generation=number, **self._values()) else 0

    def _create(self) -> int:
        try:
            with transaction.atomic(using=self._alias):
                self._rows().create(name=self._name, address="", generation=1, **self._values())
        except IntegrityError:
            return 0  # another process made the row at the same moment
        return 1

    def _values(self) -> dict[str, Any]:
        now = self._clock.now()
        self._written = max(now, self._written)
        return {
            "holder": self._holder,
            "host": procfs.this_process(),
            "pid": os.getpid(),
            "renewed_at": self._written,
            "expires_at": now + TTL,
        }

    def _mine(self) -> "QuerySet[models.LeaderLeaseRow]":
        return self._rows().filter(holder=self._holder, generation=self.number)

    def _rows(self) -> "QuerySet[models.LeaderLeaseRow]":
        return models.LeaderLeaseRow.objects.using(self._alias).filter(name=self._name)


def stale_holder(alias: str, name: str, until: int) -> LeaseHolder | None:
    """Return the last holder of a lease that expired before a time without being released.

    Its process was killed or hangs, and no other one has taken over.

    Args:
        name: Name of the lease, such as "scheduler".
        until: UTC milliseconds.
    """
    rows = models.LeaderLeaseRow.objects.using(alias).filter(name=name)
    row = rows.values_list(*LeaseHolder._fields).first()
    if row is None:
        return None
    holder = LeaseHolder(*row)
    return holder if RELEASED < to_milliseconds(holder.expires_at) < until else None
