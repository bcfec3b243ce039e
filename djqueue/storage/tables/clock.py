"""Follow the clock of the database server, which all processes share."""

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.clock import SYSTEM_CLOCK, Clock

MEASURE_EVERY = 60_000
"""Milliseconds between measurements of the difference between the clocks."""

EXACT_WITHIN = 200
"""Milliseconds within which a reading of the server's clock is exact enough."""
TRIES = 4
"""Further readings after one that took longer; the fastest counts."""


class DatabaseClock:
    """The clock of a database server, continued by this machine's time since its start.

    So setting the clock of this machine has no effect. An embedded database has no clock: this machine's
    counts then.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._started: int | None = None
        """When this machine started, by the server's clock."""
        self._measured: int | None = None

    def now(self) -> int:
        """Return the UTC time in milliseconds."""
        return SYSTEM_CLOCK.now() if self._started is None else self._started + SYSTEM_CLOCK.elapsed()

    def monotonic(self) -> int:
        """Return the monotonic time in milliseconds."""
        return SYSTEM_CLOCK.monotonic()

    def elapsed(self) -> int:
        """Return the milliseconds since the machine started, including suspended time."""
        return SYSTEM_CLOCK.elapsed()

    def measure(self) -> None:
        """Measure the difference to the server's clock, unless done recently. Raises DatabaseError."""
        tick = SYSTEM_CLOCK.elapsed()
        if self._measured is not None and tick - self._measured < MEASURE_EVERY:
            return
        connection = connections[self._alias]
        if connection.vendor == "postgresql":
            # This process may have been stopped between the two readings.
            found = self._started_by(connection)
            for _ in range(TRIES):
                if found[0] <= EXACT_WITHIN:
                    break
                found = min(found, self._started_by(connection))
            self._started = found[1]
        self._measured = tick

    def _started_by(self, connection: BaseDatabaseWrapper) -> tuple[int, int]:
        """Return how long a reading of the server's clock took, and when this machine started by it."""
        before = SYSTEM_CLOCK.elapsed()
        with connection.cursor() as cursor:
            cursor.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
            there = cursor.fetchone()[0]
        taken = SYSTEM_CLOCK.elapsed() - before
        return taken, there - before - taken // 2


def set_right(clock: Clock) -> None:
    """Synchronize a `DatabaseClock`; other clocks are left alone."""
    if isinstance(clock, DatabaseClock):
        clock.measure()
