"""What happened in which minute, hour and day: counts, and how long jobs waited and ran."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from .errors import OptionError
from .options import DAY
from .overview import Totals

MINUTE, HOUR = 60_000, 3_600_000
STEPS = (MINUTE, HOUR, DAY)
"""Lengths of the buckets that are kept, in milliseconds."""
MOST_BUCKETS = 50_000
"""Of one answer."""
MOST_NAMES = 200
"""Job names of a queue and step that have buckets of their own."""
OTHERS = "…"
"""The name of the bucket of all others."""

BOUNDS = (
    *(20, 30, 45, 65, 100, 150, 225, 335, 500, 750, 1_100, 1_700, 2_500, 3_800, 5_750, 8_500),
    *(13_000, 20_000, 30_000, 45_000, 65_000, 100_000, 150_000, 225_000, 335_000),
)
"""Milliseconds at which the parts of a histogram end, each about half as long again as the one before; the
last part, the 26th, has what is slower. Fixed, so that any two histograms can be added up. Sidekiq's.
"""
PARTS = len(BOUNDS) + 1


class Histogram(NamedTuple):
    """How many times were how long."""

    counts: tuple[int, ...]
    """For each part: see `BOUNDS`."""

    @property
    def total(self) -> int:
        """All times."""
        return sum(self.counts)

    def merge(self, other: "Histogram") -> "Histogram":
        """Both together."""
        return Histogram(tuple(map(sum, zip(self.counts, other.counts, strict=True))))

    def percentile(self, share: float) -> float | None:
        """Milliseconds that `share` (0 to 1) of the times are not above; None if there are none.

        Evenly spread within a part; what is slower than all bounds counts as the last of these. Merge
        histograms and ask the sum: a mean of percentiles is none.
        """
        wanted = share * self.total
        seen = 0
        for part, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                if part == len(BOUNDS):
                    break
                low = BOUNDS[part - 1] if part else 0
                return low + (BOUNDS[part] - low) * max(0.0, wanted - seen) / count
            seen += count
        return float(BOUNDS[-1]) if self.total else None


NO_TIMES = Histogram((0,) * PARTS)


def part_of(milliseconds: int) -> int:
    """Return the part of a histogram that a time belongs to."""
    return bisect_right(BOUNDS, milliseconds)


class RunStats(NamedTuple):
    """What a worker tells of the runs of one job type that have ended since it last told."""

    queue: str
    name: str
    """The job's name."""
    completed: int
    retried: int
    failed: int
    cancelled: int
    wait: Histogram
    """From when a job could be claimed to its first start, as the storage's clock has it; not of jobs that
    depended on others."""
    run: Histogram
    """From start to end of every run, as the worker's clock has it."""


class Bucket(NamedTuple):
    """What happened in a queue, or in several, in one stretch of time."""

    queue: str
    """Empty: in all that were asked for."""
    name: str
    """The job's name; empty: of all jobs."""
    start: int
    """UTC milliseconds: a multiple of the step."""
    step: int
    """Milliseconds."""
    enqueued: int
    """As the next six, see `Totals`. Of one job name only what workers have ended is known."""
    started: int
    completed: int
    retried: int
    failed: int
    cancelled: int
    stalled: int
    wait: Histogram
    """First runs: from when the job could be claimed to its start, noted when the run has ended."""
    run: Histogram
    """All runs that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Milliseconds for which buckets of each length are kept."""

    minute: int = 7 * DAY
    hour: int = 90 * DAY
    day: int = 400 * DAY

    def kept(self) -> dict[int, int]:
        """By length of the bucket."""
        return {MINUTE: self.minute, HOUR: self.hour, DAY: self.day}


DEFAULT_TIERS = Tiers()
COUNTS = len(Totals._fields)
Values = list[int]
"""A bucket while it is added to: counts as in `Totals`, then the parts of both histograms."""
Row = tuple[str, str, int, Sequence[int]]
"""(queue, name, start, values)."""


def new_values() -> Values:
    """Nothing has happened yet."""
    return [0] * (COUNTS + 2 * PARTS)


def values_of(stats: RunStats) -> Values:
    """Return what runs add to the bucket of their name."""
    _, _, completed, retried, failed, cancelled, wait, run = stats
    ended = completed + retried + failed + cancelled
    return [0, ended, completed, retried, failed, cancelled, 0, *wait.counts, *run.counts]


def times_of(stats: RunStats) -> Values:
    """Return what runs add to the bucket of their queue, whose counts are exact without them."""
    return [0] * COUNTS + [*stats.wait.counts, *stats.run.counts]


def add_up(values: Values, more: Sequence[int]) -> None:
    """Add to a bucket."""
    for at, number in enumerate(more):
        if number:
            values[at] += number


class Span(NamedTuple):
    """A stretch of time, in buckets."""

    start: int
    end: int
    step: int
    tier: int
    """Length of the buckets that are kept of which these are made."""

    def starts(self) -> range:
        """When buckets of the tier begin."""
        return range(self.start, self.end, self.tier)


def span_of(start: int, end: int, step: int) -> Span:
    """Return the buckets that touch [start, end). Raises OptionError."""
    tier = next((tier for tier in reversed(STEPS) if step > 0 and step % tier == 0), None)
    if tier is None:
        raise OptionError(f"step: must be a multiple of 60,000 ms (one minute); got {step!r}")
    first, last = start - start % step, end + -end % step
    if (last - first) // step > MOST_BUCKETS:
        raise OptionError(
            f"step: the range has {(last - first) // step:,} buckets, and at most {MOST_BUCKETS:,} are "
            "allowed; use a longer step"
        )
    return Span(first, last, step, tier)


def assemble(rows: Iterable[Row], queues: Sequence[str] | None, span: Span, *, by_name: bool) -> list[Bucket]:
    """Buckets of what is kept; see `Storage.series`."""
    sums: dict[tuple[str, str, int], Sequence[int]] = {}
    for queue, name, start, values in rows:
        key = ("" if queues is None else queue, name, start - start % span.step)
        there = sums.get(key)
        # Most are made of one row; what is given is the caller's.
        sums[key] = values if there is None else [*map(add, there, values)]
    if by_name:
        return [_bucket(*key, span.step, sums[key]) for key in sorted(sums)]
    return list(_dense(sums, [""] if queues is None else queues, span))


def _dense(
    sums: dict[tuple[str, str, int], Sequence[int]], queues: Sequence[str], span: Span
) -> Iterator[Bucket]:
    for queue in queues:
        for start in range(span.start, span.end, span.step):
            values = sums.get((queue, "", start))
            if values is None:
                yield Bucket(queue, "", start, span.step, 0, 0, 0, 0, 0, 0, 0, NO_TIMES, NO_TIMES)
            else:
                yield _bucket(queue, "", start, span.step, values)


def _bucket(queue: str, name: str, start: int, step: int, values: Sequence[int]) -> Bucket:
    middle = COUNTS + PARTS
    wait, run = Histogram(tuple(values[COUNTS:middle])), Histogram(tuple(values[middle:]))
    return Bucket._make((queue, name, start, step, *values[:COUNTS], wait, run))
