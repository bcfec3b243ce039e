"""Which jobs wait for which, and which hold whose record: the reverse index."""

from itertools import chain, islice

from .enginejob import EngineJob
from .options import JobKey


class DependencyTracker:
    """For each job of a shard that others wait for: those others, in the order in which they came; for each
    that has completed or was cancelled: those of them that live, and may read its record.

    Jobs, not their ids: one that is enqueued again under its id is another job.
    """

    __slots__ = ("_dependents", "holders")

    def __init__(self) -> None:
        self._dependents: dict[JobKey, dict[EngineJob, None]] = {}
        self.holders: dict[JobKey, dict[EngineJob, None]] = {}
        """Live jobs by the ended ones whose records they hold."""

    def add(self, dependency: JobKey, dependent: EngineJob) -> None:
        """Note that `dependent` waits for `dependency`."""
        self._dependents.setdefault(dependency, {})[dependent] = None

    def pop(self, dependency: JobKey) -> list[EngineJob]:
        """The jobs that wait for one that has just ended; they are forgotten here."""
        return list(self._dependents.pop(dependency, ()))

    def keep(self, dependency: JobKey) -> list[EngineJob]:
        """The jobs that wait for one that has just ended; from now on they hold its record."""
        dependents = self._dependents.pop(dependency, None)
        if dependents is None:
            return []
        self.holders[dependency] = dependents
        return list(dependents)

    def hold(self, dependency: JobKey, dependent: EngineJob) -> None:
        """Note that `dependent` came when `dependency` had ended, and holds its record."""
        self.holders.setdefault(dependency, {})[dependent] = None

    def let_go(self, dependency: JobKey, dependent: EngineJob) -> bool:
        """`dependent` waits for `dependency` no more, nor holds it; whether it was the last that did that."""
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
        """The record is gone: nobody holds it."""
        self.holders.pop(dependency, None)

    def of(self, dependency: JobKey) -> list[EngineJob]:
        """Return the jobs that wait for this one."""
        return list(self._dependents.get(dependency, ()))

    def known(self, dependency: JobKey, most: int) -> list[JobKey]:
        """Up to so many live jobs that wait for this one, or may read its record."""
        found = (self._dependents.get(dependency, {}), self.holders.get(dependency, {}))
        return [(job.queue, job.id) for job in islice(chain(*found), most)]

    def __len__(self) -> int:
        return len(self._dependents) + len(self.holders)
