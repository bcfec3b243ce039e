"""Dependencies and unique keys, which blocked jobs wait for, and the graph of dependencies.

A live job has a row for each of its dependencies until it ends. While such a row exists, the record of a
dependency that has completed or was cancelled is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from djqueue.core.flow import FlowGraph, FlowNode, JobLink, explore_all, link, walked
from djqueue.core.options import JobKey
from djqueue.core.policies import Succession, succession
from djqueue.core.states import LIVE, State
from djqueue.storage.tables.rows import unpack_options

from . import retention
from .stored import StoredJob, by_keys, ids_by_queue, is_grouped, lock_jobs
from .transaction import Tx, group_lock, key_lock

DEPENDENCY = ("dependent", "queue", "job_id", "met")


def waits(tx: Tx, job: StoredJob) -> bool:
    """Return whether a job waits for a dependency."""
    waiting = "SELECT 1 FROM djqueue_dependency WHERE dependent = ? AND NOT met LIMIT 1"
    return tx.row(waiting, job.pk) is not None


def unmet_of(tx: Tx, job: StoredJob) -> list[JobKey]:
    """Return the dependencies that a job waits for."""
    waiting = "SELECT queue, job_id FROM djqueue_dependency WHERE dependent = ? AND NOT met ORDER BY id"
    return [(queue, id) for queue, id in tx.rows(waiting, job.pk)]


def states_of(tx: Tx, keys: Iterable[JobKey], *, lock: bool = True) -> dict[JobKey, State]:
    """Return the states of jobs; with `lock`, they cannot end before the transaction does."""
    states: dict[JobKey, State] = {}
    for queue, ids in ids_by_queue(sorted(set(keys))).items():
        condition, values = tx.among("job_id", ids)
        if lock and tx.dialect.for_share:
            which = f"SELECT id FROM djqueue_job WHERE queue = ? AND {condition}"
            # Where records are counted, one that gets a dependent is changed: see `retention.hold`.
            pks = [pk for (pk,) in tx.rows(which, queue, values)]
            lock_jobs(tx, pks, share=not retention.is_bounded(tx, queue))
        statement = f"SELECT job_id, state FROM djqueue_job WHERE queue = ? AND {condition}"
        states |= {(queue, id): State(state) for id, state in tx.rows(statement, queue, values)}
    return states


def note_end(tx: Tx, job: StoredJob, state: State) -> None:
    """Record the end of a job for those that wait for it; `settle` applies it."""
    waiting = tx.rows(
        "SELECT dependent FROM djqueue_dependency WHERE queue = ? AND job_id = ? AND NOT met ORDER BY id",
        *(job.queue, job.id),
    )
    if waiting:
        tx.ended.append(((job.queue, job.id), state, [pk for (pk,) in waiting]))


def note_removed(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    """Apply the removal of jobs, whose rows are gone, to the jobs that wait for them or may read them."""
    for queue, ids in ids_by_queue((job.queue, job.id) for job in jobs).items():
        condition, values = tx.among("job_id", ids)
        which = f"SELECT DISTINCT job_id, met FROM djqueue_dependency WHERE queue = ? AND {condition}"
        rows = tx.rows(which, queue, values)
        waited_for = {id for id, met in rows if not met}
        for job in jobs:
            if job.queue == queue and job.id in waited_for:
                note_end(tx, job, State.CANCELLED)
        if rows:
            forget(tx, queue, ids)  # Another job may get the id.


def unbind(tx: Tx, job: StoredJob) -> None:
    """Release the dependencies of a job that has ended, and their records."""
    if not job.options.depends_on:
        return
    tx.run("DELETE FROM djqueue_dependency WHERE dependent = ?", job.pk)
    retention.let_go(tx, job.options.depends_on)


def forget(tx: Tx, queue: str, ids: Sequence[str]) -> None:
    """Drop the dependencies on records of a queue that are removed."""
    condition, values = tx.among("job_id", ids)
    if tx.run(f"DELETE FROM djqueue_dependency WHERE queue = ? AND {condition} AND met", queue, values):
        tx.run(f"DELETE FROM djqueue_pinned WHERE queue = ? AND {condition}", queue, values)


# The graph of jobs that are connected by dependencies.


NODE = "job_id, name, state, reason, options, created_at, finished_at, started_at"


def flows(tx: Tx, keys: Sequence[JobKey], limit: int) -> list[FlowGraph | None]:
    """Return the jobs connected to each of these by `depends_on`; None for an unknown job.

    Each step of all graphs costs two statements for each of their queues.
    """
    return walked(explore_all(keys, limit), lambda wanted: _links(tx, wanted, limit))


def _links(tx: Tx, keys: Sequence[JobKey], limit: int) -> Mapping[JobKey, JobLink]:
    """Return the existing jobs among these, with their own dependencies and their live dependents."""
    links: dict[JobKey, JobLink] = {}
    for queue, ids in ids_by_queue(keys).items():
        condition, values = tx.among("job_id", ids)
        rows = tx.rows(f"SELECT {NODE} FROM djqueue_job WHERE queue = ? AND {condition}", queue, values)
        dependents = _dependents(tx, queue, [row[0] for row in rows], limit)
        for id, name, state, reason, packed, created_at, finished_at, started_at in rows:
            node = FlowNode(
                *(queue, id, name, State(state), reason),
                created_at=created_at,
                finished_at=finished_at or 0,
                started_at=started_at or 0,
            )
            links[queue, id] = link(node, unpack_options(bytes(packed)), dependents.get(id, ()))
    return links


def _dependents(tx: Tx, queue: str, ids: Sequence[str], limit: int) -> dict[str, list[JobKey]]:
    """Return live jobs that depend on these: enough to find `limit` more of them."""
    if not ids:
        return {}
    condition, values = tx.among("d.job_id", ids)
    rows = tx.rows(
        "SELECT d.job_id, j.queue, j.job_id FROM djqueue_dependency d "
        f"JOIN djqueue_job j ON j.id = d.dependent WHERE d.queue = ? AND {condition} LIMIT ?",
        *(queue, values, 2 * limit + 1),
    )
    dependents: dict[str, list[JobKey]] = {}
    for id, *dependent in rows:
        dependents.setdefault(id, []).append((dependent[0], dependent[1]))
    return dependents


# The unique keys of queues: their owners, and the jobs that wait for the end of active owners.


WHERE_KEY = " WHERE queue = ? AND key = ?"


class Key(NamedTuple):
    """A unique key, as of the start of the transaction; each value is a primary key of a job, or None."""

    owner: int | None = None
    successor: int | None = None
    """The job that waits for the end of `behind`."""
    behind: int | None = None


def lock_key(tx: Tx, queue: str, key: str) -> Key:
    """Return a key, which no other transaction changes until this one ends."""
    tx.lock(key_lock(queue, key))
    return read_key(tx, queue, key)


def read_key(tx: Tx, queue: str, key: str) -> Key:
    """Return a key as it is now."""
    row = tx.row(
        f"SELECT owner, successor, behind, expires_at FROM djqueue_unique_key{WHERE_KEY}", queue, key
    )
    if row is None:
        return Key()
    owner, successor, behind, expires_at = row
    if expires_at is not None and expires_at <= tx.now:
        owner = None
    return Key(owner, successor, behind)


def owner_of_key(tx: Tx, job: StoredJob) -> int | None:
    """Return the primary key of the job that has a job's unique key; None if it is free, or there is none."""
    return None if job.options.unique_key is None else lock_key(tx, job.queue, job.options.unique_key).owner


