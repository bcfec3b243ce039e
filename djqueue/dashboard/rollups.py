"""Hourly rollups for charts, which include jobs that the storage has removed."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from django.db import Error, transaction
from django.db.models import Max, Sum

from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.storage import sparktables

from .snapshot import snapshots
from .tables import alias_of, rows_of

logger = logging.getLogger("djqueue.dashboard")

HOUR = 3_600_000
FRESH = 60_000
"""Milliseconds before rollups are read again; they are written once an hour."""
COUNTS = ("enqueued", "completed", "failed", "retried")
TIMES = ("wait_p50", "wait_p95", "wait_p99", "run_p50", "run_p95", "run_p99")
MAX_REASONS = 2_000
"""Maximum rollups whose failure reasons are added up: those with most failures."""


class RollupStep(NamedTuple):
    """The counts and times of one step of a chart."""

    start: int
    """UTC milliseconds."""
    counts: tuple[int, ...]
    """The sum of each of `COUNTS`."""
    times: tuple[int | None, ...]
    """The longest of each of `TIMES`, in milliseconds."""


class Rolled(NamedTuple):
    """The rollups of a period, and why jobs failed in it."""

    step: int
    """Milliseconds."""
    steps: list[RollupStep]
    reasons: list[tuple[str, int]]
    """Most frequent first."""


def within(start: int, end: int, step: int, queues: Sequence[str]) -> Rolled | None:
    """Return the rollups of queues in a period; None if there are none, or no table."""
    step = max(step, HOUR)
    start = start // step * step
    if end - start < 2 * step:
        return None
    key = ("rollups", start, end, step, *queues)
    return snapshots.read(key, lambda: _read(start, end, step, queues), FRESH).value


def _read(start: int, end: int, step: int, queues: Sequence[str]) -> Rolled | None:
    if not sparktables.are_installed():
        return None
    model = sparktables.spark_model("Rollup")
    rows = rows_of(model).filter(hour__gte=to_datetime(start), hour__lt=to_datetime(end), queue__in=queues)
    sums = {name: Sum(name) for name in COUNTS} | {name: Max(name) for name in TIMES}
    try:
        # A missing table must not end a transaction around the request.
        with transaction.atomic(using=alias_of(model)):
            hours = list(
                rows.order_by().values("hour").annotate(**{f"of_{name}": sums[name] for name in sums})
            )
            failed = rows.filter(failed__gt=0).order_by("-failed", "-hour").values_list("reasons", flat=True)
            reasons = list(failed[:MAX_REASONS]) if hours else []
    except Error as error:
        logger.debug("Could not read the rollups; the page shows none: %s", error)
        return None
    if not hours:
        return None
    steps = {at: RollupStep(at, (0,) * len(COUNTS), (None,) * len(TIMES)) for at in range(start, end, step)}
    for hour in hours:
        at = to_milliseconds(hour["hour"]) // step * step
        steps[at] = _added(steps[at], hour)
    total = Counter[str]()
    for found in reasons:
        total.update(found)
    return Rolled(step, list(steps.values()), sorted(total.items(), key=lambda pair: (-pair[1], pair[0])))


def _added(step: RollupStep, hour: Mapping[str, Any]) -> RollupStep:
    counts = tuple(had + (hour[f"of_{name}"] or 0) for had, name in zip(step.counts, COUNTS, strict=True))
    times = tuple(_longer(had, hour[f"of_{name}"]) for had, name in zip(step.times, TIMES, strict=True))
    return step._replace(counts=counts, times=times)


def _longer(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)
