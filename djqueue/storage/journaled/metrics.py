"""Store metric buckets in the tables. The scheduler keeps them in memory while they grow."""

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import msgpack

from djqueue import models
from djqueue.core.metrics import (
    ALL_TIME,
    COUNTS,
    MAX_NAMES,
    MINUTE,
    OTHERS,
    PARTS,
    TIERS,
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
from djqueue.core.metrics import Row as Found
from djqueue.storage.tables.rows import Row, chunked, raw_values

from .buffer import BUCKET
from .journal import DatabaseJournal

Key = tuple[str, str, int, int]
"""(queue, name, length, start)."""
GROWING = 60_000
"""Milliseconds to keep a bucket in memory after its end."""


class DatabaseMetrics:
    """The scheduler's metric buckets, written with its journal.

    Values are added to the buckets of all lengths at once. A bucket is written as a whole, so that writing it
    again is idempotent.
    """

    def __init__(self, alias: str, journal: DatabaseJournal) -> None:
        self._alias = alias
        self._journal = journal
        self._lock = Lock()
        self._growing: dict[Key, Values] = {}
        self._pruned = 0
        """When ended buckets were last removed from memory."""
        self._names: dict[str, set[str]] = {}

    def count(self, queue: str, counts: Sequence[int], now: int) -> None:
        """Add to the counts of a queue."""
        with self._lock:
            self._add([(queue, "", counts)], now)

    def record(self, stats: Sequence[RunStats], now: int) -> None:
        """Add the statistics that workers reported."""
        with self._lock:
            changes: list[tuple[str, str, Sequence[int]]] = []
            for one in stats:
                changes.append((one.queue, "", times_of(one)))
                changes.append((one.queue, self._name(one.queue, one.name), values_of(one)))
            self._add(changes, now)

    def rows(self, queues: Sequence[str] | None, span: Span, *, by_name: bool) -> Iterator[Found]:
        """Return the values in a span of time, by queue or by job name."""
        return read(self._alias, queues, span, by_name=by_name)

    def everything(self, queues: Sequence[str] | None) -> Iterator[Found]:
        """Return the values since the queues began, by queue and by job name."""
        return read_everything(self._alias, queues)

    def forget(self, queue: str) -> None:
        """Delete a queue's buckets."""
        with self._lock:
            self._names.pop(queue, None)
            self._growing = {key: values for key, values in self._growing.items() if key[0] != queue}
            self._journal.metrics_gone(queue)

    def _add(self, changes: Sequence[tuple[str, str, Sequence[int]]], now: int) -> None:
        keys = [(*change[:2], step, start_of(step, now)) for change in changes for step in TIERS]
        self._load({key for key in keys if key not in self._growing})
        for place, key in enumerate(keys):
            add_up(self._growing[key], changes[place // len(TIERS)][2])
        for key in set(keys):
            self._journal.metric_changed(key, _row(key, self._growing[key]))
        self._prune(now)

    def _prune(self, now: int) -> None:
        if start_of(MINUTE, now) == self._pruned:
            return
        self._pruned = start_of(MINUTE, now)
        ended = [key for key in self._growing if key[2] != ALL_TIME and key[2] + key[3] + GROWING < now]
        for key in ended:
            del self._growing[key]

    def _load(self, missing: set[Key]) -> None:
        """Load buckets that an earlier scheduler may have started."""
        wanted: dict[tuple[int, int], set[str]] = {}
        for key in missing:
            wanted.setdefault(key[2:], set()).add(key[0])
        there = {key: new_values() for key in missing}
        for (tier, start), queues in wanted.items():
            for chunk in chunked(sorted(queues)):
                found = _buckets(self._alias).filter(tier=tier, start=start, queue__in=chunk)
                for queue, name, _, values in _read(found):
                    if (queue, name, tier, start) in missing:
                        there[queue, name, tier, start] = list(values)
        self._growing.update(there)

    def _name(self, queue: str, name: str) -> str:
        names = self._names.get(queue)
        if names is None:
            there = _buckets(self._alias).filter(queue=queue, tier=ALL_TIME).exclude(name="")
            names = self._names[queue] = set(there.values_list("name", flat=True).distinct())
        if name not in names and len(names - {OTHERS}) >= MAX_NAMES:
            return OTHERS
        names.add(name)
        return name


def read(alias: str, queues: Sequence[str] | None, span: Span, *, by_name: bool) -> Iterator[Found]:
    """Return the buckets in a span of time, by queue or by job name."""
    found = _buckets(alias).filter(tier=span.tier, start__gte=span.start, start__lt=span.end)
    return _of(found.exclude(name="") if by_name else found.filter(name=""), queues)


def read_everything(alias: str, queues: Sequence[str] | None) -> Iterator[Found]:
    """Return the buckets with everything since the queues began, by queue and by job name."""
    return _of(_buckets(alias).filter(tier=ALL_TIME), queues)


def _of(found: Any, queues: Sequence[str] | None) -> Iterator[Found]:
    if queues is None:
        yield from _read(found)
        return
    for chunk in chunked(list(dict.fromkeys(queues))):
        yield from _read(found.filter(queue__in=chunk))


def purge(alias: str, tiers: Tiers, now: int, limit: int) -> int:
    """Delete at most `limit` expired buckets of each length; return their number."""
    removed = 0
    for tier, kept in tiers.kept().items():
        old = _buckets(alias).filter(tier=tier, start__lt=now - kept).order_by("start")
        numbers = list(old.values_list("id", flat=True)[:limit])
        if numbers:
            removed += _buckets(alias).filter(id__in=numbers).delete()[0]
    return removed


def _buckets(alias: str) -> Any:
    return models.MetricBucket.objects.using(alias)


def _read(found: Any) -> Iterator[Found]:
    for queue, name, _, start, *values in raw_values(found, BUCKET):
        counts, (wait, run) = values[:COUNTS], values[COUNTS:]
        wait_sum, *wait = _unpack(wait)
        run_sum, *run = _unpack(run)
        yield queue, name, start, [*counts, *wait, *run, wait_sum, run_sum]


def _row(key: Key, values: Values) -> Row:
    middle = COUNTS + PARTS
    *run, wait_sum, run_sum = values[middle:]
    return (*key, *values[:COUNTS], _pack(wait_sum, values[COUNTS:middle]), _pack(run_sum, run))


def _pack(total: int, counts: Sequence[int]) -> bytes:
    """Encode a histogram: its sum, then its parts without the trailing empty ones."""
    many = max((part for part, count in enumerate(counts, 1) if count), default=0)
    packed: bytes = msgpack.packb([total, *counts[:many]])
    return packed


def _unpack(data: bytes) -> list[int]:
    """Return the sum of a histogram, then all its parts."""
    numbers: list[int] = msgpack.unpackb(data)
    return numbers + [0] * (1 + PARTS - len(numbers))
