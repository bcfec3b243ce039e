"""Jobs as a transaction reads and writes them."""

from collections.abc import Iterable, Sequence
from typing import Any

from djqueue.codecs import decode
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.job import AttemptRecord, JobFailure
from djqueue.core.options import MSGPACK, JobKey, JobOptions
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import TEXT_LIMIT, clean

from .dialects import Row
from .transaction import Tx

COLUMNS = ", ".join(
    f'j."{name}"' for name in ("id", *("queue", "job_id", "name", "state", "payload", "options"))
) + (
    ", j.created_at, j.run_at, j.started_at, j.finished_at, j.attempts, j.failures, j.stalls, "
    "j.worker, j.reason"
    ", j.error_type, j.error_message, j.traceback, j.progress, j.items, j.token, j.expires_at"
)
NEW_JOB = (
    *("id", "queue", "job_id", "name", "state", "priority", "payload", "content_type", "options"),
    *("unique_key", '"group"', "subject", "created_at", "run_at", "expires_at"),
    *("attempts", "failures", "stalls", "worker", "reason", "error_type", "error_message", "traceback"),
    *("items", "inbox", "token", "process"),
)
"""Columns of a new job."""
NO_OPTIONS = JobOptions()
UNTOUCHED = (0, 0, 0, "", "", "", "", "", 0, False, 0, "")
TOKENS = 20
"""Bits of a token for the number of the job's claim; the others are its primary key."""
HOT = ("djqueue_ready", "djqueue_delayed", "djqueue_held", "djqueue_claim")
MEASURED = {
    "djqueue_job_result": ("kept_size", "result_bytes"),
    "djqueue_dead_letter": ("size", "letter_bytes"),
}
"""Tables of what belongs to a job and may be counted: the column of its size, and the sum of these."""
OWNED = ("djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item")
"""Other tables of what belongs to a job, by its queue and id."""


class StoredJob(EngineJob):
    """A job with the primary key of its row."""

    __slots__ = ("cancel", "expires_at", "kept", "pk")

    pk: int
    expires_at: int | None
    """When its ttl expires, or its record."""
    cancel: bool
    """Whether the cancellation of its attempt was requested."""
    kept: tuple[int, ...]
    """Order and size of the record of a job that ends now; empty if its queue does not count it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = ()


def job_of(row: Row) -> StoredJob:
    """Convert a row of `COLUMNS`."""
    options = rows.unpack_options(bytes(row[6]))
    job = StoredJob(row[2], row[1], row[3], bytes(row[5]), options, State(row[4]), row[7], row[8])
    job.pk = row[0]
    job.started_at, job.finished_at = row[9] or 0, row[10] or 0
    job.attempts, job.failures, job.stalls, job.worker, job.reason = row[11:16]
    if row[16]:
        job.error = JobFailure(row[16], row[17], row[18])
    if row[19] is not None:
        job.progress = decode(bytes(row[19]), MSGPACK)
    if row[20]:
        job.stream = ItemStream(0, None, row[20])
    job.token = row[21]
    job.expires_at = row[22]
    job.cancel = False
    return job


def queues_in(table: str) -> str:
    """Return a SELECT of the queues (`name`) in a table, which a further condition may follow.

    Each queue is one probe of an index, however many rows the table has.
    """
    return (
        f"WITH RECURSIVE found(name) AS (SELECT MIN(queue) FROM {table} UNION ALL "
        f"SELECT (SELECT MIN(queue) FROM {table} WHERE queue > found.name) FROM found "
        "WHERE found.name IS NOT NULL) SELECT name FROM found WHERE name IS NOT NULL"
    )


def select(tx: Tx, condition: str, *parameters: Any) -> list[StoredJob]:
    """Return the jobs (`j`) of a condition and what may follow it, without locks."""
    return [
        job_of(row) for row in tx.rows(f"SELECT {COLUMNS} FROM djqueue_job j WHERE {condition}", *parameters)
    ]


def by_keys(tx: Tx, pks: Sequence[int], *, lock: bool = True) -> list[StoredJob]:
    """Return jobs by primary key, in the order of their keys; those that are gone are left out.

    Args:
        lock: Keep other transactions from changing them.
    """
    if not pks:
        return []
    if lock:
        lock_jobs(tx, pks)
    condition, values = tx.among("j.id", pks)
    return select(tx, f"{condition} ORDER BY j.id", values)


def lock_jobs(tx: Tx, pks: Sequence[int]) -> None:
    """Wait for other transactions that change these jobs, and keep more from doing so."""
    if tx.dialect.for_update:
        # The row of its state first: a claim deletes it before anything else, and so does an end.
        for table in (*HOT, "djqueue_job"):
            condition, values = tx.among("id", pks)
            tx.rows(f"SELECT id FROM {table} WHERE {condition} ORDER BY id FOR UPDATE", values)


def by_ids(tx: Tx, queue: str, ids: Iterable[str], *, lock: bool = True) -> dict[str, StoredJob]:
    """Return jobs of a queue by id."""
    if not lock or not tx.dialect.for_update:
        condition, values = tx.among("j.job_id", list(dict.fromkeys(ids)))
        jobs = select(tx, f"j.queue = ? AND {condition} ORDER BY j.id", queue, values)
        return {job.id: job for job in jobs}
    condition, values = tx.among("job_id", list(dict.fromkeys(ids)))
    pks = [
        pk for (pk,) in tx.rows(f"SELECT id FROM djqueue_job WHERE queue = ? AND {condition}", queue, values)
    ]
    return {job.id: job for job in by_keys(tx, pks, lock=lock)}


def by_id(tx: Tx, queue: str, id: str, *, lock: bool = True) -> StoredJob | None:
    """Return a job of a queue."""
    return by_ids(tx, queue, [id], lock=lock).get(id)


def ids_by_queue(keys: Iterable[JobKey]) -> dict[str, list[str]]:
    """Return the ids of jobs by queue."""
    found: dict[str, list[str]] = {}
    for queue, id in keys:
        found.setdefault(queue, []).append(id)
    return found


def ended(tx: Tx, pks: Sequence[int]) -> list[StoredJob]:
    """Lock ended jobs; return those that are left, without what their removal does not need."""
    condition, values = tx.among("id", pks)
    found = tx.rows(
        f"SELECT id, queue, job_id, name, state FROM djqueue_job WHERE {condition} "
        f"AND state IN ('completed', 'failed', 'cancelled') ORDER BY id{tx.dialect.for_update}",
        values,
    )
    jobs = []
    for pk, queue, id, name, state in found:
        job = StoredJob(id, queue, name, b"", NO_OPTIONS, State(state), 0, 0)
        job.pk = pk
        jobs.append(job)
    return jobs


def new_row(job: StoredJob, packed: bytes) -> Row:
    """Return a new job as `NEW_JOB`."""
    options = job.options
    return (
        *(job.pk, job.queue, job.id, job.name, job.state.value, options.priority, job.payload),
        *(options.content_type, packed, options.unique_key, options.group, options.subject),
        *(job.created_at, job.run_at, job.expires_at, *UNTOUCHED),
    )


def save(tx: Tx, job: StoredJob) -> None:
    """Write a job's state, counters and times, and how its record counts if it does."""
    error = job.error or rows.NO_ERROR
    tx.run(
        "UPDATE djqueue_job SET state = ?, run_at = ?, started_at = ?, finished_at = ?, expires_at = ?, "
        "attempts = ?, failures = ?, stalls = ?, worker = ?, reason = ?, error_type = ?, error_message = ?, "
        f"traceback = ?, token = ?{', kept_order = ?, kept_size = ?' if job.kept else ''} WHERE id = ?",
        *(job.state.value, job.run_at, job.started_at or None, job.finished_at or None, job.expires_at),
        *(job.attempts, job.failures, job.stalls, clean(job.worker, TEXT_LIMIT)),
        *(clean(job.reason, TEXT_LIMIT), clean(error.type, TEXT_LIMIT), clean(error.message)),
        *(clean(error.traceback), job.token, *job.kept, job.pk),
    )


