"""All queues and workers that a user can see, with their last hour and a forecast of each backlog.

The board is read once a second for all users of a process, then filtered for each user.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.metrics import COUNTS, MINUTE, NO_TIMES, Bucket, Histogram, Percentile
from djqueue.core.overview import QueueOverview
from djqueue.core.states import State
from djqueue.core.workers import Unhandled, WorkerInfo, is_silent, served, silent_from, unhandled
from djqueue.dashboard import reading, rights
from djqueue.dashboard.reading import FRESH_TIME, CachedRead, read_cache

MIN_SAMPLE_GAP = 2_000
"""Minimum milliseconds between the samples of an estimate."""
SAMPLE_SPAN = 15_000
"""Milliseconds of samples used for an estimate. If samples are further apart, the last two are used."""
COMPARED = 12
"""Maximum latest samples compared with one another."""
MAX_SAMPLE_AGE = 300_000
"""Milliseconds after which the previous sample is ignored."""
MIN_WINDOW = 10_000
"""Minimum milliseconds of a window in which a backlog may have grown."""
WINDOWS = 3
"""Consecutive windows of growth after which a backlog counts as never draining."""
MAX_SAMPLES = 64
"""Maximum samples kept per queue."""
EMPTY, ESTIMATING, DRAINING, STEADY, NEVER = "empty", "estimating", "draining", "steady", "never"
PAUSED, HELD, NO_WORKER = "paused", "held", "no_worker"
CHART_MINUTES = 60
"""Minutes in a queue's small charts."""
RATE_MINUTES = 5
"""Whole minutes from which current rates are computed."""
OPEN_MINUTES = 3
"""Minutes, including the current one, whose counts may still change: the storage's clocks and its delayed
writes differ by less."""


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


class QueueRow(NamedTuple):
    """A queue with its last hour."""

    row: QueueOverview
    buckets: tuple[Bucket, ...]
    """One bucket per minute, oldest first; the last minute is not over."""
    workers: int
    """The number of workers that serve the queue."""
    at: int
    """Time of the read, in UTC milliseconds."""
    forecast: Forecast = Forecast(EMPTY)
    """When the backlog drains."""
    unhandled: tuple[Unhandled, ...] = ()
    """Names of waiting jobs that no live worker of the queue knows."""

    @property
    def name(self) -> str:
        return self.row.name

    def count(self, state: State) -> int:
        return self.row.counts.get(state, 0)

    @property
    def waiting(self) -> int:
        """The number of jobs that are ready, or wait for their concurrency key."""
        return self.count(State.WAITING)

    @property
    def backlog(self) -> int:
        """The number of waiting and active jobs."""
        return self.waiting + self.count(State.ACTIVE)

    @property
    def age(self) -> int:
        """Milliseconds that the oldest waiting job that is not held has waited."""
        return 0 if self.row.oldest_at is None else max(0, self.at - self.row.oldest_at)

    @property
    def objective(self) -> int | None:
        """Milliseconds within which jobs should start; None if not configured."""
        return get_settings().policy(self.name).objective

    @property
    def is_late(self) -> bool:
        """Whether the oldest waiting job that is not held has waited longer than the objective."""
        return self.objective is not None and self.age > self.objective

    @property
    def whole(self) -> tuple[Bucket, ...]:
        """The latest whole minutes."""
        return self.buckets[-1 - RATE_MINUTES : -1]

    @property
    def arriving(self) -> float:
        """Jobs enqueued per minute."""
        return _mean([bucket.enqueued for bucket in self.whole])

    @property
    def leaving(self) -> float:
        """Jobs finished per minute."""
        return _mean(list(map(jobs_ended, self.whole)))

    @property
    def history(self) -> list[int]:
        """Jobs finished in each minute."""
        return list(map(jobs_ended, self.buckets))

    @property
    def wait_p95(self) -> Percentile | None:
        """95th percentile of the wait times of the last hour."""
        return _together([bucket.wait for bucket in self.buckets]).percentile(0.95)

    @property
    def run_p99(self) -> Percentile | None:
        """99th percentile of the run times of the last hour."""
        return _together([bucket.run for bucket in self.buckets]).percentile(0.99)

    @property
    def drain(self) -> "Drain":
        """When the backlog drains, by its recent sizes and by the counts of the last minutes."""
        if not self.waiting:
            return Drain(EMPTY)
        if self.row.paused:
            return Drain(PAUSED)
        if self.row.held >= self.waiting:
            return Drain(HELD)
        if not self.workers:
            return Drain(NO_WORKER)
        shrinking = self.leaving - self.arriving
        counted = (self.waiting - self.row.held) / shrinking * MINUTE if shrinking > 0 else None
        # The forecast counts held jobs, too.
        if self.forecast.kind == ESTIMATING or (self.row.held and self.forecast.kind != NEVER):
            if counted is not None:
                return Drain(DRAINING, counted, counted)
            # Delayed jobs were counted when they were enqueued, and do not wait yet.
            is_steady = self.leaving and not self.count(State.DELAYED)
            return Drain(STEADY if is_steady else ESTIMATING)
        if self.forecast.left is None:
            return Drain(self.forecast.kind)
        return Drain(DRAINING, *sorted((self.forecast.left, counted or self.forecast.left)))