def take_key(tx: Tx, job: StoredJob) -> None:
    """Give a job its key, which must be free."""
    if job.options.unique_key is None:
        return
    ttl = job.options.unique_ttl
    tx.run(
        "INSERT INTO djqueue_unique_key (queue, key, owner, expires_at) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (queue, key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at",
        *(job.queue, job.options.unique_key, job.pk, None if ttl is None else job.created_at + ttl),
    )


def wait_for_key(tx: Tx, job: StoredJob, behind: StoredJob) -> None:
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
    return key is not None and lock_key(tx, job.queue, key).behind == job.pk


def waits_for_key(tx: Tx, job: StoredJob) -> bool:
    """Return whether a job waits for the end of the one that has its key."""
    key = job.options.unique_key
    return key is not None and lock_key(tx, job.queue, key).successor == job.pk


def lock_successors(tx: Tx, keys: Mapping[int, tuple[str, str]]) -> None:
    """Lock the jobs that wait for the keys of jobs, given by primary key: rows come before keys.

    A call that cancels these jobs has locked them, and waits for the keys.
    """
    if keys and tx.dialect.for_update:
        within, queues = tx.among("queue", sorted({queue for queue, _ in keys.values()}))
        named, names = tx.among("key", sorted({key for _, key in keys.values()}))
        followed, pks = tx.among("behind", list(keys))
        found = tx.rows(
            f"SELECT successor FROM djqueue_unique_key WHERE {within} AND {named} AND {followed}",
            *(queues, names, pks),
        )
        lock_jobs(tx, [pk for (pk,) in found if pk])


