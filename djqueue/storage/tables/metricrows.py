"""Rows of metrics: counts, then two histograms."""

from collections.abc import Sequence
from typing import Any

import msgpack

from djqueue.core.metrics import COUNTS, PARTS, Values
from djqueue.core.overview import Totals

BUCKET_KEY = ("queue", "name", "tier", "start")
BUCKET = (*BUCKET_KEY, *Totals._fields, "wait", "run")
"""Columns of a row."""


def bucket_row(key: tuple[str, str, int, int], values: Values) -> tuple[Any, ...]:
    """Return the values of a bucket as `BUCKET`."""
    middle = COUNTS + PARTS
    *run, wait_sum, run_sum = values[middle:]
    return (
        *key,
        *values[:COUNTS],
        pack_histogram(wait_sum, values[COUNTS:middle]),
        pack_histogram(run_sum, run),
    )


def bucket_values(row: Sequence[Any]) -> Values:
    """Return the values of a row of `BUCKET`."""
    wait_sum, *wait = _unpack(row[-2])
    run_sum, *run = _unpack(row[-1])
    return [*row[len(BUCKET_KEY) : -2], *wait, *run, wait_sum, run_sum]


def pack_histogram(total: int, counts: Sequence[int]) -> bytes:
    """Encode a histogram: its sum, then its parts without the trailing empty ones."""
    many = max((part for part, count in enumerate(counts, 1) if count), default=0)
    packed: bytes = msgpack.packb([total, *counts[:many]])
    return packed


def _unpack(data: bytes) -> list[int]:
    """Return the sum of a histogram, then all its parts."""
    numbers: list[int] = msgpack.unpackb(bytes(data))
    return numbers + [0] * (1 + PARTS - len(numbers))
