"""Changes of the engine that have not been written to the tables yet, and how they are written."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db.models import Model

from djqueue import models
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.job import WorkerInfo
from djqueue.core.overview import Totals
from djqueue.core.retention import Retention
from djqueue.core.states import State

from ..tables import rows, workerrows
from ..tables.dialects import Dialect
from ..tables.groups import GROUP_STATE, QUEUE_STATE
from ..tables.rows import Row
from . import pinned
from .retentionindex import RetentionEntry, RetentionIndex

Key = tuple[str, str]
JobRowKey = tuple[str, str, int]
BucketKey = tuple[str, str, int, int]
Done = Callable[[BaseException | None], None]


class Buffer:
    """Unwritten changes, with the latest values of each job."""

    def __init__(self) -> None:
        self.deletes: dict[JobRowKey, None] = {}
        self.inserts: dict[Key, Row] = {}
        self.accepted: dict[Key, Row] = {}
        """Rows of producers that leave the inbox as they are."""
        self.updates: dict[Key, Row] = {}
        self.leases: dict[Key, Row] = {}
        """Ends of the renewed leases of active jobs."""
        self.contents: dict[Key, Row] = {}
        """Changed priorities, payloads and options of jobs."""
        self.options: dict[Key, Row] = {}
        """Changed priorities and options of jobs whose payloads have stayed in the table."""
        self.results: dict[Key, Row] = {}
        self.letters: dict[Key, Row] = {}
        self.letters_gone: dict[Key, None] = {}
        self.attempts: dict[Key, list[Row]] = {}
        self.progress: dict[Key, Row] = {}
        self.logs: dict[Key, list[Row]] = {}
        self.items: dict[Key, list[Row]] = {}
        self.items_gone: dict[Key, None] = {}
        """Jobs that begin another run, so that the items of the last one are deleted."""
        self.items_sent: dict[Key, Row] = {}
        """Numbers of items, as `JOB_KEY` and the number."""
        self.items_size = 0
        """Bytes of items."""
        self.elsewhere: list[ItemStream] = []
        """Streams that the engine can drop after the flush."""
        self.long: dict[Key, None] = {}
        """Jobs with so many runs or log lines that the oldest are deleted."""
        self.put_off: dict[Key, bool] = {}
        """Ended jobs whose records are kept for their dependents (True), or no longer (False)."""
        self.kept: dict[Key, RetentionEntry | None] = {}
        """Entries of the retention index, for queues with bounds."""
        self.results_gone: dict[Key, int] = {}
        """End times of jobs whose results are deleted before their records."""
        self.queues: dict[str, Row | None] = {}
        self.groups: dict[Key, Row | None] = {}
        self.limiters: dict[str, Row | None] = {}
        self.workers: dict[str, WorkerInfo | None] = {}
        self.metrics: dict[BucketKey, Row] = {}
        self.metrics_gone: set[str] = set()
        """Queues whose metrics are deleted before new ones are written."""
        self.ended: list[EngineJob] = []
        """Jobs that the engine can drop after the flush."""
        self.waiting: list[Done] = []
        self.durable = False

    def __bool__(self) -> bool:
        return self.is_visible or bool(self.workers or self.waiting)

    @property
    def is_visible(self) -> bool:
        """Whether there are other changes than heartbeats of workers."""
        return bool(
            self.inserts
            or self.accepted
            or self.updates
            or self.leases
            or self.contents
            or self.options
            or self.deletes
            or self.progress
            or self.logs
            or self.put_off
            or self.items_sent
            or self.queues
            or self.groups
            or self.limiters
            or self.results_gone
            or self.metrics
            or self.metrics_gone
        )

    def __len__(self) -> int:
        changed = len(self.accepted) + len(self.updates) + len(self.contents) + len(self.options)
        return len(self.inserts) + changed + len(self.deletes)

    def update(self, key: Key, row: Row) -> None:
        """Note a job's changed fields, which include an earlier renewal of its lease."""
        self.updates[key] = row
        if self.leases:
            self.leases.pop(key, None)

    def remove(self, row: JobRowKey) -> None:
        """Drop the noted changes of a job, and note that its rows are deleted."""
        key = row[:2]
        for changes in self._by_job():
            changes.pop(key, None)
        self.letters_gone.pop(key, None)
        self.items_gone.pop(key, None)
        self.deletes[row] = None

    def forget_metrics(self, queue: str) -> None:
        """Drop the metrics of a queue, and note that its rows are deleted."""
        self.metrics_gone.add(queue)
        self.metrics = {key: row for key, row in self.metrics.items() if key[0] != queue}

    def follow(self, later: "Buffer") -> None:
        """Merge the changes that were noted after these."""
        for row in later.deletes:
            self.remove(row)
        for key in later.items_gone:
            self.items.pop(key, None)
            self.items_gone[key] = None
        for key in self.leases.keys() & later.updates.keys():
            del self.leases[key]
        for key in self.options.keys() & later.contents.keys():
            del self.options[key]
        self.items_size += later.items_size
        self.elsewhere += later.elsewhere
        for mine, theirs in zip(self._by_job(), later._by_job(), strict=True):
            if mine is self.attempts or mine is self.logs or mine is self.items:
                for key, lines in theirs.items():
                    mine.setdefault(key, []).extend(lines)
            else:
                mine.update(theirs)
        for key in later.letters_gone:
            if key not in later.letters:
                self.letters.pop(key, None)
                self.letters_gone[key] = None
        self.queues.update(later.queues)
        self.groups.update(later.groups)
        self.limiters.update(later.limiters)
        self.workers.update(later.workers)
        for queue in later.metrics_gone:
            self.forget_metrics(queue)
        self.metrics.update(later.metrics)
        self.ended += later.ended
        self.waiting += later.waiting
        self.durable = self.durable or later.durable

    def _by_job(self) -> tuple[dict[Key, Any], ...]:
        return (
            self.inserts,
            self.accepted,
            self.updates,
            self.leases,
            self.contents,
            self.options,
            self.results,
            self.letters,
            self.attempts,
            self.progress,
            self.logs,
            self.items,
            self.items_sent,
            self.long,
            self.put_off,
            self.kept,
            self.results_gone,
        )