def free_keys(tx: Tx, queue: str, keys: Mapping[int, str]) -> set[int]:
    """Free the keys of jobs that have ended, by their primary keys, unless others wait for them or have them.

    Returns the jobs whose keys were freed.
    """
    named, names = tx.among("key", list(keys.values()))
    owned, owners = tx.among("owner", list(keys))
    freed = tx.rows(
        f"DELETE FROM djqueue_unique_key WHERE queue = ? AND {named} AND {owned} AND successor IS NULL AND "
        "behind IS NULL RETURNING owner",
        *(queue, names, owners),
    )
    return {owner for (owner,) in freed}


def release_key(tx: Tx, queue: str, key: str | None, pk: int) -> int | None:
    """Free the key of a job that has ended, unless another job has it by now.

    Returns the successor that waited for it, which gets the key if it is free.
    """
    if key is None:
        return None
    tx.lock(key_lock(queue, key))
    if free_keys(tx, queue, {pk: key}):
        return None
    current = read_key(tx, queue, key)
    if current.owner == pk or current.owner is None:
        tx.run(f"UPDATE djqueue_unique_key SET owner = NULL, expires_at = NULL{WHERE_KEY}", queue, key)
        current = current._replace(owner=None)
    successor = None
    if pk in (current.successor, current.behind):
        tx.run(f"UPDATE djqueue_unique_key SET successor = NULL, behind = NULL{WHERE_KEY}", queue, key)
        successor = None if current.successor == pk else current.successor
        if successor is not None and current.owner is None:
            [follower] = by_keys(tx, [successor])
            take_key(tx, follower)
    tx.run(f"DELETE FROM djqueue_unique_key{WHERE_KEY} AND owner IS NULL AND successor IS NULL", queue, key)
    return successor


def taken_keys(tx: Tx, queue: str, keys: Iterable[str]) -> set[str]:
    """Return those of the keys that jobs have, or wait for."""
    condition, values = tx.among("key", sorted(keys))
    search = f"SELECT key FROM djqueue_unique_key WHERE queue = ? AND {condition}"
    return {key for (key,) in tx.rows(search, queue, values)}


def hand_over_key(tx: Tx, job: StoredJob) -> tuple[StoredJob | None, Succession[StoredJob] | None]:
    """Return the owner of a new job's key, and how the job comes to the key; None if it is a duplicate."""
    assert job.options.unique_key is not None
    if tx.dialect.for_update:
        key = read_key(tx, job.queue, job.options.unique_key)
        owner, handover = _hand_over_key(tx, job, key, lock=False)
        if owner is not None and handover is None and owner.state in LIVE:
            return owner, None  # A duplicate changes nothing, so that it locks nothing.
        # Rows before keys, as at the end of a job: in another order, the two would wait for each other.
        lock_jobs(tx, [pk for pk in (key.owner, key.successor) if pk])
        if is_grouped(tx, job):
            tx.lock(group_lock(job.queue, job.options.concurrency_key or ""))
    return _hand_over_key(tx, job, lock_key(tx, job.queue, job.options.unique_key))


def _hand_over_key(
    tx: Tx, job: StoredJob, key: Key, *, lock: bool = True
) -> tuple[StoredJob | None, Succession[StoredJob] | None]:
    holders = by_keys(tx, [pk for pk in (key.owner, key.successor) if pk], lock=lock)
    holders_by_pk = {other.pk: other for other in holders}
    owner = holders_by_pk.get(key.owner or 0)
    if owner is None:
        return None, Succession()
    is_active = owner.state is State.ACTIVE
    pending = holders_by_pk.get(key.successor or 0) if is_active else owner
    return owner, succession(job.options.on_duplicate, owner if is_active else None, pending)


def forget_expired_keys(tx: Tx, limit: int) -> int:
    """Free up to `limit` expired keys; return their number."""
    condition = tx.dialect.once(
        "SELECT id FROM djqueue_unique_key WHERE expires_at <= ? ORDER BY expires_at LIMIT ?"
        f"{tx.dialect.skip_locked}"
    )
    freed = tx.rows(
        f"UPDATE djqueue_unique_key SET owner = NULL, expires_at = NULL WHERE id {condition} "
        "RETURNING id, successor",
        *(tx.now, limit),
    )
    if unused := [id for id, successor in freed if successor is None]:
        condition, ids = tx.among("id", unused)
        tx.run(f"DELETE FROM djqueue_unique_key WHERE {condition}", ids)
    return len(freed)
