"""Which workers are live, and which queues they serve."""

from collections import Counter
from collections.abc import Iterable, Sequence

from .job import WorkerInfo
from .overview import QueueOverview
from .states import State

SILENT = 15_000
"""Milliseconds without a heartbeat after which a worker counts as silent."""
RUNNING = "running"
"""State of a worker that claims jobs."""


def is_silent(worker: WorkerInfo, at: int) -> bool:
    """Return whether a worker has sent no heartbeat for too long, at a time in UTC milliseconds."""
    return at > silent_from(worker)


def silent_from(worker: WorkerInfo) -> int:
    """Return until when a worker is live without another heartbeat, in UTC milliseconds.

    A worker with rare heartbeats may miss two of them.
    """
    return worker.seen_at + max(SILENT, 3 * worker.heartbeat)


def claiming(workers: Iterable[WorkerInfo], at: int) -> list[WorkerInfo]:
    """Return the workers that are live and claim jobs."""
    return [worker for worker in workers if worker.state == RUNNING and not is_silent(worker, at)]


def served(workers: Iterable[WorkerInfo]) -> "Counter[str | None]":
    """Return how many workers that claim jobs serve each queue; None stands for workers of all queues."""
    found: Counter[str | None] = Counter()
    for worker in workers:
        if worker.state == RUNNING:
            found.update((None,) if worker.queues is None else set(worker.queues))
    return found


def unserved(queues: Iterable[QueueOverview], workers: Sequence[WorkerInfo]) -> list[QueueOverview]:
    """Return the queues that have waiting or active jobs and no worker that claims them.

    Paused queues are left out: nothing is meant to claim their jobs.
    """
    counts = served(workers)
    return [
        queue
        for queue in queues
        if not queue.paused
        and not counts[None] + counts[queue.name]
        and queue.counts.get(State.WAITING, 0) + queue.counts.get(State.ACTIVE, 0)
    ]
