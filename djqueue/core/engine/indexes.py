"""Indexes of jobs: by unique key, by the job that they wait for, and by subject."""

import heapq
from collections.abc import Iterable
from itertools import chain, islice

from ..enginejob import EngineJob
from ..options import JobKey

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
        return key is not None and (waiting := self._successors.get(key)) is not None and waiting[1] is job

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


class DependencyTracker:
    """The dependents of each job of a shard, in order of arrival.

    For a job that has completed or was cancelled, they are the live jobs that may read its record. Dependents
    are kept as jobs, not ids: a job that is enqueued again under its id is another job.
    """

    __slots__ = ("_dependents", "holders")

    def __init__(self) -> None:
        self._dependents: dict[JobKey, dict[EngineJob, None]] = {}
        self.holders: dict[JobKey, dict[EngineJob, None]] = {}
        """Live jobs by the ended jobs whose records they hold."""

    def add(self, dependency: JobKey, dependent: EngineJob) -> None:
        """Record that `dependent` waits for `dependency`."""
        self._dependents.setdefault(dependency, {})[dependent] = None

    def pop(self, dependency: JobKey) -> list[EngineJob]:
        """Remove and return the jobs that wait for one that has ended."""
        return list(self._dependents.pop(dependency, ()))

    def keep(self, dependency: JobKey) -> list[EngineJob]:
        """Return the jobs that wait for one that has ended; from now on they hold its record."""
        dependents = self._dependents.pop(dependency, None)
        if dependents is None:
            return []
        self.holders[dependency] = dependents
        return list(dependents)

    def hold(self, dependency: JobKey, dependent: EngineJob) -> None:
        """Record that `dependent` was added after `dependency` had ended, and holds its record."""
        self.holders.setdefault(dependency, {})[dependent] = None

    def let_go(self, dependency: JobKey, dependent: EngineJob) -> bool:
        """Release `dependency` from `dependent`; return whether that was the last holder of its record."""
        holders = self.holders.get(dependency)
        if holders is not None and dependent in holders:
            del holders[dependent]
            if holders:
                return False
            del self.holders[dependency]
            return True
        waiting = self._dependents.get(dependency)
        if waiting is not None:
            waiting.pop(dependent, None)
            if not waiting:
                del self._dependents[dependency]
        return False

    def forget(self, dependency: JobKey) -> None:
        """Drop the holders of a record that is gone."""
        self.holders.pop(dependency, None)

    def of(self, dependency: JobKey) -> list[EngineJob]:
        """Return the jobs that wait for this one."""
        return list(self._dependents.get(dependency, ()))

    def known(self, dependency: JobKey, limit: int) -> list[JobKey]:
        """Return up to `limit` live jobs that wait for this one, or may read its record."""
        dependents = (self._dependents.get(dependency, {}), self.holders.get(dependency, {}))
        return [(job.queue, job.id) for job in islice(chain(*dependents), limit)]

    def __len__(self) -> int:
        return len(self._dependents) + len(self.holders)


class SubjectIndex:
    """Jobs of one queue by subject, guarded by the lock of its shard."""

    __slots__ = ("_jobs",)

    def __init__(self) -> None:
        self._jobs: dict[str, dict[str, EngineJob]] = {}
        """Jobs by subject, then by id; no subject is empty."""

    def add(self, jobs: Iterable[EngineJob], subject: str) -> None:
        """Add jobs about one subject."""
        self._jobs.setdefault(subject, {}).update((job.id, job) for job in jobs)

    def drop(self, job: EngineJob, subject: str) -> None:
        """Remove a job."""
        jobs = self._jobs[subject]
        del jobs[job.id]
        if not jobs:
            del self._jobs[subject]

    def about(self, subject: str) -> list[EngineJob]:
        """Return the jobs about a subject, in no order."""
        return list(self._jobs.get(subject, {}).values())

    def __len__(self) -> int:
        """Return the number of subjects."""
        return len(self._jobs)
