"""A clock that does not advance until a test moves it."""


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
