"""Waiting jobs that no live worker of their queue handles, although workers serve the queue."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .job import WorkerInfo
from .overview import QueueOverview
from .workercontrol import STOPPING

RECORDS = frozenset({"kombu.queue", "kombu.exchange", "celery.result"})
"""Names of jobs that keep values for Celery: they are never run, and their owners remove expired ones."""


class Unhandled(NamedTuple):
    """Waiting jobs of one queue and name that no live worker can run."""

    queue: str
    name: str
    jobs: int


def unhandled(queues: Iterable[QueueOverview], workers: Sequence[WorkerInfo]) -> list[Unhandled]:
    """Return the job names that no live worker of their queue handles, most jobs first.

    Queues without any worker are left out: there, the missing worker is the problem.
    """
    live = [worker for worker in workers if worker.state != STOPPING]
    everywhere = {name for worker in live if worker.queues is None for name in worker.names}
    serves_all = any(worker.queues is None for worker in live)
    known: dict[str, set[str]] = {}
    for worker in live:
        for queue in worker.queues or ():
            known.setdefault(queue, set()).update(worker.names)
    found = []
    for row in queues:
        if not serves_all and row.name not in known:
            continue
        handled = everywhere | known.get(row.name, set())
        found += [
            Unhandled(row.name, name, count)
            for name, count in row.names.items()
            if count and name not in handled and name not in RECORDS
        ]
    return sorted(found, key=lambda one: (-one.jobs, one.queue, one.name))
