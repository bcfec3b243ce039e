"""What the tables say of groups: what was said to them, and in which mode each queue has them."""

from typing import Any

from djqueue import models
from djqueue.core.groups import NO_LIMIT, GroupLimit
from djqueue.core.limiter import Rate

from .rows import Row

GROUP_STATE = ("queue", "group", "concurrency", "paused", "rate_capacity", "rate_per", "weight", "mode")
"""Without a group's name it is about every group, and has the mode."""


def row_of(queue: str, group: str | None, said: GroupLimit, mode: str = "") -> Row | None:
    """As `GROUP_STATE`; None if there is nothing to keep."""
    if said == NO_LIMIT and not mode:
        return None
    capacity, per = (said.rate.capacity, said.rate.per) if said.rate is not None else (None, None)
    return queue, group or "", said.concurrency, said.paused, capacity, per, said.weight, mode


def group_limits(alias: str, **which: Any) -> dict[tuple[str, str | None], GroupLimit]:
    """What was said to groups, by queue and name; under None, to every group."""
    found: dict[tuple[str, str | None], GroupLimit] = {}
    rows = models.GroupState.objects.using(alias).filter(**which).values_list(*GROUP_STATE[:-1])
    for queue, group, concurrency, paused, capacity, per, weight in rows:
        rate = Rate(capacity, per) if capacity and per else None
        said = GroupLimit(concurrency, paused, rate, weight)
        if said != NO_LIMIT:
            found[queue, group or None] = said
    return found


def recorded_modes(alias: str, **which: Any) -> dict[str, str]:
    """The modes that are recorded, by queue."""
    found = models.GroupState.objects.using(alias).filter(group="", **which).exclude(mode="")
    return dict(found.values_list("queue", "mode"))


def record_mode(alias: str, queue: str, mode: str) -> None:
    """Record a queue's mode, unless one is recorded."""
    rows = models.GroupState.objects.using(alias)
    row, _ = rows.get_or_create(queue=queue, group="", defaults={"mode": mode})
    if not row.mode:
        rows.filter(pk=row.pk, mode="").update(mode=mode)
