"""The source of time: the only module of the package that reads a clock."""

import sys
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time. `now` may jump when the machine's clock is set; `monotonic` may not."""

    def now(self) -> int:
        """Return UTC in whole milliseconds since 1970: for times of jobs."""
        ...

    def monotonic(self) -> int:
        """Return the milliseconds since an arbitrary start: for lengths of time."""
        ...

    def elapsed(self) -> int:
        """Return the milliseconds since the machine started, including those for which it was suspended.

        Processes of one machine share this time. Where the system does not count it, it equals `monotonic`.
        """
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> int:
        """Return UTC in whole milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> int:
        """Return the milliseconds since an arbitrary start."""
        return time.monotonic_ns() // 1_000_000

    def elapsed(self) -> int:
        """Return the milliseconds since the machine started."""
        if sys.platform == "linux":
            return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        return self.monotonic()


SYSTEM_CLOCK = SystemClock()
