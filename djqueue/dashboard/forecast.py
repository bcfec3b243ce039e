"""Estimates when a queue's backlog drains, from how its size changes per second."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from djqueue.core.overview import QueueOverview
from djqueue.core.states import State

ENOUGH = 2_000
"""Minimum milliseconds between the samples of an estimate."""
SPAN = 15_000
"""Milliseconds of samples used for an estimate. If samples are further apart, the last two are used."""
COMPARED = 12
"""Maximum latest samples compared with one another."""
OLDEST = 300_000
"""Milliseconds after which the previous sample is ignored."""
WINDOW = 10_000
"""Minimum milliseconds of a window in which a backlog may have grown."""
WINDOWS = 3
"""Consecutive windows of growth after which a backlog counts as never draining."""
MAX_SAMPLES = 64
"""Maximum samples kept per queue."""

EMPTY, ESTIMATING, DRAINING, STEADY, NEVER = "empty", "estimating", "draining", "steady", "never"


class Sample(NamedTuple):
    """The size of a backlog at one moment."""

    tick: int
    """Monotonic milliseconds."""
    waiting: int


class Forecast(NamedTuple):
    """When a backlog drains if its trend continues."""

    kind: str
    """empty | estimating (too few samples) | draining | steady (neither shrinking nor clearly growing) |
    never (grew in each of the last windows)"""
    left: float | None = None
    """Milliseconds until a draining backlog is empty."""


Samples = tuple[Sample, ...]


def forecast(samples: Sequence[Sample]) -> Forecast:
    """Return the forecast of a queue from its samples, oldest first."""
    if not samples or not samples[-1].waiting:
        return Forecast(EMPTY)
    now = samples[-1]
    recent = _recent(samples)
    if not recent:
        return Forecast(ESTIMATING)
    # The median ignores a burst that arrived between two samples; the mean would not.
    falling = median(
        (one.waiting - later.waiting) / (later.tick - one.tick) for one, later in combinations(recent, 2)
    )
    if falling > 0:
        return Forecast(DRAINING, now.waiting / falling)
    return Forecast(NEVER if _has_grown(samples) else STEADY)


def sampled(known: Mapping[str, Samples], rows: Sequence[QueueOverview], tick: int) -> dict[str, Samples]:
    """Return the samples of each existing queue with the current size added."""
    found = {}
    for row in rows:
        new = Sample(tick, row.counts.get(State.WAITING, 0))
        old = known.get(row.name, ())
        if old and old[-1].tick >= tick:
            old = old[:-1]
        found[row.name] = (*old, new)[-MAX_SAMPLES:]
    return found


def _recent(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples used for an estimate; none until they span enough time."""
    now = samples[-1].tick
    near = [one for one in samples if now - one.tick <= SPAN]
    if now - near[0].tick >= ENOUGH:
        return near[-COMPARED:]
    before = [one for one in samples if SPAN < now - one.tick <= OLDEST]
    return (*before[-1:], samples[-1]) if before else ()


def _has_grown(samples: Sequence[Sample]) -> bool:
    """Return whether the backlog grew in each of the last windows."""
    later, grown = samples[-1], 0
    for one in reversed(samples):
        if later.tick - one.tick < WINDOW:
            continue
        if later.tick - one.tick > OLDEST or one.waiting >= later.waiting:
            return False
        later, grown = one, grown + 1
        if grown == WINDOWS:
            return True
    return False
