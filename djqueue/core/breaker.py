"""A circuit breaker: one caller probes a server in an outage; the others do not wait for it."""

import random
import threading
from collections.abc import Callable
from typing import NamedTuple

from .clock import SYSTEM_CLOCK, Clock

FIRST_PAUSE = 500
"""Milliseconds until the first probe of a server that missed a deadline, doubled for each further one."""
LONGEST_PAUSE = 4_000
"""Maximum milliseconds between probes."""


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
        self._pause = FIRST_PAUSE
        self._next_probe = 0
        self._is_probing = False

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
            if self._is_probing or not (at_once or self._clock.monotonic() >= self._next_probe):
                return False
            self._is_probing = True
            return True

    def succeeded(self) -> None:
        """Record that the server answered."""
        if self._outage is None:
            return
        with self._lock:
            self._outage = None
            self._is_probing = False
            self._pause = FIRST_PAUSE

    def failed(self, reason: str) -> None:
        """Record that the server missed a deadline."""
        with self._lock:
            if self._outage is None:
                self._outage = Outage(self._clock.now(), reason)
                self._pause = FIRST_PAUSE
            elif self._is_probing:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._is_probing = False
            self._next_probe = self._clock.monotonic() + int(self._pause * self._jitter())

    def gave_up(self) -> None:
        """Record that a probe ended without an answer and without a missed deadline."""
        with self._lock:
            self._is_probing = False
