"""The storage inside the scheduler's process: engine, journal, socket and inbox."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asgiref.sync import sync_to_async
from django.db import DatabaseError, connections

from djqueue import models
from djqueue.conf import get_settings
from djqueue.core.clock import Clock
from djqueue.core.engine import DEFAULT_POLICY, Engine
from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    EnqueueResult,
    Finished,
    Job,
    JobRecord,
    Outcome,
    WorkerInfo,
)
from djqueue.core.limiter import Rate
from djqueue.core.maintenance import Swept
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.base import P, T
from djqueue.storage.engined import EngineStorage

from . import cron, recovery, rows
from .dialects import Dialect
from .inspector import Inspector
from .journal import DatabaseJournal
from .lease import SchedulerLease
from .producer import Inserter

logger = logging.getLogger("djqueue.scheduler")

POLL = 1.0
"""Seconds between looks into the inbox, should a wake-up have been lost."""
INBOX_PAGE = 2_000
PURGE_LIMIT = 1_000
"""Old rows taken away at a time."""
KEPT_APART = (State.COMPLETED, State.CANCELLED)
"""States whose jobs the engine forgets once they are written."""


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
    ) -> None:
        self._alias = dialect.alias
        self._dialect = dialect
        self._lease = lease
        self._clock = clock
        self._inserter = Inserter(dialect, clock)
        self._inspector = Inspector(dialect.alias)
        self._identity = threading.RLock()
        """Held while ids are looked up in the tables and taken, and while the engine forgets ids."""
        self._journal = DatabaseJournal(dialect, lease.hold, self._written, lost or _nothing)
        self.engine = Engine(
            clock=clock,
            journal=self._journal,
            policies=policies,
            default_policy=DEFAULT_POLICY,
            keep_finished=False,
            cores=cores,
        )
        self._closing = threading.Event()
        self._arrived = threading.Event()
        self._inbox_thread = threading.Thread(target=self._watch_inbox, name="djqueue-inbox", daemon=True)

    # Life.

    def open(self) -> dict[str, int]:
        """Load everything that is alive, and begin to write; returns how much it was."""
        self._journal.start()
        counts = recovery.recover(self._alias, self.engine, self._journal)
        self._inbox_thread.start()
        return counts

    def open_for(self, queue: str, ids: Sequence[str] | None) -> None:
        """Load these jobs (None: all) of one queue alone; this thread writes."""
        if ids is None:
            found = models.Job.objects.using(self._alias).filter(queue=queue)
            ids = list(found.values_list("job_id", flat=True))
        recovery.queues(self._alias, self.engine)
        jobs = recovery.load(self._alias, queue, ids, tuple(State))
        wanted = set(ids)
        letters = [letter for letter in self._inspector.dead_letters(queue) if letter.id in wanted]
        recovery.take_over(self.engine, self._journal, jobs, letters)

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
        """See `Storage.enqueue`. Inside a transaction the jobs are part of it."""
        self._journal.check()
        if connections[self._alias].in_atomic_block and not all(_detached(batch) for batch in batches):
            return self._inserter.insert(batches, self._arrived.set)
        results = self._accept(batches)
        if any(batch.options.durable for batch in batches):
            self._sync(results)
        elif self._journal.is_full():
            self._journal.wait_for_room()
        return results

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if not _simple(batches):
            return await self.acall(self.enqueue, batches)
        self._journal.check()
        results = self.engine.enqueue(batches)
        if any(batch.options.durable for batch in batches):
            await self._async_sync(results)
        await self._room()
        return results

    # Runs.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        self._journal.check()
        if self._journal.is_full():
            self._journal.wait_for_room()
        return self.engine.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        self._journal.check()
        await self._room()
        return self.engine.finish(outcomes, then)

    async def _room(self) -> None:
        if self._journal.is_full():
            await asyncio.to_thread(self._journal.wait_for_room)

    def _accept(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if _simple(batches):
            return self.engine.enqueue(batches)
        with self._identity:
            keys = [
                (batch.queue, job_id)
                for batch in batches
                if batch.ids is not None and not batch.fresh
                for job_id in batch.ids
            ]
            keys += [key for batch in batches for key in batch.options.depends_on]
            fetched = recovery.fetch(self._alias, self.engine, keys)
            try:
                return self.engine.enqueue(batches)
            finally:
                self.engine.evict(fetched)

    def _sync(self, results: list[EnqueueResult]) -> None:
        try:
            self._journal.sync(durable=True)
        except (DatabaseError, StorageUnavailableError) as error:
            self._take_back(results, error)

    async def _async_sync(self, results: list[EnqueueResult]) -> None:
        loop = asyncio.get_running_loop()
        written: asyncio.Future[BaseException | None] = loop.create_future()

        def done(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(_resolve, written, error)

        self._journal.when_written(done, durable=True)
        error = await written
        if error is not None:
            self._take_back(results, error)

    def _take_back(self, results: list[EnqueueResult], error: BaseException) -> None:
        """A durable enqueue could not be written: it did not happen."""
        for result in results:
            if result.status == "queued":
                self.engine.remove(result.queue, [result.id])
        raise StorageUnavailableError(
            f"the database {self._alias!r} could not write: {error}; nothing was enqueued"
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
            kept = self._inspector.counts(queue, KEPT_APART)
        return {**counts, **{state: kept.get(state, 0) for state in KEPT_APART}}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        self._flush()
        return self._inspector.page(queue, state, limit, after)

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return sorted({*self.engine.queues(), *self._inspector.queues()})

    # Jobs that have ended are in the tables alone.

    def remove(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.remove`."""
        with self._identity:
            recovery.fetch(self._alias, self.engine, [(queue, job_id) for job_id in ids])
            return self.engine.remove(queue, ids)

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[Any]:
        """See `Storage.cancel`."""
        with self._identity:
            keys = [(queue, job_id) for job_id in ids]
            fetched = recovery.fetch(self._alias, self.engine, keys)
            try:
                return self.engine.cancel(queue, ids, reason)
            finally:
                self.engine.evict(fetched)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        removed = 0
        ended = [state.value for state in KEPT_APART if state in states]
        while ended and (limit is None or removed < limit):
            self._flush()
            found = self._all(queue).filter(state__in=ended, finished_at__lt=before)
            room = PURGE_LIMIT if limit is None else min(PURGE_LIMIT, limit - removed)
            ids = list(found.order_by("finished_at", "id").values_list("job_id", flat=True)[:room])
            gone = sum(self.remove(queue, ids))
            removed += gone
            if not gone:
                break
        others = states - {*KEPT_APART}
        if others and (limit is None or removed < limit):
            left = None if limit is None else limit - removed
            removed += self.engine.clean(queue, frozenset(others), before, left)
        self._flush()
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        self._flush()
        with self._identity:
            removed = self.engine.obliterate(queue, force=force)
            if removed < 0:
                raise StorageError(f"queue {queue!r} has active jobs: wait for them, or use force")
            ids = list(self._all(queue).filter(state__in=KEPT_APART).values_list("job_id", flat=True))
            removed += sum(self.remove(queue, ids))
        self._flush()
        models.QueueState.objects.using(self._alias).filter(name=queue).delete()
        return removed

    # What is said to queues is kept.

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self.engine.pause(queue)
        self._keep_queue(queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self.engine.resume(queue)
        self._keep_queue(queue)

    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        """See `Storage.set_limits`."""
        self.engine.set_limits(queue, rate, concurrency)
        self._keep_queue(queue)

    def _keep_queue(self, queue: str) -> None:
        rate, concurrency = self.engine.limits(queue)
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
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
        swept = super().maintain()
        now = self._clock.now()
        if self._lease.is_due():
            self._journal.sync()
        due = cron.due_jobs(self._alias, now, get_settings().defaults)
        if due:
            self._accept(due)
        return swept._replace(removed=swept.removed + self._purge(now))

    def _purge(self, now: int) -> int:
        removed = 0
        old = self._all().filter(expires_at__lte=now, state__in=KEPT_APART)
        keys: dict[str, list[str]] = {}
        for queue, job_id in old.order_by("expires_at").values_list("queue", "job_id")[:PURGE_LIMIT]:
            keys.setdefault(queue, []).append(job_id)
        for queue, ids in keys.items():
            removed += sum(self.remove(queue, ids))
        results = models.JobResult.objects.using(self._alias).filter(expires_at__lte=now)
        numbers = list(results.values_list("id", flat=True)[:PURGE_LIMIT])
        if numbers:
            models.JobResult.objects.using(self._alias).filter(id__in=numbers).delete()
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
                    while not self._closing.is_set() and self.take_in() == INBOX_PAGE:
                        pass
                except DatabaseError as error:
                    logger.warning("The inbox could not be read; it is tried again: %s", error)
                    connections[self._alias].close()
        finally:
            connections[self._alias].close()

    def take_in(self) -> int:
        """Take in what other producers have written; returns how many rows there were."""
        with self._identity:
            found = self._all().filter(inbox=True).order_by("id")[:INBOX_PAGE]
            jobs = [rows.job_from_row(row) for row in rows.job_rows(found)]
            if jobs:
                wanted = [key for job in jobs for key in job.options.depends_on]
                fetched = recovery.fetch(self._alias, self.engine, wanted)
                self.engine.accept(jobs)
                self.engine.evict(fetched)
        if len(jobs) == INBOX_PAGE:
            self._flush()
        return len(jobs)

    # Inside.

    def _written(self, ended: list[Job]) -> None:
        with self._identity:
            self.engine.evict(ended)

    def _flush(self) -> None:
        """Have what the engine knows in the tables, unless this thread holds them back itself."""
        if self._inbox_thread.ident is None or not connections[self._alias].in_atomic_block:
            try:
                self._journal.sync()
            except DatabaseError as error:
                raise StorageUnavailableError(
                    f"the database {self._alias!r} could not write: {error}"
                ) from error

    def _all(self, queue: str | None = None) -> Any:
        found = models.Job.objects.using(self._alias)
        return found if queue is None else found.filter(queue=queue)


def _simple(batches: Sequence[Batch]) -> bool:
    """Whether no id of these jobs can be in the tables, and none of their dependencies."""
    return all((batch.ids is None or batch.fresh) and not batch.options.depends_on for batch in batches)


def _detached(batch: Batch) -> bool:
    """Whether the caller asked for an enqueue outside its transaction."""
    return batch.options.durable is False


def _resolve(future: "asyncio.Future[BaseException | None]", error: BaseException | None) -> None:
    if not future.done():
        future.set_result(error)


def _nothing() -> None:
    pass
