"""Checks before operations of the scheduler, and waits for its journal."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import Error, connections

from djqueue.core.deadline import remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.shown import in_one_line

from ..tables.dialects import Dialect
from .buffer import Waiter
from .journal import DatabaseJournal
from .lease import SchedulerLease


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
