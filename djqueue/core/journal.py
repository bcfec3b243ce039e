"""The journal: receives the engine's changes for a storage that keeps its jobs in tables, too."""

from typing import Protocol

from .enginejob import EngineJob
from .job import DeadLetterRecord
from .options import JobKey


class Journal(Protocol):
    """Receives every change, in order, while the lock of the job is held: it must return quickly, and copy
    what it keeps.
    """

    def added(self, jobs: list[EngineJob]) -> None:
        """Record new jobs."""
        ...

    def changed(self, job: EngineJob) -> None:
        """Record a changed state, counter, time or option of a job."""
        ...

    def updated(self, job: EngineJob) -> None:
        """Record a new payload or priority of a pending job, which may just have been revived."""
        ...

    def completed(self, job: EngineJob) -> None:
        """Record a completed job with its result."""
        ...

    def died(self, job: EngineJob, letter: DeadLetterRecord) -> None:
        """Record a failed job with its dead letter."""
        ...

    def revived(self, job: EngineJob) -> None:
        """Record the retry of a dead letter."""
        ...

    def removed(self, jobs: list[EngineJob]) -> None:
        """Record the removal of jobs with their results and dead letters."""
        ...

    def trimmed(self, jobs: list[EngineJob]) -> None:
        """Record that results, items, attempts or log lines of ended jobs may be gone."""
        ...

    def let_go(self, key: JobKey) -> None:
        """Record that no other job holds the record of an ended one any more; it may be gone."""
        ...

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        """Record the progress of a job and its new log lines."""
        ...

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        """Record streamed items, the last ones of a job's stream."""
        ...

    def restarted(self, job: EngineJob) -> None:
        """Record that a job starts over, without the streamed items of its last attempt."""
        ...
