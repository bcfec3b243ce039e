"""Which process is the scheduler of a database: a row that one of them holds.

`PauseWatch` detects that this process did not run for a while, so that its lease may be over.
"""

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

from django.db import Error, IntegrityError, OperationalError, connections, transaction
from django.db.models import F, QuerySet

from djqueue import models
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import StorageUnavailableError

from ..tables.clock import set_right
from ..tables.holders import (
    ABANDONED,
    RELEASED,
    SCHEDULER_LEASE,
    LeaseHolder,
    died_here,
    host_name,
    lives_here,
    start_mark,
)

NAME = SCHEDULER_LEASE
TTL = 10_000
"""Default of SCHEDULER_LEASE: milliseconds for which the row is valid unless it is renewed."""
BLOCKED = 1_000
"""Milliseconds that a write may wait for another process's lock; the holder may have been waiting as well."""
RUNS_NOTHING = (
    "This process runs no jobs until that scheduler stops; to run jobs now, start this process with "
    "--standby work."
)
TAKES_OVER = "This process takes over when that scheduler stops; its workers run jobs in the meantime."
"""Log messages about a standby: a single process, and the scheduler process of a supervisor."""


HOLD = (
    f"UPDATE {models.SchedulerLease._meta.db_table} SET renewed_at = %s, expires_at = %s "
    "WHERE name = %s AND holder = %s AND generation = %s"
)
"""Renews the holder's row. No name in it needs quotes."""


class LeaseLost(StorageUnavailableError):
    """Another process has become the scheduler of this database, so this process must stop."""


class SchedulerLease:
    """This process's claim to be the scheduler.

    Its `generation` is the fence: each transaction of the journal first runs `hold`, which fails when
    another process has taken the row, no matter how long this process was suspended.
    """

    def __init__(self, alias: str, clock: Clock, address: str, ttl: int = TTL) -> None:
        self._alias = alias
        self._clock = clock
        self._address = address
        self.ttl = ttl
        self._holder = secrets.token_hex(8)
        self._generation = 0
        self._renewed = 0
        self.lag = 0
        """Milliseconds from monotonic time to UTC when the row was taken. All lease times written while it
        is held use this one timeline, so that setting the wall clock does not affect comparisons.
        """
        self.left_at = 0
        """When the previous scheduler last renewed its lease, in UTC milliseconds; 0 if there was none."""
        self.was_released = True
        """Whether the previous scheduler released its lease, instead of being killed or suspended until it
        expired.
        """
        self._serves = False
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Take the row if it is free: released, expired, or held by a process of this machine that has
        died.
        """
        try:
            set_right(self._clock)
            tick, now = self._clock.monotonic(), self._clock.now()
            since = _observed.get(self._alias)
            there = self.present()
        except Error:
            # The holder may not have reached the database either.
            _observed.pop(self._alias, None)
            _failed_at[self._alias] = self._clock.monotonic()
            raise
        if there is not None and not self._is_free(there, since, tick, now):
            return False
        # Later than everything the last scheduler wrote, even if the wall clock was set back.
        start = now if there is None else max(now, to_milliseconds(there.renewed_at) + 1)
        values = {
            "holder": self._holder,
            "host": host_name() + start_mark(os.getpid()),
            "pid": os.getpid(),
            "address": self._address,
            "renewed_at": 0 if there is None else to_milliseconds(there.renewed_at),
            "expires_at": now + self.ttl,
        }
        taken = 0
        if there is not None:
            taken = self._replace(there, tick, values)
        else:
            try:
                with transaction.atomic(using=self._alias):
                    self._rows().create(name=NAME, generation=1, **values)
                taken = 1
            except IntegrityError:
                # Another process created the row at the same time, and is the scheduler.
                return False
        if not taken:
            return False
        if there is not None:
            self.left_at = to_milliseconds(there.renewed_at)
            self.was_released = to_milliseconds(there.expires_at) == RELEASED
        self._generation = self._rows().get(holder=self._holder).generation
        self._renewed, self.lag, self._serves = tick, start - tick, False
        self._observe(now + self.ttl, tick)
        return True

    def _replace(self, there: LeaseHolder, tick: int, values: dict[str, Any]) -> int:
        """Take another holder's row, unless the holder has renewed it or another process has taken it."""
        unchanged = self._rows().filter(
            holder=there.holder, generation=there.generation, expires_at=there.expires_at
        )
        try:
            with transaction.atomic(using=self._alias):
                taken = unchanged.update(generation=F("generation") + 1, **values)
                waited = self._clock.monotonic() - tick
                if waited >= BLOCKED and lives_here(there) and to_milliseconds(there.expires_at) > ABANDONED:
                    # Whatever delayed this write may have delayed the holder's, too.
                    transaction.set_rollback(True, using=self._alias)
                    _observed.pop(self._alias, None)
                    taken = 0
        except OperationalError:
            _observed.pop(self._alias, None)
            raise
        return taken

    def hold(self) -> None:
        """Renew the claim. Raises LeaseLost if another process has the row."""
        set_right(self._clock)
        tick, now = self._clock.monotonic(), self._clock.now()
        renewed_at = tick + self.lag if self._serves else self.left_at
        # Each transaction of the journal does this, and the ORM would take longer than the rest of a small
        # one.
        with connections[self._alias].cursor() as cursor:
            cursor.execute(HOLD, [renewed_at, now + self.ttl, NAME, self._holder, self._generation])
            is_mine = cursor.rowcount > 0
        if not is_mine:
            raise LeaseLost
        self._renewed = tick
        self._observe(now + self.ttl, tick)

    def serve(self) -> None:
        """Renew the lease as a scheduler that has written the leases of all running jobs again.

        Until then, `renewed_at` is the last sign of the previous scheduler. If this process dies before,
        the next scheduler must not treat the old leases as if they had expired while a scheduler could
        renew them. Called before the first claim: the tokens of the next scheduler are higher than
        `started_at`.
        """
        self._serves = True
        self.hold()

    @property
    def started_at(self) -> int:
        """A time on the lease's timeline that is later than everything earlier schedulers wrote."""
        return self._renewed + self.lag

    @property
    def claim(self) -> bytes:
        """The argument of `renew_claim`."""
        return f"{self._holder} {self._generation} {self.lag}".encode()

    def renew_claim(self, claim: bytes) -> None:
        """Renew the lease on behalf of another process of this machine, unless it has released or lost it."""
        holder, generation, lag = claim.decode().split()
        now = self._clock.now()
        renewed_at = self._clock.monotonic() + int(lag)
        claimed = self._rows().filter(holder=holder, generation=int(generation), expires_at__gt=ABANDONED)
        claimed.update(renewed_at=renewed_at, expires_at=now + self.ttl)

    def move(self, address: str) -> None:
        """Store the address of the socket."""
        self._address = address
        mine = self._rows().filter(holder=self._holder, generation=self._generation)
        mine.update(address=address)

    def has_run_out(self) -> bool:
        """Return whether the last renewal is so old that another process may have taken the row."""
        return self._clock.monotonic() - self._renewed >= self.ttl

    def release(self) -> None:
        """Release the row if this process still holds it."""
        self._rows().filter(holder=self._holder, generation=self._generation).update(expires_at=RELEASED)

    def release_unserved(self) -> None:
        """Restore the row as it was found, because no worker could renew a lease in the meantime."""
        mine = self._rows().filter(holder=self._holder, generation=self._generation)
        mine.update(renewed_at=self.left_at, expires_at=RELEASED if self.was_released else ABANDONED)

    def present(self) -> LeaseHolder | None:
        """Return the current or last holder of the row."""
        return present_holder(self._alias)

    def _observe(self, expires_at: int, tick: int) -> None:
        with _observing:
            _observed[self._alias] = (self._holder, self._generation, expires_at), tick

    def _is_free(self, there: LeaseHolder, since: "Observed | None", tick: int, now: int) -> bool:
        """Return whether the holder has released the row, has died, or has let it expire.

        The wall clock decides only about a holder on another machine, because an expired row can also mean
        that this clock was set forward. Otherwise the time counts for which this process has seen the row
        unchanged, by the monotonic clock. While the database is unavailable, the holder cannot renew the row,
        so the time counts from when this process can read the row again.

        Args:
            since: The observation before the row was read. If another thread has observed a later row in the
                meantime, that observation stays.
        """
        ends = to_milliseconds(there.expires_at)
        if ends <= ABANDONED or died_here(there):
            return True
        seen = there.holder, there.generation, ends
        if since is None or since[0] != seen:
            with _observing:
                if _observed.get(self._alias) is since:
                    _observed[self._alias] = (seen, tick)
            since = (seen, tick)
        if tick - since[1] >= self.ttl:
            return True
        failed_at = _failed_at.get(self._alias)
        was_away = failed_at is not None and tick - failed_at < self.ttl
        return ends <= now and not was_away and not lives_here(there)

    def _rows(self) -> "QuerySet[models.SchedulerLease]":
        return models.SchedulerLease.objects.using(self._alias).filter(name=NAME)


