"""Let jobs go before the mirror: when it copies, and how long it rests."""

from collections.abc import Callable, Mapping
from threading import Event
from time import monotonic, process_time, thread_time
from typing import TYPE_CHECKING

from djqueue.core.clock import Clock

if TYPE_CHECKING:
    from djqueue.storage.redis.changes import Backlog

REST_FACTOR = 3.0
"""Duration of the rest after a copy, relative to the copy, if the other threads are always busy."""
MAX_REST = 1.0
"""Seconds."""
BUSY_RATE = 5_000
"""Changes of jobs per second from which copies wait. Copying them would take a noticeable part of a processor
and of Redis.
"""
SUSPECT_COUNT = 500
"""Jobs copied in one round after which the next one looks whether many jobs change."""
LOOK_EVERY = 200
"""Milliseconds between two looks."""
FULL_SHARE = 1 / 3
"""Part of a stream that may hold changes that are not copied."""


class CopyThrottle:
    """Rests after each copy while the other threads of the process need the processor.

    All threads share one interpreter: without rests they would run at half speed while much is copied.

    Args:
        stop: Ends a rest when it is set.
    """

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._began = self._rested = monotonic()
        self._others = self._of_others()

    def rest(self) -> None:
        """Rest after a copy."""
        now, others = monotonic(), self._of_others()
        share = (others - self._others) / max(now - self._began, 1e-6)
        seconds = REST_FACTOR * (now - self._rested) * min(share, 1.0)
        self._began, self._others = now, others
        self._stop.wait(min(seconds, MAX_REST))
        self._rested = monotonic()

    def wait(self, seconds: float) -> None:
        """Wait when there is nothing to copy."""
        self._stop.wait(seconds)
        self.begin()

    def begin(self) -> None:
        """Begin to copy after a wait, which counts neither as a copy nor as a rest."""
        self._began = self._rested = monotonic()
        self._others = self._of_others()

    def _of_others(self) -> float:
        """Return the processor seconds of the other threads."""
        return process_time() - thread_time()


class BusyPause:
    """Makes the mirror wait while many jobs change, so that it takes no processor time from them.

    A job that changes several times in the meantime is copied once. The wait ends when fewer jobs change,
    when the tables may be too old, or when a stream might overflow. What counts is the rate of changes, not
    the load of this machine: Redis, which runs one script at a time, has as much to do wherever it is.

    Args:
        backlogs: Returns the backlog of each queue.
        keep_lease: Called while waiting.
        length: Entries that a stream keeps.
        max_lag: Milliseconds from the last complete copy after which nothing waits; 0 never waits.
        clock: The source of time.
        stop: Ends a wait when it is set.
    """

    def __init__(
        self,
        backlogs: "Callable[[], Mapping[str, Backlog]]",
        keep_lease: Callable[[], object],
        *,
        length: int,
        max_lag: int,
        clock: Clock,
        stop: Event,
    ) -> None:
        self._backlogs = backlogs
        self._keep_lease = keep_lease
        self._max_waiting = int(length * FULL_SHARE)
        self._max_lag = max_lag
        self._clock = clock
        self._stop = stop
        self._copied_at = clock.monotonic()
        """Start of the last complete copy; everything older is in the tables."""
        self._added: dict[str, int] = {}
        """Entries of each stream at the last look."""
        self._looked_at: int | None = None
        self._must_wait = False

    def before_round(self, copied: int) -> bool:
        """Wait before a round if many jobs change; return whether this waited.

        Args:
            copied: Jobs that the last round copied. After a few, this does not even look.
        """
        return (self._looked_at is None or self._must_wait or copied >= SUSPECT_COUNT) and self.wait()

    def wait(self) -> bool:
        """Wait while many jobs change; return whether this waited. Call it outside of transactions."""
        has_waited = False
        while self._is_waiting() and not self._stop.wait(LOOK_EVERY / 1_000):
            has_waited = True
            self._keep_lease()
        return has_waited

    def caught_up(self, began: int) -> None:
        """Note that all changes before this time are in the tables."""
        self._copied_at = began

    def _is_waiting(self) -> bool:
        now = self._clock.monotonic()
        if now - self._copied_at >= self._max_lag:
            return False
        if self._looked_at is None or now - self._looked_at >= LOOK_EVERY:
            self._look(now)
        return self._must_wait

    def _look(self, now: int) -> None:
        backlogs = self._backlogs()
        changes = 0.0
        for queue, backlog in backlogs.items():
            if queue in self._added:
                changes += max(0, backlog.added - self._added[queue]) * backlog.changes
        seconds = (now - self._looked_at) / 1_000 if self._looked_at is not None else 1.0
        is_filling = any(backlog.waiting > self._max_waiting for backlog in backlogs.values())
        self._must_wait = changes >= BUSY_RATE * seconds and not is_filling
        self._added = {queue: backlog.added for queue, backlog in backlogs.items()}
        self._looked_at = now
