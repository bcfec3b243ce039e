"""The source of time: the only module of the package that reads a clock."""

import sys
from time import monotonic_ns, time_ns
from typing import Protocol

if sys.platform == "linux":
    from time import CLOCK_BOOTTIME, clock_gettime_ns


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

    def __repr__(self) -> str:
        return "SYSTEM_CLOCK"

    def now(self) -> int:
        """Return UTC in whole milliseconds since 1970."""
        return time_ns() // 1_000_000

    def monotonic(self) -> int:
        """Return the milliseconds since an arbitrary start."""
        return monotonic_ns() // 1_000_000

    def elapsed(self) -> int:
        """Return the milliseconds since the machine started."""
        if sys.platform == "linux":
            return clock_gettime_ns(CLOCK_BOOTTIME) // 1_000_000
        return self.monotonic()


SYSTEM_CLOCK = SystemClock()
