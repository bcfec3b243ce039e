"""The unique keys of queues: their owners, and the jobs that wait for the end of active owners."""

from typing import NamedTuple

from djqueue.core.states import State
from djqueue.core.unique import Succession, succession

from .stored import StoredJob, by_keys, lock_jobs
from .transaction import Tx, key_lock

WHERE = " WHERE queue = ? AND key = ?"


class Key(NamedTuple):
    """A unique key, as of the start of the transaction; each value is a primary key of a job, or None."""

    owner: int | None = None
    successor: int | None = None
    """The job that waits for the end of `behind`."""
    behind: int | None = None


def lock(tx: Tx, queue: str, key: str) -> Key:
    """Return a key, which no other transaction changes until this one ends."""
    tx.lock(key_lock(queue, key))
    found = tx.row(f"SELECT owner, successor, behind, expires_at FROM djqueue_unique_key{WHERE}", queue, key)
    if found is None:
        return Key()
    owner, successor, behind, expires_at = found
    if expires_at is not None and expires_at <= tx.now:
        owner = None
    return Key(owner, successor, behind)


def owner_of(tx: Tx, job: StoredJob) -> int | None:
    """Return the primary key of the job that has a job's unique key; None if it is free, or there is none."""
    return None if job.options.unique_key is None else lock(tx, job.queue, job.options.unique_key).owner


def take(tx: Tx, job: StoredJob) -> None:
    """Give a job its key, which must be free."""
    if job.options.unique_key is None:
        return
    ttl = job.options.unique_ttl
    tx.run(
        "INSERT INTO djqueue_unique_key (queue, key, owner, expires_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (queue, key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at",
        *(job.queue, job.options.unique_key, job.pk, None if ttl is None else job.created_at + ttl),
    )


def wait(tx: Tx, job: StoredJob, behind: StoredJob) -> None:
    """Make a job wait behind an active one that has no successor yet."""
    tx.run(
        "INSERT INTO djqueue_unique_key (queue, key, successor, behind) VALUES (?, ?, ?, ?) ON "
        "CONFLICT (queue, key) "
        "DO UPDATE SET successor = excluded.successor, behind = excluded.behind",
        *(job.queue, job.options.unique_key, job.pk, behind.pk),
    )


def is_followed(tx: Tx, job: StoredJob) -> bool:
    """Return whether another job waits for the end of this one to get its key."""
    key = job.options.unique_key
    return key is not None and lock(tx, job.queue, key).behind == job.pk


def is_waiting(tx: Tx, job: StoredJob) -> bool:
    """Return whether a job waits for the end of the one that has its key."""
    key = job.options.unique_key
    return key is not None and lock(tx, job.queue, key).successor == job.pk


def release(tx: Tx, job: StoredJob) -> int | None:
    """Free the key of a job that has ended, unless another job has it by now.

    Returns the successor that waited for it, which gets the key if it is free.
    """
    key = job.options.unique_key
    if key is None:
        return None
    found = lock(tx, job.queue, key)
    if found.owner == job.pk or found.owner is None:
        tx.run(f"UPDATE djqueue_unique_key SET owner = NULL, expires_at = NULL{WHERE}", job.queue, key)
        found = found._replace(owner=None)
    successor = None
    if job.pk in (found.successor, found.behind):
        tx.run(f"UPDATE djqueue_unique_key SET successor = NULL, behind = NULL{WHERE}", job.queue, key)
        successor = None if found.successor == job.pk else found.successor
        if successor is not None and found.owner is None:
            [follower] = by_keys(tx, [successor])
            take(tx, follower)
    tx.run(f"DELETE FROM djqueue_unique_key{WHERE} AND owner IS NULL AND successor IS NULL", job.queue, key)
    return successor


def succeed(tx: Tx, job: StoredJob) -> tuple[StoredJob | None, Succession[StoredJob] | None]:
    """Return the owner of a new job's key, and how the job comes to the key; None if it is a duplicate."""
    assert job.options.unique_key is not None
    if tx.dialect.for_update:
        # Rows before keys, as at the end of a job: in another order, the two would wait for each other.
        holders = f"SELECT owner, successor FROM djqueue_unique_key{WHERE}"
        seen = tx.row(holders, job.queue, job.options.unique_key) or ()
        lock_jobs(tx, [pk for pk in seen if pk])
    key = lock(tx, job.queue, job.options.unique_key)
    found = {other.pk: other for other in by_keys(tx, [pk for pk in (key.owner, key.successor) if pk])}
    owner = found.get(key.owner or 0)
    if owner is None:
        return None, Succession()
    is_active = owner.state is State.ACTIVE
    pending = found.get(key.successor or 0) if is_active else owner
    return owner, succession(job.options.on_duplicate, owner if is_active else None, pending)


def sweep(tx: Tx) -> None:
    """Drop expired keys."""
    tx.run("UPDATE djqueue_unique_key SET owner = NULL, expires_at = NULL WHERE expires_at <= ?", tx.now)
    tx.run("DELETE FROM djqueue_unique_key WHERE owner IS NULL AND successor IS NULL")
