"""Enqueues by any process: rows inserted in the caller's own transaction."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from django.db import connections

from djqueue import models
from djqueue.core.capacity import full_error
from djqueue.core.clock import Clock
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import OptionError
from djqueue.core.flow import Substitutes, outside
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import LIVE, PENDING, REUSABLE, State
from djqueue.core.unique import succession
from djqueue.storage import commits
from djqueue.storage.tables import rows
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import AWAY, drop_if_broken, unavailable
from djqueue.storage.tables.dialects import Dialect

Found = tuple[State, bytes | None]
"""State and result of a job."""
Owner = tuple[str, State]
"""Id and state of a job that has a unique key."""

JOBS_TOGETHER, BYTES_TOGETHER = 1_000, 1024 * 1024
"""Jobs of several batches, and the bytes of their payloads, from which on they are inserted."""


class Inserter:
    """Writes jobs to the inbox of the scheduler."""

    def __init__(self, dialect: Dialect, clock: Clock, policy: Callable[[str], QueuePolicy]) -> None:
        self._dialect = dialect
        self._clock = clock
        self._policy = policy
        self._ids = IdSource()

    # Overridden where more is known than in the tables.

    def find_job(self, queue: str, job_id: str) -> Found | None:
        """Return the state and result of a job that is not in the tables."""
        return None

    def find_owners(self, queue: str, key: str) -> list[Owner]:
        """Return the live jobs with a unique key that are not in the tables yet."""
        return []

    def have_ended(self, queue: str, ids: Sequence[str]) -> set[str]:
        """Return the jobs that have ended, although the tables still show them as live."""
        return set()

    def is_known(self, queue: str, job_id: str) -> bool:
        """Return whether a job exists that is not in the tables."""
        return self.find_job(queue, job_id) is not None

    # Enqueue.

    def insert(self, batches: Sequence[Batch], wake: Callable[[], object]) -> list[EnqueueResult]:
        """Add jobs, at once or with the caller's transaction; return the results of `Storage.enqueue`.

        Args:
            wake: Called after the commit.
        """
        for batch in batches:
            if batch.ids is not None and len(batch.ids) != len(batch.payloads):
                raise ValueError(f"expected one id per payload ({len(batch.payloads)}), got {len(batch.ids)}")
        alias = self._dialect.alias
        connection = connections[alias]
        connection.validate_no_broken_transaction()
        durable = any(batch.options.durable for batch in batches)
        try:
            set_right(self._clock)
            with self._dialect.transaction(durable=durable):
                self._check_dependencies(outside(batches))
                results = self._insert_all(batches)
                commits.note(alias, results, wake)
        except AWAY as error:
            drop_if_broken(alias)
            raise unavailable(alias, error, ", and none of the jobs was enqueued") from error
        return results

    def _insert_all(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if keys := self._contended(batches):
            self._dialect.take_turns(keys)
        results: list[EnqueueResult] = []
        substitutes = Substitutes()
        together: list[rows.Row] = []
        size = 0
        for given in batches:
            batch = substitutes.in_(given)
            if len(batches) > 1 and self._is_plain(batch):
                new, answers = self._new(batch, self._ids_of(batch), self._clock.now())
                together += new
                size += sum(map(len, batch.payloads))
                if len(together) >= JOBS_TOGETHER or size >= BYTES_TOGETHER:
                    self._write(together)
                    together, size = [], 0
            else:
                # It may look for the jobs before it in the tables.
                self._write(together)
                together, size = [], 0
                answers = self._insert(batch)
            if batch.options.rejected is not None:
                answers = [answer._replace(status="rejected") for answer in answers]
            substitutes.note(batch, answers)
            results += answers
        self._write(together)
        return results

    def _contended(self, batches: Sequence[Batch]) -> set[tuple[str, str]]:
        """Return the unique keys for which other producers have to wait; "" stands for a bounded queue."""
        keyed = {(batch.queue, key) for batch in batches if (key := batch.options.unique_key) is not None}
        queues = {batch.queue for batch in batches}
        return keyed | {(queue, "") for queue in queues if is_bounded(self._policy(queue))}

    def _is_plain(self, batch: Batch) -> bool:
        """Return whether jobs can be inserted without looking at others."""
        is_fresh = batch.ids is None or batch.fresh
        return is_fresh and batch.options.unique_key is None and not is_bounded(self._policy(batch.queue))

    def _ids_of(self, batch: Batch) -> Sequence[str]:
        if batch.ids is not None:
            return batch.ids
        return self._ids.many(len(batch.payloads), self._clock.now())

    def _insert(self, batch: Batch) -> list[EnqueueResult]:
        now = self._clock.now()
        ids = self._ids_of(batch)
        if batch.ids is None or batch.fresh:
            return self._insert_fresh(batch, ids, now)
        answers: dict[int, EnqueueResult] = {}
        left = list(range(len(ids)))
        while left:
            # Again for jobs whose ids another producer has used since they were read.
            self._insert_known(batch, ids, left, now, answers)
            left = [at for at in left if at not in answers]
        return [answers[at] for at in range(len(ids))]

    def _insert_fresh(self, batch: Batch, ids: Sequence[str], now: int) -> list[EnqueueResult]:
        new, answers = self._new(batch, ids, now)
        self._check_room(batch, answers)
        self._write(new)
        return answers

    def _new(self, batch: Batch, ids: Sequence[str], now: int) -> tuple[list[rows.Row], list[EnqueueResult]]:
        """Return the rows of a batch whose jobs have new ids, and its results."""
        if batch.options.unique_key is None:
            model = self._job(batch, "", b"", now)
            answers = [EnqueueResult(job_id, "queued", batch.queue) for job_id in ids]
            return rows.alike_rows(model, ids, batch.payloads), answers
        new: dict[str, EngineJob] = {}
        answers = []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            answer = self._keyed(batch, job_id, new)
            if answer.status == "queued":
                new[job_id] = self._job(batch, job_id, payload, now)
            answers.append(answer)
        return inbox_rows(new), answers

    def _write(self, new: Sequence[rows.Row]) -> None:
        if new:
            self._dialect.insert(models.Job, rows.NEW_JOB, new, constants=rows.UNTOUCHED)

    def _insert_known(
        self,
        batch: Batch,
        ids: Sequence[str],
        left: Sequence[int],
        now: int,
        answers: dict[int, EnqueueResult],
    ) -> None:
        there = self._there(batch.queue, [ids[at] for at in left])
        new: dict[str, EngineJob] = {}
        queued: dict[str, tuple[int, EnqueueResult]] = {}
        replacing: set[str] = set()
        """Return the ids of cancelled jobs whose rows these jobs replace."""
        for at in left:
            job_id = ids[at]
            answer = self._taken(batch, job_id, there, new) or self._keyed(batch, job_id, new)
            if answer.status != "queued":
                answers[at] = answer
                continue
            if job_id in there:
                forgotten = self._forget(batch.queue, job_id)
                if forgotten is None:
                    continue
                if forgotten is State.CANCELLED:
                    replacing.add(job_id)
            new[job_id] = self._job(batch, job_id, batch.payloads[at], now)
            queued[job_id] = at, answer
        self._check_room(batch, [answer for _, answer in queued.values()])
        for process in ("", rows.REPLACES_CANCELLED) if replacing else ("",):
            some = {job_id: job for job_id, job in new.items() if (job_id in replacing) == bool(process)}
            constants = {**rows.UNTOUCHED, "process": process}
            written = self._dialect.insert_new(
                models.Job, rows.NEW_JOB, inbox_rows(some), constants=constants, key=rows.KEY
            )
            for _, job_id in written:
                at, answer = queued[job_id]
                answers[at] = answer

    def _check_room(self, batch: Batch, answers: Sequence[EnqueueResult]) -> None:
        """Raise QueueFullError if the new jobs do not fit; only the scheduler drops jobs."""
        policy = self._policy(batch.queue)
        if not is_bounded(policy) or batch.options.rejected is not None:
            return
        assert policy.max_size is not None
        limit = policy.max_size
        if (size := _chunk_size.get()) > limit:
            limit += size - 1  # It would never fit, so let it in as long as the queue is not full.
        growth = sum(answer.status == "queued" and answer.replaced is None for answer in answers)
        pending = models.Job.objects.using(self._dialect.alias).filter(
            queue=batch.queue, state__in=[state.value for state in PENDING]
        )
        if growth and pending[:limit].count() + growth > limit:
            raise full_error(batch.queue, limit, len(batch.payloads))

    def _taken(
        self, batch: Batch, job_id: str, there: dict[str, Found], new: dict[str, EngineJob]
    ) -> EnqueueResult | None:
        """Return the result if the job of an id must not be enqueued again."""
        if job_id in new:
            return EnqueueResult(job_id, "duplicate", batch.queue, new[job_id].state)
        found = there.get(job_id) or self.find_job(batch.queue, job_id)
        if found is None or (found[0] in REUSABLE and batch.options.rejected is None):
            return None
        status = "completed" if found[0] is State.COMPLETED else "duplicate"
        return EnqueueResult(job_id, status, batch.queue, *found)

    def _keyed(self, batch: Batch, job_id: str, new: dict[str, EngineJob]) -> EnqueueResult:
        """Return the result for a job with a free id; the scheduler later replaces the jobs that it
        replaces.
        """
        key = batch.options.unique_key
        if key is None:
            return EnqueueResult(job_id, "queued", batch.queue)
        owners = [(job.id, job.state) for job in new.values()] or self._owners(batch.queue, key)
        active = next((owner for owner in owners if owner[1] is State.ACTIVE), None)
        pending = next((owner for owner in reversed(owners) if owner[1] is not State.ACTIVE), None)
        found = succession(batch.options.on_duplicate, active, pending)
        if found is None:
            owner = active or pending
            assert owner is not None
            return EnqueueResult(owner[0], "duplicate", batch.queue, owner[1])
        replaced = None if found.replaced is None else found.replaced[0]
        return EnqueueResult(job_id, "queued", batch.queue, replaced=replaced)

    def _forget(self, queue: str, job_id: str) -> State | None:
        """Delete a job whose id may be enqueued again; return its state, or None if it is another job."""
        deleted = (
            state
            for state in sorted(REUSABLE)
            if self._dialect.delete(models.Job, (*rows.KEY, "state"), [(queue, job_id, state.value)])
        )
        if (ended := next(deleted, None)) is None:
            return None
        for model in (models.JobResult, models.DeadLetter, models.JobAttempt, models.JobLog, models.JobItem):
            self._dialect.delete(model, rows.KEY, [(queue, job_id)])
        return ended

    def _job(self, batch: Batch, job_id: str, payload: bytes, now: int) -> EngineJob:
        run_at = batch.run_at if batch.run_at is not None else now + (batch.delay or 0)
        state = State.WAITING if run_at <= now else State.DELAYED
        if batch.options.depends_on:
            state = State.BLOCKED
        options = replace(batch.options, delay=batch.delay) if batch.delay else batch.options
        return EngineJob(job_id, batch.queue, batch.name, payload, options, state, now, run_at)

    def _there(self, queue: str, ids: Sequence[str]) -> dict[str, Found]:
        """Return the jobs with these ids. Results are read after states, so that the result of a job that
        ends in between is not missed.
        """
        alias = self._dialect.alias
        found: dict[str, Found] = {}
        for chunk in rows.chunked(ids):
            pairs = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk)
            states = {job_id: State(state) for job_id, state in pairs.values_list("job_id", "state")}
            completed = [job_id for job_id, state in states.items() if state is State.COMPLETED]
            found |= {job_id: (state, None) for job_id, state in states.items()}
            if completed:
                kept = models.JobResult.objects.using(alias).filter(queue=queue, job_id__in=completed)
                for job_id, result in kept.values_list("job_id", "result"):
                    found[job_id] = State.COMPLETED, bytes(result)
        return found

    def _owners(self, queue: str, key: str) -> list[Owner]:
        """Return the live jobs that have a unique key, oldest first; of pending ones, the last counts."""
        live = models.Job.objects.using(self._dialect.alias).filter(
            queue=queue, unique_key=key, state__in=[state.value for state in LIVE]
        )
        now = self._clock.now()
        found: list[Owner] = []
        for row in rows.raw_values(live.order_by("id"), ("job_id", "state", "created_at", "options")):
            ttl = rows.unpack_options(bytes(row[3])).unique_ttl
            if ttl is None or row[2] + ttl > now:
                found.append((row[0], State(row[1])))
        if found:
            ended = self.have_ended(queue, [owner[0] for owner in found])
            found = [owner for owner in found if owner[0] not in ended]
        return found or self.find_owners(queue, key)

    def _check_dependencies(self, keys: Sequence[JobKey]) -> None:
        wanted: dict[str, list[str]] = {}
        for queue, job_id in keys:
            wanted.setdefault(queue, []).append(job_id)
        for queue, ids in wanted.items():
            for chunk in rows.chunked(ids):
                mine = models.Job.objects.using(self._dialect.alias).filter(queue=queue, job_id__in=chunk)
                there = set(mine.values_list("job_id", flat=True))
                for job_id in chunk:
                    if job_id not in there and not self.is_known(queue, job_id):
                        raise OptionError(f"depends_on: queue {queue!r} has no job {job_id!r}")


_chunk_size: ContextVar[int] = ContextVar("djqueue_chunk_size", default=0)


@contextmanager
def enqueueing_chunk(size: int) -> Iterator[None]:
    """Enqueue a staged chunk of this many jobs in the block, even if it is larger than `MAX_SIZE`."""
    token = _chunk_size.set(size)
    try:
        yield
    finally:
        _chunk_size.reset(token)


def is_bounded(policy: QueuePolicy) -> bool:
    """Return whether a queue refuses jobs when it is full, at once or after a time."""
    return policy.max_size is not None and policy.when_full in ("reject", "block")


def inbox_rows(jobs: dict[str, EngineJob]) -> list[rows.Row]:
    """Return rows of jobs for the inbox."""
    return list(rows.new_rows(jobs.values(), inbox=True).values())
