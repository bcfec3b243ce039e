"""The mirror: jobs in Redis, copied to the tables, where they can be looked at and outlive Redis."""

import logging
from collections.abc import Callable, Sequence
from threading import Event
from typing import TYPE_CHECKING

from django.db import Error, connections

from djqueue.core.clock import Clock
from djqueue.core.errors import ConfigurationError, DjqueueError
from djqueue.core.shown import in_one_line
from djqueue.storage.base import Storage
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.rows import Row

from .copying import NOT_KNOWN, Copying, Counted
from .leaderlease import LeaderLease, LeaderLeaseLostError
from .pace import CopyThrottle
from .tables import Tables

if TYPE_CHECKING:
    from djqueue.storage.redis.changes import ChangeBatch, ChangeStream, Controls, Mark

logger = logging.getLogger("djqueue.mirror")

IDLE = 0.5
"""Seconds between two looks when nothing has changed."""
TIDY_EVERY = 5_000
"""Milliseconds between two looks at the workers, and at what is to be forgotten."""
STEPS = 20
"""Times a thousand rows that are forgotten at such a look; what is left goes with the next round."""
FIRST_RETRY, LAST_RETRY = 0.5, 10.0
"""Seconds before what failed is tried again, doubling."""
FORCED = 20
"""Tries to have a turn that others take at the same moment."""
LONGEST = 10_000
"""Milliseconds that catching up may take: where changes never end, it would not, either."""

Progress = Callable[[str, int, int], None]
"""Called with a queue, and how many of its jobs were copied, and forgotten, so far."""


