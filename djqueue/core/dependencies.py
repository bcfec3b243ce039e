"""Which jobs wait for which: the reverse index."""

from .job import Job
from .options import JobKey


class DependencyTracker:
    """For each job of a shard that others wait for: those others, in the order in which they came.

    Jobs, not their ids: one that is enqueued again under its id is another job.
    """

    __slots__ = ("_dependents",)

    def __init__(self) -> None:
        self._dependents: dict[JobKey, dict[Job, None]] = {}

    def add(self, dependency: JobKey, dependent: Job) -> None:
        """Note that `dependent` waits for `dependency`."""
        self._dependents.setdefault(dependency, {})[dependent] = None

    def discard(self, dependency: JobKey, dependent: Job) -> None:
        """`dependent` does not wait for `dependency` any more."""
        waiting = self._dependents.get(dependency)
        if waiting is not None:
            waiting.pop(dependent, None)
            if not waiting:
                del self._dependents[dependency]

    def pop(self, dependency: JobKey) -> list[Job]:
        """The jobs that wait for one that has just ended; they are forgotten here."""
        return list(self._dependents.pop(dependency, ()))

    def of(self, dependency: JobKey) -> list[Job]:
        """The jobs that wait for this one."""
        return list(self._dependents.get(dependency, ()))

    def __len__(self) -> int:
        return len(self._dependents)
