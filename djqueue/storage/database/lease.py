"""Which process is the scheduler of a database: a row that one of them holds."""

import os
import secrets
import socket
import threading
from pathlib import Path
from typing import NamedTuple

from django.db import IntegrityError, transaction
from django.db.models import F, Q, QuerySet

from djqueue import models
from djqueue.core.clock import Clock

from .clock import set_right
from .journal import LeaseLost
from .rows import raw_values

NAME = "scheduler"
TTL = 10_000
"""Milliseconds for which the row holds unless renewed."""
RELEASED, ABANDONED = 0, 1
"""Ends of a claim that was given back, and of one whose process was killed."""


class Holder(NamedTuple):
    """Who has the row."""

    holder: str
    host: str
    pid: int
    address: str

    def describe(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.host.partition('/')[0]}"


class SchedulerLease:
    """This process's claim to be the scheduler.

    Its `generation` is the fence: `hold` is run first in each transaction of the journal, and fails once
    another process has the row, however long this one was asleep.
    """

    def __init__(self, alias: str, clock: Clock, address: str) -> None:
        self._alias = alias
        self._clock = clock
        self._address = address
        self._holder = secrets.token_hex(8)
        self._generation = 0
        self._renewed = 0
        self.left_at = 0
        """When the scheduler before this one last renewed its claim: UTC milliseconds; 0: there was none."""
        self.was_released = True
        """Whether that one ended by itself, rather than being killed, or frozen until its claim ran out."""
        self._lock = threading.Lock()

    def acquire(self) -> bool:
        """Take the row if it is free: released, run out, or its holder died on this machine."""
        set_right(self._clock)
        tick, now = self._clock.monotonic(), self._clock.now()
        free = Q(expires_at__lte=now)
        before = next(iter(raw_values(self._rows(), ("renewed_at", "expires_at"))), None)
        there = self.present()
        if there is not None and died_here(there):
            free |= Q(holder=there.holder)
        values = {
            "holder": self._holder,
            "host": host_name(),
            "pid": os.getpid(),
            "address": self._address,
            "renewed_at": now,
            "expires_at": now + TTL,
        }
        taken = self._rows().filter(free).update(generation=F("generation") + 1, **values)
        if not taken and there is None:
            try:
                with transaction.atomic(using=self._alias):
                    self._rows().create(name=NAME, generation=1, **values)
                taken = 1
            except IntegrityError:
                # Another process made the row at the same moment: it is the scheduler.
                return False
        if not taken:
            return False
        if before is not None:
            self.left_at, self.was_released = before[0], before[1] == RELEASED
        self._generation = self._rows().get(holder=self._holder).generation
        self._renewed = tick
        return True

    def hold(self) -> None:
        """Renew the claim. Raises LeaseLost if another process has the row."""
        set_right(self._clock)
        tick, now = self._clock.monotonic(), self._clock.now()
        mine = self._rows().filter(holder=self._holder, generation=self._generation)
        if not mine.update(renewed_at=now, expires_at=now + TTL):
            raise LeaseLost
        self._renewed = tick

    def move(self, address: str) -> None:
        """Say where the socket listens."""
        self._address = address
        mine = self._rows().filter(holder=self._holder, generation=self._generation)
        mine.update(address=address)

    def has_run_out(self) -> bool:
        """Whether it was renewed so long ago that another process may have the row."""
        return self._clock.monotonic() - self._renewed >= TTL

    def release(self) -> None:
        """Give the row back, if it is still this process's."""
        self._rows().filter(holder=self._holder, generation=self._generation).update(expires_at=RELEASED)

    def release_unserved(self) -> None:
        """Give the row back as it was found: no worker could renew a lease in the meantime."""
        mine = self._rows().filter(holder=self._holder, generation=self._generation)
        mine.update(renewed_at=self.left_at, expires_at=RELEASED if self.was_released else ABANDONED)

    def present(self) -> Holder | None:
        """Who has the row, or had it last."""
        return present_holder(self._alias)

    def _rows(self) -> "QuerySet[models.SchedulerLease]":
        return models.SchedulerLease.objects.using(self._alias).filter(name=NAME)


def present_holder(alias: str, now: int | None = None) -> Holder | None:
    """Who has the row, or had it last; with `now`, only if it has not run out."""
    found = models.SchedulerLease.objects.using(alias).filter(name=NAME)
    if now is not None:
        found = found.filter(expires_at__gt=now)
    row = found.values_list("holder", "host", "pid", "address").first()
    return None if row is None else Holder(*row)


def host_name() -> str:
    """This machine, boot and process namespace: two holders of one name can see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return socket.gethostname()
    namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{boot.read_text().strip()[:8]}/{namespace}"


def died_here(holder: Holder) -> bool:
    """Whether the holder was a process of this machine that is no more."""
    if holder.host != host_name() or "/" not in holder.host:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
