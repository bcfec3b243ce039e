"""The number of workers that queues need, from their oldest waiting jobs and their objectives."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any, NamedTuple

from djqueue.conf import Settings
from djqueue.core.metrics import MINUTE, Bucket
from djqueue.core.overview import Overview, QueueOverview
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo
from djqueue.storage.base import Storage

DEFAULT_OBJECTIVE = 60_000
"""Milliseconds within which jobs of queues without an OBJECTIVE should start."""
RECENT = 5 * MINUTE
"""Milliseconds over which arrivals and durations are averaged."""
LEAST_REMAINING = 4
"""A late backlog should drain within the objective divided by this."""


class QueueDemand(NamedTuple):
    """The slots that a queue needs, and why."""

    queue: str
    waiting: int
    """Claimable jobs for which live workers have handlers; without workers, all. Held ones do not count."""
    active: int
    oldest_waiting: int
    """Milliseconds that the oldest claimable job has waited; 0 if there is none, or if it may be held."""
    objective: int
    """Milliseconds within which jobs should start."""
    duration: float | None
    """Mean milliseconds of an attempt; None: no attempt has ended."""
    arrivals: float
    """Jobs enqueued per second lately."""
    slots: int
    """Number of jobs that should run at once."""


class Scaling(NamedTuple):
    """The workers that some queues need together."""

    at: int
    """The storage's time, in UTC milliseconds."""
    workers: int
    """Number of workers wanted."""
    running: int
    """Number of live workers of these queues that claim jobs."""
    slots: int
    """Number of jobs that should run at once."""
    slots_per_worker: float
    """Mean concurrency of the live workers; the default of the settings if there are none."""
    queues: list[QueueDemand]

    def as_json(self) -> dict[str, Any]:
        """Return the answer of the URL, with times in seconds."""
        return {
            "workers": self.workers,
            "running": self.running,
            "slots": self.slots,
            "slots_per_worker": self.slots_per_worker,
            "at": self.at / 1_000,
            "queues": {
                demand.queue: {
                    "waiting": demand.waiting,
                    "active": demand.active,
                    "oldest_waiting_seconds": demand.oldest_waiting / 1_000,
                    "objective_seconds": demand.objective / 1_000,
                    "duration_seconds": None if demand.duration is None else demand.duration / 1_000,
                    "arrivals_per_second": demand.arrivals,
                    "slots": demand.slots,
                }
                for demand in self.queues
            },
        }


def read_scaling(storage: Storage, settings: Settings, queues: Sequence[str] | None = None) -> Scaling:
    """Return the workers that queues (None: all) need now."""
    overview, cumulative = storage.reads.overview(queues), storage.reads.cumulative(queues)
    return scaling(storage, settings, overview, storage.workers.all(), cumulative, queues)


def scaling(
    storage: Storage,
    settings: Settings,
    overview: Overview,
    workers: Sequence[WorkerInfo],
    cumulative: Iterable[Bucket],
    queues: Sequence[str] | None = None,
) -> Scaling:
    """Return the workers that queues need, from what has been read of them; reads only the latest minutes."""
    names = [row.name for row in overview.queues]
    recent: dict[str, list[Bucket]] = {name: [] for name in names}
    if names:
        for bucket in storage.reads.series(names, overview.at - RECENT, overview.at, MINUTE):
            recent[bucket.queue].append(bucket)
    lifetime = {bucket.queue: bucket for bucket in cumulative if not bucket.name}
    claiming = [worker for worker in workers if worker.state == "running" and _serves(worker, queues)]
    demands = [
        _demand(row, overview.at, settings, recent[row.name], lifetime.get(row.name), claiming)
        for row in overview.queues
    ]
    slots = sum(demand.slots for demand in demands)
    each = (
        settings.concurrency
        if not claiming
        else sum(worker.concurrency for worker in claiming) / len(claiming)
    )
    wanted = ceil(slots / max(1.0, each))
    return Scaling(overview.at, wanted, len(claiming), slots, float(each), demands)


def _demand(
    row: QueueOverview,
    now: int,
    settings: Settings,
    recent: Sequence[Bucket],
    lifetime: Bucket | None,
    workers: Sequence[WorkerInfo],
) -> QueueDemand:
    objective = settings.policy(row.name).objective or DEFAULT_OBJECTIVE
    serving = [worker for worker in workers if _serves(worker, [row.name])]
    handled = {name for worker in serving for name in worker.names}
    waiting = sum(
        count
        for name, count in row.names.items()
        if row.hold_on(name) is None and (not serving or name in handled)
    )
    age = 0 if row.oldest_at is None else max(0, now - row.oldest_at)
    duration = _mean_duration(recent) or _mean_duration([lifetime] if lifetime is not None else [])
    arrivals = sum(bucket.enqueued for bucket in recent) / (RECENT / 1_000)
    active = row.counts[State.ACTIVE]
    demand = QueueDemand(row.name, waiting, active, age, objective, duration, arrivals, active)
    return demand._replace(slots=_slots(demand, row))


def _slots(demand: QueueDemand, row: QueueOverview) -> int:
    """Return how many jobs should run at once.

    Never fewer than are active: a worker that is stopped would have to release them. Never more than there
    are jobs, or than the limits of the queue allow.
    """
    waiting, active, duration = demand.waiting, demand.active, demand.duration
    if row.paused or not waiting:
        return active
    limit = active + waiting if row.concurrency is None else min(active + waiting, row.concurrency)
    if duration is None:
        # How long jobs take is unknown, so the number grows step by step.
        wanted = float(2 * active if demand.oldest_waiting > demand.objective else active)
    else:
        remaining = max(demand.objective - demand.oldest_waiting, demand.objective / LEAST_REMAINING)
        wanted = demand.arrivals * duration / 1_000 + waiting * duration / remaining
        if row.rate is not None:
            wanted = min(wanted, row.rate.capacity * duration / row.rate.per)
    return max(active, min(limit, max(1, ceil(wanted))))


def _mean_duration(buckets: Sequence[Bucket]) -> float | None:
    """Return the mean milliseconds of an attempt, at least one."""
    total = sum(bucket.run.total for bucket in buckets)
    return max(1.0, sum(bucket.run.sum for bucket in buckets) / total) if total else None


def _serves(worker: WorkerInfo, queues: Sequence[str] | None) -> bool:
    """Return whether a worker claims from any of some queues (None: of all)."""
    return queues is None or worker.queues is None or not set(queues).isdisjoint(worker.queues)
