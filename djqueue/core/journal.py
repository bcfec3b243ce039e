"""What the engine tells a storage that keeps its jobs elsewhere, too."""

from contextlib import AbstractContextManager
from typing import Protocol

from .job import DeadLetterRecord, EngineJob
from .options import JobKey


class Journal(Protocol):
    """Hears of every change, in order, while the lock that guards the job is held: it must be quick,
    and copy what it wants to keep.
    """

    def added(self, jobs: list[EngineJob]) -> None:
        """Jobs that are new."""
        ...

    def changed(self, job: EngineJob) -> None:
        """A job whose state, counters, times or options changed."""
        ...

    def updated(self, job: EngineJob) -> None:
        """A pending job that was given another payload or other options; it may just have been revived."""
        ...

    def completed(self, job: EngineJob) -> None:
        """A job that completed; its result is there."""
        ...

    def died(self, job: EngineJob, letter: DeadLetterRecord) -> None:
        """A job that failed for good."""
        ...

    def revived(self, job: EngineJob) -> None:
        """A job that left the dead letters and lives again."""
        ...

    def removed(self, jobs: list[EngineJob]) -> None:
        """Jobs whose records go, with result and dead letter; told while the engine still knows them: one
        who finds that it does not, and reads them elsewhere, can then tell that they are gone.
        """
        ...

    def put_off(self, key: JobKey) -> None:
        """The record of an ended job is to go, and is kept for others for now."""
        ...

    def let_go(self, key: JobKey) -> None:
        """The record of a job that has ended is kept for no other any more; it may be gone."""
        ...

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        """A job whose progress changed, and its new log lines."""
        ...

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        """A job whose run has sent items, which are the last ones of its stream."""
        ...

    def renewed(self, job: EngineJob) -> None:
        """An active job of another process whose lease was extended."""
        ...

    def stepped(self, job: EngineJob) -> None:
        """A job whose times were moved along with the wall clock: see `clocksteps`."""
        ...

    def postponed(self, letter: DeadLetterRecord) -> None:
        """A dead letter that is retried by itself at another time than before."""
        ...

    def clock_set(self, offset: int) -> None:
        """All jobs have followed the wall clock; `offset` is that of `StepDetector`."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What the thread tells while this lasts is kept or lost as one."""
        ...

    def restarted(self, job: EngineJob) -> None:
        """A job whose run is over, and with it what that has sent."""
        ...
