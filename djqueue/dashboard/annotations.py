"""What is noted in charts: deploys, and what somebody marked."""

import logging
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.models import Annotation

from . import tables
from .snapshot import snapshots
from .tables import alias_of

logger = logging.getLogger("djqueue.dashboard")

MOST = 50
"""Marks of one chart, the newest."""
FRESH = 5_000
"""Milliseconds for which they are shown again."""
NEWEST = """\
SELECT at, label FROM djqueue_annotation WHERE at >= %s AND at < %s ORDER BY at DESC, id DESC LIMIT %s"""


class ChartAnnotation(NamedTuple):
    """A mark in a chart."""

    at: int
    """UTC milliseconds."""
    label: str


def within(series: Sequence[Bucket]) -> list[ChartAnnotation]:
    """Marks of the time that a chart shows, oldest first; none where there is no table."""
    if not series:
        return []
    start, end = series[0].start, series[-1].start + series[-1].step
    return _between(start, end)


def parts(_request: HttpRequest) -> Hashable:
    """What the charts of the last hour show of marks: see `freshness.Parts`."""
    end = (SYSTEM_CLOCK.now() // MINUTE + 1) * MINUTE
    return tuple(_between(end - 60 * MINUTE, end))


def _between(start: int, end: int) -> list[ChartAnnotation]:
    return snapshots.read(("marks", start, end), lambda: _read(start, end), FRESH).value


def _guarded(alias: str) -> AbstractContextManager[Any]:
    """A savepoint in a transaction; without one a statement that fails undoes nothing else."""
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()


def _read(start: int, end: int) -> list[ChartAnnotation]:
    try:
        # So that a transaction around the request goes on if there is no such table.
        with _guarded(alias_of(Annotation)):
            newest = tables.select(Annotation, NEWEST, (start, end, MOST))
    except Error as error:
        logger.debug("Charts have no marks: %s", error)
        return []
    return [ChartAnnotation(at, label) for at, label in reversed(newest)]
