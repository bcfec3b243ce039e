"""Moves of jobs between queues, with everything that belongs to them and waits for them."""

from collections.abc import Sequence
from dataclasses import replace

from djqueue.core.options import JobKey
from djqueue.core.queue import KEYED
from djqueue.core.states import PENDING, REUSABLE, State
from djqueue.storage.tables import rows

from . import deadletters, dependencies, retention, stored, transitions, unique
from .ready import displace, place
from .stored import StoredJob
from .transaction import Tx

BELONGINGS = ("djqueue_job_result", "djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item")
"""Tables of what a job takes along, by its queue and id. Its dead letter becomes the newest one there."""


def move(tx: Tx, queue: str, ids: Sequence[str], to: str) -> list[str]:
    """Move pending jobs, or dead letters, to the end of another queue; return what became of each."""
    stored.by_ids(tx, queue, ids)
    return [_move(tx, queue, id, to) for id in ids]


def _move(tx: Tx, queue: str, id: str, to: str) -> str:
    # The move of one may have changed another, which waits for it.
    job = stored.by_id(tx, queue, id, lock=False)
    if job is None:
        return "not_found"
    if job.state is State.FAILED:
        return _move_letter(tx, job, to)
    if job.state not in PENDING:
        return "active" if job.state is State.ACTIVE else "ended"
    return _move_pending(tx, job, to)


def _move_pending(tx: Tx, job: StoredJob, to: str) -> str:
    if job.options.group is None and tx.storage.policy(to).group_mode == KEYED:
        return "group_needed"
    existing = stored.by_id(tx, to, job.id)
    if existing is not None and existing.state not in REUSABLE:
        return "duplicate"
    if job.options.unique_key is not None and unique.lock(tx, to, job.options.unique_key).owner is not None:
        return "unique_key_taken"
    old = (job.queue, job.id)
    # A job whose unique key it waits for stays behind.
    is_blocked = job.state is State.BLOCKED and dependencies.waits(tx, job)
    _leave(tx, job)
    if existing is not None:
        transitions.make_way(tx, existing)
    _carry(tx, job, to)
    unique.take(tx, job)
    place(tx, job, is_blocked=is_blocked)
    tx.count(to, "enqueued")
    tx.shift(to, None, job.state)
    tx.woken.add(to)
    stored.save(tx, job)
    tx.note(job, "queued")
    _rename(tx, old, (to, job.id))
    return "moved"


def _leave(tx: Tx, job: StoredJob) -> None:
    """Take a pending job out of its queue."""
    displace(tx, job)
    if job.options.group is not None:
        tx.woken.add(job.queue)
    unique.release(tx, job)
    tx.shift(job.queue, job.state, None)
    tx.note(job, "removed")


def _move_letter(tx: Tx, job: StoredJob, to: str) -> str:
    if stored.by_id(tx, to, job.id) is not None:
        # Unlike for a new job, an ended one does not make way: its dead letter would be lost unread.
        return "duplicate"
    old = (job.queue, job.id)
    letter = deadletters.of(tx, job) or deadletters.NONE
    tx.note(job, "removed")
    tx.shift(job.queue, State.FAILED, None)
    deadletters.drop(tx, job)
    _carry(tx, job, to)
    policy = tx.storage.policy(to).dead_letters
    retry_at = policy.retry_at(letter.reason, letter.retries, tx.now, tx.storage.random)
    deadletters.add(tx, job, letter._replace(queue=to, next_retry_at=retry_at))
    tx.shift(to, None, State.FAILED)
    retention.note_details(tx, job)
    tx.note(job, "failed")
    _rename(tx, old, (to, job.id))
    transitions.evict_letters(tx, to)
    return "moved"


def _carry(tx: Tx, job: StoredJob, to: str) -> None:
    """Give the rows of a job, and of what belongs to it, their new queue."""
    tx.storage.use(tx, to)
    tx.run("UPDATE djqueue_job SET queue = ? WHERE id = ?", to, job.pk)
    for table in BELONGINGS:
        tx.run(f"UPDATE {table} SET queue = ? WHERE queue = ? AND job_id = ?", to, job.queue, job.id)
    job.queue = to


def _rename(tx: Tx, old: JobKey, new: JobKey) -> None:
    """Make the jobs that wait for a job wait for it under its new key."""
    waiting = "FROM djqueue_dependency WHERE queue = ? AND job_id = ? AND NOT met"
    pks = [pk for (pk,) in tx.rows(f"SELECT DISTINCT dependent {waiting}", *old)]
    if not pks:
        return
    changed = []
    for dependent in stored.by_keys(tx, pks):
        keys = dict.fromkeys(new if key == old else key for key in dependent.options.depends_on)
        options = replace(dependent.options, depends_on=tuple(keys))
        changed.append((rows.pack_options(options), dependent.pk))
    tx.many("UPDATE djqueue_job SET options = ? WHERE id = ?", changed)
    tx.run(
        "UPDATE djqueue_dependency SET queue = ?, job_id = ? WHERE queue = ? AND job_id = ? AND NOT met",
        *new,
        *old,
    )
