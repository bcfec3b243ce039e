"""Follow the clock of the database server, which all processes share."""

import time

from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK, Clock

MEASURE_EVERY = 60_000
"""Milliseconds between measurements of the difference between the clocks."""


class DatabaseClock:
    """This machine's clock, corrected by that of a database server.

    An embedded database has no clock, so its times are not corrected.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._offset = 0
        self._measured: int | None = None

    def now(self) -> int:
        """Return the UTC time in milliseconds."""
        return SYSTEM_CLOCK.now() + self._offset

    def monotonic(self) -> int:
        """Return the monotonic time in milliseconds."""
        return SYSTEM_CLOCK.monotonic()

    def elapsed(self) -> int:
        """Return the milliseconds since the machine started, including suspended time."""
        return SYSTEM_CLOCK.elapsed()

    def measure(self) -> None:
        """Measure the difference to the server's clock, unless done recently. Raises DatabaseError."""
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
    """Synchronize a `DatabaseClock`; other clocks are left alone."""
    if isinstance(clock, DatabaseClock):
        clock.measure()
