"""The mirror: jobs in Redis, copied to the tables, where they can be looked at and outlive Redis."""

import logging
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

from django.db import DataError, Error, connections

from djqueue.core.clock import Clock
from djqueue.core.errors import ConfigurationError, DjqueueError, SerializationError
from djqueue.core.states import State
from djqueue.storage.base import Storage
from djqueue.storage.database.away import in_one_line
from djqueue.storage.database.clock import DatabaseClock
from djqueue.storage.database.rows import Row

from .pace import Pace
from .tables import UNFINISHED, Tables
from .turn import Turn, TurnLostError

if TYPE_CHECKING:
    from djqueue.storage.redis.changes import Changes, Controls

logger = logging.getLogger("djqueue.mirror")

BATCH = 1_000
"""Jobs of one transaction."""
IDLE = 0.5
"""Seconds between two looks when nothing has changed."""
TIDY_EVERY = 5_000
"""Milliseconds between two looks at the workers, and at what is to be forgotten."""
FIRST_RETRY, LAST_RETRY = 0.5, 10.0
"""Seconds before what failed is tried again, doubling."""
LONGEST = 10_000
"""Milliseconds that catching up may take: where changes never end, it would not, either."""
BAD = (DataError, SerializationError, OverflowError, ValueError)
"""What a job raises that cannot be read or written, however often that is tried."""
NOT_KNOWN = (
    "Redis does not know %d unfinished jobs of queue %r that are in the tables, and may have lost them: "
    "`manage.py djqueue restore-from-mirror` enqueues them again, `manage.py djqueue resync` forgets them."
)

Counted = Callable[[int, int], None]
"""Called with how many jobs were copied, and how many forgotten, so far."""


