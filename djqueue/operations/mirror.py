"""The mirror: copies the jobs in Redis to the tables, where they can be inspected and outlive Redis.

`Mirror` follows the changes of all queues, and `Copying` copies the jobs of one queue. `mirroring` runs a
mirror on a thread beside a worker.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from django.db import DataError, Error, connections, router

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.deadlines import GrowingPause
from djqueue.core.errors import ConfigurationError, DjqueueError, SerializationError, StorageError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.states import State
from djqueue.core.threads import beside
from djqueue.storage.base import Storage
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.leaderlease import MIRROR, LeaderLease, LeaderLeaseLostError
from djqueue.storage.tables.rows import Row, pack_holds

from .mirrortables import UNFINISHED, MirroredRows, Tables
from .throttle import BusyPause, CopyThrottle

if TYPE_CHECKING:
    from djqueue.storage.redis.changes import ChangeBatch, ChangeStream, Controls, Mark

logger = Log("djqueue.mirror")

INTERVAL, IDLE = 0.2, 0.5
"""Seconds between the starts of two rounds: while jobs change, and while none do. A round costs as much as
many jobs, and a job that is enqueued, claimed and finished within one interval is copied once."""
SWEEP_EVERY = 5_000
"""Milliseconds between two copies of the workers, and between two removals of expired rows."""
STEPS_PER_ROUND = 20
"""Thousands of rows that one such round removes; the next round removes the rest."""
FIRST_RETRY, LAST_RETRY = 0.5, 10.0
"""Seconds before the next attempt after an error: first and longest wait, with doubling."""
MAX_TAKES = 20
"""Attempts to take the leader lease when other processes try at the same time."""
MAX_CATCH_UP = 10_000
"""Maximum milliseconds for catching up, which would never end while changes keep coming."""
JOBS_PER_TRANSACTION = 2_000
"""Jobs copied in one transaction."""
PERMANENT_ERRORS = (DataError, SerializationError, OverflowError, ValueError)
"""Errors of jobs that can never be read or written, so that retries are useless."""
NOT_KNOWN = (
    "%d unfinished jobs of queue %r are in the tables but not in Redis, which may have lost them. Run "
    "`manage.py djqueue restore-from-mirror` to enqueue them again, or `manage.py djqueue resync` to "
    "delete their rows."
)

Counted = Callable[[int, int], None]
"""Called with the numbers of jobs copied and removed so far."""
Progress = Callable[[str, int, int], None]
"""Called with a queue, and the numbers of its jobs that have been copied and removed."""


@contextmanager
def mirroring(storage: Storage) -> Iterator[None]:
    """Copy changes on a thread within the block, if the storage has a mirror; finish copying at the end."""
    if not is_mirrored(storage):
        yield
        return
    with beside(mirror_of(storage).run, "djqueue-mirror"):
        yield


def is_mirrored(storage: Storage) -> bool:
    """Return whether the storage's jobs are copied to the tables."""
    return storage.capabilities.changes is not None


def mirror_of(storage: Storage) -> "Mirror":
    """Return the mirror in the database that the routers name. Raises ConfigurationError if there is none."""
    return Mirror(storage, router.db_for_write(models.Job))


