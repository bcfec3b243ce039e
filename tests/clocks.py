"""A clock that runs, and that a test sets ahead."""

from djqueue.core.clock import SYSTEM_CLOCK


class AheadClock:
    """The machine's time, which is also Redis's, and some milliseconds more."""

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead

    def now(self) -> int:
        return SYSTEM_CLOCK.now() + self.ahead

    def monotonic(self) -> int:
        return SYSTEM_CLOCK.monotonic() + self.ahead

    def elapsed(self) -> int:
        return SYSTEM_CLOCK.elapsed() + self.ahead

    def advance(self, milliseconds: int) -> None:
        self.ahead += milliseconds
