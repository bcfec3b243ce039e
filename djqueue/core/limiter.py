"""Limits of a queue: a token bucket, and a maximum of active jobs."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """`capacity` starts at once, refilled evenly: `capacity` in `per` milliseconds."""

    capacity: int
    per: int = 1_000


class Unset(Enum):
    """The type of `UNSET`."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
"""Default for a limit that stays as it is; None removes a limit."""
SetRate = Rate | Literal[Unset.UNSET] | None
SetConcurrency = int | Literal[Unset.UNSET] | None


class TokenBucket:
    """Tokens computed from elapsed time, so that no timer has to refill them.

    Tokens are counted in parts, `per` to a token: a millisecond adds `capacity` parts.
    """

    __slots__ = ("_at", "_parts", "rate")

    def __init__(self, rate: Rate, tick: int) -> None:
        self.rate = rate
        self._parts = rate.capacity * rate.per
        self._at = tick

    def available(self, tick: int) -> int:
        """Return the whole tokens at a monotonic time in milliseconds."""
        self._refill(tick)
        return self._parts // self.rate.per

    def consume(self, count: int) -> None:
        """Take tokens that `available` has returned."""
        self._parts -= count * self.rate.per

    def wait(self, tick: int) -> int:
        """Return the milliseconds until a whole token is available; 0: now."""
        self._refill(tick)
        missing = self.rate.per - self._parts
        return max(0, -(-missing // self.rate.capacity))

    @property
    def missing(self) -> int:
        """Parts that are missing to a full bucket, as of the last call with a time."""
        return self.rate.capacity * self.rate.per - self._parts

    def take_parts(self, parts: int) -> None:
        """Take parts of tokens."""
        self._parts -= parts

    def _refill(self, tick: int) -> None:
        elapsed = max(0, tick - self._at)
        self._at += elapsed
        full = self.rate.capacity * self.rate.per
        self._parts = min(full, self._parts + elapsed * self.rate.capacity)


class QueueLimiter:
    """The limits of one queue: rate first, then concurrency; a refusal changes nothing."""

    __slots__ = ("bucket", "concurrency", "full")

    def __init__(self) -> None:
        self.bucket: TokenBucket | None = None
        self.concurrency: int | None = None
        self.full = False
        """True if the last claim may have left no free slot, so that the next free slot wakes workers."""

    def set(self, rate: SetRate, concurrency: SetConcurrency, tick: int) -> None:
        """Change the limits; an unchanged rate keeps its tokens."""
        if rate is None:
            self.bucket = None
        elif rate is not UNSET and (self.bucket is None or self.bucket.rate != rate):
            self.bucket = TokenBucket(rate, tick)
        if concurrency is not UNSET:
            self.concurrency = concurrency

    def allowance(self, wanted: int, active: int, tick: int) -> int:
        """Return how many of `wanted` jobs may start while `active` run."""
        if self.bucket is not None:
            wanted = min(wanted, self.bucket.available(tick))
        if self.concurrency is not None:
            wanted = min(wanted, self.concurrency - active)
        return max(0, wanted)

    def started(self, count: int) -> None:
        """Record that jobs have started."""
        if self.bucket is not None:
            self.bucket.consume(count)