class Mirror:
    """Copies the jobs of a Redis storage to the tables of a database. Any number of processes may run one.

    Jobs are copied in their state when their change is read, many in one transaction. The change is
    acknowledged after the commit, so that an interrupted copy is repeated. `LeaderLease` ensures that an
    older copy never overwrites a newer one. If changes were missed, all jobs of the queue are compared.
    One thread at a time calls the methods.
    """

    def __init__(self, storage: Storage, alias: str, *, clock: Clock | None = None) -> None:
        changes: ChangeStream | None = storage.capabilities.changes
        if changes is None:
            raise ConfigurationError(f"{storage.describe()} has no change stream to mirror")
        self.storage = storage
        self.clock = clock or DatabaseClock(alias)
        self._alias = alias
        self._changes = changes
        self._lease = LeaderLease(alias, self.clock, MIRROR)
        renew = self._lease.renew
        self.tables = Tables(alias, changes.options, renew)
        self._copying = Copying(storage, changes, self.tables, self.clock, renew)
        self._number = 0
        """Generation of the leader lease to which the fields below belong."""
        self._controls: dict[str, Row] = {}
        """Controls of the queues in the tables."""
        self._revisions: dict[str, int] = {}
        """Version of each queue's limits of concurrency keys when they were last copied."""
        self._marks: dict[str, Mark] = {}
        """Position in each queue's stream."""
        self._swept_at = 0
        self._is_behind = False
        """Whether the last round left changes for the next one."""
        self._warned: set[str] = set()
        """Queues that Redis does not know, and for which a warning was logged."""

    def copy_once(self) -> int:
        """Copy changes, or a part of them if they are many; return the number of compared jobs.

        Also 0 while another process copies. Raises StorageError and the database's errors.
        """
        self.tables.tune()
        self._is_behind = False
        try:
            if not self._lease.acquire():
                return 0
            try:
                return self._round()
            except StorageError:
                # Another process may have taken over and read on, which looks like a loss of data.
                self._lease.renew()
                raise
        except LeaderLeaseLostError:
            return 0

    def catch_up(self) -> None:
        """Copy all changes so far. Another process that copies stops until this is done."""
        self._take_lease()
        try:
            self._copy_rest()
        finally:
            self.close()

    def resync(self, queue: str | None = None, progress: Progress = lambda *_: None) -> None:
        """Make the tables equal to Redis, and remove all unfinished jobs that Redis does not know.

        Another process that copies stops until this is done. Raises LeaderLeaseLostError if another
        process resyncs.
        """
        self._take_lease()
        try:
            listed, followed = self._changes.queues()
            every = {*listed, *followed, *self.tables.queues()}
            for name in sorted(every) if queue is None else [queue]:
                counted = _named(name, progress)
                if name in listed:
                    self._copying.copy_all(name, 0, counted)
                else:
                    counted(0, self._remove_obliterated(name))
            self._sweep(listed)
        finally:
            self.close()

    def count_resync(self, queue: str | None = None, progress: Progress = lambda *_: None) -> None:
        """Count what `resync` would copy and remove, and change nothing."""
        listed, followed = self._changes.queues()
        every = {*listed, *followed, *self.tables.queues()}
        for name in sorted(every) if queue is None else [queue]:
            self._copying.count_all(name, _named(name, progress))

    def has_lost(self, queue: str) -> bool:
        """Return whether the tables may contain jobs of the queue that Redis has lost."""
        listed, followed = self._changes.queues()
        return queue not in listed or followed.get(queue) != 0

    def close(self) -> None:
        """Release the leader lease."""
        self._lease.release()

    # One round.

    def _take_lease(self) -> None:
        self.tables.tune()
        # Another process may take the lease between the check and the change; a process that must have it
        # tries again.
        if not any(self._lease.acquire(by_force=True) for _ in range(MAX_TAKES)):
            raise LeaderLeaseLostError

    def _round(self) -> int:
        if self._number != self._lease.number:
            self._begin()
        listed, followed = self._changes.queues()
        copied = sum(self._remove_obliterated(queue) for queue in followed.keys() - set(listed))
        copied += sum(self._copy_queue(queue, followed.get(queue)) for queue in listed)
        if self.clock.monotonic() - self._swept_at >= SWEEP_EVERY:
            self._sweep(listed)
        return copied

    def _begin(self) -> None:
        """Begin a new lease: what was known about the tables may no longer be true."""
        self._controls = self.tables.controls()
        self._revisions = {}
        self.tables.check_all()
        self._marks = {}
        self._swept_at = self.clock.monotonic() - SWEEP_EVERY
        for queue, since in self._changes.queues()[1].items():
            # Jobs that Redis had lost may have been restored since.
            if since:
                self._marks[queue] = self._copying.copy_all(queue, since)[1]
        self._number = self._lease.number

    def _copy_queue(self, queue: str, since: int | None) -> int:
        reading = self._changes.next(queue, self._revisions.get(queue))
        if reading.status == "go" and since is not None and not self._is_older(queue, reading):
            self._copying.copy(queue, reading.ids, reading.after)
            self._changes.acknowledge(queue, reading.entries)
            self._marks[queue] = reading.after
            if since == 0:
                self._note_controls(queue, reading.controls)
            self._is_behind = self._is_behind or reading.is_full
            return len(reading.ids)
        if reading.status == "new":
            self._marks.pop(queue, None)
        elif reading.status == "gap":
            logger.warning(
                "Queue %r: the change stream was trimmed before it was read; copying all jobs.", queue
            )
        copied, self._marks[queue] = self._copying.copy_all(queue, self._trusted(queue, reading))
        self._is_behind = True
        return copied

    def _trusted(self, queue: str, reading: "ChangeBatch") -> int | None:
        """Return since when unknown jobs count as removed; None if Redis may have lost any of them."""
        if self._is_older(queue, reading):
            return None
        if reading.status == "new" and self._changes.is_cluster:
            return None  # only the node of this queue may have lost its data
        # The current value: it was lost together with the stream, unless that was deleted with its queue.
        return self._changes.queues()[1].get(queue)

    def _is_older(self, queue: str, reading: "ChangeBatch") -> bool:
        """Return whether Redis has returned to an older state of its data."""
        mark = self._marks.get(queue)
        return bool(mark and reading.before) and _numbers(reading.before) < _numbers(mark or b"")

    def _remove_obliterated(self, queue: str) -> int:
        """Remove the jobs of an obliterated queue; return their number."""
        self._changes.leave(queue)
        forgotten = self._copying.forget_unknown(queue, 0).forgotten
        self._lease.renew()
        self._changes.forget(queue)
        self.tables.write_controls(queue, None)
        self.tables.write_groups(queue, {})
        self._controls.pop(queue, None)
        self._revisions.pop(queue, None)
        self._marks.pop(queue, None)
        return forgotten

    def _note_controls(self, queue: str, controls: "Controls") -> None:
        rate = controls.rate
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
        row = (queue, controls.paused, capacity, per, controls.concurrency, pack_holds(controls.holds))
        known = self._controls.get(queue)
        if row != known and (known is not None or controls.paused or controls.limited or controls.holds):
            self.tables.write_controls(queue, row)
            self._controls[queue] = row
        if controls.groups is not None:
            self.tables.write_groups(queue, controls.groups)
            self._revisions[queue] = controls.revision

    def _sweep(self, listed: Sequence[str]) -> None:
        """Copy the workers; remove expired rows, and queues that Redis no longer knows."""
        self.tables.write_workers(self.storage.workers.all())
        is_done = self._forget_old()
        for queue in sorted({*self.tables.queues()} - {*listed} - self._warned):
            unknown = self.tables.count_unfinished(queue)
            if unknown:
                logger.warning(NOT_KNOWN, unknown, queue)
                self._warned.add(queue)
        if is_done:
            self._swept_at = self.clock.monotonic()

    def _forget_old(self) -> bool:
        """Remove some expired rows; return whether all were removed."""
        for _ in range(STEPS_PER_ROUND):
            if not self.tables.purge(self.clock.now()) and not self.tables.trim():
                return True
            self._copying.between()
        return False

    # The thread.

    def run(self, stop: Event) -> None:
        """Copy changes until `stop` is set, and then the remaining ones. Errors are logged, not raised."""
        pace, pause = CopyThrottle(stop), self._pause(stop)
        retry = GrowingPause(FIRST_RETRY, LAST_RETRY)

        def between() -> None:
            pace.rest()
            if pause.wait():
                pace.begin()

        self._copying.between = between
        copied = 0
        try:
            while not stop.is_set():
                try:
                    if self._wait_while_busy(pause, copied):
                        pace.begin()
                    began, round_began = time.monotonic(), self.clock.monotonic()
                    copied = self.copy_once()
                except Exception as error:
                    copied = 0
                    self._failed(error, retry.failures)
                    pace.wait(retry.failed())
                    continue
                if retry.failures:
                    logger.warning("Mirroring resumed.")
                retry.succeeded()
                if not self._is_behind:
                    if self._lease.number:
                        pause.caught_up(round_began)
                    elapsed = time.monotonic() - began
                    pace.wait(max(0.0, (INTERVAL if copied else IDLE) - elapsed))
            self._end()
        finally:
            connections[self._alias].close()

    def _pause(self, stop: Event) -> BusyPause:
        return BusyPause(
            self._changes.backlogs,
            self._lease.renew_if_due,  # a lease that was lost and taken again would be that of another round
            length=self._changes.length,
            max_lag=self._changes.options.max_lag,
            clock=self.clock,
            stop=stop,
        )

    def _wait_while_busy(self, pause: BusyPause, copied: int) -> bool:
        """Wait while many jobs change, within bounds; return whether this waited."""
        self.tables.tune()
        try:
            return bool(self._lease.number) and pause.before_round(copied)
        except LeaderLeaseLostError:
            return False

    def _end(self) -> None:
        for last in (self._copy_rest, self.close):
            try:
                last()
            except Exception as error:
                self._failed(error, 0)

    def _copy_rest(self) -> None:
        until = self.clock.monotonic() + MAX_CATCH_UP
        while self.copy_once() and self.clock.monotonic() < until:
            pass

    def _failed(self, error: Exception, failures: int) -> None:
        connections[self._alias].close()
        if not failures:
            # Any other error is a defect of this package, and needs its traceback.
            unexpected = None if isinstance(error, DjqueueError | Error | OSError) else error
            reason = in_one_line(error)
            logger.warning("Mirroring paused, retrying: %s", reason, exc_info=unexpected)


