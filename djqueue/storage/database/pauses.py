"""Times in which this process did not run: frozen, starved, or held up by one long call."""

import threading
from collections.abc import Callable

from djqueue.core.clock import SYSTEM_CLOCK, Clock

BEAT = 0.25
"""Seconds between looks at the clock."""
PAUSE = 1_000
"""Milliseconds between two looks from which on this process counts as paused."""


class PauseWatch:
    """Calls `paused` with the milliseconds for which this process did not run.

    A thread looks at the monotonic clock again and again. `check` does the same at once: whoever acts on the
    time that has passed calls it first, since that thread may not have run yet.
    """

    def __init__(self, paused: Callable[[int], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._paused = paused
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = clock.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="djqueue-pauses", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._seen = self._clock.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def check(self) -> None:
        """Report a pause that has just ended; nothing unless this was started."""
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
