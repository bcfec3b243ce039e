"""Reads by the scheduler: the engine knows what lives, and the tables have what has ended."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asgiref.sync import sync_to_async

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics
from djqueue.core.engine import Engine, EngineReads
from djqueue.core.explain import Explanation
from djqueue.core.graph import MAX_FLOW_JOBS, FlowGraph, JobLink
from djqueue.core.job import ItemMark, ItemPage, JobRecord
from djqueue.core.metrics import Bucket
from djqueue.core.options import JobKey
from djqueue.core.pages import JobPage
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage
from djqueue.storage.tables import rows
from djqueue.storage.tables.inspector import DatabaseInspector

from . import diagnosis, recovery
from .endedjobs import EndedJobs
from .gate import JournalGate
from .inbox import Inbox
from .journal import DatabaseJournal


class SchedulerReads(EngineReads):
    """Reads of the engine and of the tables. Where the tables answer alone, the journal is written first."""

    def __init__(
        self,
        alias: str,
        engine: Engine,
        journal: DatabaseJournal,
        gate: JournalGate,
        ended: EndedJobs,
        inbox: Inbox,
        clock: Clock,
        swept_at: Callable[[], int | None],
    ) -> None:
        super().__init__(engine.context, engine.workers)
        self._alias = alias
        self._journal = journal
        self._gate = gate
        self._ended = ended
        self._inbox = inbox
        self._clock = clock
        self._swept_at = swept_at
        self._inspector = DatabaseInspector(alias)

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        self._inbox.take_successors(queue, ids)
        with self._ended.lock:
            found = super().jobs(queue, ids)
            missing = [job_id for job_id, record in zip(ids, found, strict=True) if record is None]
            if missing:
                written = {
                    job_id: record
                    for job_id, record in rows.records(self._alias, queue, missing).items()
                    if not self._journal.is_gone((queue, job_id, record.created_at))
                }
                found = [record or written.get(job_id) for job_id, record in zip(ids, found, strict=True)]
        return found

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await sync_to_async(self.jobs, thread_sensitive=True)(queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        with self._ended.lock:
            found = super().items(queue, marks)
            missing = [mark for mark, page in zip(marks, found, strict=True) if page is None]
            written = iter(self._inspector.items(queue, missing, self._clock.now()))
            return [next(written) if page is None else page for page in found]

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return await sync_to_async(self.items, thread_sensitive=True)(queue, marks)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        self._inbox.take_successors(queue, ids)
        with self._ended.lock:
            found = super().states(queue, ids)
            missing = [job_id for job_id, state in zip(ids, found, strict=True) if state is None]
            if missing:
                written = self._written_states(queue, missing)
                found = [state or written.get(job_id) for job_id, state in zip(ids, found, strict=True)]
        return found

    def _written_states(self, queue: str, ids: Sequence[str]) -> dict[str, State]:
        """Return states from the tables, except of jobs whose rows are only waiting to be deleted."""
        found = {}
        jobs: Any = models.Job.objects.using(self._alias)
        for chunk in rows.chunked(ids):
            mine = jobs.filter(queue=queue, job_id__in=chunk)
            for job_id, state, created_at in rows.raw_values(mine, ("job_id", "state", "created_at")):
                if not self._journal.is_gone((queue, job_id, created_at)):
                    found[job_id] = State(state)
        return found

    def counts(self, queue: str) -> dict[State, int]:
        self._gate.flush()
        with self._ended.lock:
            counts = super().counts(queue)
            ended = self._inspector.counts(queue, recovery.ENDED)
        return {**counts, **{state: ended.get(state, 0) for state in recovery.ENDED}}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        self._gate.flush()
        return self._inspector.page(queue, state, limit, after)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        self._gate.flush()
        return self._inspector.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        self._gate.flush()
        if queues is None:
            queues = sorted({*self._context.queue_names(), *self._inspector.queues()})
        return self._inspector.find(id, queues)

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        self._gate.flush()
        return self._inspector.about(subject, limit, cursor, queues)

    def explain(self, queue: str, id: str) -> Explanation | None:
        explanation = super().explain(queue, id)
        if explanation is None:
            with self._ended.known([(queue, id)]):
                explanation = super().explain(queue, id)
        return explanation

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        self._inbox.take_successors(queue, [id])
        return super().flow(queue, id, limit)

    def links(self, keys: Sequence[JobKey], limit: int) -> Mapping[JobKey, JobLink]:
        with self._ended.lock:
            found = dict(super().links(keys, limit))
            missing = [key for key in keys if key not in found]
            if missing:
                for key, one in self._inspector.links(missing).items():
                    if not self._journal.is_gone((*key, one.node.created_at)):
                        waiting = (*self.dependents(key, limit), *one.dependents)
                        found[key] = one._replace(dependents=waiting)
        return found

    def change_version(self) -> str | None:
        # The tables are written a little later than the engine changes.
        return f"{super().change_version()}:{self._journal.changes.value}"

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        self._gate.flush()
        return super().series(queues, start, end, step, by_name)

    def diagnostics(self) -> Diagnostics:
        now = self._clock.now()
        journal = self._journal
        lines = [
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(self._context.queue_names()):,}"),
            *diagnosis.of_database(self._alias, now),
            *diagnosis.of_journal(journal.backlog, journal.flushed_at, self._swept_at(), now),
        ]
        return Diagnostics("database", now, lines)
