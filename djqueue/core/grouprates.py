"""Rates of single groups: token buckets and times by name."""

import heapq
from itertools import count
from typing import Generic, TypeVar

from .limiter import Rate

K = TypeVar("K")
STALE = 64
"""Number of stale entries, beyond twice the live ones, at which they are removed."""


class Times(Generic[K]):
    """Times by name, earliest first: a heap with lazy removal."""

    __slots__ = ("_at", "_heap", "_numbers")

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, int, K]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, name: K) -> bool:
        return name in self._at

    def set(self, name: K, at: int) -> None:
        """Set the time of a name."""
        if self._at.get(name) == at:
            return
        self._at[name] = at
        heapq.heappush(self._heap, (at, next(self._numbers), name))
        self._compact()

    def drop(self, name: K) -> None:
        """Remove a name."""
        if self._at.pop(name, None) is not None:
            self._compact()

    def of(self, name: K) -> int | None:
        """Return the time of a name."""
        return self._at.get(name)

    def next(self) -> int | None:
        """Return the earliest time."""
        while self._heap:
            at, _, name = self._heap[0]
            if self._at.get(name) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def due(self, tick: int) -> list[K]:
        """Remove and return the names whose time has come, earliest first."""
        names = []
        while (at := self.next()) is not None and at <= tick:
            name = heapq.heappop(self._heap)[2]
            del self._at[name]
            names.append(name)
        return names

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._at) + STALE:
            self._heap = [entry for entry in self._heap if self._at.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)


class GroupBuckets:
    """Token buckets of groups.

    Only the time at which a bucket will be full is kept, from which everything else follows; full buckets are
    not kept. A bucket belongs to one rate: under another rate, the group has another bucket. Times are
    monotonic milliseconds, divided into as many parts as the rate's capacity, so that a token is a whole
    number of parts.
    """

    __slots__ = ("_full_at", "_times")

    def __init__(self) -> None:
        self._full_at: dict[tuple[str, Rate], int] = {}
        self._times: Times[tuple[str, Rate]] = Times()
        """Times at which buckets may be full."""

    def __len__(self) -> int:
        return len(self._full_at)

    def available(self, group: str, rate: Rate, tick: int) -> int:
        """Return the number of whole tokens."""
        return (rate.capacity * rate.per - self._missing(group, rate, tick)) // rate.per

    def available_at(self, group: str, rate: Rate, tokens: int, tick: int) -> int:
        """Return when this many tokens will be available, up to the rate's capacity."""
        late = self._missing(group, rate, tick) - (rate.capacity - tokens) * rate.per
        return tick + max(0, -(-late // rate.capacity))

    def consume(self, group: str, rate: Rate, tick: int) -> None:
        """Take a token that `available` has returned."""
        key = (group, rate)
        full_at = tick * rate.capacity + self._missing(group, rate, tick) + rate.per
        self._full_at[key] = full_at
        if key not in self._times:
            self._times.set(key, -(-full_at // rate.capacity))

    def forget_full(self, tick: int) -> None:
        """Drop buckets that are full again."""
        for key in self._times.due(tick):
            at = -(-self._full_at[key] // key[1].capacity)
            if at > tick:
                self._times.set(key, at)
            else:
                del self._full_at[key]

    def _missing(self, group: str, rate: Rate, tick: int) -> int:
        full_at = self._full_at.get((group, rate))
        return 0 if full_at is None else max(0, full_at - tick * rate.capacity)