class Drain(NamedTuple):
    """When a queue drains, as a range of estimates."""

    kind: str
    """Kind of `Forecast` | paused | held (all waiting jobs are) | no_worker"""
    soonest: float = 0.0
    """Milliseconds, as for `latest`."""
    latest: float = 0.0

    @property
    def is_range(self) -> bool:
        """Whether the estimates differ by more than half."""
        return self.latest > 1.5 * self.soonest


Samples = tuple[Sample, ...]


class Board(NamedTuple):
    """All queues and workers that a user can see."""

    lines: tuple[QueueRow, ...]
    workers: tuple[WorkerInfo, ...]
    at: int
    past: "Past | None" = None
    """Buckets of the minutes before the `OPEN_MINUTES` ones, if known."""
    samples: Mapping[str, Samples] = MappingProxyType({})
    """Recent sizes of each queue's backlog."""

    def total(self, state: State) -> int:
        return sum(line.count(state) for line in self.lines)

    def series(self) -> list[Bucket]:
        """Return the counts of all queues per minute, without times."""
        known = () if self.past is None else self.past.whole
        others = zip(*(line.buckets[len(known) :] for line in self.lines), strict=True)
        return [*known, *map(_in_all, others)] if self.lines else []

    def names_with(self, state: State, queue: str = "") -> list[str]:
        """Return the queues that have jobs in a state, or only this queue if given."""
        return [line.name for line in self.lines if line.count(state) and queue in ("", line.name)]

    def is_silent(self, worker: WorkerInfo) -> bool:
        """Return whether a worker has sent no heartbeat for too long."""
        return is_silent(worker, self.at)

    def line(self, name: str) -> QueueRow | None:
        return next((line for line in self.lines if line.name == name), None)


class Past(NamedTuple):
    """The minutes whose counts no longer change."""

    start: int
    lines: dict[str, tuple[Bucket, ...]]
    """Buckets of each queue."""
    whole: tuple[Bucket, ...]
    """Buckets of all queues together, without times."""


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
    samples = {}
    for row in rows:
        new = Sample(tick, row.counts.get(State.WAITING, 0))
        old = known.get(row.name, ())
        if old and old[-1].tick >= tick:
            old = old[:-1]
        samples[row.name] = (*old, new)[-MAX_SAMPLES:]
    return samples


def sum_of(buckets: Sequence[Bucket]) -> Bucket:
    """Return the sum of one or more buckets, with the queue, name and start of the first."""
    wait, run = _together([one.wait for one in buckets]), _together([one.run for one in buckets])
    return _counted(buckets)._replace(wait=wait, run=run)


def jobs_ended(bucket: Bucket) -> int:
    """Return how many jobs ended in a bucket."""
    return bucket.completed + bucket.failed + bucket.cancelled


def empty_bucket(queue: str, start: int, step: int) -> Bucket:
    """Return an empty bucket."""
    return Bucket(queue, "", start, step, 0, 0, 0, 0, 0, 0, 0, NO_TIMES, NO_TIMES)


def board(request: HttpRequest) -> CachedRead[Board]:
    """Return all queues that the user can see, with their last hour."""
    cached = whole()
    changes_at(request, cached.value)
    lines = tuple(line for line in cached.value.lines if rights.sees(request, line.name))
    if len(lines) == len(cached.value.lines):
        return cached
    return cached._replace(value=cached.value._replace(lines=lines, past=None))


def whole() -> CachedRead[Board]:
    """Return the board of all queues, including those that a user can't see."""
    cached = read_cache.read("board", read_board, versioned=True)
    return cached._replace(at=cached.value.at)


def changes_at(request: HttpRequest, board: Board) -> None:
    """Limit how long a page may show a board while only time passes."""
    for line in board.lines:
        if line.waiting and not line.row.paused and line.forecast.kind != STEADY:
            reading.expire_at(request, board.at + FRESH_TIME)  # the estimate changes with time
        if line.row.rate is not None and (line.row.tokens or 0) < line.row.rate.capacity:
            reading.expire_at(request, board.at + FRESH_TIME)
        for hold in line.row.holds:
            if hold.until is not None:
                reading.expire_at(request, hold.until)
        if line.objective is not None and line.row.oldest_at is not None:
            # A late job's age is shown, and grows.
            late_at = line.row.oldest_at + line.objective
            reading.expire_at(request, board.at + FRESH_TIME if line.is_late else late_at)
    for worker in board.workers:
        if not board.is_silent(worker):
            reading.expire_at(request, silent_from(worker))


