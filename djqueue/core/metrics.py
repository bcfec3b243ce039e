"""Metrics by minute, hour and day, and since a queue began: counts, and how long jobs waited and ran."""

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
"""Lengths of the stored buckets, in milliseconds."""
ALL_TIME = 0
"""Length of the bucket with everything since the queue began. It starts at 0 and never ends."""
TIERS = (*STEPS, ALL_TIME)
"""Lengths of all stored buckets."""
MAX_BUCKETS = 50_000
"""Maximum number of buckets per queue in one answer."""
MAX_NAMES = 200
"""Maximum number of job names of a queue and step with buckets of their own."""
OTHERS = "…"
"""Name of the bucket for all other job names."""

BOUNDS = (
    *(20, 30, 45, 65, 100, 150, 225, 335, 500, 750, 1_100, 1_700, 2_500, 3_800, 5_750, 8_500),
    *(13_000, 20_000, 30_000, 45_000, 65_000, 100_000, 150_000, 225_000, 335_000, 500_000, 750_000),
    *(1_100_000, 1_700_000, 2_500_000, 3_800_000, 5_750_000, 8_500_000, 13_000_000, 20_000_000, 30_000_000),
    *(45_000_000, 65_000_000, DAY),
)
"""Upper ends of the histogram's parts in milliseconds, each about half as long again as the one before.

The last part, the 40th, has times of a day and more. The bounds are fixed, so that any two histograms can be
added. Up to 335 s, they are Sidekiq's.
"""
PARTS = len(BOUNDS) + 1


class Percentile(NamedTuple):
    """A duration that a share of all times does not exceed."""

    milliseconds: float
    is_floor: bool
    """Whether the time is at least this long: it is beyond all bounds of the histogram."""


class Histogram(NamedTuple):
    """Numbers of times by length."""

    counts: tuple[int, ...]
    """Number of times in each part: see `BOUNDS`."""
    sum: int = 0
    """Sum of the times, in milliseconds."""

    @property
    def total(self) -> int:
        """Number of all times."""
        return sum(self.counts)

    def merge(self, other: "Histogram") -> "Histogram":
        """Return the sum of both histograms."""
        counts = tuple(map(add, self.counts, other.counts))
        return Histogram(counts, self.sum + other.sum)

    def percentile(self, share: float) -> Percentile | None:
        """Return the duration that `share` (0 to 1) of the times do not exceed; None if there are none.

        Times are assumed to be spread evenly within a part; of times beyond all bounds, only the last bound
        is known. For several histograms, merge them first: percentiles cannot be averaged.
        """
        wanted = share * self.total
        seen = 0
        for part, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                if part == len(BOUNDS):
                    break
                low = BOUNDS[part - 1] if part else 0
                inside = (BOUNDS[part] - low) * max(0.0, wanted - seen) / count
                return Percentile(low + inside, is_floor=False)
            seen += count
        return Percentile(float(BOUNDS[-1]), is_floor=True) if self.total else None


NO_TIMES = Histogram((0,) * PARTS)


def part_of(milliseconds: int) -> int:
    """Return the part of a histogram that a time belongs to."""
    return bisect_right(BOUNDS, milliseconds)


class RunStats(NamedTuple):
    """Statistics of the ended attempts of one job type since a worker's last report."""

    queue: str
    name: str
    """The job's name."""
    completed: int
    retried: int
    failed: int
    cancelled: int
    wait: Histogram
    """Times from when a job could be claimed to its first start, by the storage's clock; without jobs that
    had dependencies.
    """
    run: Histogram
    """Times from start to end of every attempt, by the worker's clock."""


class Bucket(NamedTuple):
    """Metrics of a queue, or of several, in one period."""

    queue: str
    """Name of the queue; empty: all queues that were asked for."""
    name: str
    """Name of the job; empty: all jobs."""
    start: int
    """UTC milliseconds, a multiple of the step."""
    step: int
    """Length in milliseconds; 0: since the queue began."""
    enqueued: int
    """Like the next six: see `Totals`. For one job name, only what workers reported is known."""
    started: int
    completed: int
    retried: int
    failed: int
    cancelled: int
    stalled: int
    wait: Histogram
    """Times from when jobs could be claimed to their first start, recorded when the attempt ends."""
    run: Histogram
    """Times of all ended attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Milliseconds for which buckets of each length are kept."""

    minute: int = 7 * DAY
    hour: int = 90 * DAY
    day: int = 400 * DAY

    def kept(self) -> dict[int, int]:
        """Return the times by the length of the bucket."""
        return {MINUTE: self.minute, HOUR: self.hour, DAY: self.day}


