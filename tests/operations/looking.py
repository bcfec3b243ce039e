"""What the tables say, in the words of the storages."""

from typing import Any

from djqueue import models
from djqueue.core.job import DeadLetterRecord, JobRecord
from djqueue.core.states import State
from djqueue.core.units import to_milliseconds
from djqueue.core.workers import WorkerInfo
from djqueue.operations.mirror import Mirror
from djqueue.storage.tables import rows
from djqueue.storage.tables.inspector import DatabaseInspector
from djqueue.storage.tables.rows import WORKER
from djqueue.testing import factories

tables = DatabaseInspector("default")


def mirrored(job_id: str, queue: str = factories.QUEUE) -> JobRecord | None:
    """The job as the tables have it."""
    return tables.jobs(queue, [job_id])[0]


def mirrored_state(job_id: str, queue: str = factories.QUEUE) -> State | None:
    return tables.states(queue, [job_id])[0]


def letters(queue: str = factories.QUEUE) -> list[DeadLetterRecord]:
    found = models.DeadLetter.objects.filter(queue=queue).order_by("id")
    return [rows.letter_from_row(row) for row in rows.raw_values(found, rows.LETTER)]


def workers() -> list[WorkerInfo]:
    return [_worker(row) for row in models.WorkerState.objects.order_by("worker_id")]


def _worker(row: models.WorkerState) -> WorkerInfo:
    values = {name: getattr(row, name) for name in WORKER[1:]}
    values["queues"] = None if row.queues is None else tuple(row.queues)
    values["names"] = tuple(row.names)
    values |= {name: to_milliseconds(values[name]) for name in ("started_at", "seen_at")}
    about = {name: tuple(value) if isinstance(value, list) else value for name, value in row.about.items()}
    return WorkerInfo(row.worker_id, **values, **about)


def copy_all(mirror: Mirror) -> int:
    """Copy until nothing is left; how many jobs were looked at."""
    copied = 0
    while some := mirror.copy_once():
        copied += some
    return copied


def assert_alike(storage: Any, queue: str = factories.QUEUE) -> None:
    """The tables have the queue's jobs exactly as Redis has them."""
    there = {job.id: job for job in storage.reads.page(queue, None, 100_000)}
    ids = list(models.Job.objects.filter(queue=queue).values_list("job_id", flat=True))
    assert sorted(ids) == sorted(there)
    assert {job.id: job for job in tables.jobs(queue, ids)} == there  # type: ignore[union-attr]
    assert sorted(letters(queue)) == sorted(storage.reads.dead_letters(queue))
