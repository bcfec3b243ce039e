"""Seven days before the demo began: metrics of its passengers' jobs, with nights, a bad release, its repair.

Only numbers are made up, so that charts of a week have a past; no job, dead letter or activity is.
"""

from collections.abc import Iterator
from math import cos, pi
from operator import add
from random import Random
from typing import NamedTuple

from demo_project.flights.passengers import check_weather, find_booking, pay_passenger, write_letter
from djqueue.client import get_storage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.metrics import PARTS, part_of
from djqueue.core.units import to_datetime
from djqueue.models import Annotation, MetricBucket
from djqueue.operations.annotations import annotate
from djqueue.storage.tables.rows import pack_histogram

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
DAYS = 7
BAD_RELEASE, REPAIR = 76, 71
"""When the bad release and its repair were deployed, in hours ago."""
RELEASES = {150: "2.3.1", BAD_RELEASE: "2.3.2", REPAIR: "2.3.3"}
"""Hours ago of each release."""


class Habit(NamedTuple):
    """Jobs of one name per hour of a busy day, their usual milliseconds, and how many in 1,000 fail."""

    queue: str
    name: str
    hourly: int
    wait: int
    run: int
    failing: int


HABITS = (
    Habit("letters", write_letter.name, 1_900, 900, 310, 21),
    Habit("payments", pay_passenger.name, 5_200, 60, 210, 4),
    Habit("bookings", find_booking.name, 180, 45, 560, 0),
    Habit("bookings", check_weather.name, 180, 45, 1_150, 1),
)


def make_history() -> None:
    """Add the metrics of the last days, unless they are there or the storage keeps metrics elsewhere."""
    if type(get_storage()).__module__.split(".")[2] != "database":
        return
    now = SYSTEM_CLOCK.now()
    if MetricBucket.objects.filter(start__lt=to_datetime(now - DAY)).exists():
        return
    chance = Random(2013)
    rows: dict[tuple[str, str, int, int], list[int]] = {}
    times: dict[tuple[str, str, int, int], list[list[int]]] = {}
    for habit in HABITS:
        for start, length in spans(now):
            counts, waits, runs = made(habit, start, length, (now - start) / HOUR, chance)
            tiers = (MINUTE, HOUR, DAY) if length == MINUTE else (HOUR, DAY)
            for tier in tiers:
                for name in ("", habit.name):
                    key = (habit.queue, name, tier, start // tier * tier)
                    rows[key] = list(map(add, rows.get(key, [0] * 7), counts))
                    both = times.setdefault(key, [[0] * (PARTS + 1), [0] * (PARTS + 1)])
                    for total, parts in zip(both, (waits, runs), strict=True):
                        total[:] = map(sum, zip(total, parts, strict=True))
    names = ("enqueued", "started", "completed", "retried", "failed", "cancelled", "stalled")
    MetricBucket.objects.bulk_create(
        (
            MetricBucket(
                queue=queue,
                name=name,
                tier=tier,
                start=to_datetime(start),
                **dict(zip(names, counts, strict=True)),
                **{
                    field: pack_histogram(total[-1], total[:-1])
                    for field, total in zip(("wait", "run"), times[queue, name, tier, start], strict=True)
                },
            )
            for (queue, name, tier, start), counts in rows.items()
        ),
        ignore_conflicts=True,
    )
    if not Annotation.objects.exists():
        for ago, release in RELEASES.items():
            annotate("default", release, now - ago * HOUR)


def spans(now: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of the past: hours, then the minutes of the last two."""
    recent = now // HOUR * HOUR - HOUR
    for start in range(recent - DAYS * DAY, recent, HOUR):
        yield start, HOUR
    for start in range(recent, now // MINUTE * MINUTE, MINUTE):
        yield start, MINUTE


def made(
    habit: Habit, start: int, length: int, ago: float, chance: Random
) -> tuple[list[int], list[int], list[int]]:
    """Return counts and histograms of a span: fewer jobs at night, many failures between two releases."""
    hour = start % DAY / HOUR
    busy = 0.25 + 0.75 * (0.5 - 0.5 * cos((hour - 4) / 24 * 2 * pi))
    ended = round(habit.hourly * busy * length / HOUR * chance.uniform(0.85, 1.15))
    is_bad = habit.queue == "payments" and REPAIR < ago <= BAD_RELEASE
    failed = round(ended * (0.17 if is_bad else habit.failing / 1_000 * chance.uniform(0.5, 1.5)))
    slower = 2.2 if is_bad else 1.0
    waits, runs = [0] * (PARTS + 1), [0] * (PARTS + 1)
    sample = min(ended, 60)
    for at in range(sample):
        share = (ended * (at + 1)) // sample - (ended * at) // sample
        for total, usual in ((waits, habit.wait), (runs, habit.run)):
            took = round(usual * slower * chance.lognormvariate(0, 0.5))
            total[part_of(took)] += share
            total[-1] += took * share
    return [ended, ended + failed, ended - failed, failed, failed, 0, 0], waits, runs
