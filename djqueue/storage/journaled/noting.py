"""Note the changes of the engine in a buffer."""

import threading
from collections.abc import Iterable, Mapping

from djqueue.core.enginejob import EngineJob
from djqueue.core.job import DeadLetterRecord, WorkerInfo
from djqueue.core.journal import Journal
from djqueue.core.options import JobKey
from djqueue.core.retention import NO_RETENTION, Retention
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import Row

from .buffer import BucketKey, Buffer, Key
from .retentionindex import RetentionIndex

MANY_ITEMS = 4 * 1024 * 1024
"""Bytes of unwritten items at which senders of items wait."""


class NotingJournal(Journal):
    """The part of the journal that the engine calls: it copies changes to a buffer, which a thread writes.

    Args:
        book: The index of retained jobs.
        retention: The retention of the queues that have one.
        own: The process of claims that name none.
        lag: Milliseconds from the monotonic time to UTC, for the ends of leases.
    """

    def __init__(self, book: RetentionIndex, retention: Mapping[str, Retention], own: str, lag: int) -> None:
        self.book = book
        self._retention = retention
        self._own = own
        self._lag = lag
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notified when there is something to write, and when the journal closes."""
        self._buffer = Buffer()
        self._put_off: set[Key] = set()
        """Ended jobs whose records are kept for their dependents."""

    def _noted(self) -> None:
        """Wake the thread that writes, if needed. The caller has the lock."""
        raise NotImplementedError

    # Changes of the engine.

    def added(self, jobs: list[EngineJob]) -> None:
        new = rows.new_rows(jobs)
        with self._changed:
            self._buffer.inserts.update(new)
            self._noted()

    def changed(self, job: EngineJob) -> None:
        retention = self._retention_of(job.queue)
        key, row = (job.queue, job.id), rows.changed_row(job, retention.of(job.state), self._lag, self._own)
        attempts = _take_history(job)
        with self._changed:
            buffer = self._buffer
            buffer.update(key, row)
            if attempts:
                buffer.attempts.setdefault(key, []).extend(attempts)
                if _is_long(job, retention):
                    buffer.long[key] = None
            if job.state is State.CANCELLED:
                buffer.ended.append(job)
            if self.book.concerns(job.queue) and job.state is not State.ACTIVE:
                # Also for a live job: a producer may have enqueued it again in the row of an ended one.
                buffer.kept[key] = self.book.entry(job) if job.state is State.CANCELLED else None
            self._noted()

    def accepted(self, job: EngineJob) -> None:
        if self.book.concerns(job.queue):
            self.changed(job)
            return
        with self._changed:
            self._buffer.accepted[job.queue, job.id] = (*rows.job_key(job), False)
            self._noted()

    def renewed(self, job: EngineJob) -> None:
        row = rows.lease_row(job, self._lag)
        with self._changed:
            self._buffer.leases[job.queue, job.id] = row
            self._noted()

    def updated(self, job: EngineJob) -> None:
        key = job.queue, job.id
        if job.unloaded is not None:
            row = rows.options_row(job)
            with self._changed:
                self._buffer.options[key] = row
                self._noted()
            return
        row = rows.update_row(job)
        with self._changed:
            self._buffer.contents[key] = row
            self._buffer.options.pop(key, None)
            self._noted()

    def completed(self, job: EngineJob) -> None:
        retention = self._retention_of(job.queue)
        key, row = (job.queue, job.id), rows.changed_row(job, retention.completed)
        result = rows.result_row(job, retention.results)
        with self._changed:
            buffer = self._buffer
            buffer.update(key, row)
            if job.result is not None:
                buffer.results[key] = result
            if self.book.concerns(job.queue):
                buffer.kept[key] = self.book.entry(job)
            if _is_long(job, retention):
                buffer.long[key] = None
            buffer.ended.append(job)
            self._noted()

    def died(self, job: EngineJob, letter: DeadLetterRecord) -> None:
        key, row = (job.queue, job.id), rows.changed_row(job)
        dead, attempts = rows.letter_row(job, letter), _take_history(job)
        with self._changed:
            buffer = self._buffer
            buffer.update(key, row)
            buffer.letters[key] = dead
            if job.stream is not None:
                buffer.elsewhere.append(job.stream)
            if attempts:
                buffer.attempts.setdefault(key, []).extend(attempts)
            if _is_long(job, self._retention_of(job.queue)):
                buffer.long[key] = None
            self._noted()

    def revived(self, job: EngineJob) -> None:
        key, row = (job.queue, job.id), rows.changed_row(job)
        with self._changed:
            self._buffer.update(key, row)
            self._buffer.letters.pop(key, None)
            self._buffer.letters_gone[key] = None
            self._noted()

    def removed(self, jobs: list[EngineJob]) -> None:
        with self._changed:
            for job in jobs:
                self._buffer.remove(rows.job_key(job))
                self._put_off.discard((job.queue, job.id))
                if self.book.concerns(job.queue):
                    self._buffer.kept[job.queue, job.id] = None
            self._noted()

    def let_go(self, key: JobKey) -> None:
        with self._changed:
            if key in self._put_off:
                self._put_off.discard(key)
                self._buffer.put_off[key] = False
                self._noted()

    def put_off(self, key: JobKey) -> None:
        """Mark a record that is kept for its dependents after its retention has ended."""
        with self._changed:
            if key not in self._put_off:
                self._put_off.add(key)
                self._buffer.put_off[key] = True
                self._noted()

    def was_put_off(self, key: JobKey) -> None:
        """Remember a record that the tables have marked; see `put_off`."""
        with self._changed:
            self._put_off.add(key)

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        key = (job.queue, job.id)
        progress = rows.progress_row(job) if job.progress is not None else None
        with self._changed:
            if progress is not None:
                self._buffer.progress[key] = progress
            if lines:
                self._buffer.logs.setdefault(key, []).extend(rows.log_rows(job, lines))
            self._noted()

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        key, new = (job.queue, job.id), rows.item_rows(job, items)
        with self._changed:
            buffer = self._buffer
            buffer.items.setdefault(key, []).extend(new)
            buffer.items_sent[key] = rows.items_row(job)
            buffer.items_size += sum(map(len, items))
            self._noted()

    def restarted(self, job: EngineJob) -> None:
        key = (job.queue, job.id)
        with self._changed:
            buffer = self._buffer
            buffer.items.pop(key, None)
            buffer.items_gone[key] = None
            buffer.items_sent[key] = rows.items_row(job)
            self._noted()

    def has_many_items(self) -> bool:
        """Return whether senders of items should wait until these are written."""
        return self._buffer.items_size > MANY_ITEMS

    def _retention_of(self, queue: str) -> Retention:
        return self._retention.get(queue, NO_RETENTION) if self._retention else NO_RETENTION

    # Changes of the storage.

    def results_over(self, found: Iterable[tuple[str, str, int]]) -> None:
        """Delete results before their records; `found` has queue, id and end of the jobs."""
        with self._changed:
            for queue, job_id, ended_at in found:
                self._buffer.results_gone[queue, job_id] = ended_at
            self._noted()

    def queue_changed(self, name: str, row: Row | None) -> None:
        """Note a pause or a limit of a queue, as a row of `QUEUE_STATE`; None if the queue is gone."""
        with self._changed:
            self._buffer.queues[name] = row
            self._noted()

    def group_changed(self, key: Key, row: Row | None) -> None:
        """Note the limit of a group, as a row of `GROUP_STATE`; None if it was removed."""
        with self._changed:
            self._buffer.groups[key] = row
            self._noted()

    def limiter_changed(self, name: str, row: Row | None) -> None:
        """Note the limit of a limiter, as a row of `LIMITER_STATE`; None if it was removed."""
        with self._changed:
            self._buffer.limiters[name] = row
            self._noted()

    def worker_seen(self, worker_id: str, info: WorkerInfo | None) -> None:
        """Note the heartbeat of a worker; None if it has gone."""
        with self._changed:
            self._buffer.workers[worker_id] = info
            self._noted()

    def metric_changed(self, key: BucketKey, row: Row) -> None:
        """Note a bucket of metrics, as a row of `BUCKET`."""
        with self._changed:
            self._buffer.metrics[key] = row
            self._noted()

    def metrics_gone(self, queue: str) -> None:
        """Note that the metrics of a queue are deleted."""
        with self._changed:
            self._buffer.forget_metrics(queue)
            self._noted()


def _is_long(job: EngineJob, retention: Retention) -> bool:
    runs, lines = job.history, job.logs
    return (runs is not None and len(runs) >= retention.attempts.count) or (
        lines is not None and len(lines) >= retention.logs.count
    )


def _take_history(job: EngineJob) -> list[Row]:
    """Return the rows of ended runs that have not been noted yet; the engine keeps its copy for reads."""
    if job.history is None or job.noted == len(job.history):
        return []
    new = job.history[job.noted :]
    job.noted = len(job.history)
    return [rows.attempt_row(job, attempt) for attempt in new]
