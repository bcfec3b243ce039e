"""What the pages read: the storage's answers, put together for a viewer and shared for a second."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.job import WorkerDump, WorkerInfo
from djqueue.core.metrics import COUNTS, NO_TIMES, Bucket, Histogram
from djqueue.core.overview import QueueOverview
from djqueue.core.states import State
from djqueue.core.unhandled import Unhandled, unhandled

from . import freshness, rights
from .forecast import EMPTY, STEADY, Forecast, Samples, forecast, sampled
from .snapshot import FRESH, CachedRead, snapshots

MINUTE = 60_000
HOUR = 60 * MINUTE
SHOWN = 60
"""Minutes of a queue's small charts."""
LATELY = 5
"""Whole minutes that its present rates are taken from."""
CAP = 10_000
"""Jobs of a queue and state at which counting ends, where no scheduler can be asked."""
RECENT = 3
"""Minutes, with the one that is not over, in which something may yet be noted: the storage's clocks, and the
writing of what they counted, are no further apart."""
SILENT = 15_000
"""Milliseconds after which a worker that has not been heard of is marked."""


class QueueRow(NamedTuple):
    """One queue."""

    row: QueueOverview
    buckets: tuple[Bucket, ...]
    """Of the last minutes, oldest first; the last one is not over yet."""
    workers: int
    """Those that serve it."""
    at: int
    """UTC milliseconds at which all this was so."""
    forecast: Forecast = Forecast(EMPTY)
    """When nothing of it waits any more."""
    unhandled: tuple[Unhandled, ...] = ()
    """Names of its waiting jobs that none of its live workers knows."""

    @property
    def name(self) -> str:
        """The queue's."""
        return self.row.name

    def count(self, state: State) -> int:
        """Jobs in a state."""
        return self.row.counts.get(state, 0)

    @property
    def waiting(self) -> int:
        """Jobs that may start, or wait for their group."""
        return self.count(State.WAITING)

    @property
    def backlog(self) -> int:
        """Jobs that would run now if there were room for all."""
        return self.waiting + self.count(State.ACTIVE)

    @property
    def age(self) -> int:
        """Milliseconds for which the job that waits longest has waited."""
        return 0 if self.row.oldest_at is None else max(0, self.at - self.row.oldest_at)

    @property
    def objective(self) -> int | None:
        """Milliseconds within which its jobs should start; None: nobody said."""
        return get_settings().policy(self.name).objective

    @property
    def is_late(self) -> bool:
        """Whether the job that waits longest has waited longer than it should."""
        return self.objective is not None and self.age > self.objective

    @property
    def whole(self) -> tuple[Bucket, ...]:
        """Its last minutes, without the one that is not over."""
        return self.buckets[-1 - LATELY : -1]

    @property
    def arriving(self) -> float:
        """Jobs enqueued in a minute, lately."""
        return _mean([bucket.enqueued for bucket in self.whole])

    @property
    def leaving(self) -> float:
        """Jobs that ended, or went back with an error for good, in a minute, lately."""
        return _mean([bucket.completed + bucket.failed + bucket.cancelled for bucket in self.whole])

    @property
    def history(self) -> list[int]:
        """Jobs that ended in each of the last minutes."""
        return [bucket.completed + bucket.failed + bucket.cancelled for bucket in self.buckets]

    @property
    def wait_p95(self) -> float | None:
        """Milliseconds that 95 of 100 jobs waited no longer than, within the hour."""
        return _together([bucket.wait for bucket in self.buckets]).percentile(0.95)


class Board(NamedTuple):
    """Everything, as far as a viewer may see it."""

    lines: tuple[QueueRow, ...]
    workers: tuple[WorkerInfo, ...]
    at: int
    capped: bool = False
    """Whether counts stop at 10,000, as no scheduler could be asked."""
    past: "Past | None" = None
    """What all these queues did in the minutes before the `RECENT` ones, if that is known."""
    samples: Mapping[str, Samples] = MappingProxyType({})
    """The sizes that each queue's backlog had at the last reads."""

    def total(self, state: State) -> int:
        """Jobs in a state."""
        return sum(line.count(state) for line in self.lines)

    def series(self) -> list[Bucket]:
        """The last minutes of all queues together: counts, without times."""
        known = () if self.past is None else self.past.whole
        others = zip(*(line.buckets[len(known) :] for line in self.lines), strict=True)
        return [*known, *map(_in_all, others)] if self.lines else []

    def line(self, name: str) -> QueueRow | None:
        """One of the queues."""
        return next((line for line in self.lines if line.name == name), None)


def merged(buckets: Sequence[Bucket]) -> Bucket:
    """Buckets added up: of the first one's queue, name and start. There is at least one."""
    wait, run = _together([one.wait for one in buckets]), _together([one.run for one in buckets])
    return _counted(buckets)._replace(wait=wait, run=run)


def nothing(queue: str, start: int, step: int) -> Bucket:
    """A stretch of time in which nothing happened."""
    return Bucket(queue, "", start, step, 0, 0, 0, 0, 0, 0, 0, NO_TIMES, NO_TIMES)


def board(request: HttpRequest) -> CachedRead[Board]:
    """All queues that the user sees, with their last hour."""
    cached = snapshots.read("board", _board, versioned=True)
    changes_at(request, cached.value)
    lines = tuple(line for line in cached.value.lines if rights.sees(request, line.name))
    if len(lines) == len(cached.value.lines):
        return cached
    return cached._replace(value=cached.value._replace(lines=lines, past=None))


