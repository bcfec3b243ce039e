"""Throttle the mirror in processes that also run jobs."""

import time
from threading import Event

REST = 3.0
"""Duration of the rest after a copy, relative to the copy, if the other threads are always busy."""
LONGEST = 1.0
"""Seconds."""


class CopyThrottle:
    """Rests after each copy while the other threads of the process need the processor.

    All threads share one interpreter: without rests they would run at half speed while much is copied.

    Args:
        stop: Ends a rest when it is set.
    """

    def __init__(self, stop: Event) -> None:
        self._stop = stop
        self._began = self._rested = time.monotonic()
        self._others = self._of_others()

    def rest(self) -> None:
        """Rest after a copy."""
        now, others = time.monotonic(), self._of_others()
        share = (others - self._others) / max(now - self._began, 1e-6)
        seconds = REST * (now - self._rested) * min(share, 1.0)
        self._began, self._others = now, others
        self._stop.wait(min(seconds, LONGEST))
        self._rested = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Wait when there is nothing to copy."""
        self._stop.wait(seconds)
        self._began = self._rested = time.monotonic()
        self._others = self._of_others()

    def _of_others(self) -> float:
        """Return the processor seconds of the other threads."""
        return time.process_time() - time.thread_time()