class Mirror:
    """Copies the jobs of a Redis storage to the tables of a database. Any number of processes may have one.

    Jobs are copied as they are when their change is read, many in a transaction, and the change is
    acknowledged after the commit: a copy that was cut off is made again. See `Turn` for why an older copy
    never comes last. Where changes were lost, all jobs of the queue are looked at.
    """

    def __init__(self, storage: Storage, alias: str, *, clock: Clock | None = None) -> None:
        changes = getattr(storage, "changes", None)
        if changes is None:
            raise ConfigurationError(f"nothing is mirrored of {storage.describe()}")
        self.storage = storage
        self._changes: Changes = changes
        self._alias = alias
        self.clock = clock or DatabaseClock(alias)
        self._turn = Turn(alias, self.clock)
        options = self._changes.options
        self.tables = Tables(alias, options.states, options.retention, self._turn.hold)
        self._between: Callable[[], None] = lambda: None
        """Called after each transaction."""
        self._begun = 0
        """The number of the turn that the fields below are of."""
        self._controls: dict[str, Row] = {}
        """What the tables say that queues were told."""
        self._read: dict[str, bytes] = {}
        """The last entry of each queue's stream that was read."""
        self._tidied = 0
        self._warned: set[str] = set()
        """Queues of which it has been said that Redis does not know them."""

    # Copying.

    def copy_once(self) -> int:
        """Copy what has changed, a part of it if that is much; returns how many jobs were looked at.

        0 as well while another process is at it. Raises StorageError and the database's errors.
        """
        try:
            return self._copy_changes() if self._turn.take() else 0
        except TurnLostError:
            return 0

    def has_lost(self, queue: str) -> bool:
        """Whether the tables may know jobs of the queue that Redis has lost."""
        listed, followed = self._changes.queues()
        return queue not in listed or followed.get(queue) != 0

    def close(self) -> None:
        """Let another process go on."""
        self._turn.release()

    def catch_up(self) -> None:
        """Copy all that has changed by now. Another process that copies stops until this is done."""
        self._take_turn()
        try:
            self._copy_rest()
        finally:
            self.close()

    def _copy_changes(self) -> int:
        listed, followed = self._changes.queues()
        if self._begun != self._turn.number:
            self._begin(followed)
        copied = sum(self._bury(queue) for queue in followed.keys() - set(listed))
        copied += sum(self._copy_queue(queue, followed.get(queue)) for queue in listed)
        if self.clock.monotonic() - self._tidied >= TIDY_EVERY:
            self._tidy(listed)
        return copied

    def _take_turn(self) -> None:
        if not self._turn.take(by_force=True):
            raise TurnLostError

    def _begin(self, followed: dict[str, int]) -> None:
        """The turn is a new one: what was known of the tables may not be so any more."""
        self._controls = self.tables.controls()
        self._read = {}
        self._tidied = self.clock.monotonic() - TIDY_EVERY
        for queue, since in followed.items():
            # Jobs that Redis had lost may have been restored meanwhile.
            if since:
                unknown = self._forget_unknown(queue, None)
                self._trust(queue, unknown)
                followed[queue] = unknown.since
        self._begun = self._turn.number

    def _copy_queue(self, queue: str, since: int | None) -> int:
        reading = self._changes.next(queue)
        # So it is if Redis has gone back to an older state of its data.
        is_back = _number(reading.before) < _number(self._read.get(queue, reading.before))
        if reading.word == "new":
            # In a cluster, the node of this queue alone may have lost its data.
            return self._copy_all(queue, None if self._changes.is_cluster else since)
        if reading.word == "gap":
            logger.warning("Queue %r has changed more than its stream keeps: all is copied.", queue)
        if reading.word == "gap" or since is None or is_back:
            return self._copy_all(queue, None if is_back else since)
        self._copy(queue, reading.ids)
        self._changes.acknowledge(queue, reading.entries)
        self._read[queue] = max((reading.before, *reading.entries[-1:]), key=_number)
        if since == 0:
            self._note_controls(queue, reading.controls)
        return len(reading.ids)

    def _copy(self, queue: str, ids: Sequence[str]) -> None:
        for first in range(0, len(ids), BATCH):
            self._copy_batch(queue, ids[first : first + BATCH])
            self._between()

    def _copy_batch(self, queue: str, ids: Sequence[str]) -> None:
        try:
            found = dict(zip(ids, self._changes.records(queue, ids), strict=True))
            failed = [job.id for job in found.values() if job is not None and job.state is State.FAILED]
            letters = self._changes.letters(queue, failed)
            self.tables.write(queue, found, letters, self.clock.now())
        except BAD as error:
            if len(ids) == 1:
                logger.error("Job %r of queue %r cannot be copied: %s", ids[0], queue, in_one_line(error))
                return
            middle = len(ids) // 2
            self._copy_batch(queue, ids[:middle])
            self._copy_batch(queue, ids[middle:])

    def _note_controls(self, queue: str, controls: "Controls") -> None:
        rate = controls.rate
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
        row = (queue, controls.paused, capacity, per, controls.concurrency)
        there = self._controls.get(queue)
        if row != there and (there is not None or controls.paused or controls.limited):
            self.tables.write_controls(queue, row)
            self._controls[queue] = row

    # Looking at all.

    def resync(
        self, queue: str | None = None, progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> None:
        """Make the tables equal to Redis, also forgetting all unfinished jobs that it does not know.

        progress: called with a queue, and how many of its jobs were copied, and forgotten, so far.

        Another process that copies stops until this is done. Raises TurnLostError if another one does this.
        """
        self._take_turn()
        try:
            listed, followed = self._changes.queues()
            every = {*listed, *followed, *self.tables.queues()}
            for name in sorted(every) if queue is None else [queue]:
                counted = _named(name, progress)
                if name in listed:
                    self._copy_all(name, 0, counted)
                else:
                    counted(0, self._bury(name))
            self._tidy(listed)
        finally:
            self._turn.release()

    def _copy_all(self, queue: str, since: int | None, counted: Counted = lambda *_: None) -> int:
        """Make the tables equal to what Redis has of a queue; returns how many jobs were looked at.

        since: unfinished jobs that Redis does not know are forgotten, if they were enqueued since then;
            None: it may have lost them, and they stay.
        """
        place = self._changes.follow(queue)
        copied = 0
        for ids in self._changes.pages(queue):
            self._copy(queue, ids)
            copied += len(ids)
            counted(copied, 0)
        unknown = self._forget_unknown(queue, since)
        counted(copied, unknown.forgotten)
        self._turn.hold()
        if self._changes.go_on(queue, place):
            self._trust(queue, unknown)
            self._read[queue] = place.entry
        return copied

    def _bury(self, queue: str) -> int:
        """Forget the jobs of a queue that was obliterated; returns how many."""
        forgotten = self._forget_unknown(queue, 0).forgotten
        self._turn.hold()
        self._changes.forget(queue)
        self.tables.write_controls(queue, None)
        self._controls.pop(queue, None)
        return forgotten

    def _forget_unknown(self, queue: str, since: int | None) -> "Unknown":
        """Take leave of the jobs that Redis does not know."""
        forgotten = kept = newest = 0
        for page in self.tables.pages(queue):
            states = self.storage.states(queue, [row.job_id for row in page])
            gone: dict[str, None] = {}
            for row, state in zip(page, states, strict=True):
                if state is not None:
                    continue
                if row.state not in UNFINISHED or (since is not None and row.created_at >= since):
                    gone[row.job_id] = None
                else:
                    kept += 1
                    newest = max(newest, row.created_at + 1)
            if gone:
                self.tables.write(queue, gone, {}, self.clock.now())
            forgotten += len(gone)
        return Unknown(forgotten, kept, newest)

    def _trust(self, queue: str, unknown: "Unknown") -> None:
        if unknown.kept:
            logger.warning(NOT_KNOWN, unknown.kept, queue)
        self._changes.trust(queue, unknown.since)

    # Workers, and what is over.

    def _tidy(self, listed: Sequence[str]) -> None:
        self.tables.write_workers(self.storage.workers())
        while self.tables.purge(self.clock.now()):
            self._between()
        for queue in sorted({*self.tables.queues()} - {*listed} - self._warned):
            unknown = self.tables.count_unfinished(queue)
            if unknown:
                logger.warning(NOT_KNOWN, unknown, queue)
                self._warned.add(queue)
        self._tidied = self.clock.monotonic()

    # The thread.

    def run(self, stop: Event) -> None:
        """Copy again and again until `stop` is set, and then what is left. Errors are logged, not raised."""
        pace = Pace(stop)
        self._between = pace.rest
        failures = 0
        try:
            while not stop.is_set():
                try:
                    copied = self.copy_once()
                except Exception as error:
                    self._failed(error, failures)
                    pace.wait(min(FIRST_RETRY * 2**failures, LAST_RETRY))
                    failures += 1
                    continue
                if failures:
                    logger.warning("The mirror goes on.")
                failures = 0
                if not copied:
                    pace.wait(IDLE)
            self._end()
        finally:
            connections[self._alias].close()

    def _end(self) -> None:
        for last in (self._copy_rest, self.close):
            try:
                last()
            except Exception as error:
                self._failed(error, 0)

    def _copy_rest(self) -> None:
        until = self.clock.monotonic() + LONGEST
        while self.copy_once() and self.clock.monotonic() < until:
            pass

    def _failed(self, error: Exception, failures: int) -> None:
        connections[self._alias].close()
        if not failures:
            # What is no error of Redis's or the database's is one of this package: it needs its traceback.
            unexpected = None if isinstance(error, DjqueueError | Error | OSError) else error
            reason = in_one_line(error)
            logger.warning("The mirror stands still, and is tried again: %s", reason, exc_info=unexpected)


class Unknown(NamedTuple):
    """What became of the jobs of a queue that the tables have and Redis does not know."""

    forgotten: int
    kept: int
    """Unfinished ones that Redis may have lost."""
    since: int
    """The time, in UTC milliseconds, before which all of these were enqueued; 0 if there are none."""


def _number(entry: bytes) -> tuple[int, ...]:
    """The id of an entry as numbers, which rise from entry to entry."""
    return tuple(map(int, entry.split(b"-")))


def _named(queue: str, progress: Callable[[str, int, int], None]) -> Counted:
    return lambda copied, forgotten: progress(queue, copied, forgotten)
