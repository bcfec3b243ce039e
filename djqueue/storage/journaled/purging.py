"""The scheduler's retention: removes expired rows, and rows beyond the limits of a queue."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db.models import Model

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.engine import Engine
from djqueue.core.metrics import Tiers
from djqueue.core.options import JobKey
from djqueue.core.retention import Retention
from djqueue.core.states import TERMINAL, State
from djqueue.storage import sparktables
from djqueue.storage.engined import WORKER_TTL
from djqueue.storage.publishing import AbandonedPlans
from djqueue.storage.tables import rows

from . import metrics, recovery
from .bulkwrites import DatabaseBulkWriteReports
from .journal import DatabaseJournal, JournalGate
from .staging import DatabaseStaging, purge_staged

LIMIT = 1_000
"""Old rows removed at a time."""
STEPS = 10
"""Steps of each kind in one sweep; other work can run between them."""
LONG_JOBS = 100
"""Jobs whose attempts or log lines are removed at a time: each may have many."""

RemoveEnded = Callable[[str, Sequence[str], int], int]
"""Removes the jobs of a queue that ended before a time; returns their number."""


class Purge:
    """Removes old rows, a bounded number in each sweep."""

    def __init__(
        self,
        staging: DatabaseStaging,
        engine: Engine,
        journal: DatabaseJournal,
        gate: JournalGate,
        retention: Mapping[str, Retention],
        tiers: Tiers,
        clock: Clock,
        remove_ended: RemoveEnded,
    ) -> None:
        self._dialect = staging.dialect
        self._alias = staging.dialect.alias
        self._engine = engine
        self._journal = journal
        self._gate = gate
        self._retention = retention
        self._tiers = tiers
        self._clock = clock
        self._remove_ended = remove_ended
        reports = DatabaseBulkWriteReports(self._alias, clock)
        self._abandoned = AbandonedPlans(staging, reports, engine.reads.counts)
        self._positions: dict[tuple[str, State, str], tuple[int, int]] = {}
        """The last ended job (its end, the number of its row) whose attempts, log lines or items were
        removed.
        """

    def run(self, now: int) -> int:
        """Remove what has expired by a time in UTC milliseconds; return the number of removed jobs."""
        removed = self._in_steps(lambda: self._purge_jobs(now))
        for queue, retention in self._retention.items():
            if retention.counts:
                if self._engine.persistence.put_off(queue):
                    self._gate.flush()  # pinned jobs do not count
                for state in recovery.ENDED:
                    removed += self._in_steps(partial(self._trim, queue, state))
                self._in_steps(partial(self._trim_results, queue))
            kinds: tuple[tuple[type[Model], int | None, Iterable[State]], ...] = (
                (models.JobAttempt, retention.attempts.age, TERMINAL),
                (models.JobLog, retention.logs.age, TERMINAL),
                (models.JobItem, retention.results.age, (State.COMPLETED,)),
            )
            for model, age, states in kinds:
                for state in states if age is not None else ():
                    self._in_steps(partial(self._remove_belongings, queue, state, model, now - (age or 0)))
        self._in_steps(lambda: self._purge_results(now))
        self._in_steps(lambda: purge_staged(self._dialect, now, LIMIT))
        if sparktables.are_installed():
            self._abandoned.sweep()
        metrics.purge(self._alias, self._tiers, now, LIMIT)
        models.WorkerState.objects.using(self._alias).filter(seen_at__lte=now - WORKER_TTL).delete()
        return removed

    def _in_steps(self, step: Callable[[], int]) -> int:
        removed = 0
        for _ in range(STEPS):
            part = step()
            removed += part
            if not part:
                break
        if removed:
            self._engine.changes.bump()
        return removed

    def _purge_jobs(self, now: int) -> int:
        jobs: Any = models.Job.objects.using(self._alias)
        old = jobs.filter(expires_at__lte=now, state__in=recovery.ENDED)
        found = list(old.order_by("expires_at").values_list("queue", "job_id")[:LIMIT])
        return self._remove(self._unpinned(found), now)

    def _unpinned(self, found: Iterable[JobKey]) -> dict[str, list[str]]:
        """Return, by queue, the ended jobs that no other job needs; postpone the ends of the others."""
        keys: dict[str, list[str]] = {}
        for queue, job_id in found:
            keys.setdefault(queue, []).append(job_id)
        for queue, ids in keys.items():
            if needed := self._engine.persistence.put_off(queue, ids):
                keys[queue] = [job_id for job_id in ids if job_id not in needed]
                # Otherwise the next step would find the same rows.
                self._gate.flush()
        return keys

    def _trim(self, queue: str, state: State) -> int:
        """Remove some of the records above a queue's limit for one state."""
        surplus = self._journal.book.surplus(queue, state, LIMIT)
        return self._remove(self._unpinned((queue, job_id) for job_id in surplus), self._clock.now())

    def _remove(self, jobs: Mapping[str, Sequence[str]], now: int) -> int:
        removed = sum(self._remove_ended(queue, ids, now + 1) for queue, ids in jobs.items() if ids)
        if removed:
            self._gate.flush()
        return removed

    def _trim_results(self, queue: str) -> int:
        return self._remove_results(self._journal.book.surplus_results(queue, LIMIT))

    def _purge_results(self, now: int) -> int:
        old = models.JobResult.objects.using(self._alias).filter(expires_at__lte=now).order_by("expires_at")
        due = [tuple(row) for row in rows.raw_values(old[:LIMIT], ("queue", "job_id", "completed_at"))]
        return self._remove_results(due)

    def _remove_results(self, due: Sequence[tuple[str, str, int]]) -> int:
        """Remove results, by queue, id and end of their jobs, unless other jobs need them."""
        unpinned = self._unpinned(row[:2] for row in due)
        wanted = {(queue, job_id) for queue, ids in unpinned.items() for job_id in ids}
        found = [row for row in due if row[:2] in wanted]
        if found:
            self._journal.results_over(found)
            self._gate.flush()
        return len(found)

    def _remove_belongings(self, queue: str, state: State, model: type[Model], before: int) -> int:
        """Remove the attempts, log lines or items of some of the jobs that ended before a time."""
        kind = (queue, state, model.__name__)
        seen = self._positions.get(kind, (0, 0))
        if seen[0] > before:
            seen = (0, 0)  # the clock was set back
        jobs: Any = models.Job.objects.using(self._alias)
        old = jobs.filter(queue=queue, state=state.value, finished_at__gte=seen[0], finished_at__lte=before)
        old = old.exclude(finished_at=seen[0], id__lte=seen[1]).order_by("finished_at", "id")
        page = list(rows.raw_values(old[:LONG_JOBS], ("job_id", "finished_at", "id")))
        if page:
            ids = [job_id for job_id, *_ in page]
            if state is State.FAILED:
                ids = self._engine.persistence.drop_details(queue, ids, logs=model is models.JobLog)
            with self._gate.transaction():
                self._dialect.delete(model, rows.KEY, [(queue, job_id) for job_id in ids])
            self._positions[kind] = page[-1][1:]
        return len(page)
