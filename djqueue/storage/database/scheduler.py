"""The storage inside the scheduler's process: engine, journal, socket and inbox."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import Error, connections
from django.db.models import F

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.engine import DEFAULT_POLICY, Engine
from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.flow import outside
from djqueue.core.groups import NO_LIMIT
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    EnqueueResult,
    Finished,
    Incident,
    Job,
    JobRecord,
    Outcome,
    WorkerInfo,
)
from djqueue.core.limiter import Rate
from djqueue.core.maintenance import Swept
from djqueue.core.options import MAX_INTEGER, JobKey
from djqueue.core.queue import OPTIONAL, QueuePolicy
from djqueue.core.retention import NO_RETENTION
from djqueue.core.states import State
from djqueue.storage import room
from djqueue.storage.base import P, T
from djqueue.storage.engined import WORKER_TTL, EngineStorage

from . import recovery, rows
from .away import in_one_line
from .dialects import Dialect
from .inspector import Inspector
from .journal import DatabaseJournal, LeaseLost, Waiter
from .lease import SchedulerLease
from .producer import Found, Inserter, Owner

logger = logging.getLogger("djqueue.scheduler")

POLL = 1.0
"""Seconds between looks into the inbox, should a wake-up have been lost."""
INBOX_PAGE = 2_000
PURGE_LIMIT = 1_000
"""Old rows taken away at a time."""
FOREVER = 2**62
MANY = 10_000
"""Ended jobs that wait to be forgotten: then those who would put that off wait first, but not for long."""
PATIENCE = 1.0
"""Seconds."""


class SchedulerStorage(EngineStorage):
    """What the engine knows it answers; what has ended is in the tables."""

    def __init__(
        self,
        dialect: Dialect,
        lease: SchedulerLease,
        clock: Clock,
        policies: Mapping[str, QueuePolicy] | None = None,
        cores: int | None = None,
        lost: Callable[[], None] | None = None,
        incidents: Callable[[list[Incident]], None] | None = None,
    ) -> None:
        self._alias = dialect.alias
        self._dialect = dialect
        self._lease = lease
        self._clock = clock
        self._inserter = _EngineInserter(dialect, clock, self)
        self._inspector = Inspector(dialect.alias)
        self._identity = threading.Condition()
        """Held while the engine and the tables are asked for ids, and while the engine forgets ended jobs;
        not while others are told of anything.
        """
        self._pins = 0
        """How many are at work with ids that they have looked up: until they are done none is forgotten."""
        self._forgettable: list[Job] = []
        self._inbox = threading.RLock()
        self._retention = {
            name: policy.retention
            for name, policy in (policies or {}).items()
            if policy.retention is not NO_RETENTION
        }
        self._journal = DatabaseJournal(dialect, lease.hold, self._written, lost or _nothing, self._retention)
        self.engine = Engine(
            clock=clock,
            journal=self._journal,
            policies=policies,
            default_policy=DEFAULT_POLICY,
            keep_finished=False,
            cores=cores,
            incidents=incidents,
        )
        self._taken: set[int] = set()
        """Numbers of rows that were taken in, and of which the tables may not know it yet."""
        self._recorded: set[str] = set()
        """Queues whose mode this process has written down."""
        self._is_open = False
        """Whether this is the scheduler, with all that is alive, and not for a moment with some jobs."""
        self._closing = threading.Event()
        self._arrived = threading.Event()
        self._inbox_thread = threading.Thread(target=self._watch_inbox, name="djqueue-inbox", daemon=True)

    # Life.

    def open(self) -> dict[str, int]:
        """Load everything that is alive, and begin to write; returns how much it was."""
        recovery.agree(self._alias, self.engine)
        self._journal.start()
        self._is_open = True
        counts = recovery.recover(self._alias, self.engine, self._journal, self._take_in_all, self._knowing)
        self._inbox_thread.start()
        return counts

    def open_for(self, queue: str, ids: Sequence[str] | None, to: str | None = None) -> None:
        """Load these jobs (None: all) of one queue alone, and what depends on them; this thread writes.

        to: a queue to which they are moved, of which what may be in their way is loaded, too.
        """
        recovery.borrow(self._alias, self.engine, self._journal, self._knowing, queue, ids, to)

    def close(self) -> None:
        """Write what is left, and let the next scheduler come."""
        self._closing.set()
        self._arrived.set()
        if self._inbox_thread.is_alive():
            self._inbox_thread.join()
        self._journal.close()

    def describe(self) -> str:
        """See `Storage.describe`."""
        return f"database {self._alias!r}"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Storage.acall`: most verbs read tables, on the thread of the async ORM."""
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`. Inside a transaction the jobs are part of it, and do not wait for room."""
        if self.engine.may_block and not connections[self._alias].in_atomic_block:
            return room.enqueue(self, self.engine.policy, batches, self.enqueue_at_once)
        return self.enqueue_at_once(batches)

    def enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`; never waits for room."""
        for batch in batches:
            self._record_mode(batch)
        if connections[self._alias].in_atomic_block and not all(_detached(batch) for batch in batches):
            return self._inserter.insert(batches, self._arrived.set)
        self._check()
        results = self._accept(batches)
        try:
            if _durable(batches):
                self._journal.sync(durable=True)
            elif self._journal.is_full():
                self._journal.wait_for_room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if self.engine.may_block:
            if _called_by_sync_code():
                return await self.acall(self.enqueue, batches)
            return await room.aenqueue(self, self.engine.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if not _simple(batches) or _called_by_sync_code():
            return await self.acall(self.enqueue_at_once, batches)
        for batch in batches:
            self._record_mode(batch)
        await self._acheck()
        results = self.engine.enqueue(batches)
        try:
            if _durable(batches):
                await self._synced(durable=True)
            await self._room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    # Runs.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        self._check()
        if self._journal.is_full():
            self._journal.wait_for_room()
        return self.engine.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        await self._acheck()
        await self._room()
        return self.engine.finish(outcomes, then)

    def _check(self) -> None:
        """Raise LeaseLost if this is the scheduler no more: one that was asleep learns that by writing."""
        self._journal.check()
        if self._lease.has_run_out():
            self._journal.sync()

    async def _acheck(self) -> None:
        self._journal.check()
        if self._lease.has_run_out():
            await self._synced()

    async def _room(self) -> None:
        if self._journal.is_full():
            await asyncio.to_thread(self._journal.wait_for_room)

    def _accept(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if _simple(batches):
            return self.engine.enqueue(batches)
        keys = [
            (batch.queue, job_id)
            for batch in batches
            if batch.ids is not None and not batch.fresh
            for job_id in batch.ids
        ]
        keys += outside(batches)
        with self._knowing(keys), self._journal.together():
            return self.engine.enqueue(batches)

    async def _synced(self, *, durable: bool = False) -> None:
        waiter = Waiter(asyncio.get_running_loop())
        self._journal.when_written(waiter, durable=durable)
        error = await waiter.written
        if error is not None:
            raise error

    def _take_back(self, results: list[EnqueueResult], error: BaseException) -> None:
        """What could not be written was not enqueued, but for what a worker has already begun."""
        begun = [
            result.id
            for result in reversed(results)
            if result.status == "queued" and not self.engine.remove(result.queue, [result.id])[0]
        ]
        if isinstance(error, LeaseLost):
            raise error
        but = f" but what a worker has already begun: {', '.join(begun)}" if begun else ""
        raise StorageUnavailableError(
            f"the database {self._alias!r} could not write: {in_one_line(error)}; nothing was enqueued{but}"
        ) from error

    # Reads: what has ended is in the tables, once the journal is.

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        with self._identity:
            found = self.engine.jobs(queue, ids)
            missing = [job_id for job_id, record in zip(ids, found, strict=True) if record is None]
            if missing:
                there = rows.records(self._alias, queue, missing)
                found = [record or there.get(job_id) for job_id, record in zip(ids, found, strict=True)]
        return found

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        with self._identity:
            found = self.engine.states(queue, ids)
            missing = [job_id for job_id, state in zip(ids, found, strict=True) if state is None]
            if missing:
                there = dict(zip(missing, self._inspector.states(queue, missing), strict=True))
                found = [state or there.get(job_id) for job_id, state in zip(ids, found, strict=True)]
        return found

    def counts(self, queue: str) -> dict[State, int]:
        """See `Storage.counts`."""
        self._flush()
        with self._identity:
            counts = self.engine.counts(queue)
            kept = self._inspector.counts(queue, recovery.ENDED)
        return {**counts, **{state: kept.get(state, 0) for state in recovery.ENDED}}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        self._flush()
        return self._inspector.page(queue, state, limit, after)

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return sorted({*self.engine.queues(), *self._inspector.queues()})

    # Jobs that have ended, or have just arrived, are in the tables alone.

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """See `Storage.cancel`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.cancel(queue, ids, reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.promote`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.promote(queue, ids)

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """See `Storage.reschedule`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.reschedule(queue, ids, run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """See `Storage.update`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.update(queue, ids, priority, payload)

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`."""
        self._check()
        if self._is_open and self._journal.is_full():
            self._journal.wait_for_room()
        keys = [(name, job_id) for job_id in ids for name in (queue, to)]
        with self._knowing(keys):
            answers = self.engine.move(queue, ids, to)
        self._flush()
        return answers

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        self._check()
        if self._is_open and self._journal.is_full():
            self._journal.wait_for_room()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.retry(queue, ids, dry_run=dry_run)

    def remove(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.remove`."""
        self._check()
        removed = self._remove(queue, ids)
        self._flush()
        return removed

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        self._check()
        self._take_in_all()
        self._flush()
        removed = self._clean_ended(queue, states, before, limit)
        others = states - {*recovery.ENDED}
        if others and (limit is None or removed < limit):
            left = None if limit is None else limit - removed
            parts = self.engine.clean_in_parts(queue, frozenset(others), before, left)
            gone: int | None = 0
            while gone is not None:
                with self._journal.together():
                    gone = next(parts, None)
                removed += gone or 0
                self._flush()
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        self._check()
        self._take_in_all()
        groups = {None, *self.engine.group_limits(queue)}
        self._recorded.discard(queue)
        with self._journal.together():
            removed = self.engine.obliterate(queue, force=force)
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait for them, or use force")
        self._journal.queue_changed(queue, None)
        for group in groups:
            self._journal.group_changed((queue, group or ""), None)
        self._flush()
        removed += self._clean_ended(queue, frozenset(recovery.ENDED), FOREVER, None)
        # The queue itself, which has come back with the last of its jobs.
        removed += max(0, self.engine.obliterate(queue))
        self._flush()
        return removed

    def _clean_ended(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
        removed = 0
        ended = [state.value for state in recovery.ENDED if state in states]
        while ended and (limit is None or removed < limit):
            found = self._all(queue).filter(state__in=ended, finished_at__lt=before)
            room = PURGE_LIMIT if limit is None else min(PURGE_LIMIT, limit - removed)
            ids = list(found.order_by("finished_at", "id").values_list("job_id", flat=True)[:room])
            gone = sum(self._remove(queue, ids))
            removed += gone
            self._flush()
            if not gone:
                break
        return removed

    def _remove(self, queue: str, ids: Sequence[str]) -> list[bool]:
        # To the next scheduler a job that is gone has completed: what becomes of its dependents goes with it.
        with self._knowing((queue, job_id) for job_id in ids), self._journal.together():
            return self.engine.remove(queue, ids)

    @contextmanager
    def _knowing(self, keys: Iterable[JobKey]) -> Iterator[None]:
        """The engine knows these jobs, if there are such, for as long as this lasts."""
        with self._identity:
            if len(self._forgettable) > MANY:
                self._identity.wait_for(lambda: not self._pins, PATIENCE)
            self._pins += 1
            try:
                found = recovery.find(self._alias, self.engine, self._journal, keys)
                self.engine.restore(found.ended)
                self._forgettable += found.ended
            except BaseException:
                self._unpin()
                raise
        try:
            self._take(found.arrived)
            yield
        finally:
            with self._identity:
                self._unpin()

    def _unpin(self) -> None:
        self._pins -= 1
        self._forget()

    def _forget(self) -> None:
        if not self._pins:
            ended, self._forgettable = self._forgettable, []
            self.engine.evict(ended)
            self._identity.notify_all()

    # What is said to queues is kept.

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self._check()
        self.engine.pause(queue)
        self._keep_queue(queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self._check()
        self.engine.resume(queue)
        self._keep_queue(queue)

    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        """See `Storage.set_limits`."""
        self._check()
        self.engine.set_limits(queue, rate, concurrency)
        self._keep_queue(queue)

    def set_group_limit(self, queue: str, group: str | None, concurrency: int | None) -> None:
        """See `Storage.set_group_limit`."""
        self._check()
        self.engine.set_group_limit(queue, group, concurrency)
        self._keep_group(queue, group)

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self._check()
        self.engine.pause_group(queue, group)
        self._keep_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        self._check()
        self.engine.resume_group(queue, group)
        self._keep_group(queue, group)

    def _record_mode(self, batch: Batch) -> None:
        policy = self.engine.policy(batch.queue)
        policy.check_batch(batch)
        if policy.group_mode != OPTIONAL and batch.queue not in self._recorded:
            self._recorded.add(batch.queue)
            self._note_group(batch.queue, None)

    def _keep_group(self, queue: str, group: str | None) -> None:
        self._note_group(queue, group)
        self._flush()

    def _note_group(self, queue: str, group: str | None) -> None:
        said = self.engine.group_limits(queue).get(group, NO_LIMIT)
        mode = self.engine.policy(queue).group_mode if group is None else OPTIONAL
        key = (queue, group or "")
        is_nothing = said == NO_LIMIT and mode == OPTIONAL
        row = None if is_nothing else (*key, *said, "" if mode == OPTIONAL else mode)
        self._journal.group_changed(key, row)

    def _keep_queue(self, queue: str) -> None:
        rate, concurrency = self.engine.limits(queue)
        policy = self.engine.policy(queue)
        if (rate, concurrency) == (policy.rate, policy.concurrency):
            # The settings' own: they may say something else after the next start.
            rate = concurrency = None
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
        concurrency = None if concurrency is None else min(concurrency, MAX_INTEGER)
        row = (queue, self.engine.is_paused(queue), capacity, per, concurrency)
        self._journal.queue_changed(queue, row)
        self._flush()

    # Workers.

    def register_worker(self, info: WorkerInfo) -> None:
        """See `Storage.register_worker`."""
        self.engine.register_worker(info)
        self._journal.worker_seen(info.id, info._replace(seen_at=self._clock.now()))

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`."""
        self.engine.unregister_worker(worker_id)
        self._journal.worker_seen(worker_id, None)

    # Time.

    def maintain(self) -> Swept:
        """See `Storage.maintain`."""
        self._check()
        swept = super().maintain()
        self._flush()
        return swept._replace(removed=swept.removed + self._purge())

    def _purge(self) -> int:
        """Rows whose time is over."""
        now = self._clock.now()
        removed = 0
        old = self._all().filter(expires_at__lte=now, state__in=recovery.ENDED)
        keys: dict[str, list[str]] = {}
        for queue, job_id in old.order_by("expires_at").values_list("queue", "job_id")[:PURGE_LIMIT]:
            keys.setdefault(queue, []).append(job_id)
        for queue, ids in keys.items():
            removed += sum(self._remove(queue, ids))
        if removed:
            self._flush()
        removed += sum(self._trim(queue, state) for queue in self._retention for state in recovery.ENDED)
        results = models.JobResult.objects.using(self._alias).filter(expires_at__lte=now)
        numbers = list(results.values_list("id", flat=True)[:PURGE_LIMIT])
        if numbers:
            models.JobResult.objects.using(self._alias).filter(id__in=numbers).delete()
        models.WorkerState.objects.using(self._alias).filter(seen_at__lte=now - WORKER_TTL).delete()
        return removed

    def _trim(self, queue: str, state: State) -> int:
        """Forget some of the records above what a queue keeps of one outcome."""
        most = self._retention[queue].of(state).count
        if most is None:
            return 0
        there = self._all(queue).filter(state=state.value)
        surplus = there.count() - most
        if surplus <= 0:
            return 0
        first = there.order_by(F("expires_at").asc(nulls_last=True), "finished_at", "id")
        ids = list(first.values_list("job_id", flat=True)[: min(surplus, PURGE_LIMIT)])
        removed = sum(self._remove(queue, ids))
        self._flush()
        return removed

    # The inbox.

    def arrived(self) -> None:
        """Rows of other producers may be there."""
        self._arrived.set()

    def _watch_inbox(self) -> None:
        try:
            while not self._closing.is_set():
                self._arrived.wait(POLL)
                self._arrived.clear()
                try:
                    self._take_in_all()
                except Exception as error:
                    connections[self._alias].close()
                    if not self._closing.wait(POLL):
                        logger.warning(
                            "The inbox could not be read; it is tried again: %s", in_one_line(error)
                        )
                        self._arrived.set()
        finally:
            connections[self._alias].close()

    def _take_in_all(self) -> None:
        if not self._is_open:
            return  # What concerns it is here, and nobody else's jobs are to be.
        while self.take_in() == INBOX_PAGE and not self._closing.is_set():
            # Else the next look would find the same rows.
            self._flush()

    def take_in(self) -> int:
        """Take in what other producers have written; returns how many rows there were."""
        with self._inbox:
            found = recovery.arrived(self._alias, INBOX_PAGE)
            last = max(found, default=0) if len(found) == INBOX_PAGE else FOREVER
            self._taken = {number for number in self._taken if number in found or number > last}
            self._take(found)
        return len(found)

    def _take(self, jobs: Mapping[int, Job]) -> None:
        """Take in jobs, by the numbers of their rows; before them those that they wait for."""
        if not jobs:
            return
        with self._inbox, self._knowing(key for job in jobs.values() for key in job.options.depends_on):
            new = {number: job for number, job in jobs.items() if number not in self._taken}
            now = self._clock.now()
            for job in new.values():
                if job.state is State.WAITING:
                    # Its producer's clock may be a little ahead.
                    job.run_at = min(job.run_at, now)
            self.engine.accept(new.values())
            self._taken.update(new)

    # Inside.

    def _written(self, ended: list[Job]) -> None:
        with self._identity:
            self._forgettable += ended
            self._forget()

    def _flush(self) -> None:
        """Have what the engine knows in the tables, unless this thread holds them back itself."""
        if not self._is_open or not connections[self._alias].in_atomic_block:
            try:
                self._journal.sync()
            except (Error, OSError) as error:
                raise StorageUnavailableError(
                    f"the database {self._alias!r} could not write: {in_one_line(error)}"
                ) from error

    def _all(self, queue: str | None = None) -> Any:
        found = models.Job.objects.using(self._alias)
        return found if queue is None else found.filter(queue=queue)


class _EngineInserter(Inserter):
    """Knows what the journal has not written yet."""

    def __init__(self, dialect: Dialect, clock: Clock, storage: SchedulerStorage) -> None:
        super().__init__(dialect, clock, lambda queue: storage.engine.policy(queue))
        self._storage = storage

    def find_job(self, queue: str, job_id: str) -> Found | None:
        """See `Inserter`."""
        [record] = self._storage.engine.jobs(queue, [job_id])
        return None if record is None else (record.state, record.result)

    def find_owners(self, queue: str, key: str) -> list[Owner]:
        """See `Inserter`."""
        return [(job.id, job.state) for job in self._storage.engine.unique_owners(queue, key)]


def _simple(batches: Sequence[Batch]) -> bool:
    """Whether no id of these jobs can be in the tables, and none of their dependencies."""
    return all((batch.ids is None or batch.fresh) and not batch.options.depends_on for batch in batches)


def _detached(batch: Batch) -> bool:
    """Whether the caller asked for an enqueue outside its transaction."""
    return batch.options.durable is False


def _durable(batches: Sequence[Batch]) -> bool:
    return any(batch.options.durable for batch in batches)


def _called_by_sync_code() -> bool:
    """Whether this coroutine is run by `async_to_sync`, whose caller may be in a transaction."""
    if getattr(AsyncToSync.executors, "current", None) is not None:
        return True
    return asyncio.get_running_loop() in AsyncToSync.loop_thread_executors


def _nothing() -> None:
    pass
