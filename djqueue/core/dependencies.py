"""The reverse index of dependencies: which jobs wait for a job, and which hold its record."""

from itertools import chain, islice

from .enginejob import EngineJob
from .options import JobKey


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
        found = (self._dependents.get(dependency, {}), self.holders.get(dependency, {}))
        return [(job.queue, job.id) for job in islice(chain(*found), limit)]

    def __len__(self) -> int:
        return len(self._dependents) + len(self.holders)