def sees_all(request: HttpRequest) -> bool:
    """Return whether the user can see every queue."""
    lines = whole().value.lines
    return all(rights.sees(request, line.name) for line in lines)


def empty_row(name: str, at: int) -> QueueRow:
    """Return a queue that has no jobs, or was removed."""
    start = at // MINUTE * MINUTE + MINUTE - CHART_MINUTES * MINUTE
    row = get_storage().reads.overview([name]).queues[0]
    buckets = tuple(empty_bucket(name, start + index * MINUTE, MINUTE) for index in range(CHART_MINUTES))
    return QueueRow(row, buckets, 0, at)


def read_board() -> Board:
    """Read the board of all queues, including those that a user can't see."""
    storage = get_storage()
    overview = storage.reads.overview()
    workers = tuple(storage.workers.all())
    names = [row.name for row in overview.queues]
    serving = served(workers)
    end = overview.at // MINUTE * MINUTE + MINUTE
    last = read_cache.last("board")
    past = _past(names, end - CHART_MINUTES * MINUTE, None if last is None else last.value.past)
    recent = _by_queue(names, end - OPEN_MINUTES * MINUTE, end)
    known = {} if last is None else last.value.samples
    samples = sampled(known, overview.queues, SYSTEM_CLOCK.monotonic())
    names_without_handler: dict[str, list[Unhandled]] = {}
    for one in unhandled(overview.queues, workers):
        names_without_handler.setdefault(one.queue, []).append(one)
    lines = tuple(
        QueueRow(
            row,
            (*past.lines[row.name], *recent[row.name]),
            serving[row.name] + serving[None],
            overview.at,
            forecast(samples[row.name]),
            tuple(names_without_handler.get(row.name, ())),
        )
        for row in overview.queues
    )
    return Board(lines, workers, overview.at, past, samples)


def _recent(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples used for an estimate; none until they span enough time."""
    now = samples[-1].tick
    near = [one for one in samples if now - one.tick <= SAMPLE_SPAN]
    if now - near[0].tick >= MIN_SAMPLE_GAP:
        return near[-COMPARED:]
    before = [one for one in samples if SAMPLE_SPAN < now - one.tick <= MAX_SAMPLE_AGE]
    return (*before[-1:], samples[-1]) if before else ()


def _has_grown(samples: Sequence[Sample]) -> bool:
    """Return whether the backlog grew in each of the last windows."""
    later, grown = samples[-1], 0
    for one in reversed(samples):
        if later.tick - one.tick < MIN_WINDOW:
            continue
        if later.tick - one.tick > MAX_SAMPLE_AGE or one.waiting >= later.waiting:
            return False
        later, grown = one, grown + 1
        if grown == WINDOWS:
            return True
    return False


def _past(names: Sequence[str], start: int, known: Past | None) -> Past:
    """Return the minutes from `start` up to the recent ones, reading only those that are not known yet."""
    end = start + (CHART_MINUTES - OPEN_MINUTES) * MINUTE
    behind = None if known is None else start - known.start
    if known is None or behind not in (0, MINUTE):
        known, behind = Past(start, {}, ()), 0
    old = [name for name in names if name in known.lines]
    if not behind and old == names and len(old) == len(known.lines):
        return known
    lines = _by_queue([name for name in names if name not in known.lines], start, end)
    following = _by_queue(old, end - MINUTE, end) if behind else dict.fromkeys(old, ())
    for name in old:
        lines[name] = (*known.lines[name], *following[name])[-(CHART_MINUTES - OPEN_MINUTES) :]
    return Past(start, lines, tuple(map(_in_all, zip(*lines.values(), strict=True))))


def _by_queue(names: Sequence[str], start: int, end: int) -> dict[str, tuple[Bucket, ...]]:
    minutes = (end - start) // MINUTE
    buckets = get_storage().reads.series(names, start, end, MINUTE) if names else []
    return {name: tuple(buckets[at * minutes : (at + 1) * minutes]) for at, name in enumerate(names)}


def _counted(buckets: Sequence[Bucket]) -> Bucket:
    """Return the summed counts of buckets, without times."""
    first = buckets[0]
    at = Bucket._fields.index("enqueued")
    counts = map(sum, zip(*(one[at : at + COUNTS] for one in buckets), strict=True))
    return Bucket._make((*first[:at], *counts, NO_TIMES, NO_TIMES))


def _in_all(buckets: Sequence[Bucket]) -> Bucket:
    return _counted(buckets)._replace(queue="")


def _together(times: Sequence[Histogram]) -> Histogram:
    known = [one for one in times if one is not NO_TIMES]
    if not known:
        return NO_TIMES
    counts = map(sum, zip(*(one.counts for one in known), strict=True))
    return Histogram(tuple(counts), sum(one.sum for one in known))


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
