"""Compute the slots of a schedule to enqueue now, and the next slot."""

from typing import NamedTuple

from .schedule import Schedule

LATE = 60_000
"""Milliseconds by which a slot may be late and is still in time, and not missed."""
AT_ONCE = 100
"""Slots of one plan; the rest is left to the next one."""


class SlotPlan(NamedTuple):
    """The slots to enqueue, oldest first, and the first that is not dealt with by that."""

    slots: tuple[int, ...]
    following: int | None


def plan(schedule: Schedule, name: str, slot: int, now: int) -> SlotPlan | None:
    """Return the plan for a schedule with this next slot; None if it is not due yet.

    If the slot was missed, `Schedule.missed` decides about it and about all later missed slots.
    """
    late = now - schedule.fires_at(slot, name)
    if late < 0:
        return None
    if late > LATE and schedule.missed == "one":
        return SlotPlan((slot,), _first(schedule, name, slot, now + 1))
    following: int | None = slot
    if late > LATE:
        window = schedule.missed_window if schedule.missed == "all" else 0
        following = _first(schedule, name, slot, now - max(window, LATE))
    due: list[int] = []
    while following is not None and schedule.fires_at(following, name) <= now and len(due) < AT_ONCE:
        due.append(following)
        following = schedule.next_slot(following)
    return SlotPlan(tuple(due), following)


def _first(schedule: Schedule, name: str, slot: int, earliest: int) -> int | None:
    """The first slot, from this one on, whose job is not to be enqueued before a time."""
    found: int | None = slot
    while found is not None and schedule.fires_at(found, name) < earliest:
        found = schedule.next_slot(max(found, earliest - schedule.jitter - 1))
    return found
