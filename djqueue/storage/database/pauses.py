"""Detect periods in which this process did not run: suspended, starved, or blocked by a long call."""

import threading
from collections.abc import Callable

from djqueue.core.clock import SYSTEM_CLOCK, Clock

BEAT = 0.25
"""Seconds between checks of the clock."""
PAUSE = 1_000
"""Milliseconds between two checks from which the process counts as paused."""


class PauseWatch:
    """Call `paused` with the milliseconds for which this process did not run.

    A thread checks the monotonic clock regularly. Code that acts on elapsed time must call `check` first,
    because the thread may not have run yet.
    """

    def __init__(self, paused: Callable[[int], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._paused = paused
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = clock.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="djqueue-pauses", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._seen = self._clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Report a pause that has just ended, if the watch was started."""
        if self._thread.ident is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            gap, self._seen = now - self._seen, now
            if gap >= PAUSE:
                self._paused(gap)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            self.check()
