"""Retention of ended jobs and their results: when they expire, and how they count against bounds of queues.

A queue with bounds counts its records and results in `RetentionTally`: rows that have a `kept_order` and a
`kept_size` are in its sums, in the order in which they expire. A record that live jobs depend on is not
counted, and outlives its time; it is counted again, and expires, when the last of them has ended.
"""

import itertools
from collections.abc import Iterable, Sequence

from djqueue.core.job import JobFailure
from djqueue.core.options import JobKey
from djqueue.core.sizes import size_of, size_of_error
from djqueue.core.states import State
from djqueue.storage.tables import rows

from .dialects import Row
from .stored import StoredJob, ids_by_queue
from .transaction import Tx

_FOREVER = 1 << 42
"""Later than every time at which a record may expire, in UTC milliseconds."""
_TIES = 19
"""Bits of an order for records of one time: those that end first come first."""
_ends = itertools.count()
DETAIL = ("at", "job", "queue", "ended_at", "kind")
HAS_DETAILS = {
    "attempts": "EXISTS (SELECT 1 FROM djqueue_job_attempt WHERE queue = ? AND job_id = ?)",
    "logs": "EXISTS (SELECT 1 FROM djqueue_job_log WHERE queue = ? AND job_id = ?)",
}


def is_bounded(tx: Tx, queue: str) -> bool:
    """Return whether a queue counts its records."""
    return tx.database.policy(queue).retention.counts


def order_of(expires_at: int | None, ended_at: int) -> int:
    """Return a number by which records that expire first come first, then those that are kept forever."""
    time = _FOREVER + ended_at if expires_at is None else min(expires_at, _FOREVER - 1)
    return (time << _TIES) + next(_ends) % (1 << _TIES)


# Ends of jobs.


def keep(tx: Tx, job: StoredJob) -> None:
    """Set how long the record of a job that completes or is cancelled now is kept, and how it counts."""
    policy = tx.database.policy(job.queue).retention
    kept = policy.of(job.state).shorten(job.options.kept)
    job.expires_at = None if kept is None else job.finished_at + kept
    if policy.counts and not are_held(tx, job.queue, [job.id]):
        job.kept = (order_of(job.expires_at, job.finished_at), size_of(job))
        tx.keep(job.queue, job.state, 1)
        tx.keep(job.queue, f"{job.state}_bytes", job.kept[1])


def keep_result(tx: Tx, job: StoredJob) -> None:
    """Add the result of a completed job."""
    row = rows.result_row(job, tx.database.policy(job.queue).retention.results)
    if not job.kept:
        tx.insert("djqueue_job_result", rows.RESULT, [row])
        return
    size = len(job.result or b"")
    counted = (order_of(row[-1], job.finished_at), size)
    tx.insert("djqueue_job_result", (*rows.RESULT, "kept_order", "kept_size"), [(*row, *counted)])
    tx.keep(job.queue, "result_bytes", size)


def note_details(tx: Tx, job: StoredJob) -> None:
    """Record when the details of an ended job expire, if they do before its record.

    These are the attempts and log lines in queues that keep them for a time, and items without a result:
    other items expire with the result.
    """
    policy = tx.database.policy(job.queue).retention
    for kind, age in (("attempts", policy.attempts.age), ("logs", policy.logs.age)):
        if age is not None and tx.value(f"SELECT {HAS_DETAILS[kind]}", job.queue, job.id):
            _expire_detail(tx, job, kind, age)
    if job.state is State.COMPLETED and job.stream is not None and job.result is None:
        readable = policy.results.shorten(job.options.result_ttl)
        kept = policy.completed.shorten(job.options.kept)
        if readable is not None and (kept is None or readable < kept):
            _expire_detail(tx, job, "items", readable)


def _expire_detail(tx: Tx, job: StoredJob, kind: str, age: int) -> None:
    row = (job.finished_at + age, job.pk, job.queue, job.finished_at, kind)
    tx.insert("djqueue_expiring", DETAIL, [row])


# Records that live jobs may read.


def hold(tx: Tx, keys: Iterable[JobKey]) -> None:
    """Stop counting records that a live job may read from now on."""
    for queue, ids in ids_by_queue(keys).items():
        if is_bounded(tx, queue):
            _uncount(tx, queue, ids)


def let_go(tx: Tx, keys: Iterable[JobKey]) -> None:
    """Let the own times of records, and the bounds of their queues, apply again: a live job has ended."""
    for queue, ids in ids_by_queue(keys).items():
        condition, values = tx.among("job_id", ids)
        is_counted = is_bounded(tx, queue)
        if not is_counted:
            pinned = f"SELECT job_id FROM djqueue_pinned WHERE queue = ? AND {condition}"
            ids = [id for (id,) in tx.rows(pinned, queue, values)]
            if not ids:
                continue
            condition, values = tx.among("job_id", ids)
        # Of two live jobs that end at the same time, the later one must see that the other has ended.
        locked = f"SELECT job_id FROM djqueue_job WHERE queue = ? AND {condition} ORDER BY id"
        there = [id for (id,) in tx.rows(locked + tx.dialect.for_update, queue, values)]
        held = are_held(tx, queue, there) if there else set()
        free = [id for id in there if id not in held]
        if free:
            _unpin(tx, queue, free)
            if is_counted:
                count_again(tx, queue, free)


def are_held(tx: Tx, queue: str, ids: Sequence[str]) -> set[str]:
    """Return the jobs whose records live jobs may read."""
    condition, values = tx.among("job_id", ids)
    statement = f"SELECT DISTINCT job_id FROM djqueue_dependency WHERE queue = ? AND {condition}"
    return {id for (id,) in tx.rows(statement, queue, values)}


