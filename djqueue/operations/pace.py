"""How fast the mirror may go where jobs are run in the same process."""

import time
from threading import Event

REST = 3.0
"""How much longer than a copy the rest after it is, where the other threads are busy all the time."""
LONGEST = 1.0
"""Seconds."""


class CopyThrottle:
    """Rests after each copy, as long as the other threads of the process need the processor.

    All of them share one interpreter: without rests they would lose half their speed while much is copied.

    stop: ends rests when it is set.
    """

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._began = self._rested = time.monotonic()
        self._others = self._of_others()

    def rest(self) -> None:
        """After a copy."""
        now, others = time.monotonic(), self._of_others()
        share = (others - self._others) / max(now - self._began, 1e-6)
        seconds = REST * (now - self._rested) * min(share, 1.0)
        self._began, self._others = now, others
        self._stop.wait(min(seconds, LONGEST))
        self._rested = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Because there is nothing to copy."""
        self._stop.wait(seconds)
        self._began = self._rested = time.monotonic()
        self._others = self._of_others()

    def _of_others(self) -> float:
        """Seconds of the processor that the other threads have had."""
        return time.process_time() - time.thread_time()
