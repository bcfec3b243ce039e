"""The facets of the scheduler.

The engine answers; for jobs that have ended or have just arrived, the tables do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Unpack

from asgiref.sync import sync_to_async

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics
from djqueue.core.engine import Engine, EngineReads
from djqueue.core.errors import StorageError
from djqueue.core.explain import Explanation
from djqueue.core.graph import MAX_FLOW_JOBS, FlowGraph, JobLink
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.job import CancelResult, ItemMark, ItemPage, JobRecord
from djqueue.core.limiter import UNSET, Rate, SetConcurrency, SetRate
from djqueue.core.metrics import Bucket
from djqueue.core.options import MAX_INTEGER, JobKey
from djqueue.core.pages import JobPage
from djqueue.core.sharing import LimiterState
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage

from ..facets import Jobs, Limiters, Queues
from ..tables import rows
from ..tables.inspector import DatabaseInspector
from . import diagnosis, recovery
from .endedjobs import EndedJobs
from .inbox import NO_LIMIT, Inbox
from .journal import DatabaseJournal, JournalGate
from .modes import GroupModes


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


CLEAN_LIMIT = 1_000
"""Ended jobs removed at a time."""


class SchedulerQueues(Queues):
    """Controls of queues."""

    def __init__(
        self,
        alias: str,
        engine: Engine,
        journal: DatabaseJournal,
        gate: JournalGate,
        modes: GroupModes,
        inbox: Inbox,
        jobs: SchedulerJobs,
    ) -> None:
        self._alias = alias
        self._engine = engine
        self._journal = journal
        self._gate = gate
        self._modes = modes
        self._inbox = inbox
        self._jobs = jobs
        self._inspector = DatabaseInspector(alias)

    def names(self) -> list[str]:
        return sorted({*self._engine.queues.names(), *self._inspector.queues()})

    def pause(self, queue: str) -> None:
        self._gate.check()
        self._engine.queues.pause(queue)
        self._write_queue(queue)

    def resume(self, queue: str) -> None:
        self._gate.check()
        self._engine.queues.resume(queue)
        self._write_queue(queue)

    def is_paused(self, queue: str) -> bool:
        return self._engine.queues.is_paused(queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._gate.check()
        self._engine.queues.set_limits(queue, rate, concurrency)
        self._write_queue(queue)

    def set_group_limit(self, queue: str, group: str | None, **overrides: Unpack[GroupWords]) -> None:
        self._gate.check()
        self._engine.queues.set_group_limit(queue, group, **overrides)
        self._write_group(queue, group)

    def pause_group(self, queue: str, group: str) -> None:
        self._gate.check()
        self._engine.queues.pause_group(queue, group)
        self._write_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        self._gate.check()
        self._engine.queues.resume_group(queue, group)
        self._write_group(queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        return self._engine.queues.group_limits(queue)

    def _write_queue(self, queue: str) -> None:
        rate, concurrency = self._engine.queues.limits(queue)
        policy = self._engine.context.policy(queue)
        if (rate, concurrency) == (policy.rate, policy.concurrency):
            # The limits of the settings are not written: they may be others after the next start.
            rate = concurrency = None
        self._journal.queue_changed(
            queue, (queue, self._engine.queues.is_paused(queue), *_limit_columns(rate, concurrency))
        )
        self._gate.flush(in_effect=f"queue {queue!r}")

    def _write_group(self, queue: str, group: str | None) -> None:
        self._modes.agree(queue)
        self._modes.note_group(queue, group)
        self._gate.flush(in_effect=f"queue {queue!r}")

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        self._gate.check()
        self._inbox.take_in_all()
        self._gate.flush()
        removed = self._clean_ended(queue, states, before, limit)
        others = states - {*recovery.ENDED}
        if others and (limit is None or removed < limit):
            left = None if limit is None else limit - removed
            parts = self._engine.queues.clean_in_parts(queue, frozenset(others), before, left)
            part: int | None = 0
            while part is not None:
                with self._journal.together():
                    part = next(parts, None)
                removed += part or 0
                self._gate.flush()
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        self._gate.check()
        self._inbox.take_in_all()
        groups = {None, *self._engine.queues.group_limits(queue)}
        self._modes.forget(queue)
        with self._journal.together():
            removed = self._engine.queues.obliterate(queue, force=force)
        self._journal.queue_changed(queue, None)
        for group in groups:
            self._journal.group_changed((queue, group or ""), None)
        self._gate.flush()
        removed += self._clean_ended(queue, frozenset(recovery.ENDED), NO_LIMIT, None)
        with suppress(StorageError):  # Jobs that were enqueued and claimed in the meantime stay.
            # The queue itself, which came back with the last of its ended jobs.
            removed += self._engine.queues.obliterate(queue)
        self._gate.flush()
        return removed

    def _clean_ended(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
        removed = 0
        ended = [state.value for state in recovery.ENDED if state in states]
        jobs: Any = models.Job.objects.using(self._alias)
        while ended and (limit is None or removed < limit):
            found = jobs.filter(queue=queue, state__in=ended, finished_at__lt=before)
            count = CLEAN_LIMIT if limit is None else min(CLEAN_LIMIT, limit - removed)
            ids: Sequence[str] = list(
                found.order_by("finished_at", "id").values_list("job_id", flat=True)[:count]
            )
            gone = self._jobs.remove_ended(queue, ids, before)
            removed += gone
            self._gate.flush()
            if not gone:
                break
        return removed


class SchedulerLimiters(Limiters):
    """Shared limiters."""

    def __init__(self, engine: Engine, journal: DatabaseJournal, gate: JournalGate) -> None:
        self._engine = engine
        self._journal = journal
        self._gate = gate

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._gate.check()
        self._engine.limiters.set(name, rate, concurrency)
        rate, concurrency, *_ = self._engine.limiters.state(name)
        policy = self._engine.context.limiter(name).policy
        # The limits of the settings are not written: they may be others after the next start.
        is_override = (rate, concurrency) != (policy.rate, policy.concurrency)
        self._journal.limiter_changed(
            name, (name, *_limit_columns(rate, concurrency)) if is_override else None
        )
        self._gate.flush(in_effect=f"limiter {name!r}")

    def state(self, name: str) -> LimiterState:
        return self._engine.limiters.state(name)


def _limit_columns(rate: Rate | None, concurrency: int | None) -> tuple[Any, Any, int | None]:
    capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
    return capacity, per, None if concurrency is None else min(concurrency, MAX_INTEGER)


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

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        self._gate.flush()
        return super().cumulative(queues)

    def diagnostics(self) -> Diagnostics:
        now = self._clock.now()
        journal = self._journal
        lines = [
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(self._context.queue_names()):,}"),
            *diagnosis.of_database(self._alias, now),
            *diagnosis.of_journal(journal.backlog, journal.flushed_at, self._swept_at(), now),
        ]
        return Diagnostics("database", now, lines)