DEFAULT_TIERS = Tiers()
COUNTS = len(Totals._fields)
NUMBERS = COUNTS + 2 * PARTS + 2
Values = list[int]
"""A growing bucket: counts as in `Totals`, the parts of both histograms, and the sums of both."""
Row = tuple[str, str, int, Sequence[int]]
"""(queue, name, start, values)."""


def new_values() -> Values:
    """Return an empty bucket."""
    return [0] * NUMBERS


def start_of(step: int, now: int) -> int:
    """Return when the current bucket of a length starts."""
    return now - now % step if step else 0


def values_of(stats: RunStats) -> Values:
    """Return what attempts add to the bucket of their name."""
    _, _, completed, retried, failed, cancelled, wait, run = stats
    ended = completed + retried + failed + cancelled
    return [0, ended, completed, retried, failed, cancelled, 0, *_times(wait, run)]


def times_of(stats: RunStats) -> Values:
    """Return what attempts add to the bucket of their queue, whose counts are exact without them."""
    return [0] * COUNTS + _times(stats.wait, stats.run)


def _times(wait: Histogram, run: Histogram) -> list[int]:
    return [*wait.counts, *run.counts, wait.sum, run.sum]


def add_up(values: Values, more: Sequence[int]) -> None:
    """Add values to a bucket."""
    for at, number in enumerate(more):
        if number:
            values[at] += number


class Span(NamedTuple):
    """A period, in buckets."""

    start: int
    end: int
    step: int
    tier: int
    """Length of the stored buckets of which these consist."""

    def starts(self) -> range:
        """Return the starts of the stored buckets."""
        return range(self.start, self.end, self.tier)


def span_of(start: int, end: int, step: int) -> Span:
    """Return the buckets that overlap [start, end). Raises OptionError."""
    tier = next((tier for tier in reversed(STEPS) if step > 0 and step % tier == 0), None)
    if tier is None:
        raise OptionError(f"step: must be a multiple of 60,000 ms (one minute); got {step!r}")
    first, last = start - start % step, end + -end % step
    if (last - first) // step > MAX_BUCKETS:
        raise OptionError(
            f"step: the range has {(last - first) // step:,} buckets, and at most {MAX_BUCKETS:,} are "
            "allowed; use a longer step"
        )
    return Span(first, last, step, tier)


def assemble(rows: Iterable[Row], queues: Sequence[str] | None, span: Span, *, by_name: bool) -> list[Bucket]:
    """Return the buckets of stored rows: see `Reads.series`."""
    sums: dict[tuple[str, str, int], Sequence[int]] = {}
    for queue, name, start, values in rows:
        key = ("" if queues is None else queue, name, start - start % span.step)
        sum_ = sums.get(key)
        # Most buckets consist of one row, which belongs to the caller.
        sums[key] = values if sum_ is None else [*map(add, sum_, values)]
    if by_name:
        return [_bucket(*key, span.step, sums[key]) for key in sorted(sums)]
    return list(_dense(sums, [""] if queues is None else queues, span))


def since_beginning(rows: Iterable[Row]) -> list[Bucket]:
    """Return the buckets of stored rows of `ALL_TIME`: see `Reads.cumulative`."""
    cumulative = sorted((queue, name, values) for queue, name, _, values in rows)
    return [_bucket(queue, name, 0, ALL_TIME, values) for queue, name, values in cumulative]


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
    *run_counts, wait_sum, run_sum = values[middle:]
    wait = Histogram(tuple(values[COUNTS:middle]), wait_sum)
    run = Histogram(tuple(run_counts), run_sum)
    return Bucket._make((queue, name, start, step, *values[:COUNTS], wait, run))