def pin(tx: Tx, pk: int, key: JobKey, column: str, expires_at: int) -> bool:
    """Keep a record, or its result, that has expired, because live jobs depend on it.

    Args:
        column: `expires_at` for the record, `result_expires_at` for the result.

    Returns whether a live job still does.
    """
    # While this row is locked, the end of that job waits, and finds what is pinned.
    held = "SELECT id FROM djqueue_dependency WHERE queue = ? AND job_id = ? ORDER BY id LIMIT 1"
    if tx.row(held + tx.dialect.skip_locked, *key) is None:
        return False
    tx.run(
        f"INSERT INTO djqueue_pinned (id, queue, job_id, {column}) VALUES (?, ?, ?, ?) "
        f"ON CONFLICT (id) DO UPDATE SET {column} = excluded.{column}",
        *(pk, *key, expires_at),
    )
    if column == "expires_at":
        tx.run("UPDATE djqueue_job SET expires_at = NULL WHERE id = ?", pk)
    else:
        tx.run("UPDATE djqueue_job_result SET expires_at = NULL WHERE queue = ? AND job_id = ?", *key)
    return True


def _unpin(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    condition, values = tx.among("job_id", ids)
    for pk, id, expires_at, result_expires_at in tx.rows(
        f"DELETE FROM djqueue_pinned WHERE queue = ? AND {condition} "
        "RETURNING id, job_id, expires_at, result_expires_at",
        *(queue, values),
    ):
        if expires_at is not None:
            tx.run("UPDATE djqueue_job SET expires_at = ? WHERE id = ?", expires_at, pk)
        if result_expires_at is not None:
            tx.run(
                "UPDATE djqueue_job_result SET expires_at = ? WHERE queue = ? AND job_id = ?",
                *(result_expires_at, queue, id),
            )


# Counts.


# Whether a row is counted is no condition of these statements: SQLite would search the index of counted rows,
# or that of the states, instead of the key.


def _uncount(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    condition, values = tx.among("job_id", ids)
    which = f"WHERE queue = ? AND {condition} ORDER BY id{tx.dialect.for_update}"
    jobs = tx.rows(f"SELECT id, state, kept_size FROM djqueue_job {which}", queue, values)
    for state in (State.COMPLETED, State.CANCELLED):
        counted = [(pk, size) for pk, other, size in jobs if other == state and size is not None]
        tx.keep(queue, state, -len(counted))
        tx.keep(queue, f"{state}_bytes", -_clear(tx, "djqueue_job", counted))
    results = tx.rows(f"SELECT id, kept_size FROM djqueue_job_result {which}", queue, values)
    counted = [(pk, size) for pk, size in results if size is not None]
    tx.keep(queue, "result_bytes", -_clear(tx, "djqueue_job_result", counted))


def _clear(tx: Tx, table: str, counted: Sequence[tuple[int, int]]) -> int:
    """Stop counting rows (primary key, size) of a table; return the sum of their sizes."""
    if counted:
        condition, pks = tx.among("id", [pk for pk, _ in counted])
        tx.run(f"UPDATE {table} SET kept_order = NULL, kept_size = NULL WHERE {condition}", pks)
    return sum(size for _, size in counted)


def count_again(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    """Count records that are not counted, and that no live job may read. The caller has locked them."""
    condition, values = tx.among("job_id", ids)
    found = tx.rows(
        "SELECT id, state, kept_order, finished_at, expires_at, LENGTH(payload), error_type, error_message, "
        f"traceback FROM djqueue_job WHERE queue = ? AND {condition}",
        *(queue, values),
    )
    counted = []
    for pk, state, order, finished_at, expires_at, size, *error in found:
        if order is None and state in (State.COMPLETED, State.CANCELLED):
            size += _size_of_error(error)
            counted.append((order_of(expires_at, finished_at), size, pk))
            tx.keep(queue, state, 1)
            tx.keep(queue, f"{state}_bytes", size)
    tx.many("UPDATE djqueue_job SET kept_order = ?, kept_size = ? WHERE id = ?", counted)
    results = tx.rows(
        "SELECT id, kept_order, completed_at, expires_at, LENGTH(result) FROM djqueue_job_result "
        f"WHERE queue = ? AND {condition}",
        *(queue, values),
    )
    measured = [
        (order_of(expires_at, ended_at), size, pk)
        for pk, order, ended_at, expires_at, size in results
        if order is None
    ]
    tx.many("UPDATE djqueue_job_result SET kept_order = ?, kept_size = ? WHERE id = ?", measured)
    tx.keep(queue, "result_bytes", sum(size for _, size, _ in measured))


def count_letters(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    """Count the bytes of jobs with dead letters that are not counted."""
    condition, values = tx.among("j.job_id", ids)
    found: list[Row] = tx.rows(
        "SELECT d.id, LENGTH(j.payload), j.error_type, j.error_message, j.traceback "
        "FROM djqueue_dead_letter d "
        f"JOIN djqueue_job j ON j.queue = d.queue AND j.job_id = d.job_id WHERE j.queue = ? AND {condition} "
        "AND d.size IS NULL",
        *(queue, values),
    )
    measured = [(size + _size_of_error(error), pk) for pk, size, *error in found]
    tx.many("UPDATE djqueue_dead_letter SET size = ? WHERE id = ?", measured)
    tx.keep(queue, "letter_bytes", sum(size for size, _ in measured))


def _size_of_error(texts: Sequence[str]) -> int:
    return size_of_error(JobFailure(*texts)) if any(texts) else 0
