"""One deadline for everything that a call does, in all layers and round trips."""

from contextvars import ContextVar

from .clock import SYSTEM_CLOCK

_deadline: ContextVar[int | None] = ContextVar("djqueue_deadline", default=None)
"""Monotonic milliseconds by which the current call has to end."""


class within:  # noqa: N801 - used like a function; a generator would take several times as long
    """Limit everything inside to `seconds`; an earlier deadline that is already set stays."""

    __slots__ = ("_seconds", "_token")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        """Set the deadline."""
        until = SYSTEM_CLOCK.monotonic() + int(self._seconds * 1_000)
        current = _deadline.get()
        self._token = _deadline.set(until if current is None else min(current, until))

    def __exit__(self, *_: object) -> None:
        """Restore the earlier deadline."""
        _deadline.reset(self._token)


def remaining(limit: float) -> float:
    """Return the seconds that are left, at most `limit` and never less than 0."""
    until = _deadline.get()
    if until is None:
        return limit
    return min(limit, max(0, until - SYSTEM_CLOCK.monotonic()) / 1_000)
