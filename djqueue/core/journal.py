"""What the engine tells a storage that keeps its jobs elsewhere, too."""

from typing import Protocol

from .job import DeadLetter, Job


class Journal(Protocol):
    """Hears of every change, in order, while the lock that guards the job is held: it must be quick,
    and copy what it wants to keep.
    """

    def added(self, jobs: list[Job]) -> None:
        """Jobs that are new."""
        ...

    def changed(self, job: Job) -> None:
        """A job whose state, counters, times or options changed."""
        ...

    def updated(self, job: Job) -> None:
        """A pending job that was given another payload or other options."""
        ...

    def completed(self, job: Job) -> None:
        """A job that completed; its result is there."""
        ...

    def died(self, job: Job, letter: DeadLetter) -> None:
        """A job that failed for good."""
        ...

    def revived(self, job: Job) -> None:
        """A job that left the dead letters and lives again."""
        ...

    def removed(self, jobs: list[Job]) -> None:
        """Jobs whose records go, with result and dead letter; told while the engine still knows them: one
        who finds that it does not, and reads them elsewhere, can then tell that they are gone.
        """
        ...

    def reported(self, job: Job, lines: tuple[tuple[int, str], ...]) -> None:
        """A job whose progress changed, and its new log lines."""
        ...