def save_options(tx: Tx, job: StoredJob) -> None:
    """Write a job's options."""
    tx.run(
        "UPDATE djqueue_job SET options = ?, priority = ? WHERE id = ?",
        *(rows.pack_options(job.options), job.options.priority, job.pk),
    )


def note_attempt(tx: Tx, job: StoredJob, outcome: str, error: JobFailure | None) -> None:
    """Add the attempt that has just ended to the job's history, as long as the queue says."""
    attempt = AttemptRecord(job.attempts, job.worker, job.started_at, tx.now, outcome, error)
    tx.insert("djqueue_job_attempt", rows.ATTEMPT, [rows.attempt_row(job, attempt)])
    keep_newest(tx, "djqueue_job_attempt", job, tx.storage.policy(job.queue).retention.attempts.count)


def history(tx: Tx, job: StoredJob) -> list[AttemptRecord]:
    """Return the ended attempts of a job that did not complete it, without their errors."""
    attempts = tx.rows(
        "SELECT attempt, worker, started_at, finished_at, outcome FROM djqueue_job_attempt "
        "WHERE queue = ? AND job_id = ? ORDER BY id",
        *(job.queue, job.id),
    )
    return [AttemptRecord(*row) for row in attempts]


def keep_newest(tx: Tx, table: str, job: StoredJob, count: int) -> None:
    """Delete all but the newest rows of a job in a table of attempts or log lines."""
    key = "queue = ? AND job_id = ?"
    # Most jobs have few: so a read, not a delete, each time.
    last = tx.value(
        f"SELECT id FROM {table} WHERE {key} ORDER BY id DESC LIMIT 1 OFFSET ?", job.queue, job.id, count
    )
    if last is not None:
        tx.run(f"DELETE FROM {table} WHERE {key} AND id <= ?", job.queue, job.id, last)


def restart(tx: Tx, job: StoredJob) -> None:
    """Drop the streamed items of an attempt: those of the next one start anew."""
    if job.stream is not None:
        job.stream = None
        tx.run("UPDATE djqueue_job SET items = 0 WHERE id = ?", job.pk)
        tx.run("DELETE FROM djqueue_job_item WHERE queue = ? AND job_id = ?", job.queue, job.id)


def delete(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    """Delete the rows of jobs and of what belongs to them, and what is counted of them."""
    for queue, ids in ids_by_queue((job.queue, job.id) for job in jobs).items():
        condition, values = tx.among("job_id", ids)
        for table, (size, total) in MEASURED.items():
            deleted = tx.rows(
                f"DELETE FROM {table} WHERE queue = ? AND {condition} RETURNING {size}", queue, values
            )
            tx.keep(queue, total, -sum(size or 0 for (size,) in deleted))
        for table in OWNED:
            tx.run(f"DELETE FROM {table} WHERE queue = ? AND {condition}", queue, values)
    condition, values = tx.among("id", [job.pk for job in jobs])
    for queue, state, size in tx.rows(
        f"DELETE FROM djqueue_job WHERE {condition} RETURNING queue, state, kept_size", values
    ):
        if size is not None:
            tx.keep(queue, state, -1)
            tx.keep(queue, f"{state}_bytes", -size)
