"""What is noted in charts: deploys, and what somebody marked."""

import logging
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from django.db import Error, transaction
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.models import Mark

from .snapshot import snapshots
from .tables import alias_of, rows_of

logger = logging.getLogger("djqueue.dashboard")

MOST = 50
"""Marks of one chart, the newest."""
FRESH = 5_000
"""Milliseconds for which they are shown again."""


class Flag(NamedTuple):
    """A mark in a chart."""

    at: int
    """UTC milliseconds."""
    label: str


def within(series: Sequence[Bucket]) -> list[Flag]:
    """Marks of the time that a chart shows, oldest first; none where there is no table."""
    if not series:
        return []
    start, end = series[0].start, series[-1].start + series[-1].step
    return _between(start, end)


def parts(_request: HttpRequest) -> Hashable:
    """What the charts of the last hour show of marks: see `freshness.Parts`."""
    end = (SYSTEM_CLOCK.now() // MINUTE + 1) * MINUTE
    return tuple(_between(end - 60 * MINUTE, end))


def _between(start: int, end: int) -> list[Flag]:
    return snapshots.read(("marks", start, end), lambda: _read(start, end), FRESH).value


def _read(start: int, end: int) -> list[Flag]:
    rows = rows_of(Mark).filter(at__gte=to_datetime(start), at__lt=to_datetime(end))
    try:
        # So that a transaction around the request goes on if there is no such table.
        with transaction.atomic(using=alias_of(Mark)):
            newest = list(rows.order_by("-at", "-id").values_list("at", "label")[:MOST])
    except Error as error:
        logger.debug("Charts have no marks: %s", error)
        return []
    return [Flag(to_milliseconds(at), label) for at, label in reversed(newest)]
