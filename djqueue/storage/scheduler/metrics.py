"""Metrics in memory whose buckets are rows, too."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from djqueue import models
from djqueue.core.metrics import (
    ALL_TIME,
    COUNTS,
    DEFAULT_TIERS,
    PARTS,
    TIERS,
    Tiers,
    Values,
    start_of,
)
from djqueue.core.metricstore import MetricStore
from djqueue.core.overview import Totals
from djqueue.storage.tables.rows import raw_values

from .changes import TableChange

BUCKET = ("queue", "name", "tier", "start", *Totals._fields, "wait", "run")
BucketKey = tuple[int, int, str, str]
"""(length, start, queue, name)."""
PURGE_EVERY = 60_000
"""Milliseconds between two removals of expired rows."""


class StoredMetrics(MetricStore):
    """Metrics that note which buckets have changed."""

    def __init__(self, tiers: Tiers = DEFAULT_TIERS) -> None:
        super().__init__(tiers)
        self._changed: dict[BucketKey, None] = {}
        self._gone: dict[str, None] = {}
        self._purged = 0

    def load(self, alias: str) -> None:
        """Load the rows."""
        found = models.MetricBucket.objects.using(alias).order_by("start")
        with self._lock:
            for queue, name, tier, start, *values in raw_values(found, BUCKET):
                if tier in self._buckets:
                    self._buckets[tier][start, queue, name] = _values(values)
                if tier == ALL_TIME and name:
                    self._names.setdefault(queue, set()).add(name)

    def forget(self, queue: str) -> None:
        super().forget(queue)
        with self._lock:
            self._gone[queue] = None
            self._changed = {key: None for key in self._changed if key[2] != queue}

    def _add(self, queue: str, name: str, values: Sequence[int], now: int) -> None:
        super()._add(queue, name, values, now)
        self._changed.update({(tier, start_of(tier, now), queue, name): None for tier in TIERS})

    # Rows.

    def take(self) -> list[TableChange]:
        """Return the changes of the table since the last call."""
        with self._lock:
            changed, self._changed = self._changed, {}
            gone, self._gone = self._gone, {}
            found = [
                _row(key, self._buckets[key[0]][key[1:]])
                for key in changed
                if key[1:] in self._buckets.get(key[0], {})
            ]
        changes = (
            TableChange("delete", models.MetricBucket, (), [(name,) for name in gone], ("queue",)),
            TableChange("insert", models.MetricBucket, BUCKET, found, BUCKET[:4]),
        )
        return [change for change in changes if change.rows]

    def give_back(self, changes: Sequence[TableChange]) -> None:
        """Note changes again that could not be written."""
        with self._lock:
            for change in changes:
                if change.kind == "delete":
                    self._gone.update({name: None for (name,) in change.rows})
                else:
                    self._changed.update({(row[2], row[3], row[0], row[1]): None for row in change.rows})

    def purge(self, alias: str, now: int) -> None:
        """Delete expired rows, once a minute."""
        if now - self._purged < PURGE_EVERY:
            return
        self._purged = now
        kept: Mapping[int, int] = self._kept
        for tier, time in kept.items():
            models.MetricBucket.objects.using(alias).filter(tier=tier, start__lt=now - time).delete()


def _row(key: BucketKey, values: Values) -> tuple[Any, ...]:
    tier, start, queue, name = key
    middle = COUNTS + PARTS
    *run, wait_sum, run_sum = values[middle:]
    times = _pack(wait_sum, values[COUNTS:middle]), _pack(run_sum, run)
    return (queue, name, tier, start, *values[:COUNTS], *times)


def _values(columns: Sequence[Any]) -> Values:
    wait_sum, *wait = _unpack(columns[-2])
    run_sum, *run = _unpack(columns[-1])
    return [*columns[:COUNTS], *wait, *run, wait_sum, run_sum]


def _pack(total: int, counts: Sequence[int]) -> bytes:
    """Encode a histogram: its sum, then its parts without the trailing empty ones."""
    last = max((part for part, count in enumerate(counts, 1) if count), default=0)
    packed: bytes = msgpack.packb([total, *counts[:last]])
    return packed


def _unpack(data: bytes) -> list[int]:
    """Return the sum of a histogram, then all its parts."""
    numbers: list[int] = msgpack.unpackb(bytes(data))
    return numbers + [0] * (1 + PARTS - len(numbers))
