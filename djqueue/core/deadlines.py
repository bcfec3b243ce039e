"""Calls that may hang or fail: one deadline for everything that a call does, in all layers and round trips,
pauses that grow while tries fail, and a circuit breaker for a server that misses deadlines.
"""

import random
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from . import procfs
from .clock import SYSTEM_CLOCK, Clock

_deadline: ContextVar["within | None"] = ContextVar("djqueue_deadline", default=None)
"""The deadline by which the current call has to end."""


class within:  # noqa: N801 - used like a function; a generator would take several times as long
    """Limit everything inside to `seconds`; an earlier deadline that is already set stays."""

    __slots__ = ("_token", "_until")

    def __init__(self, seconds: float) -> None:
        self._until = SYSTEM_CLOCK.monotonic() + int(seconds * 1_000)

    def __enter__(self) -> None:
        """Set the deadline."""
        current = _deadline.get()
        self._token = _deadline.set(self if current is None or self.left() <= current.left() else current)

    def __exit__(self, *_: object) -> None:
        """Restore the earlier deadline."""
        _deadline.reset(self._token)

    def left(self) -> int:
        """Return the milliseconds until the deadline; less than 0 if it is over."""
        return self._until - SYSTEM_CLOCK.monotonic()


class waiting_within(within):  # noqa: N801
    """Like `within`, but count only the time for which this thread waits for others.

    The time for which it runs, or waits for a processor, does not count, so that a busy machine does not look
    like a server that does not respond. Without /proc, all time counts.
    """

    __slots__ = ("_busy", "_thread")

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self._thread = threading.get_native_id()
        self._busy = procfs.busy_time(self._thread)

    def left(self) -> int:
        """Return the milliseconds for which the thread may still wait."""
        return super().left() + max(0, procfs.busy_time(self._thread) - self._busy)


def remaining(limit: float) -> float:
    """Return the seconds that are left, at most `limit` and never less than 0."""
    deadline = _deadline.get()
    if deadline is None:
        return limit
    return min(limit, max(0, deadline.left()) / 1_000)


class GrowingPause:
    """The pause before the next try, which doubles with each failure.

    Args:
        first: the shortest pause, in the caller's unit.
        longest: the longest pause.
    """

    __slots__ = ("_first", "_longest", "failures", "length")

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.failures = 0
        """Tries that have failed since the last one that succeeded."""
        self.length = 0.0
        """The current pause; 0 if the last try succeeded."""

    def failed(self) -> float:
        """Return the pause after a try that has failed."""
        self.failures += 1
        self.length = min(2 * self.length, self._longest) or self._first
        return self.length

    def succeeded(self) -> None:
        """Let the next failure count as the first one."""
        self.failures, self.length = 0, 0.0


FIRST_PAUSE = 500
"""Milliseconds until the first probe of a server that missed a deadline, doubled for each further one."""
LONGEST_PAUSE = 4_000
"""Maximum milliseconds between probes."""
LONGEST_PROBE = 60_000
"""Milliseconds after which a probe that has reported nothing does not keep others from probing."""


class Outage(NamedTuple):
    """An outage of a server."""

    since: int
    """UTC milliseconds of the first missed deadline."""
    reason: str


class CircuitBreaker:
    """A circuit breaker, whose methods may be called from any thread.

    While it is closed, every caller may ask the server. A missed deadline opens it until a pause is over:
    then one caller may probe the server, and the others wait for the result, or do without.

    Args:
        jitter: random factor of the pauses, so that the processes of a site do not probe at the same moment.
    """

    def __init__(
        self, clock: Clock = SYSTEM_CLOCK, jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0)
    ) -> None:
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self._outage: Outage | None = None
        self._pause = GrowingPause(FIRST_PAUSE, LONGEST_PAUSE)
        self._next_probe = 0
        self._probing_until: int | None = None

    @property
    def outage(self) -> Outage | None:
        """The current outage; None while the server answers."""
        return self._outage

    def enter(self, *, at_once: bool = False) -> bool:
        """Return whether the caller may ask the server; during an outage, that makes it the probe.

        A probe has to call `succeeded`, `failed` or `gave_up`.

        Args:
            at_once: probe now, even if the pause is not over.
        """
        if self._outage is None:
            return True
        with self._lock:
            if self._outage is None:
                return True
            now = self._clock.monotonic()
            if self._probing_until is not None and now < self._probing_until:
                return False
            if not at_once and now < self._next_probe:
                return False
            self._probing_until = now + LONGEST_PROBE
            return True

    def succeeded(self) -> None:
        """Record that the server answered."""
        if self._outage is None:
            return
        with self._lock:
            self._outage = None
            self._probing_until = None
            self._pause.succeeded()

    def failed(self, reason: str) -> None:
        """Record that the server missed a deadline."""
        with self._lock:
            if self._outage is None or self._probing_until is not None:
                self._pause.failed()
            if self._outage is None:
                self._outage = Outage(self._clock.now(), reason)
            self._probing_until = None
            self._next_probe = self._clock.monotonic() + int(self._pause.length * self._jitter())

    def gave_up(self) -> None:
        """Record that a probe ended without an answer and without a missed deadline."""
        with self._lock:
            self._probing_until = None
