"""The write-behind journal between the engine and the tables.

The engine's changes are copied to a buffer at once, merged by job, and written by one thread: at most
`WINDOW` after they were noted, or as soon as `WINDOW_JOBS` are waiting; a whole buffer in one transaction.
If a flush fails, its buffer is merged with the later changes and tried again. Each transaction renews the
scheduler's lease; while there is nothing to write, an empty one does so.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from django.db import Error, connections

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import remaining
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.retention import Retention
from djqueue.core.shown import in_one_line
from djqueue.core.versions import ChangeCounter

from ..tables.dialects import Dialect
from .buffer import Buffer, BufferWriter, Done, JobRowKey, Waiter, notify
from .lease import LeaseLost, SchedulerLease
from .noting import NotingJournal
from .retentionindex import RetentionIndex

logger = logging.getLogger("djqueue.journal")

WINDOW = 0.010
"""Maximum seconds before a change is written."""
GATHER = 0.002
"""Seconds for which a commit waits for as many waiters as the last one had."""
WINDOW_JOBS = 100
"""Number of changed jobs that are written at once."""
PATIENCE = 1.0
"""Seconds for which a flush waits for changes that belong together."""
BACKLOG = 1_000
"""Unwritten jobs at which callers wait. It bounds the loss in a crash."""
FIRST_RETRY, LAST_RETRY = 0.1, 5.0
"""Seconds before a failed flush is tried again: first and longest wait, with doubling."""
RENEW_EVERY = 3.0
"""Maximum seconds between renewals of the lease while there is nothing to write."""


class DatabaseJournal(NotingJournal):
    """The engine's journal, with the thread that writes it; before `start`, callers of `sync` write it.

    Args:
        dialect: The database.
        fence: Runs first in each transaction; raises LeaseLost if this process is no longer the scheduler.
        written: Called with the ended jobs of each flush after its commit.
        lost: Called when another process has become the scheduler.
        retention: The retention of the queues that have one.
        clock: The clock of `flushed_at`.
        own: The process of claims that name none.
        lease_ttl: Milliseconds until the lease expires; `fence` runs three times as often.
        lag: Milliseconds from the monotonic time to UTC, for the ends of leases; see `SchedulerLease.lag`.
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
    ) -> None:
        self._dialect = dialect
        self._written = written
        self._lost = lost
        bounds = dict(retention or {})
        lag = clock.now() - clock.monotonic() if lag is None else lag
        super().__init__(RetentionIndex(dialect, bounds), bounds, own, lag)
        self._writer = BufferWriter(dialect, fence, self.book, self._retention_of)
        self._clock = clock
        self._renew_share = lease_ttl / 3_000
        self.flushed_at: int | None = None
        """Time of the last flush, in UTC milliseconds."""
        self.changes = ChangeCounter()
        """The version of the tables."""
        self._room = threading.Condition(self._lock)
        """Notified when the journal is no longer full."""
        self._flying: Buffer | None = None
        """The buffer that is being written."""
        self._in_flight = 0
        self._idle = False
        """Whether the thread sleeps until there is something to write."""
        self._urgent = False
        self._together = 0
        """Number of waiters of the last flush."""
        self._is_gathering = False
        self._holders: set[int] = set()
        """Threads that are noting changes which belong in one transaction."""
        self._closing = False
        self._ended = False
        self._failure: BaseException | None = None
        self._failures = 0
        """Flushes that failed since the last success."""
        self._thread = threading.Thread(target=self._run, name="djqueue-journal", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Write the rest and stop the thread. Raises the error if the rest could not be written."""
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
        """The alias of the database."""
        return self._dialect.alias

    @property
    def lag(self) -> int:
        """Milliseconds from the monotonic time to UTC, for the ends of leases."""
        return self._lag

    @property
    def backlog(self) -> int:
        """Number of jobs with unwritten changes."""
        return len(self._buffer) + self._in_flight

    def is_gone(self, row: JobRowKey) -> bool:
        """Return whether a job's row is about to be deleted.

        The caller must have kept `written` from returning since before it read the row.
        """
        with self._changed:
            flying = self._flying
            return row in self._buffer.deletes or (flying is not None and row in flying.deletes)

    def check(self) -> None:
        """Check that changes can be written.

        Raises:
            LeaseLost: Another process has become the scheduler.
            StorageUnavailableError: Flushes fail, and the journal is full.
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
        """Return whether callers with further changes should wait."""
        return self.backlog > BACKLOG

    def wait_for_room(self, timeout: float = math.inf) -> None:
        """Wait until the journal is no longer full, for `timeout` seconds or until the call's deadline.

        Raises the errors of `check` if waiting is useless, and StorageUnavailableError at the deadline.
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

    # Waiting.

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the changes that this thread notes in the block in one transaction, unless it waits."""
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
        """Wait until all noted changes are committed. Raises the error if a flush fails."""
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
        """Call `done(None)` on the journal's thread once all noted changes are committed.

        If the next flush fails, `done` is called with the error, and the changes are tried again.
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
        """Wait for the next buffer to write, and return it; None at the end."""
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
        """Take the buffer in order to write it. The caller has the lock."""
        buffer = self._flying = self._buffer
        self._buffer = Buffer()
        self._in_flight = len(buffer)
        self._urgent = False
        self._together = len(buffer.waiting)
        return buffer

    def _gather(self) -> None:
        """Wait for more waiters to share the commit: those of the last commit soon return."""
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
            logger.warning("The journal can be written again; all pending changes were written.")
        self._failure = None
        self.flushed_at = self._clock.now()
        if buffer.is_visible:
            self.changes.bump()
        self._written(buffer.ended)
        for stream in buffer.elsewhere:
            stream.items = None
        self._flying = None
        notify(buffer.waiting, None)

    def _fail(self, buffer: Buffer, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            waiting, buffer.waiting = buffer.waiting, []
            buffer.follow(self._buffer)
            self._buffer = buffer
            self._flying = None
            self._in_flight = 0
            self._room.notify_all()
        notify(waiting, error)

    def _warn(self, seconds: float, error: Exception) -> None:
        """Log a failure, and close the connection, so that the next try opens a new one."""
        connections[self._dialect.alias].close()
        # Other errors than those of the database are defects of this package, and need a traceback.
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
        """Fail all waiters."""
        with self._changed:
            self._ended = True
            waiting, self._buffer.waiting = self._buffer.waiting, []
            self._room.notify_all()
        notify(waiting, self._failure or StorageUnavailableError("the journal is closed"))

    def _write(self, buffer: Buffer) -> None:
        self._writer.write(buffer, again=self._failure is not None)

    def _write_here(self) -> None:
        buffer, self._buffer = self._buffer, Buffer()
        self._write(buffer)
        self.changes.bump()
        self._written(buffer.ended)


class JournalGate:
    """Checks that this process is still the scheduler, waits for room in the journal, and has it written."""

    def __init__(
        self, journal: DatabaseJournal, lease: SchedulerLease, dialect: Dialect, timeout: float
    ) -> None:
        self._journal = journal
        self._lease = lease
        self._dialect = dialect
        self._timeout = timeout
        self.is_open = False
        """This is the scheduler, with every live job, and not for the moment of one operation."""

    def check(self) -> None:
        """Raise LeaseLost if another process is the scheduler: one that was suspended learns it by
        writing.
        """
        self._journal.check()
        if self._lease.has_run_out():
            self._journal.sync()

    async def acheck(self) -> None:
        """Async version of `check`."""
        self._journal.check()
        if self._lease.has_run_out():
            await self.written()

    def wait_for_room(self) -> None:
        """Wait, before a change, until the journal is no longer full, for TIMEOUT at most."""
        if self.is_open and self._journal.is_full():
            self._journal.wait_for_room(self._timeout)

    async def room(self) -> None:
        """Wait until the journal is no longer full, or until the call's deadline."""
        if self._journal.is_full():
            await asyncio.to_thread(self._journal.wait_for_room)

    def flush(self, *, in_effect: str = "") -> None:
        """Write the engine's changes to the tables, unless this thread's own transaction holds them back.

        Args:
            in_effect: what a change that the engine has already made concerns, for the error if the write
                fails.
        """
        alias = self._dialect.alias
        if self.is_open and connections[alias].in_atomic_block:
            return
        try:
            self._journal.sync()
        except (Error, OSError, StorageUnavailableError) as error:
            if isinstance(error, StorageUnavailableError) and not in_effect:
                raise
            reason = str(error)
            if not isinstance(error, StorageUnavailableError):
                reason = f"writing to database {alias!r} failed: {in_one_line(error)}"
            if in_effect:
                reason += f"; the change of {in_effect} is in effect, and will be written as soon as possible"
            raise StorageUnavailableError(reason) from error

    async def written(self, *, durable: bool = False) -> None:
        """Wait until everything noted so far is committed. Raises what kept it from being written."""
        waiter = Waiter(asyncio.get_running_loop())
        self._journal.when_written(waiter, durable=durable)
        left = remaining(math.inf)
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                error = await waiter.written
        except TimeoutError:
            raise StorageUnavailableError("the journal could not be written in time") from None
        if error is not None:
            raise error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction of the scheduler. Raises LeaseLost if another process is the scheduler."""
        self._dialect.tune()
        with self._dialect.transaction():
            self._lease.hold()
            yield
