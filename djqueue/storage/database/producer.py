"""Enqueues by any process: rows inserted in the caller's own transaction."""

from collections.abc import Callable, Sequence
from typing import Any

from django.db import InterfaceError, OperationalError, ProgrammingError, connections, transaction

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult, Job
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, State

from . import rows
from .dialects import Dialect


class Inserter:
    """Writes jobs to the inbox of the scheduler."""

    def __init__(self, dialect: Dialect, clock: Clock) -> None:
        self._dialect = dialect
        self._clock = clock
        self._ids = IdSource()

    def insert(self, batches: Sequence[Batch], wake: Callable[[], object]) -> list[EnqueueResult]:
        """Add jobs: at once outside a transaction, else when the caller's commits.

        wake: called after that. See `Storage.enqueue` for the answers.
        """
        alias = self._dialect.alias
        connection = connections[alias]
        connection.validate_no_broken_transaction()
        durable = any(batch.options.durable for batch in batches)
        try:
            if not connection.in_atomic_block:
                self._dialect.tune(durable=durable)
            with self._dialect.transaction():
                results = [result for batch in batches for result in self._insert(batch)]
                transaction.on_commit(lambda: wake(), using=alias)
        except (OperationalError, InterfaceError, ProgrammingError) as error:
            raise StorageUnavailableError(
                f"the database {alias!r} did not take the jobs, and none was enqueued: {error}. Is it "
                "running, and are its tables there (manage.py migrate)?"
            ) from error
        return results

    def _insert(self, batch: Batch) -> list[EnqueueResult]:
        now = self._clock.now()
        ids = batch.ids if batch.ids is not None else self._ids.many(len(batch.payloads), now)
        known = batch.ids is not None and not batch.fresh
        there = self._there(batch.queue, ids) if known else {}
        self._check_dependencies(batch.options.depends_on)
        answers: dict[int, EnqueueResult] = {}
        new: dict[str, Job] = {}
        for at, (job_id, payload) in enumerate(zip(ids, batch.payloads, strict=True)):
            answer = self._refused(batch, job_id, there, new)
            if answer is None:
                answer = EnqueueResult(job_id, "queued", batch.queue)
                new[job_id] = self._job(batch, job_id, payload, now)
            answers[at] = answer
        if new:
            written = self._dialect.insert(
                models.Job,
                rows.NEW_JOB,
                list(rows.new_rows(new.values(), inbox=True).values()),
                constants=rows.UNTOUCHED,
                key=rows.KEY if known else (),
            )
            if written < len(new):
                self._lost_races(batch, answers)
        return [answers[at] for at in range(len(ids))]

    def _refused(
        self, batch: Batch, job_id: str, there: dict[str, tuple[State, Any]], new: dict[str, Job]
    ) -> EnqueueResult | None:
        if job_id in new:
            return EnqueueResult(job_id, "duplicate", batch.queue, State.WAITING)
        if batch.options.unique_key is not None:
            owner = self._owner(batch.queue, batch.options.unique_key)
            if owner is None and new:
                owner = next(iter(new)), State.WAITING
            if owner is not None:
                return EnqueueResult(owner[0], "duplicate", batch.queue, owner[1])
        found = there.get(job_id)
        if found is None:
            return None
        state, result = found
        if state in LIVE:
            return EnqueueResult(job_id, "duplicate", batch.queue, state)
        if state is State.COMPLETED:
            return EnqueueResult(job_id, "completed", batch.queue, state, result)
        key = [(batch.queue, job_id)]
        for model in (
            models.Job,
            models.JobResult,
            models.DeadLetter,
            models.JobAttempt,
            models.JobLog,
        ):
            self._dialect.delete(model, rows.KEY, key)
        return None

    def _job(self, batch: Batch, job_id: str, payload: bytes, now: int) -> Job:
        run_at = batch.run_at if batch.run_at is not None else now + (batch.delay or 0)
        state = State.WAITING if run_at <= now else State.DELAYED
        if batch.options.depends_on:
            state = State.BLOCKED
        return Job(job_id, batch.queue, batch.name, payload, batch.options, state, now, run_at)

    def _there(self, queue: str, ids: Sequence[str]) -> dict[str, tuple[State, Any]]:
        """State and result of the jobs that have these ids."""
        alias = self._dialect.alias
        found: dict[str, tuple[State, Any]] = {}
        for chunk in rows.chunked(ids):
            mine = {"queue": queue, "job_id__in": chunk}
            results = dict(
                models.JobResult.objects.using(alias).filter(**mine).values_list("job_id", "result")
            )
            pairs = models.Job.objects.using(alias).filter(**mine).values_list("job_id", "state")
            for job_id, state in pairs:
                result = results.get(job_id)
                found[job_id] = State(state), None if result is None else bytes(result)
        return found

    def _owner(self, queue: str, key: str) -> tuple[str, State] | None:
        live = models.Job.objects.using(self._dialect.alias).filter(
            queue=queue, unique_key=key, state__in=[state.value for state in LIVE]
        )
        now = self._clock.now()
        for row in rows.raw_values(live, ("job_id", "state", "created_at", "options")):
            ttl = rows.unpack_options(bytes(row[3])).unique_ttl
            if ttl is None or row[2] + ttl > now:
                return row[0], State(row[1])
        return None

    def _lost_races(self, batch: Batch, answers: dict[int, EnqueueResult]) -> None:
        """Another producer wrote some of the ids since we looked: theirs is the job."""
        mine = [answer.id for answer in answers.values() if answer.status == "queued"]
        payloads = {job_id: batch.payloads[at] for at, job_id in enumerate(batch.ids or ())}
        alias = self._dialect.alias
        for chunk in rows.chunked(mine):
            found = models.Job.objects.using(alias).filter(queue=batch.queue, job_id__in=chunk)
            for job_id, state, payload, inbox in found.values_list("job_id", "state", "payload", "inbox"):
                if inbox and bytes(payload) == payloads[job_id]:
                    continue
                for at, answer in answers.items():
                    if answer.id == job_id and answer.status == "queued":
                        answers[at] = EnqueueResult(job_id, "duplicate", batch.queue, State(state))

    def _check_dependencies(self, keys: Sequence[JobKey]) -> None:
        for queue, job_id in keys:
            alias = self._dialect.alias
            if not models.Job.objects.using(alias).filter(queue=queue, job_id=job_id).exists():
                raise OptionError(f"depends_on: queue {queue!r} has no job {job_id!r}")