def present_holder(alias: str, now: int | None = None) -> LeaseHolder | None:
    """Return the current or last holder of the row.

    With `now`, return None if the row has expired, unless its holder is a live process of this machine.
    """
    found = models.SchedulerLease.objects.using(alias).filter(name=NAME)
    row = found.values_list(*LeaseHolder._fields).first()
    if row is None:
        return None
    holder = LeaseHolder(*row)
    if now is None or to_milliseconds(holder.expires_at) > now:
        return holder
    # The clock may have been set forward since the last renewal.
    is_free = to_milliseconds(holder.expires_at) <= ABANDONED
    return holder if not is_free and lives_here(holder) else None


Observed = tuple[tuple[str, int, int], int]

_observed: dict[str, Observed] = {}
"""By database: the last row that this process read, and the monotonic time at which it first read that
row.
"""
_observing = threading.Lock()

_failed_at: dict[str, int] = {}
"""By database: the monotonic time at which this process last failed to read the row."""


BEAT = 0.25
"""Seconds between checks of the clock."""
PAUSE = 1_000
"""Milliseconds between two checks from which the process counts as paused."""


class PauseWatch:
    """Call `paused` with the milliseconds for which this process did not run.

    A thread checks the monotonic clock regularly. Code that acts on elapsed time must call `check` first,
    because the thread may not have run yet.
    """

    def __init__(self, paused: Callable[[int], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._paused = paused
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = clock.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="djqueue-pauses", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._seen = self._clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Report a pause that has just ended, if the watch was started."""
        if self._thread.ident is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            gap, self._seen = now - self._seen, now
            if gap >= PAUSE:
                self._paused(gap)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            self.check()
