"""Annotations of charts: deploys, and what users have added."""

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

MAX_ANNOTATIONS = 50
"""Maximum annotations of one chart, newest first."""
FRESH = 5_000
"""Milliseconds before annotations are read again."""
NEWEST = """\
SELECT at, label FROM djqueue_annotation WHERE at >= %s AND at < %s ORDER BY at DESC, id DESC LIMIT %s"""


class ChartAnnotation(NamedTuple):
    """An annotation of a chart."""

    at: int
    """UTC milliseconds."""
    label: str


def within(series: Sequence[Bucket]) -> list[ChartAnnotation]:
    """Return the annotations of the period of a chart, oldest first; none if the table doesn't exist."""
    if not series:
        return []
    start, end = series[0].start, series[-1].start + series[-1].step
    return _between(start, end)


def parts(_request: HttpRequest) -> Hashable:
    """Return the annotations of the last hour: see `freshness.Parts`."""
    end = (SYSTEM_CLOCK.now() // MINUTE + 1) * MINUTE
    return tuple(_between(end - 60 * MINUTE, end))


def _between(start: int, end: int) -> list[ChartAnnotation]:
    return snapshots.read(("marks", start, end), lambda: _read(start, end), FRESH).value


def _guarded(alias: str) -> AbstractContextManager[Any]:
    """Return a savepoint inside a transaction; outside, a failed statement affects no other."""
    return transaction.atomic(using=alias) if connections[alias].in_atomic_block else nullcontext()


def _read(start: int, end: int) -> list[ChartAnnotation]:
    try:
        # A missing table must not end a transaction around the request.
        with _guarded(alias_of(Annotation)):
            newest = tables.select(Annotation, NEWEST, (start, end, MAX_ANNOTATIONS))
    except Error as error:
        logger.debug("Could not read the annotations; the charts show none: %s", error)
        return []
    return [ChartAnnotation(at, label) for at, label in reversed(newest)]
