"""One deadline for everything that a call does, in all layers and round trips."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .clock import SYSTEM_CLOCK

_deadline: ContextVar[int | None] = ContextVar("djqueue_deadline", default=None)
"""Monotonic milliseconds by which the current call has to end."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Limit everything inside to `seconds`; an earlier deadline that is already set stays."""
    until = SYSTEM_CLOCK.monotonic() + int(seconds * 1_000)
    current = _deadline.get()
    token = _deadline.set(until if current is None else min(current, until))
    try:
        yield
    finally:
        _deadline.reset(token)


def remaining(limit: float) -> float:
    """Return the seconds that are left, at most `limit` and never less than 0."""
    until = _deadline.get()
    if until is None:
        return limit
    return min(limit, max(0, until - SYSTEM_CLOCK.monotonic()) / 1_000)
