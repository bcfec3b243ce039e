"""Clocks that advance only when a test moves them."""

from collections.abc import Callable
from datetime import datetime, timedelta

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.units import milliseconds, to_datetime, to_milliseconds


class FakeClock:
    """A `djqueue.core.clock.Clock` whose two times a test sets."""

    def __init__(self, now: int = 1_700_000_000_000, monotonic: int = 1_000_000) -> None:
        self._now = now
        self._monotonic = monotonic
        self._suspended = 0

    def now(self) -> int:
        """UTC, in milliseconds."""
        return self._now

    def monotonic(self) -> int:
        """Milliseconds since an arbitrary start."""
        return self._monotonic

    def elapsed(self) -> int:
        """Milliseconds since an arbitrary start, with those of `suspend`."""
        return self._monotonic + self._suspended

    def advance(self, milliseconds: int) -> None:
        """Let time pass, on both clocks."""
        if milliseconds < 0:
            raise ValueError(
                "advance() does not accept a negative time; use jump() to set the wall clock back"
            )
        self._now += milliseconds
        self._monotonic += milliseconds

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock forward or back, as people and NTP do; no time passes."""
        self._now += milliseconds

    def suspend(self, milliseconds: int) -> None:
        """Let time pass while the machine is suspended: its monotonic clock does not advance."""
        self._now += milliseconds
        self._suspended += milliseconds


class JobClock:
    """The clock of a test's jobs: it starts at the current time, and advances only when the test moves it.

        clock.advance(3600)
        clock.advance(timedelta(days=2))
        clock.move_to(datetime(2030, 1, 1, tzinfo=UTC))

    Only jobs and schedules follow it: `timezone.now()` in the tested code does not.

    Args:
        on_move: Called after each step of a move with whether to fire schedules. It does what is due, and
            returns the milliseconds until more is due, or None.
    """

    def __init__(self, on_move: Callable[[bool], int | None] | None = None) -> None:
        self._clock = FakeClock(SYSTEM_CLOCK.now(), SYSTEM_CLOCK.monotonic())
        self._on_move = on_move

    def now(self) -> int:
        """Return UTC in milliseconds."""
        return self._clock.now()

    def monotonic(self) -> int:
        """Return the milliseconds since an arbitrary start."""
        return self._clock.monotonic()

    def elapsed(self) -> int:
        """Return the milliseconds since an arbitrary start."""
        return self._clock.elapsed()

    @property
    def time(self) -> datetime:
        """The current time, in UTC."""
        return to_datetime(self._clock.now())

    def advance(self, by: float | timedelta, *, schedules: bool = False) -> None:
        """Move the clock forward by seconds or a timedelta.

        The clock stops at each time at which something is due: it expires what has a TTL and, in the
        immediate mode, runs the jobs that are due. Without the immediate mode, call `drain` afterwards.

        schedules: Also enqueue the jobs of schedules that are due. This uses the database.
        """
        self._move(self.now() + milliseconds("by", by), schedules)

    def move_to(self, at: datetime, *, schedules: bool = False) -> None:
        """Move the clock forward to a time, as `advance` does. Raises ValueError for a time in the past."""
        if not isinstance(at, datetime) or at.tzinfo is None:
            raise ValueError(f"move_to() needs a datetime with a time zone, such as UTC; got {at!r}")
        target = to_milliseconds(at)
        if target < self.now():
            raise ValueError(
                f"move_to() does not accept a time before that of the clock, {self.time.isoformat()}; "
                f"got {at.isoformat()}"
            )
        self._move(target, schedules)

    def _move(self, target: int, schedules: bool) -> None:
        while True:
            wait = None if self._on_move is None else self._on_move(schedules)
            left = target - self.now()
            if left <= 0:
                return
            # What is due but cannot run, such as a job without a handler, must not stop the clock.
            self._clock.advance(left if wait is None else min(left, max(1, wait)))