def changes_at(request: HttpRequest, board: Board) -> None:
    """Tell until when a page may show a board without asking again, as long as nothing but time passes."""
    for line in board.lines:
        if line.waiting and not line.row.paused and line.forecast.kind != STEADY:
            freshness.limit(request, board.at + FRESH)  # an estimate follows the clock
        if line.row.rate is not None and (line.row.tokens or 0) < line.row.rate.capacity:
            freshness.limit(request, board.at + FRESH)
        if line.objective is not None and line.row.oldest_at is not None and not line.is_late:
            freshness.limit(request, line.row.oldest_at + line.objective)
    for worker in board.workers:
        if board.at - worker.seen_at <= SILENT:
            freshness.limit(request, worker.seen_at + SILENT)


def sees_all(request: HttpRequest) -> bool:
    """Whether no queue is hidden from the user."""
    lines = snapshots.read("board", _board, versioned=True).value.lines
    return all(rights.sees(request, line.name) for line in lines)


def worker_dump(worker_id: str) -> WorkerDump | None:
    """What a worker told of its threads and tasks; of now."""
    return get_storage().workers.dump(worker_id)


def empty_line(name: str, at: int) -> QueueRow:
    """A queue that nobody has used, or that is gone."""
    start = at // MINUTE * MINUTE + MINUTE - SHOWN * MINUTE
    row = get_storage().reads.overview([name]).queues[0]
    buckets = tuple(nothing(name, start + index * MINUTE, MINUTE) for index in range(SHOWN))
    return QueueRow(row, buckets, 0, at)


class Past(NamedTuple):
    """What happened in the minutes of which nothing is noted any more."""

    start: int
    lines: dict[str, tuple[Bucket, ...]]
    """Of each queue."""
    whole: tuple[Bucket, ...]
    """Of all queues together, without times."""


def _board() -> Board:
    storage = get_storage()
    seen = storage.reads.overview()
    workers = tuple(storage.workers.all())
    names = [row.name for row in seen.queues]
    served = _served(workers)
    end = seen.at // MINUTE * MINUTE + MINUTE
    last = snapshots.last("board")
    past = _past(names, end - SHOWN * MINUTE, None if last is None else last.value.past)
    recent = _by_queue(names, end - RECENT * MINUTE, end)
    # Counts of the tables end at 10,000: above that they do not change.
    known = {} if last is None or seen.capped else last.value.samples
    samples = sampled(known, seen.queues, SYSTEM_CLOCK.monotonic())
    strange: dict[str, list[Unhandled]] = {}
    for one in unhandled(seen.queues, workers):
        strange.setdefault(one.queue, []).append(one)
    lines = tuple(
        QueueRow(
            row,
            (*past.lines[row.name], *recent[row.name]),
            served[row.name] + served[None],
            seen.at,
            forecast(samples[row.name]),
            tuple(strange.get(row.name, ())),
        )
        for row in seen.queues
    )
    return Board(lines, workers, seen.at, seen.capped, past, samples)


def _past(names: Sequence[str], start: int, known: Past | None) -> Past:
    """The minutes from `start` to the recent ones. Of what is known only the minute that follows is read."""
    end = start + (SHOWN - RECENT) * MINUTE
    behind = None if known is None else start - known.start
    if known is None or behind not in (0, MINUTE):
        known, behind = Past(start, {}, ()), 0
    old = [name for name in names if name in known.lines]
    if not behind and old == names and len(old) == len(known.lines):
        return known
    lines = _by_queue([name for name in names if name not in known.lines], start, end)
    following = _by_queue(old, end - MINUTE, end) if behind else dict.fromkeys(old, ())
    for name in old:
        lines[name] = (*known.lines[name], *following[name])[-(SHOWN - RECENT) :]
    return Past(start, lines, tuple(map(_in_all, zip(*lines.values(), strict=True))))


def _by_queue(names: Sequence[str], start: int, end: int) -> dict[str, tuple[Bucket, ...]]:
    many = (end - start) // MINUTE
    found = get_storage().reads.series(names, start, end, MINUTE) if names else []
    return {name: tuple(found[at * many : (at + 1) * many]) for at, name in enumerate(names)}


def _served(workers: Sequence[WorkerInfo]) -> "Counter[str | None]":
    """How many of the workers take jobs of each queue; None: of every one."""
    served: Counter[str | None] = Counter()
    for worker in workers:
        if worker.state != "running":
            continue
        served.update((None,) if worker.queues is None else set(worker.queues))
    return served


def _counted(buckets: Sequence[Bucket]) -> Bucket:
    """The counts of buckets added up, without times."""
    first = buckets[0]
    at = Bucket._fields.index("enqueued")
    counts = map(sum, zip(*(one[at : at + COUNTS] for one in buckets), strict=True))
    return Bucket._make((*first[:at], *counts, NO_TIMES, NO_TIMES))


def _in_all(buckets: Sequence[Bucket]) -> Bucket:
    return _counted(buckets)._replace(queue="")


def _together(times: Sequence[Histogram]) -> Histogram:
    counts = [one.counts for one in times if one is not NO_TIMES]
    return Histogram(tuple(map(sum, zip(*counts, strict=True)))) if counts else NO_TIMES


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