LIMITER_STATE = ("name", "rate_capacity", "rate_per", "concurrency")
BUCKET = ("queue", "name", "tier", "start", *Totals._fields, "wait", "run")


class BufferWriter:
    """Writes buffers, each in one transaction.

    Args:
        dialect: The database.
        fence: Runs first in each transaction; raises LeaseLost if this process is no longer the scheduler.
        book: The index of retained jobs.
        retention_of: Returns the retention of a queue.
    """

    def __init__(
        self,
        dialect: Dialect,
        fence: Callable[[], None],
        book: RetentionIndex,
        retention_of: Callable[[str], Retention],
    ) -> None:
        self._dialect = dialect
        self._fence = fence
        self._book = book
        self._retention_of = retention_of

    def write(self, buffer: Buffer, *, again: bool = False) -> None:
        """Write a buffer in one transaction.

        Args:
            again: Whether an earlier commit of these changes may have succeeded without an answer.
        """
        write = self._dialect
        write.tune()
        with write.transaction(durable=buffer.durable):
            self._fence()
            if buffer.deletes:
                write.delete(models.Job, rows.JOB_KEY, list(buffer.deletes))
                gone = list({row[:2]: None for row in buffer.deletes})
                for model in rows.OWNED:
                    write.delete(model, rows.KEY, gone)
            if buffer.inserts:
                write.insert(
                    models.Job,
                    rows.NEW_JOB,
                    list(buffer.inserts.values()),
                    constants=rows.UNTOUCHED,
                    key=rows.KEY,
                )
            if buffer.accepted:
                write.update(models.Job, rows.JOB_KEY, ("inbox",), list(buffer.accepted.values()))
            if buffer.updates:
                fields = rows.CHANGED_JOB[len(rows.JOB_KEY) :]
                write.update(models.Job, rows.JOB_KEY, fields, list(buffer.updates.values()))
            if buffer.leases:
                # After the other changes, because a renewal that is still noted is later than these.
                write.update(models.Job, rows.JOB_KEY, ("leased_until",), list(buffer.leases.values()))
            if buffer.options:
                fields = rows.OPTIONS_UPDATE[len(rows.JOB_KEY) :]
                write.update(models.Job, rows.JOB_KEY, fields, list(buffer.options.values()))
            if buffer.contents:
                fields = rows.UPDATE[len(rows.JOB_KEY) :]
                write.update(models.Job, rows.JOB_KEY, fields, list(buffer.contents.values()))
            if buffer.letters_gone:
                write.delete(models.DeadLetter, rows.KEY, list(buffer.letters_gone))
            if buffer.results_gone:
                self._forget_results(buffer.results_gone)
            self._write_one(models.JobResult, rows.RESULT, buffer.results)
            if buffer.kept or buffer.results_gone or buffer.put_off:
                self._book.write(buffer.kept, buffer.results_gone, buffer.put_off)
            if buffer.put_off:
                pinned.put_off(write.alias, [key for key, later in buffer.put_off.items() if later])
                pinned.put_back(write.alias, [key for key, later in buffer.put_off.items() if not later])
            self._write_one(models.DeadLetter, rows.LETTER, buffer.letters)
            self._add_many(models.JobAttempt, rows.ATTEMPT, buffer.attempts, again=again)
            self._add_many(models.JobLog, rows.LOG, buffer.logs, again=again)
            for key in buffer.long:
                retention = self._retention_of(key[0])
                self._shorten(models.JobAttempt, key, retention.attempts.count)
                self._shorten(models.JobLog, key, retention.logs.count)
            if buffer.progress:
                write.update(models.Job, rows.JOB_KEY, ("progress",), list(buffer.progress.values()))
            if buffer.items_sent:
                self._write_items(buffer)
            if buffer.queues or buffer.groups or buffer.limiters:
                self._write_queues(buffer)
            if buffer.workers:
                self._write_workers(buffer)
            if buffer.metrics_gone:
                write.delete(models.MetricBucket, ("queue",), [(queue,) for queue in buffer.metrics_gone])
            if buffer.metrics:
                write.insert(models.MetricBucket, BUCKET, list(buffer.metrics.values()), key=BUCKET[:4])

    def _forget_results(self, ends: Mapping[Key, int]) -> None:
        """Delete results, and the items of the jobs that ended at these times; their records may remain."""
        write = self._dialect
        named = [(*key, end) for key, end in ends.items()]
        write.delete(models.JobResult, (*rows.KEY, "completed_at"), named)
        by_queue: dict[str, list[str]] = {}
        for queue, job_id in ends:
            by_queue.setdefault(queue, []).append(job_id)
        with_items: list[Row] = []
        for queue, ids in by_queue.items():
            for chunk in rows.chunked(ids):
                found = models.Job.objects.using(write.alias).filter(queue=queue, job_id__in=chunk)
                found = found.filter(state=State.COMPLETED.value, items__gt=0)
                there = rows.raw_values(found, ("job_id", "finished_at"))
                with_items += [(queue, job_id) for job_id, end in there if end == ends[queue, job_id]]
        if with_items:
            write.delete(models.JobItem, rows.KEY, with_items)

    def _write_items(self, buffer: Buffer) -> None:
        write = self._dialect
        write.delete(models.JobItem, rows.KEY, list(buffer.items_gone))
        # By number, because a commit without an answer is repeated.
        new = [row for found in buffer.items.values() for row in found]
        write.insert(models.JobItem, rows.ITEM, new, key=rows.ITEM_KEY)
        write.update(models.Job, rows.JOB_KEY, ("items",), list(buffer.items_sent.values()))

    def _write_one(self, model: type[Model], fields: Sequence[str], found: dict[Key, Row]) -> None:
        if found:
            self._dialect.insert(model, fields, list(found.values()), key=rows.KEY)

    def _add_many(
        self, model: type[Model], fields: Sequence[str], found: dict[Key, list[Row]], *, again: bool
    ) -> None:
        if found:
            lines = [row for entry in found.values() for row in entry]
            if again:
                # The first commit may have succeeded.
                named = len(rows.LOG) if model is models.JobLog else rows.ATTEMPT_NAMED
                self._dialect.delete(model, fields[:named], [row[:named] for row in lines])
            self._dialect.insert(model, fields, lines)

    def _shorten(self, model: type[Model], key: Key, limit: int) -> None:
        """Delete the oldest rows of a job, as the engine has."""
        mine = model._default_manager.using(self._dialect.alias).filter(queue=key[0], job_id=key[1])
        newest_gone = mine.order_by("-id").values_list("id", flat=True)[limit : limit + 1].first()
        if newest_gone is not None:
            mine.filter(id__lte=newest_gone).delete()

    def _write_queues(self, buffer: Buffer) -> None:
        gone = [(name,) for name, row in buffer.queues.items() if row is None]
        if gone:
            self._dialect.delete(models.QueueState, ("name",), gone)
        there = [row for row in buffer.queues.values() if row is not None]
        if there:
            self._dialect.insert(models.QueueState, QUEUE_STATE, there, key=("name",))
        removed = [key for key, row in buffer.groups.items() if row is None]
        if removed:
            self._dialect.delete(models.GroupState, GROUP_STATE[:2], removed)
        said = [row for row in buffer.groups.values() if row is not None]
        if said:
            self._dialect.insert(models.GroupState, GROUP_STATE, said, key=GROUP_STATE[:2])
        as_configured = [(name,) for name, row in buffer.limiters.items() if row is None]
        if as_configured:
            self._dialect.delete(models.LimiterState, ("name",), as_configured)
        changed = [row for row in buffer.limiters.values() if row is not None]
        if changed:
            self._dialect.insert(models.LimiterState, LIMITER_STATE, changed, key=("name",))

    def _write_workers(self, buffer: Buffer) -> None:
        gone = [worker_id for worker_id, info in buffer.workers.items() if info is None]
        manager = models.WorkerState.objects.using(self._dialect.alias)
        if gone:
            manager.filter(worker_id__in=gone).delete()
        for info in buffer.workers.values():
            if info is not None:
                worker_id, values = workerrows.worker_row(info)
                manager.update_or_create(worker_id=worker_id, defaults=values)


logger = logging.getLogger("djqueue.journal")


class Waiter:
    """A coroutine that waits for a flush."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.written: asyncio.Future[BaseException | None] = loop.create_future()

    def __call__(self, error: BaseException | None) -> None:
        """Wake the coroutine. Called on its loop."""
        if not self.written.done():
            self.written.set_result(error)


def notify(waiting: list[Done], error: BaseException | None) -> None:
    """Call the waiters of a flush with its error; those on one loop together, which wakes it once."""
    callbacks: list[Callable[[], object]] = []
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for done in waiting:
        if isinstance(done, Waiter):
            by_loop.setdefault(done.loop, []).append(done)
        else:
            callbacks.append(partial(done, error))
    for loop, waiters in by_loop.items():
        callbacks.append(partial(loop.call_soon_threadsafe, _notify_each, waiters, error))
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # For example, the loop of a waiter has ended.
            logger.exception(
                "A callback that waited for the journal raised an exception; the journal continues."
            )


def _notify_each(waiters: list[Waiter], error: BaseException | None) -> None:
    for waiter in waiters:
        waiter(error)
