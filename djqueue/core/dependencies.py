"""Which jobs wait for which: the reverse index."""

from .options import JobKey


class DependencyTracker:
    """For each job of a shard that others wait for: the keys of those others."""

    __slots__ = ("_dependents",)

    def __init__(self) -> None:
        self._dependents: dict[JobKey, set[JobKey]] = {}

    def add(self, dependency: JobKey, dependent: JobKey) -> None:
        """Note that `dependent` waits for `dependency`."""
        self._dependents.setdefault(dependency, set()).add(dependent)

    def discard(self, dependency: JobKey, dependent: JobKey) -> None:
        """`dependent` does not wait for `dependency` any more."""
        waiting = self._dependents.get(dependency)
        if waiting is not None:
            waiting.discard(dependent)
            if not waiting:
                del self._dependents[dependency]

    def pop(self, dependency: JobKey) -> set[JobKey]:
        """The jobs that wait for one that has just ended; they are forgotten here."""
        return self._dependents.pop(dependency, set())

    def of(self, dependency: JobKey) -> frozenset[JobKey]:
        """The jobs that wait for this one."""
        return frozenset(self._dependents.get(dependency, ()))

    def __len__(self) -> int:
        return len(self._dependents)
