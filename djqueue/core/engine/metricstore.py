"""Buckets of metrics in memory."""

from collections.abc import Iterable, Iterator, Sequence
from threading import Lock
from typing import Protocol

from ..metrics import (
    ALL_TIME,
    DEFAULT_TIERS,
    MAX_NAMES,
    OTHERS,
    TIERS,
    Row,
    RunStats,
    Span,
    Tiers,
    Values,
    add_up,
    new_values,
    start_of,
    times_of,
    values_of,
)

MAX_BUCKETS = 50_000
"""Maximum number of buckets of each length, over all queues: about 40 MB. The oldest are dropped first."""


class MetricKeeper(Protocol):
    """Store of metric buckets."""

    def count(self, queue: str, counts: Sequence[int], now: int) -> None:
        """Add to the counts of a queue."""

    def record(self, stats: Sequence[RunStats], now: int) -> None:
        """Add the statistics that workers reported."""

    def rows(self, queues: Sequence[str] | None, span: Span, *, by_name: bool) -> Iterable[Row]:
        """Return what was added in a period, by queue (None: all) or by job name."""

    def everything(self, queues: Sequence[str] | None) -> Iterable[Row]:
        """Return what was added since the queues began (None: all), by queue and by job name."""

    def forget(self, queue: str) -> None:
        """Remove everything of a queue."""


class MetricStore:
    """Buckets of all lengths at once, so that nothing has to be summed up later."""

    def __init__(self, tiers: Tiers = DEFAULT_TIERS) -> None:
        self._kept = tiers.kept()
        self._lock = Lock()
        self._buckets: dict[int, dict[tuple[int, str, str], Values]] = {step: {} for step in TIERS}
        """By length, then by (start, queue, name), oldest first."""
        self._names: dict[str, set[str]] = {}

    def count(self, queue: str, counts: Sequence[int], now: int) -> None:
        """Add to the counts of a queue."""
        with self._lock:
            self._add(queue, "", counts, now)

    def record(self, stats: Sequence[RunStats], now: int) -> None:
        """Add the statistics that workers reported."""
        with self._lock:
            for run in stats:
                self._add(run.queue, "", times_of(run), now)
                self._add(run.queue, self._name(run.queue, run.name), values_of(run), now)

    def rows(self, queues: Sequence[str] | None, span: Span, *, by_name: bool) -> Iterator[Row]:
        """Return what was added in a period, by queue (None: all) or by job name."""
        wanted = None if queues is None else set(queues)
        with self._lock:
            kept = self._buckets[span.tier]
            keys: Iterable[tuple[int, str, str]] = kept
            if wanted is not None and not by_name and len(wanted) * len(span.starts()) < len(kept):
                probed = ((start, queue, "") for start in span.starts() for queue in wanted)
                keys = [key for key in probed if key in kept]
            rows = [
                (queue, name, start, tuple(kept[start, queue, name]))
                for start, queue, name in keys
                if span.start <= start < span.end
                and bool(name) is by_name
                and (wanted is None or queue in wanted)
            ]
        yield from rows

    def everything(self, queues: Sequence[str] | None) -> list[Row]:
        """Return what was added since the queues began (None: all), by queue and by job name."""
        wanted = None if queues is None else set(queues)
        with self._lock:
            return [
                (queue, name, start, tuple(values))
                for (start, queue, name), values in self._buckets[ALL_TIME].items()
                if wanted is None or queue in wanted
            ]

    def forget(self, queue: str) -> None:
        """Remove everything of a queue."""
        with self._lock:
            self._names.pop(queue, None)
            for buckets in self._buckets.values():
                for key in [key for key in buckets if key[1] == queue]:
                    del buckets[key]

    def _name(self, queue: str, name: str) -> str:
        names = self._names.setdefault(queue, set())
        if name not in names and len(names) >= MAX_NAMES:
            return OTHERS
        names.add(name)
        return name

    def _add(self, queue: str, name: str, values: Sequence[int], now: int) -> None:
        for step, buckets in self._buckets.items():
            key = (start_of(step, now), queue, name)
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = new_values()
                if step != ALL_TIME:
                    self._make_room(buckets, now - self._kept[step])
            add_up(bucket, values)

    @staticmethod
    def _make_room(buckets: dict[tuple[int, str, str], Values], before: int) -> None:
        while len(buckets) > MAX_BUCKETS or next(iter(buckets))[0] < before:
            del buckets[next(iter(buckets))]
