"""Read and write the limits of queues and groups, and the key mode of each queue."""

from collections.abc import Collection
from typing import Any

from djqueue import models
from djqueue.core.policies import NO_LIMIT, KeyLimit, Rate

from .rows import Row, chunked

QUEUE_STATE = ("name", "paused", "rate_capacity", "rate_per", "concurrency")
GROUP_STATE = (
    "queue",
    "concurrency_key",
    "concurrency",
    "paused",
    "rate_capacity",
    "rate_per",
    "weight",
    "mode",
)
"""A row without a group's name applies to every group of the queue, and has the mode."""


def row_of(queue: str, group: str | None, limit: KeyLimit, mode: str = "") -> Row | None:
    """Return a row of `GROUP_STATE`, or None if nothing has to be stored."""
    if limit == NO_LIMIT and not mode:
        return None
    capacity, per = (limit.rate.capacity, limit.rate.per) if limit.rate is not None else (None, None)
    return queue, group or "", limit.concurrency, limit.paused, capacity, per, limit.weight, mode


def key_limits(alias: str, **which: Any) -> dict[tuple[str, str | None], KeyLimit]:
    """Return the limits set on groups, by queue and group; None stands for every group."""
    limits: dict[tuple[str, str | None], KeyLimit] = {}
    rows = models.GroupState.objects.using(alias).filter(**which).values_list(*GROUP_STATE[:-1])
    for row in rows:
        limit = limit_of(row)
        if limit != NO_LIMIT:
            limits[row[0], row[1] or None] = limit
    return limits


def limit_of(row: Row) -> KeyLimit:
    """Return the limit of a row that begins with the columns of `GROUP_STATE`."""
    concurrency, paused, capacity, per, weight = row[2:7]
    rate = Rate(capacity, per) if capacity and per else None
    return KeyLimit(concurrency, bool(paused), rate, weight)


def recorded_modes(alias: str, queues: Collection[str] | None = None) -> dict[str, str]:
    """Return the recorded modes of queues, or of all, by queue."""
    rows = models.GroupState.objects.using(alias).filter(concurrency_key="").exclude(mode="")
    if queues is None:
        return dict(rows.values_list("queue", "mode"))
    found: dict[str, str] = {}
    for some in chunked(list(queues)):
        found.update(rows.filter(queue__in=some).values_list("queue", "mode"))
    return found