def _named(queue: str, progress: Progress) -> Counted:
    return lambda copied, forgotten: progress(queue, copied, forgotten)


def _numbers(entry: bytes) -> tuple[int, ...]:
    """Return the id of an entry as numbers, which increase from entry to entry."""
    return tuple(map(int, entry.split(b"-")))


class UnknownJobs(NamedTuple):
    """The jobs in the tables that Redis does not know, by outcome."""

    forgotten: int
    """Unfinished jobs whose rows were removed."""
    kept: int
    """Unfinished jobs that Redis may have lost."""
    since: int
    """Time in UTC milliseconds before which all of these were enqueued; 0 if there are none."""


class Copying:
    """Copies jobs while this process has the leader lease.

    renew: raises if another process has taken the lease.
    """

    def __init__(
        self,
        storage: Storage,
        changes: "ChangeStream",
        tables: Tables,
        clock: Clock,
        renew: Callable[[], None],
    ) -> None:
        self.between: Callable[[], None] = lambda: None
        """Called after each transaction."""
        self._storage = storage
        self._changes = changes
        self._tables = tables
        self._clock = clock
        self._renew = renew

    def copy(self, queue: str, ids: Sequence[str], mark: "Mark") -> None:
        """Write the current state of these jobs, while the queue has this mark."""
        for first in range(0, len(ids), JOBS_PER_TRANSACTION):
            self._copy(queue, ids[first : first + JOBS_PER_TRANSACTION], mark)
            self.between()

    def _copy(self, queue: str, ids: Sequence[str], mark: "Mark") -> None:
        try:
            records = dict(zip(ids, self._changes.records(queue, ids, mark), strict=True))
            failed = [job.id for job in records.values() if job is not None and job.state is State.FAILED]
            letters = self._changes.dead_letters(queue, failed)
            self._tables.write(queue, records, letters, self._clock.now())
        except PERMANENT_ERRORS as error:
            if len(ids) == 1:
                logger.error("Job %r of queue %r cannot be copied: %s", ids[0], queue, in_one_line(error))
                return
            middle = len(ids) // 2
            self._copy(queue, ids[:middle], mark)
            self._copy(queue, ids[middle:], mark)

    def copy_all(
        self, queue: str, since: int | None, counted: Counted = lambda *_: None
    ) -> tuple[int, "Mark"]:
        """Make the tables equal to a queue in Redis; return the number of compared jobs and the queue's
        mark.

        since: jobs enqueued since then that Redis does not know were removed on purpose. None: Redis may
        have lost any job, so unknown jobs keep their rows.
        """
        place = self._changes.follow(queue)
        copied = 0
        for ids in self._changes.pages(queue):
            self.copy(queue, ids, place.mark)
            copied += len(ids)
            counted(copied, 0)
        unknown = self.forget_unknown(queue, since, place.mark)
        counted(copied, unknown.forgotten)
        if unknown.kept:
            logger.warning(NOT_KNOWN, unknown.kept, queue)
        self._renew()
        # In this order: the trusted time is lost together with the stream, or found to be no longer
        # followed.
        self._changes.trust(queue, unknown.since)
        mark = self._changes.go_on(queue, place)
        if not mark:
            self._changes.forget(queue)
        return copied, mark

    def forget_unknown(self, queue: str, since: int | None, mark: "Mark" = b"") -> UnknownJobs:
        """Remove jobs that Redis does not know: see `copy_all`."""
        forgotten = kept = newest = 0
        for unknown in self._unknown_pages(queue):
            gone: list[str] = []
            for row in unknown:
                if since is not None and row.created_at >= since:
                    gone.append(row.job_id)
                    forgotten += row.state in UNFINISHED
                elif row.state in UNFINISHED:
                    kept += 1
                    newest = max(newest, row.created_at + 1)
            # Read again together with the mark, which proves that Redis has not lost its data in between.
            self.copy(queue, gone, mark)
        return UnknownJobs(forgotten, kept, newest)

    def count_all(self, queue: str, counted: Counted) -> None:
        """Count the jobs that `copy_all` would copy and the rows that it would remove; change nothing."""
        copied = 0
        for ids in self._changes.pages(queue):
            copied += len(ids)
            counted(copied, 0)
        forgotten = sum(row.state in UNFINISHED for page in self._unknown_pages(queue) for row in page)
        counted(copied, forgotten)

    def _unknown_pages(self, queue: str) -> Iterator[list[MirroredRows]]:
        """Yield the rows of jobs that Redis does not know, a page at a time."""
        for page in self._tables.pages(queue):
            states = self._storage.reads.states(queue, [row.job_id for row in page])
            yield [row for row, state in zip(page, states, strict=True) if state is None]
