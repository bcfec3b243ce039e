"""The write buffer between the engine and the tables.

What the engine tells is copied into a buffer at once, merged by job, and written by one thread: at most
`WINDOW` after it was noted, or as soon as `WINDOW_JOBS` are waiting; all of a buffer in one
transaction. A flush that fails is put back before what came later, and tried again. Each transaction
renews the scheduler's lease; one without other changes does so while there is nothing to write.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import Error, connections
from django.db.models import Model

from djqueue import models
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import remaining
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import DeadLetterRecord, WorkerInfo
from djqueue.core.options import JobKey
from djqueue.core.overview import Totals
from djqueue.core.retention import NO_RETENTION, Retention
from djqueue.core.shown import in_one_line
from djqueue.core.states import State
from djqueue.core.versions import ChangeCounter
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.groups import GROUP_STATE, QUEUE_STATE
from djqueue.storage.tables.rows import Row

from . import pinned
from .retentionindex import RetentionEntry, RetentionIndex

logger = logging.getLogger("djqueue.journal")

WINDOW = 0.010
"""Seconds that a change may wait for others."""
GATHER = 0.002
"""Seconds for which a commit waits for as many as waited for the last one."""
WINDOW_JOBS = 100
"""Changed jobs that are written without waiting for more."""
PATIENCE = 1.0
"""Seconds for which a flush waits for what belongs together."""
BACKLOG = 1_000
"""Unwritten jobs at which whoever brings more waits: what a crash can cost stays that small."""
MANY_ITEMS = 4 * 1024 * 1024
"""Bytes of unwritten items at which whoever sends more waits."""
FIRST_RETRY, LAST_RETRY = 0.1, 5.0
"""Seconds before a failed flush is tried again, doubling."""
RENEW_EVERY = 3.0
"""Seconds between renewals of the lease while there is nothing to write, at most."""

Key = tuple[str, str]
JobRowKey = tuple[str, str, int]
BucketKey = tuple[str, str, int, int]
Done = Callable[[BaseException | None], None]


class Buffer:
    """Changes that have not been written, the latest of each job."""

    def __init__(self) -> None:
        self.deletes: dict[JobRowKey, None] = {}
        self.inserts: dict[Key, Row] = {}
        self.updates: dict[Key, Row] = {}
        self.leases: dict[Key, Row] = {}
        """Until when active jobs are leased whose leases were renewed."""
        self.contents: dict[Key, Row] = {}
        """Priorities, payloads and options of jobs to which somebody has given others."""
        self.results: dict[Key, Row] = {}
        self.letters: dict[Key, Row] = {}
        self.letters_gone: dict[Key, None] = {}
        self.attempts: dict[Key, list[Row]] = {}
        self.progress: dict[Key, Row] = {}
        self.logs: dict[Key, list[Row]] = {}
        self.items: dict[Key, list[Row]] = {}
        self.items_gone: dict[Key, None] = {}
        """Of runs that are over while their jobs are not."""
        self.items_sent: dict[Key, Row] = {}
        """How many; `JOB_KEY`, then the number."""
        self.items_size = 0
        """Bytes of items."""
        self.elsewhere: list[ItemStream] = []
        """What the engine need not keep once this is written."""
        self.long: dict[Key, None] = {}
        """Jobs that have had so many runs, or lines, that the oldest are forgotten."""
        self.put_off: dict[Key, bool] = {}
        """Ended jobs whose ends are put off, or put back (False)."""
        self.kept: dict[Key, RetentionEntry | None] = {}
        """What jobs of queues with bounds take."""
        self.results_gone: dict[Key, int] = {}
        """When the jobs ended whose results go before their records."""
        self.queues: dict[str, Row | None] = {}
        self.groups: dict[Key, Row | None] = {}
        self.limiters: dict[str, Row | None] = {}
        self.workers: dict[str, WorkerInfo | None] = {}
        self.clock_offset: int | None = None
        """Where the wall clock is that the jobs have followed: see `DatabaseJournal.clock_set`."""
        self.retry_times: dict[Key, int] = {}
        """When dead letters are retried by themselves that have followed the wall clock."""
        self.metrics: dict[BucketKey, Row] = {}
        self.metrics_gone: set[str] = set()
        """Queues whose buckets of metrics go, before others are written."""
        self.ended: list[EngineJob] = []
        """Jobs that the engine may forget once this is written."""
        self.waiting: list[Done] = []
        self.durable = False

    def __bool__(self) -> bool:
        return self.is_visible or bool(self.workers or self.waiting)

    @property
    def is_visible(self) -> bool:
        """Whether more is to be written than signs of life of workers."""
        return bool(
            self.inserts
            or self.updates
            or self.leases
            or self.contents
            or self.deletes
            or self.progress
            or self.logs
            or self.put_off
            or self.items_sent
            or self.queues
            or self.groups
            or self.limiters
            or self.clock_offset is not None
            or self.retry_times
            or self.results_gone
            or self.metrics
            or self.metrics_gone
        )

    def __len__(self) -> int:
        return len(self.inserts) + len(self.updates) + len(self.contents) + len(self.deletes)

    def update(self, key: Key, row: Row) -> None:
        """Note a job's changing fields; an earlier renewal of its lease is part of them."""
        self.updates[key] = row
        if self.leases:
            self.leases.pop(key, None)

    def remove(self, row: JobRowKey) -> None:
        """Nothing of what was noted of this job is to be written; what is in the tables goes."""
        key = row[:2]
        for changes in self._by_job():
            changes.pop(key, None)
        self.letters_gone.pop(key, None)
        self.items_gone.pop(key, None)
        self.deletes[row] = None

    def forget_metrics(self, queue: str) -> None:
        """No bucket of a queue is to be there."""
        self.metrics_gone.add(queue)
        self.metrics = {key: row for key, row in self.metrics.items() if key[0] != queue}

    def follow(self, later: "Buffer") -> None:
        """Merge in what was noted after this."""
        for row in later.deletes:
            self.remove(row)
        for key in later.items_gone:
            self.items.pop(key, None)
            self.items_gone[key] = None
        for key in self.leases.keys() & later.updates.keys():
            del self.leases[key]
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
        if later.clock_offset is not None:
            self.clock_offset = later.clock_offset
        for queue in later.metrics_gone:
            self.forget_metrics(queue)
        self.metrics.update(later.metrics)
        self.ended += later.ended
        self.waiting += later.waiting
        self.durable = self.durable or later.durable

    def _by_job(self) -> tuple[dict[Key, Any], ...]:
        return (
            self.inserts,
            self.updates,
            self.leases,
            self.contents,
            self.results,
            self.letters,
            self.retry_times,
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


class DatabaseJournal:
    """The engine's journal, and the thread that writes it; before `start`, whoever calls `sync` writes.

    fence: run first in each transaction; raises if this process is not the scheduler any more.
    written: called with the ended jobs of each flush once it is committed.
    retention: of the queues that have one.
    clock: for telling when it last wrote.
    own: the process whose claims name none.
    lag: milliseconds from the monotonic time to UTC, for the ends of leases: see `SchedulerLease.lag`.
    lease_ttl: milliseconds for which the lease holds; `fence` is called three times as often.
    note_clock: writes down the `offset` that is told to `clock_set`, in the transaction of the jobs' changes.
    """

    def __init__(
        self,
        dialect: Dialect,
        fence: Callable[[], None],
        written: Callable[[list[EngineJob]], None],
        lost: Callable[[], None],
        retention: Mapping[str, Retention] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        own: str = "",
        lease_ttl: int = 10_000,
        lag: int | None = None,
        note_clock: Callable[[int], None] | None = None,
    ) -> None:
        self._dialect = dialect
        self._fence = fence
        self._written = written
        self._lost = lost
        self._retention = dict(retention or {})
        self.book = RetentionIndex(dialect, self._retention)
        self._clock = clock
        self._renew_share = lease_ttl / 3_000
        self.flushed_at: int | None = None
        """When it last wrote: UTC milliseconds."""
        self.changes = ChangeCounter()
        """Of the tables."""
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        """There is something to write, or no more."""
        self._room = threading.Condition(lock)
        self._buffer = Buffer()
        self._flying: Buffer | None = None
        """What is being written."""
        self._in_flight = 0
        self._idle = False
        """Whether the thread sleeps until there is something to write."""
        self._urgent = False
        self._together = 0
        """How many waited for the last flush."""
        self._is_gathering = False
        self._holders: set[int] = set()
        """Threads that are noting what belongs together."""
        self._closing = False
        self._ended = False
        self._failure: BaseException | None = None
        self._failures = 0
        """Flushes that failed since the last success."""
        self._own = own
        self._note_clock = note_clock
        self._lag = clock.now() - clock.monotonic() if lag is None else lag
        """Milliseconds from monotonic time to UTC, as of the last flush."""
        self._put_off: set[Key] = set()
        """Ended jobs whose ends are put off."""
        self._thread = threading.Thread(target=self._run, name="djqueue-journal", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def close(self) -> None:
        """Write what is left, and end. Raises if it could not be written."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        elif self._buffer:
            self._write_here()
        if self._buffer and self._failure is not None:
            raise self._failure

    @property
    def alias(self) -> str:
        """Of the database, in `DATABASES`."""
        return self._dialect.alias

    @property
    def lag(self) -> int:
        """Milliseconds from the monotonic time to the time in which ends of leases are written."""
        return self._lag

    @property
    def backlog(self) -> int:
        """Jobs whose changes are not written yet."""
        return len(self._buffer) + self._in_flight

    def is_gone(self, row: JobRowKey) -> bool:
        """Whether a job's row that was read in the tables is to be deleted.

        To be asked by one who keeps `written` from returning since before that row was read.
        """
        with self._changed:
            flying = self._flying
            return row in self._buffer.deletes or (flying is not None and row in flying.deletes)

    def check(self) -> None:
        """Raise LeaseLost if nothing can be written any more, StorageUnavailableError if there is too
        much already that could not be written.
        """
        failure = self._failure
        if failure is None:
            return
        if isinstance(failure, LeaseLost):
            raise failure
        if self.is_full():
            raise StorageUnavailableError(
                f"the database {self._dialect.alias!r} cannot be written to: {in_one_line(failure)}"
            ) from failure

    def is_full(self) -> bool:
        """Whether those who bring more should wait."""
        return self.backlog > BACKLOG

    def wait_for_room(self, timeout: float = math.inf) -> None:
        """Wait until the journal is no longer full, for `timeout` seconds or until the call's deadline.

        Raises what `check` raises if waiting would be in vain, and StorageUnavailableError at the deadline.
        """
        self._let_go(threading.get_ident())
        left = remaining(timeout)
        with self._room:
            is_over = self._room.wait_for(
                lambda: not self.is_full() or self._failure is not None, None if left == math.inf else left
            )
        self.check()
        if not is_over:
            raise StorageUnavailableError(
                f"the journal stayed full for {left:.1f} s; another process may hold the write lock of "
                f"database {self._dialect.alias!r}"
            )

    # What the engine tells: see `djqueue.core.journal`.

    def added(self, jobs: list[EngineJob]) -> None:
        """See `Journal`."""
        new = rows.new_rows(jobs)
        with self._changed:
            self._buffer.inserts.update(new)
            self._noted()

    def changed(self, job: EngineJob) -> None:
        """See `Journal`."""
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
                # Also of one that lives: it may be enqueued again by a producer that took an ended one's row.
                buffer.kept[key] = self.book.entry(job) if job.state is State.CANCELLED else None
            self._noted()

    def renewed(self, job: EngineJob) -> None:
        """See `Journal`."""
        row = rows.lease_row(job, self._lag)
        with self._changed:
            self._buffer.leases[job.queue, job.id] = row
            self._noted()

    def updated(self, job: EngineJob) -> None:
        """See `Journal`."""
        row = rows.update_row(job)
        with self._changed:
            self._buffer.contents[job.queue, job.id] = row
            self._noted()

    def stepped(self, job: EngineJob) -> None:
        """See `Journal`."""
        self.updated(job)
        if job.state is not State.ACTIVE:
            self.changed(job)

    def postponed(self, letter: DeadLetterRecord) -> None:
        """See `Journal`."""
        with self._changed:
            self._buffer.retry_times[letter.queue, letter.id] = letter.next_retry_at
            self._noted()

    def clock_set(self, offset: int) -> None:
        """See `Journal`."""
        with self._changed:
            self._buffer.clock_offset = offset
            self._noted()

    def completed(self, job: EngineJob) -> None:
        """See `Journal`."""
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
        """See `Journal`."""
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
        """See `Journal`."""
        key, row = (job.queue, job.id), rows.changed_row(job)
        with self._changed:
            self._buffer.update(key, row)
            self._buffer.letters.pop(key, None)
            self._buffer.letters_gone[key] = None
            self._noted()

    def removed(self, jobs: list[EngineJob]) -> None:
        """See `Journal`."""
        with self._changed:
            for job in jobs:
                self._buffer.remove(rows.job_key(job))
                self._put_off.discard((job.queue, job.id))
                if self.book.concerns(job.queue):
                    self._buffer.kept[job.queue, job.id] = None
            self._noted()

    def let_go(self, key: JobKey) -> None:
        """See `Journal`."""
        with self._changed:
            if key in self._put_off:
                self._put_off.discard(key)
                self._buffer.put_off[key] = False
                self._noted()

    def put_off(self, key: JobKey) -> None:
        """The time of a record is over that is kept for others."""
        with self._changed:
            if key not in self._put_off:
                self._put_off.add(key)
                self._buffer.put_off[key] = True
                self._noted()

    def was_put_off(self, key: JobKey) -> None:
        """See `put_off`; the tables say so."""
        with self._changed:
            self._put_off.add(key)

    def reported(self, job: EngineJob, lines: tuple[tuple[int, str], ...]) -> None:
        """See `Journal`."""
        key = (job.queue, job.id)
        progress = rows.progress_row(job) if job.progress is not None else None
        with self._changed:
            if progress is not None:
                self._buffer.progress[key] = progress
            if lines:
                self._buffer.logs.setdefault(key, []).extend(rows.log_rows(job, lines))
            self._noted()

    def emitted(self, job: EngineJob, items: tuple[bytes, ...]) -> None:
        """See `Journal`."""
        key, new = (job.queue, job.id), rows.item_rows(job, items)
        with self._changed:
            buffer = self._buffer
            buffer.items.setdefault(key, []).extend(new)
            buffer.items_sent[key] = rows.items_row(job)
            buffer.items_size += sum(map(len, items))
            self._noted()

    def restarted(self, job: EngineJob) -> None:
        """See `Journal`."""
        key = (job.queue, job.id)
        with self._changed:
            buffer = self._buffer
            buffer.items.pop(key, None)
            buffer.items_gone[key] = None
            buffer.items_sent[key] = rows.items_row(job)
            self._noted()

    def has_many_items(self) -> bool:
        """Whether those who send more should wait until these are written."""
        return self._buffer.items_size > MANY_ITEMS

    def _retention_of(self, queue: str) -> Retention:
        return self._retention.get(queue, NO_RETENTION) if self._retention else NO_RETENTION

    # What the storage tells.

    def results_over(self, found: Iterable[tuple[str, str, int]]) -> None:
        """Results, by queue, id and end of their jobs, that go before the records."""
        with self._changed:
            for queue, job_id, ended_at in found:
                self._buffer.results_gone[queue, job_id] = ended_at
            self._noted()

    def queue_changed(self, name: str, row: Row | None) -> None:
        """A queue was paused, resumed or limited; `row` as `QUEUE_STATE`; None: it is gone."""
        with self._changed:
            self._buffer.queues[name] = row
            self._noted()

    def group_changed(self, key: Key, row: Row | None) -> None:
        """Something was said to a group, `row` as `GROUP_STATE`; None: it was taken back."""
        with self._changed:
            self._buffer.groups[key] = row
            self._noted()

    def limiter_changed(self, name: str, row: Row | None) -> None:
        """A limiter was told another limit, `row` as `LIMITER_STATE`; None: it was taken back."""
        with self._changed:
            self._buffer.limiters[name] = row
            self._noted()

    def worker_seen(self, worker_id: str, info: WorkerInfo | None) -> None:
        """A worker reported itself; None: it has gone."""
        with self._changed:
            self._buffer.workers[worker_id] = info
            self._noted()

    def metric_changed(self, key: BucketKey, row: Row) -> None:
        """A bucket of metrics has grown; `row` as `BUCKET`."""
        with self._changed:
            self._buffer.metrics[key] = row
            self._noted()

    def metrics_gone(self, queue: str) -> None:
        """The buckets of a queue are to be forgotten."""
        with self._changed:
            self._buffer.forget_metrics(queue)
            self._noted()

    @contextmanager
    def together(self) -> Iterator[None]:
        """What this thread notes while this lasts is written in one transaction, unless it waits for that."""
        holder = threading.get_ident()
        with self._changed:
            is_outer = holder not in self._holders
            self._holders.add(holder)
        try:
            yield
        finally:
            if is_outer:
                self._let_go(holder)

    def _let_go(self, holder: int) -> None:
        if holder in self._holders:
            with self._changed:
                self._holders.discard(holder)
                if not self._holders:
                    self._changed.notify()

    def sync(self, *, durable: bool = False, timeout: float | None = None) -> None:
        """Wait until all that has been noted is committed. Raises what kept it from that."""
        if self._thread.ident is None:
            self._write_here()
            return
        done = threading.Event()
        outcome: list[BaseException | None] = []

        def wake(error: BaseException | None) -> None:
            outcome.append(error)
            done.set()

        self.when_written(wake, durable=durable)
        left = remaining(math.inf if timeout is None else timeout)
        if not done.wait(None if left == math.inf else left):
            raise StorageUnavailableError("the journal could not be written in time")
        if outcome[0] is not None:
            raise outcome[0]

    def when_written(self, done: Done, *, durable: bool = False) -> None:
        """Call `done`, on the journal's thread, once all that has been noted is committed.

        It is given the error if the next flush fails; what was noted is then still tried again.
        """
        self._let_go(threading.get_ident())
        with self._changed:
            if isinstance(self._failure, LeaseLost):
                raise self._failure
            if self._ended:
                raise StorageUnavailableError("the journal is closed")
            self._buffer.waiting.append(done)
            self._buffer.durable = self._buffer.durable or durable
            self._urgent = True
            if not self._is_gathering or self._are_together():
                self._changed.notify()

    # The thread.

    def _noted(self) -> None:
        if self._idle or len(self._buffer) >= WINDOW_JOBS:
            self._changed.notify()

    def _run(self) -> None:
        try:
            while (buffer := self._next()) is not None:
                delay = self._flush(buffer)
                if delay is None:
                    return
                if delay:
                    self._pause(delay)
        finally:
            connections[self._dialect.alias].close()
            self._end()

    def _flush(self, buffer: Buffer) -> float | None:
        """Write a buffer and return the seconds until the next try: 0 after a success, None at the end."""
        try:
            self._write(buffer)
        except LeaseLost as error:
            self._fail(buffer, error)
            self._lost()
            return None
        except Exception as error:
            self._fail(buffer, error)
            delay: float = min(FIRST_RETRY * 2**self._failures, LAST_RETRY)
            if self._closing and delay >= LAST_RETRY:
                return None
            self._failures += 1
            self._warn(delay, error)
            return delay
        self._succeed(buffer)
        self._failures = 0
        return 0.0

    def _next(self) -> Buffer | None:
        """The next buffer to write, when its time has come; None at the end."""
        with self._changed:
            self._in_flight = 0
            self._room.notify_all()
            self._idle = True
            while not self._buffer:
                if self._closing:
                    self._ended = True
                    return None
                if not self._changed.wait(min(RENEW_EVERY, self._renew_share)):
                    break
            else:
                self._idle = False
                self._changed.wait_for(self._due, WINDOW)
                self._gather()
                self._changed.wait_for(lambda: not self._holders, PATIENCE)
            self._idle = False
            return self._take()

    def _take(self) -> Buffer:
        """Take what has been noted, to be written. The caller has the lock."""
        buffer = self._flying = self._buffer
        self._buffer = Buffer()
        self._in_flight = len(buffer)
        self._urgent = False
        self._together = len(buffer.waiting)
        return buffer

    def _gather(self) -> None:
        """Let those who wait for a commit share it: those whom the last one set free are soon back."""
        if self._urgent and not self._are_together():
            self._is_gathering = True
            self._changed.wait_for(self._are_together, GATHER)
            self._is_gathering = False

    def _are_together(self) -> bool:
        return len(self._buffer.waiting) >= self._together or self._closing

    def _due(self) -> bool:
        return self._urgent or self._closing or len(self._buffer) >= WINDOW_JOBS

    def _succeed(self, buffer: Buffer) -> None:
        if self._failure is not None:
            logger.warning("The journal works again; its changes were written.")
        self._failure = None
        self.flushed_at = self._clock.now()
        if buffer.is_visible:
            self.changes.bump()
        self._written(buffer.ended)
        for stream in buffer.elsewhere:
            stream.items = None
        self._flying = None
        _tell(buffer.waiting, None)

    def _fail(self, buffer: Buffer, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            waiting, buffer.waiting = buffer.waiting, []
            buffer.follow(self._buffer)
            self._buffer = buffer
            self._flying = None
            self._in_flight = 0
            self._room.notify_all()
        _tell(waiting, error)

    def _warn(self, seconds: float, error: Exception) -> None:
        """Log a failure, and have the next try begin with a new connection."""
        connections[self._dialect.alias].close()
        # What is no error of the database's is one of this package: it needs its traceback.
        unexpected = None if isinstance(error, Error | OSError) else error
        logger.warning(
            "Writing the journal failed, retrying in %.1f s: %s",
            seconds,
            in_one_line(error),
            exc_info=unexpected,
        )

    def _pause(self, seconds: float) -> None:
        """Wait before the next try, but not when the journal closes."""
        closing = self._closing
        with self._changed:
            self._changed.wait_for(lambda: self._closing and not closing, seconds)

    def _end(self) -> None:
        """Nobody is to wait for what will not come."""
        with self._changed:
            self._ended = True
            waiting, self._buffer.waiting = self._buffer.waiting, []
            self._room.notify_all()
        _tell(waiting, self._failure or StorageUnavailableError("the journal is closed"))

    def _write_here(self) -> None:
        buffer, self._buffer = self._buffer, Buffer()
        self._write(buffer)
        self.changes.bump()
        self._written(buffer.ended)

    def _write(self, buffer: Buffer) -> None:
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
            if buffer.updates:
                fields = rows.CHANGED_JOB[len(rows.JOB_KEY) :]
                write.update(models.Job, rows.JOB_KEY, fields, list(buffer.updates.values()))
            if buffer.leases:
                # After the other changes: a renewal that is still noted is later than they are.
                write.update(models.Job, rows.JOB_KEY, ("leased_until",), list(buffer.leases.values()))
            if buffer.contents:
                fields = rows.UPDATE[len(rows.JOB_KEY) :]
                write.update(models.Job, rows.JOB_KEY, fields, list(buffer.contents.values()))
            if buffer.letters_gone:
                write.delete(models.DeadLetter, rows.KEY, list(buffer.letters_gone))
            if buffer.results_gone:
                self._forget_results(buffer.results_gone)
            self._write_one(models.JobResult, rows.RESULT, buffer.results)
            if buffer.kept or buffer.results_gone or buffer.put_off:
                self.book.write(buffer.kept, buffer.results_gone, buffer.put_off)
            if buffer.put_off:
                pinned.put_off(write.alias, [key for key, later in buffer.put_off.items() if later])
                pinned.put_back(write.alias, [key for key, later in buffer.put_off.items() if not later])
            self._write_one(models.DeadLetter, rows.LETTER, buffer.letters)
            if buffer.retry_times:
                times = [(*key, at) for key, at in buffer.retry_times.items()]
                write.update(models.DeadLetter, rows.KEY, ("next_retry_at",), times)
            if buffer.clock_offset is not None and self._note_clock is not None:
                self._note_clock(buffer.clock_offset)
            self._add_many(models.JobAttempt, rows.ATTEMPT, buffer.attempts)
            self._add_many(models.JobLog, rows.LOG, buffer.logs)
            for key in buffer.long:
                retention = self._retention_of(key[0])
                self._shorten(models.JobAttempt, key, retention.attempts.count)
                self._shorten(models.JobLog, key, retention.logs.count)
            if buffer.progress:
                write.update(models.Job, rows.JOB_KEY, ("progress",), list(buffer.progress.values()))
            if buffer.items_sent:
                self._write_items(buffer)
            self._write_queues(buffer)
            self._write_workers(buffer)
            if buffer.metrics_gone:
                write.delete(models.MetricBucket, ("queue",), [(queue,) for queue in buffer.metrics_gone])
            if buffer.metrics:
                write.insert(models.MetricBucket, BUCKET, list(buffer.metrics.values()), key=BUCKET[:4])

    def _forget_results(self, ends: Mapping[Key, int]) -> None:
        """With the items of the jobs that ended then; their records may be kept on."""
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
        # By number: a commit that was done, and whose answer was lost, is done again.
        new = [row for found in buffer.items.values() for row in found]
        write.insert(models.JobItem, rows.ITEM, new, key=rows.ITEM_KEY)
        write.update(models.Job, rows.JOB_KEY, ("items",), list(buffer.items_sent.values()))

    def _write_one(self, model: type[Model], fields: Sequence[str], found: dict[Key, Row]) -> None:
        if found:
            self._dialect.insert(model, fields, list(found.values()), key=rows.KEY)

    def _add_many(self, model: type[Model], fields: Sequence[str], found: dict[Key, list[Row]]) -> None:
        if found:
            lines = [row for entry in found.values() for row in entry]
            if self._failure is not None:
                # The commit may have been done, and its answer lost.
                named = len(rows.LOG) if model is models.JobLog else rows.ATTEMPT_NAMED
                self._dialect.delete(model, fields[:named], [row[:named] for row in lines])
            self._dialect.insert(model, fields, lines)

    def _shorten(self, model: type[Model], key: Key, limit: int) -> None:
        """Forget the oldest of a job's rows, as the engine has."""
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
        taken_back = [key for key, row in buffer.groups.items() if row is None]
        if taken_back:
            self._dialect.delete(models.GroupState, GROUP_STATE[:2], taken_back)
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
                worker_id, values = rows.worker_row(info)
                manager.update_or_create(worker_id=worker_id, defaults=values)


class LeaseLost(StorageUnavailableError):
    """Another process has become the scheduler of this database; this one has to stop."""


LIMITER_STATE = ("name", "rate_capacity", "rate_per", "concurrency")
BUCKET = ("queue", "name", "tier", "start", *Totals._fields, "wait", "run")


def _is_long(job: EngineJob, retention: Retention) -> bool:
    runs, lines = job.history, job.logs
    return (runs is not None and len(runs) >= retention.attempts.count) or (
        lines is not None and len(lines) >= retention.logs.count
    )


class Waiter:
    """A coroutine that waits for a flush."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.written: asyncio.Future[BaseException | None] = loop.create_future()

    def __call__(self, error: BaseException | None) -> None:
        """On its loop: have it go on."""
        if not self.written.done():
            self.written.set_result(error)


def _tell(waiting: list[Done], error: BaseException | None) -> None:
    """Those on one loop are told together: waking it takes as long as telling ten of them."""
    callbacks: list[Callable[[], object]] = []
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for done in waiting:
        if isinstance(done, Waiter):
            by_loop.setdefault(done.loop, []).append(done)
        else:
            callbacks.append(partial(done, error))
    for loop, waiters in by_loop.items():
        callbacks.append(partial(loop.call_soon_threadsafe, _tell_each, waiters, error))
    for callback in callbacks:
        try:
            callback()
        except Exception:
            # Such as a loop that has ended.
            logger.exception(
                "A callback that waited for the journal raised an exception; the journal goes on."
            )


def _tell_each(waiters: list[Waiter], error: BaseException | None) -> None:
    for waiter in waiters:
        waiter(error)


def _take_history(job: EngineJob) -> list[Row]:
    """The ended runs that have not been noted yet; the engine's copy stays, for reading."""
    if job.history is None or job.noted == len(job.history):
        return []
    new = job.history[job.noted :]
    job.noted = len(job.history)
    return [rows.attempt_row(job, attempt) for attempt in new]
