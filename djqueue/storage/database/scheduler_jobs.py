"""Changes of single jobs by the scheduler; those that have ended, or have just arrived, are in the tables
alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from djqueue.core.engine import Engine
from djqueue.core.job import CancelResult
from djqueue.core.options import JobKey
from djqueue.storage.facets import Jobs

from .endedjobs import EndedJobs
from .gate import JournalGate
from .journal import DatabaseJournal


class SchedulerJobs(Jobs):
    """Changes made by the engine, which has the jobs loaded meanwhile."""

    def __init__(self, engine: Engine, journal: DatabaseJournal, gate: JournalGate, ended: EndedJobs) -> None:
        self._engine = engine
        self._journal = journal
        self._gate = gate
        self._ended = ended

    @contextmanager
    def _changing(self, keys: Iterable[JobKey]) -> Iterator[None]:
        self._gate.check()
        with self._ended.known(keys):
            yield

    @contextmanager
    def _changing_written(self, keys: Iterable[JobKey]) -> Iterator[None]:
        """The same, for changes that producers elsewhere, who see the tables, must see at once."""
        self._gate.check()
        self._gate.wait_for_room()
        with self._ended.known(keys):
            yield
        self._gate.flush()

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        with self._changing((queue, job_id) for job_id in ids):
            return self._engine.jobs.cancel(queue, ids, reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        with self._changing((queue, job_id) for job_id in ids):
            return self._engine.jobs.promote(queue, ids)

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        with self._changing((queue, job_id) for job_id in ids):
            return self._engine.jobs.reschedule(queue, ids, run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        with self._changing((queue, job_id) for job_id in ids):
            return self._engine.jobs.update(queue, ids, priority, payload)

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        # One transaction: a job that waits again has its new payload, whatever process dies when.
        with self._changing_written([(queue, id)]), self._journal.together():
            return self._engine.jobs.replace_payload(queue, id, payload, old, retry=retry)

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        with self._changing_written((name, job_id) for job_id in ids for name in (queue, to)):
            return self._engine.jobs.move(queue, ids, to)

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        with self._changing_written((queue, job_id) for job_id in ids):
            return self._engine.jobs.retry(queue, ids, dry_run=dry_run)

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        self._gate.check()
        removed = self.remove_unwritten(queue, ids, ended_before)
        self._gate.flush()
        return removed

    def remove_unwritten(self, queue: str, ids: Sequence[str], ended_before: int | None = None) -> list[bool]:
        """Remove jobs; the caller has the journal written."""
        # To the next scheduler a removed job has completed: what becomes of its dependents is written with
        # it.
        with self._ended.known((queue, job_id) for job_id in ids), self._journal.together():
            return self._engine.jobs.remove(queue, ids, ended_before=ended_before)

    def remove_ended(self, queue: str, ids: Sequence[str], ended_before: int) -> int:
        """Remove records that were found in the tables; returns how many were still there.

        A producer may have enqueued one of the ids again since: that job is not the one found, and stays.
        """
        return sum(self.remove_unwritten(queue, ids, ended_before))
