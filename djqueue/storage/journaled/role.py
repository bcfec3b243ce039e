"""The role of the scheduler in the database storage."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from djqueue.core.clock import Clock
from djqueue.storage.capabilities import SchedulerRole

from .lease import SchedulerLease

if TYPE_CHECKING:
    from .storage import JournaledStorage


class DatabaseSchedulerRole(SchedulerRole):
    """The role of the scheduler, which this process has or waits for."""

    def __init__(self, storage: "JournaledStorage", ttl: int) -> None:
        self.standby = "wait"
        self.on_lost: Callable[[], None] | None = None
        self.on_standby: Callable[[], None] | None = None
        self._storage = storage
        self._ttl = ttl

    @property
    def is_here(self) -> bool:
        return self._storage.is_scheduler

    @property
    def clock(self) -> Clock:
        return self._storage.clock

    def claim(self) -> tuple[bytes, int] | None:
        lease = self._storage.lease
        return None if lease is None else (lease.claim, lease.ttl)

    def renew(self, claim: bytes) -> None:
        SchedulerLease(self._storage.alias, self._storage.clock, "", self._ttl).renew_claim(claim)
