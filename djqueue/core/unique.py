"""Who owns which unique key of a queue, and who is to have it next."""

import heapq

from .enginejob import EngineJob
from .options import JobKey

PREDECESSOR: JobKey = ("", "")
"""Among the unmet dependencies of a job: it waits for the active job that had its key before it."""


COMPACT_FROM = 64


class UniqueKeys:
    """Keys with their owners and, for those that have one, the time at which they are free anyway.

    Behind an active owner one job may wait for its end: the successor.
    """

    __slots__ = ("_owners", "_successors", "_times")

    def __init__(self) -> None:
        self._owners: dict[str, tuple[EngineJob, int | None]] = {}
        self._times: list[tuple[int, str]] = []
        """Heap of when keys are free anyway; also of such as are free already, or another job's."""
        self._successors: dict[str, tuple[EngineJob, EngineJob]] = {}
        """(who waits, the job whose end it waits for), by key."""

    def owner(self, key: str, now: int) -> EngineJob | None:
        """The job that holds the key; a key past its own time has none."""
        held = self._owners.get(key)
        if held is None:
            return None
        job, free_at = held
        if free_at is not None and free_at <= now:
            del self._owners[key]
            return None
        return job

    def take(self, job: EngineJob) -> None:
        """Give the job its key; the caller has seen that it is free."""
        key, ttl = job.options.unique_key, job.options.unique_ttl
        if key is not None:
            free_at = None if ttl is None else job.created_at + job.stepped + ttl
            self._owners[key] = (job, free_at)
            if free_at is not None:
                if len(self._times) > COMPACT_FROM + 2 * len(self._owners):
                    self._times = [(at, name) for name, (_, at) in self._owners.items() if at is not None]
                    heapq.heapify(self._times)
                else:
                    heapq.heappush(self._times, (free_at, key))

    def wait(self, job: EngineJob, behind: EngineJob) -> None:
        """Have a job follow an active one; the caller has seen that nobody else does."""
        assert job.options.unique_key is not None
        self._successors[job.options.unique_key] = (job, behind)

    def waiting(self, key: str) -> EngineJob | None:
        """The job that waits for the end of the active one with the key."""
        waiting = self._successors.get(key)
        return None if waiting is None else waiting[0]

    def is_followed(self, job: EngineJob) -> bool:
        """Whether a successor waits for the end of this job."""
        key = job.options.unique_key
        return key is not None and (found := self._successors.get(key)) is not None and found[1] is job

    def release(self, job: EngineJob, now: int) -> EngineJob | None:
        """Free the key of a job that is gone, unless another job has it by now.

        Returns the successor that has waited for that; the key is its own, if it was free.
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

    def follow_step(self, step: int) -> None:
        """Keep the lengths of the keys' times: the wall clock was set by so many milliseconds."""
        for key, (job, free_at) in self._owners.items():
            if free_at is not None:
                self._owners[key] = (job, free_at + step)
        self._times = [(at, key) for key, (_, at) in self._owners.items() if at is not None]
        heapq.heapify(self._times)

    def sweep(self, now: int) -> None:
        """Forget the keys whose time is over."""
        while self._times and self._times[0][0] <= now:
            self.owner(heapq.heappop(self._times)[1], now)

    def __len__(self) -> int:
        return len(self._owners) + len(self._successors)
