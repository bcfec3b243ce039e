"""The unique keys of a queue: their owners and successors, and which of several jobs wins a key."""

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from .enginejob import EngineJob
from .options import JobKey

PREDECESSOR: JobKey = ("", "")
"""Stands in a job's unmet dependencies for the active job that had its unique key before it."""


COMPACT_FROM = 64


class UniqueKeys:
    """Keys with their owners and, if they have one, the time at which they expire.

    Behind an active owner, one job may wait for its end: the successor.
    """

    __slots__ = ("_owners", "_successors", "_times")

    def __init__(self) -> None:
        self._owners: dict[str, tuple[EngineJob, int | None]] = {}
        self._times: list[tuple[int, str]] = []
        """Heap of the times at which keys expire; may contain keys that are free already, or have another
        owner.
        """
        self._successors: dict[str, tuple[EngineJob, EngineJob]] = {}
        """(successor, the job that it waits for), by key."""

    def owner(self, key: str, now: int) -> EngineJob | None:
        """Return the job that holds a key; None if it is free or has expired."""
        held = self._owners.get(key)
        if held is None:
            return None
        job, free_at = held
        if free_at is not None and free_at <= now:
            del self._owners[key]
            return None
        return job

    def take(self, job: EngineJob) -> None:
        """Give a job its key, which must be free."""
        key, ttl = job.options.unique_key, job.options.unique_ttl
        if key is not None:
            free_at = None if ttl is None else job.created_at + ttl
            self._owners[key] = (job, free_at)
            if free_at is not None:
                if len(self._times) > COMPACT_FROM + 2 * len(self._owners):
                    self._times = [(at, name) for name, (_, at) in self._owners.items() if at is not None]
                    heapq.heapify(self._times)
                else:
                    heapq.heappush(self._times, (free_at, key))

    def wait(self, job: EngineJob, behind: EngineJob) -> None:
        """Make a job wait behind an active one that has no successor yet."""
        assert job.options.unique_key is not None
        self._successors[job.options.unique_key] = (job, behind)

    def waiting(self, key: str) -> EngineJob | None:
        """Return the job that waits for the end of the active one with the key."""
        waiting = self._successors.get(key)
        return None if waiting is None else waiting[0]

    def is_followed(self, job: EngineJob) -> bool:
        """Return whether a successor waits for the end of this job."""
        key = job.options.unique_key
        return key is not None and (found := self._successors.get(key)) is not None and found[1] is job

    def release(self, job: EngineJob, now: int) -> EngineJob | None:
        """Free the key of a job that has ended, unless another job has it by now.

        Returns the successor that waited for it, which gets the key if it is free.
        """
        key = job.options.unique_key
        if key is None:
            return None
        if (held := self._owners.get(key)) is not None and held[0] is job:
            del self._owners[key]
        waiting = self._successors.get(key)
        if waiting is None or job not in waiting:
            return None
        del self._successors[key]
        successor = waiting[0]
        if successor is job:
            return None
        if self.owner(key, now) is None:
            self.take(successor)
        return successor

    def sweep(self, now: int) -> None:
        """Drop expired keys."""
        while self._times and self._times[0][0] <= now:
            self.owner(heapq.heappop(self._times)[1], now)

    def __len__(self) -> int:
        return len(self._owners) + len(self._successors)


J = TypeVar("J")

REPLACED = "replaced"
"""Reason of a cancelled job that a newer one with its unique key replaced."""


@dataclass(frozen=True, slots=True)
class Succession(Generic[J]):
    """The way in which a new job comes to its unique key."""

    replaced: J | None = None
    """The pending job that it cancels."""
    behind: J | None = None
    """The active job whose end it waits for."""
    keeps_time: bool = False
    """True if it runs no later than the job that it replaces; otherwise, a job that is replaced again and
    again would never start.
    """


def succession(on_duplicate: str, active: J | None, pending: J | None) -> Succession[J] | None:
    """Return how a new job comes to its unique key; None if it is a duplicate, and changes nothing.

    Args:
        on_duplicate: the new job's option.
        active: the active job that has the key.
        pending: the job with the key that has not started: its owner, or the one that waits for the active
            job to end.
    """
    if active is None and pending is None:
        return Succession()
    if on_duplicate == "keep" or (active is not None and on_duplicate != "keep_last_if_active"):
        return None
    return Succession(pending, active, keeps_time=on_duplicate != "debounce")
