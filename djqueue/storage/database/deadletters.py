"""The dead letters of queues."""

from collections.abc import Sequence

from djqueue.core.enginejob import size_of
from djqueue.core.job import DeadLetterPage, DeadLetterRecord
from djqueue.core.states import State
from djqueue.storage.tables import rows

from .stored import StoredJob
from .transaction import Tx

COLUMNS = ", ".join(rows.LETTER)
NONE = DeadLetterRecord("", "", "", 0, 0)
MAX_RECOUNTED = 1_000
"""A queue may have this many dead letters before their number is not counted at each new one."""
EVICTIONS_AT_ONCE = 500
"""Dead letters that are evicted at once."""


def of(tx: Tx, job: StoredJob) -> DeadLetterRecord | None:
    """Return the dead letter of a job."""
    return by_ids(tx, job.queue, [job.id]).get(job.id)


def by_ids(tx: Tx, queue: str, ids: Sequence[str]) -> dict[str, DeadLetterRecord]:
    """Return dead letters of a queue by the ids of their jobs."""
    condition, values = tx.among("job_id", list(ids))
    found = tx.rows(
        f"SELECT {COLUMNS} FROM djqueue_dead_letter WHERE queue = ? AND {condition}", queue, values
    )
    return {row[1]: rows.letter_from_row(row) for row in found}


def all_of(tx: Tx, queue: str) -> list[DeadLetterRecord]:
    """Return the dead letters of a queue, oldest first."""
    found = tx.rows(f"SELECT {COLUMNS} FROM djqueue_dead_letter WHERE queue = ? ORDER BY id", queue)
    return [rows.letter_from_row(row) for row in found]


def page(tx: Tx, queue: str, limit: int, after: str | None) -> DeadLetterPage:
    """Return up to `limit` dead letters, oldest first."""
    found = tx.rows(
        f"SELECT {COLUMNS}, id FROM djqueue_dead_letter WHERE queue = ? AND id > ? ORDER BY id LIMIT ?",
        *(queue, int(after or 0), limit + 1),
    )
    letters = [rows.letter_from_row(row[:-1]) for row in found[:limit]]
    return DeadLetterPage(letters, str(found[limit - 1][-1]) if len(found) > limit else None, tx.now)


def add(tx: Tx, job: StoredJob, letter: DeadLetterRecord) -> None:
    """Add the dead letter of a failed job as the newest one of its queue."""
    row = rows.letter_row(job, letter)
    if tx.database.policy(job.queue).dead_letters.max_bytes is None:
        tx.insert("djqueue_dead_letter", rows.LETTER, [row])
        return
    size = size_of(job)
    tx.insert("djqueue_dead_letter", (*rows.LETTER, "size"), [(*row, size)])
    tx.keep(job.queue, "letter_bytes", size)


def drop(tx: Tx, job: StoredJob) -> None:
    """Delete the dead letter of a job that stays."""
    deleted = "DELETE FROM djqueue_dead_letter WHERE queue = ? AND job_id = ? RETURNING size"
    for (size,) in tx.rows(deleted, job.queue, job.id):
        tx.keep(job.queue, "letter_bytes", -(size or 0))


def surplus(tx: Tx, queue: str) -> list[str]:
    """Return the jobs of the oldest dead letters above the queue's maximum number, after a new one was added.

    In a queue of thousands they are not counted each time: this process may add half of what fits before it
    counts again, and a sweep removes what several processes have added too much.
    """
    limit = tx.database.policy(queue).dead_letters.max_entries
    room = tx.database.letter_room
    if limit >= MAX_RECOUNTED and (left := room.get(queue, 0)) > 0:
        room[queue] = left - 1
        return []
    excess = tx.counts(queue)[State.FAILED] - limit
    room[queue] = max(0, -excess // 2)
    return oldest(tx, queue, min(excess, EVICTIONS_AT_ONCE))


def oldest(tx: Tx, queue: str, count: int) -> list[str]:
    """Return the jobs of the oldest dead letters of a queue."""
    if count <= 0:
        return []
    found = tx.rows(
        "SELECT job_id FROM djqueue_dead_letter WHERE queue = ? ORDER BY id LIMIT ?", queue, count
    )
    return [id for (id,) in found]
