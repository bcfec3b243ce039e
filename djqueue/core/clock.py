"""Where time comes from: the only module of the package that reads a clock."""

import sys
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `now` may jump when the machine's clock is set; `monotonic` may not."""

    def now(self) -> int:
        """UTC, in whole milliseconds since 1970: when something is due, started, finished."""
        ...

    def monotonic(self) -> int:
        """Milliseconds since an arbitrary start: how long something may last."""
        ...

    def elapsed(self) -> int:
        """Milliseconds since the machine's start, including those for which it was suspended.

        Processes of one machine share this time. Where the system doesn't count it, it is `monotonic`.
        """
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> int:
        """See `Clock.now`."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> int:
        """See `Clock.monotonic`."""
        return time.monotonic_ns() // 1_000_000

    def elapsed(self) -> int:
        """See `Clock.elapsed`."""
        if sys.platform == "linux":
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return self.monotonic()


SYSTEM_CLOCK = SystemClock()
