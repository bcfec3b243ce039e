"""The database server's clock: the one that all processes share."""

import time

from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK, Clock

MEASURE_EVERY = 60_000
"""Milliseconds for which the difference between two machines' clocks is taken as known."""


class DatabaseClock:
    """This machine's clock, corrected by what a database server on another machine says.

    An embedded database has no clock of its own.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._offset = 0
        self._measured: int | None = None

    def now(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return SYSTEM_CLOCK.now() + self._offset

    def monotonic(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return SYSTEM_CLOCK.monotonic()

    def elapsed(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return SYSTEM_CLOCK.elapsed()

    def measure(self) -> None:
        """Ask the server, unless that was done lately. Raises DatabaseError."""
        tick = SYSTEM_CLOCK.monotonic()
        if self._measured is not None and tick - self._measured < MEASURE_EVERY:
            return
        connection = connections[self._alias]
        if connection.vendor == "postgresql":
            before = time.perf_counter_ns()
            with connection.cursor() as cursor:
                cursor.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
                there = cursor.fetchone()[0]
            half = (time.perf_counter_ns() - before) // 2_000_000
            self._offset = there + half - SYSTEM_CLOCK.now()
        self._measured = tick


def set_right(clock: Clock) -> None:
    """Have a clock that follows the database's ask it for the time."""
    if isinstance(clock, DatabaseClock):
        clock.measure()
