"""Periodic maintenance of the storage on two threads of a worker, and a check for unhandled jobs."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import Random

from djqueue.core.clock import Clock
from djqueue.core.workers import unhandled
from djqueue.storage.base import Storage
from djqueue.storage.chores import chores_of

from .events import RunEvents
from .loops import Periodic

INTERVAL = 1.0
"""Average of seconds between two rounds; jitter keeps several workers from running at once."""
STOP_TIMEOUT = 5.0
"""Seconds that the worker's shutdown waits for a round in progress."""
UNHANDLED_CHECK_INTERVAL = 10_000
"""Milliseconds between two checks for unhandled jobs."""
UNHANDLED_LOG_INTERVAL = 3_600_000
"""Milliseconds after which the same job name is logged again."""
ERRORS = "errors"
"""The chore that stores the errors of this process, which is done once more at the end."""
SCHEDULES = "schedules"
"""The chore with a thread of its own: its jobs are due at a time, and others may take long."""
MAX_NAMES = 20
"""Maximum of names logged by one check: those with the most jobs."""


class Maintenance:
    """Runs the maintenance. Any number of processes may do so: the storage decides which of them sweeps.

    Args:
        storage: The storage to maintain.
        events: Logs failures.
        random: Source of the jitter.
        watch: Also checks for unhandled jobs.
        renew: Renews the leases of this process.
    """

    def __init__(
        self,
        storage: Storage,
        events: RunEvents,
        random: Random,
        watch: "UnhandledWatch | None" = None,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self._random = random
        self._events = events
        self._storage = storage
        self._renew = renew
        self._has_failed = False
        """Whether the last sweep has failed."""
        self._chores: dict[str, Callable[[], object]] = {"sweep": self._sweep, **chores_of(storage)}
        if watch is not None:
            self._chores["unhandled"] = watch.look
        last: dict[str, Callable[[], object]] = {"resign": storage.resign}
        if ERRORS in self._chores:
            last[ERRORS] = self._chores[ERRORS]
        if watch is not None and watch.looks_at_end:
            last["unhandled"] = watch.look_at_once
        schedules = self._chores.pop(SCHEDULES, None)
        self._threads = [
            Periodic(
                "djqueue-maintenance",
                self._seconds,
                partial(self._round, self._chores),
                partial(self._round, last),
            )
        ]
        if schedules is not None:
            fire = partial(self._call, SCHEDULES, schedules)
            self._threads.append(Periodic("djqueue-schedules", self._seconds, fire))

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leave the work to others, stop the threads, and wait a limited time for a round in progress."""
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(STOP_TIMEOUT)

    def _sweep(self) -> None:
        """Sweep. After an outage, this process's leases come first: their jobs are running or have ended, and
        would run again.
        """
        if self._has_failed:
            with suppress(Exception):  # The heartbeat tries it, too, and reports it.
                self._renew()
        self._has_failed = True
        self._storage.maintain()
        self._has_failed = False

    def _round(self, chores: Mapping[str, Callable[[], object]]) -> None:
        for name, chore in chores.items():
            self._call(name, chore)

    def _call(self, name: str, chore: Callable[[], object]) -> None:
        try:
            chore()
        except Exception as error:
            self._events.storage_failed(name, error)
        else:
            self._events.storage_worked(name)

    def _seconds(self) -> float:
        return INTERVAL * self._random.uniform(0.8, 1.2)


class UnhandledWatch:
    """Warns about jobs, in the queues of one worker, that no live worker can run.

    looks_at_end: Whether to check once more at the end of the worker, which may not have run for long.
    """

    def __init__(
        self,
        storage: Storage,
        events: RunEvents,
        clock: Clock,
        queues: tuple[str, ...] | None,
        *,
        looks_at_end: bool = False,
    ) -> None:
        self.looks_at_end = looks_at_end
        self._storage = storage
        self._events = events
        self._clock = clock
        self._queues = queues
        # Workers that start together need a moment to register.
        self._looked_at = clock.monotonic()
        self._logged: dict[tuple[str, str], int] = {}

    def look(self) -> None:
        """Check for unhandled jobs unless the last check is recent. Raises what the storage raises."""
        if self._clock.monotonic() - self._looked_at >= UNHANDLED_CHECK_INTERVAL:
            self.look_at_once()

    def look_at_once(self) -> None:
        """Check for unhandled jobs. Raises what the storage raises."""
        now = self._looked_at = self._clock.monotonic()
        rows = self._storage.reads.overview(self._queues).queues
        self._logged = {key: at for key, at in self._logged.items() if now - at < UNHANDLED_LOG_INTERVAL}
        if not any(row.names for row in rows):
            return
        for one in unhandled(rows, self._storage.workers.all())[:MAX_NAMES]:
            if (one.queue, one.name) not in self._logged:
                self._logged[one.queue, one.name] = now
                self._events.unhandled(one)