class Mirror:
    """Copies the jobs of a Redis storage to the tables of a database. Any number of processes may have one.

    Jobs are copied as they are when their change is read, many in a transaction, and the change is
    acknowledged after the commit: a copy that was cut off is made again. See `LeaderLease` for why an
    older copy never comes last. Where changes were missed, all jobs of the queue are looked at. Methods are
    called by one thread at a time.
    """

    def __init__(self, storage: Storage, alias: str, *, clock: Clock | None = None) -> None:
        changes: ChangeStream | None = storage.capabilities.changes
        if changes is None:
            raise ConfigurationError(f"{storage.describe()} has no change stream to mirror")
        self.storage = storage
        self.clock = clock or DatabaseClock(alias)
        self._alias = alias
        self._changes = changes
        self._turn = LeaderLease(alias, self.clock)
        hold = self._turn.hold
        self.tables = Tables(alias, changes.options, hold)
        self._copying = Copying(storage, changes, self.tables, self.clock, hold)
        self._begun = 0
        """The number of the turn that the fields below are of."""
        self._controls: dict[str, Row] = {}
        """The controls of queues according to the tables."""
        self._said: dict[str, int] = {}
        """The version of each queue's group limits when they were last copied."""
        self._marks: dict[str, Mark] = {}
        """The position in each queue's stream."""
        self._tidied = 0
        self._warned: set[str] = set()
        """Queues for which a warning was logged that Redis does not know them."""

    def copy_once(self) -> int:
        """Copy what has changed, a part of it if that is much; returns how many jobs were looked at.

        0 as well while another process is at it. Raises StorageError and the database's errors.
        """
        try:
            return self._round() if self._turn.take() else 0
        except LeaderLeaseLostError:
            return 0

    def catch_up(self) -> None:
        """Copy all that has changed by now. Another process that copies stops until this is done."""
        self._take_turn()
        try:
            self._copy_rest()
        finally:
            self.close()

    def resync(self, queue: str | None = None, progress: Progress = lambda *_: None) -> None:
        """Make the tables equal to Redis, also forgetting all unfinished jobs that it does not know.

        Another process that copies stops until this is done. Raises TurnLostError if another one does this.
        """
        self._take_turn()
        try:
            listed, followed = self._changes.queues()
            every = {*listed, *followed, *self.tables.queues()}
            for name in sorted(every) if queue is None else [queue]:
                counted = _named(name, progress)
                if name in listed:
                    self._copying.copy_all(name, 0, counted)
                else:
                    counted(0, self._bury(name))
            self._tidy(listed)
        finally:
            self.close()

    def has_lost(self, queue: str) -> bool:
        """Return whether the tables may know jobs of the queue that Redis has lost."""
        listed, followed = self._changes.queues()
        return queue not in listed or followed.get(queue) != 0

    def close(self) -> None:
        """Let another process go on."""
        self._turn.release()

    # One round.

    def _take_turn(self) -> None:
        # Another one may take it between the look and the change: whose turn it is meant to be asks again.
        if not any(self._turn.take(by_force=True) for _ in range(FORCED)):
            raise LeaderLeaseLostError

    def _round(self) -> int:
        if self._begun != self._turn.number:
            self._begin()
        listed, followed = self._changes.queues()
        copied = sum(self._bury(queue) for queue in followed.keys() - set(listed))
        copied += sum(self._copy_queue(queue, followed.get(queue)) for queue in listed)
        if self.clock.monotonic() - self._tidied >= TIDY_EVERY:
            self._tidy(listed)
        return copied

    def _begin(self) -> None:
        """The turn is a new one: what was known of the tables may not be so any more."""
        self._controls = self.tables.controls()
        self._said = {}
        self.tables.look_at_all()
        self._marks = {}
        self._tidied = self.clock.monotonic() - TIDY_EVERY
        for queue, since in self._changes.queues()[1].items():
            # Jobs that Redis had lost may have been restored meanwhile.
            if since:
                self._marks[queue] = self._copying.copy_all(queue, since)[1]
        self._begun = self._turn.number

    def _copy_queue(self, queue: str, since: int | None) -> int:
        reading = self._changes.next(queue, self._said.get(queue))
        if reading.status == "go" and since is not None and not self._is_older(queue, reading):
            self._copying.copy(queue, reading.ids, reading.after)
            self._changes.acknowledge(queue, reading.entries)
            self._marks[queue] = reading.after
            if since == 0:
                self._note_controls(queue, reading.controls)
            return len(reading.ids)
        if reading.status == "new":
            self._marks.pop(queue, None)
        elif reading.status == "gap":
            logger.warning(
                "Queue %r: the change stream was trimmed before it was read; copying all jobs.", queue
            )
        copied, self._marks[queue] = self._copying.copy_all(queue, self._trusted(queue, reading))
        return copied

    def _trusted(self, queue: str, reading: "ChangeBatch") -> int | None:
        """Since when jobs that Redis does not know have been removed; None: it may have lost any of them."""
        if self._is_older(queue, reading):
            return None
        if reading.status == "new" and self._changes.is_cluster:
            return None  # the node of this queue alone may have lost its data
        # As it is now: it was lost together with the stream, if that was not deleted with its queue.
        return self._changes.queues()[1].get(queue)

    def _is_older(self, queue: str, reading: "ChangeBatch") -> bool:
        """Return whether Redis has gone back to an older state of its data."""
        mark = self._marks.get(queue)
        return bool(mark and reading.before) and _numbers(reading.before) < _numbers(mark or b"")

    def _bury(self, queue: str) -> int:
        """Forget the jobs of a queue that was obliterated; returns how many."""
        self._changes.leave(queue)
        forgotten = self._copying.forget_unknown(queue, 0).forgotten
        self._turn.hold()
        self._changes.forget(queue)
        self.tables.write_controls(queue, None)
        self.tables.write_groups(queue, {})
        self._controls.pop(queue, None)
        self._said.pop(queue, None)
        self._marks.pop(queue, None)
        return forgotten

    def _note_controls(self, queue: str, controls: "Controls") -> None:
        rate = controls.rate
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
        row = (queue, controls.paused, capacity, per, controls.concurrency)
        there = self._controls.get(queue)
        if row != there and (there is not None or controls.paused or controls.limited):
            self.tables.write_controls(queue, row)
            self._controls[queue] = row
        if controls.groups is not None:
            self.tables.write_groups(queue, controls.groups)
            self._said[queue] = controls.revision

    def _tidy(self, listed: Sequence[str]) -> None:
        """Workers, rows whose time is over, and queues that Redis does not even know any more."""
        self.tables.write_workers(self.storage.workers.all())
        is_done = self._forget_old()
        for queue in sorted({*self.tables.queues()} - {*listed} - self._warned):
            unknown = self.tables.count_unfinished(queue)
            if unknown:
                logger.warning(NOT_KNOWN, unknown, queue)
                self._warned.add(queue)
        if is_done:
            self._tidied = self.clock.monotonic()

    def _forget_old(self) -> bool:
        """Forget some rows that are kept no longer; whether it was all of them."""
        for _ in range(STEPS):
            if not self.tables.purge(self.clock.now()) and not self.tables.trim():
                return True
            self._copying.between()
        return False

    # The thread.

    def run(self, stop: Event) -> None:
        """Copy again and again until `stop` is set, and then what is left. Errors are logged, not raised."""
        pace = CopyThrottle(stop)
        self._copying.between = pace.rest
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
                    logger.warning("Mirroring resumed.")
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
            logger.warning("Mirroring paused, retrying: %s", reason, exc_info=unexpected)


def _named(queue: str, progress: Progress) -> Counted:
    return lambda copied, forgotten: progress(queue, copied, forgotten)


def _numbers(entry: bytes) -> tuple[int, ...]:
    """Return the id of an entry as numbers, which rise from entry to entry."""
    return tuple(map(int, entry.split(b"-")))
