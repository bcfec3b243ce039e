"""Enqueues: duplicates, unique keys, and the room that a queue has."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from djqueue.core.errors import OptionError
from djqueue.core.flow import Substitutes, outside
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobOptions
from djqueue.core.policies import DROPPED, REPLACED, full_error
from djqueue.core.states import PENDING, REUSABLE, State
from djqueue.storage.tables import rows

from . import dependencies, stored, transitions
from .stored import DELAYED, NEW_JOB, READY, StoredJob, place, ready_row
from .transaction import Tx, group_lock, key_lock

DROPPING = ("drop_oldest", "drop_lowest")
"""Values of `when_full` that drop a job for a new one."""


def enqueue(tx: Tx, batches: Sequence[Batch], *, chunk: int = 0) -> list[EnqueueResult]:
    """Add jobs, and return a result for each job, in order: see `Storage.enqueue`.

    Args:
        chunk: Number of jobs, if the batches are a staged chunk. A chunk that is larger than the queue's
            `MAX_SIZE` would never fit, so it is added as long as the queue is not full.
    """
    for batch in batches:
        batch.check_ids()
        tx.database.policy(batch.queue).check_batch(batch)
    _check_dependencies(tx, batches)
    _lock_shared(tx, batches)
    results: list[EnqueueResult] = []
    substitutes = Substitutes()
    for given in batches:
        batch = substitutes.in_(given) if results else given
        answers = _enqueue(tx, batch, chunk)
        substitutes.note(batch, answers)
        results += answers
    tx.results += results
    return results


def _lock_shared(tx: Tx, batches: Sequence[Batch]) -> None:
    """Lock the groups and free unique keys of jobs at once: two calls that lock them in orders of their own
    would wait for each other.
    """
    if not tx.dialect.for_update or len(batches) < 2:
        return
    groups: set[str] = set()
    keys: dict[str, set[str]] = {}
    for queue, options in ((batch.queue, batch.options) for batch in batches):
        if (group := stored.holding_group(tx, queue, options.concurrency_key)) is not None:
            groups.add(group_lock(queue, group))
        if options.unique_key is not None:
            keys.setdefault(queue, set()).add(options.unique_key)
    tx.lock(*groups)
    free: set[str] = set()
    for queue, wanted in keys.items():
        # A duplicate of a job that has its key locks nothing.
        free |= {key_lock(queue, key) for key in wanted - dependencies.taken_keys(tx, queue, wanted)}
    tx.lock(*free)


def _check_dependencies(tx: Tx, batches: Sequence[Batch]) -> None:
    keys = outside(batches)
    if keys:
        existing = dependencies.states_of(tx, keys)
        for queue, id in keys:
            if (queue, id) not in existing:
                raise OptionError(f"depends_on: queue {queue!r} has no job {id!r}")


def _enqueue(tx: Tx, batch: Batch, chunk: int) -> list[EnqueueResult]:
    stored.use(tx, batch.queue)
    policy = tx.database.policy(batch.queue)
    drops = policy.max_size is not None and policy.when_full in DROPPING
    if policy.max_size is not None:
        tx.lock(f"room:{batch.queue}")
    if _is_uniform(batch) and not drops:
        if policy.max_size is not None and batch.options.rejected is None:
            _check_room(tx, batch, len(batch.payloads), chunk)
        return _insert(tx, batch, batch.ids or tx.database.ids.many(len(batch.payloads), tx.now))
    if policy.max_size is not None and not drops and batch.options.rejected is None:
        _check_room(tx, batch, None, chunk)
    return _each(tx, batch, drops=drops)


def _is_uniform(batch: Batch) -> bool:
    """Return whether all jobs of a batch are new and wait in the same way."""
    options = batch.options
    is_plain = options.unique_key is None and not options.depends_on and options.rejected is None
    return (batch.ids is None or batch.fresh) and is_plain and not options.lifo


def _insert(tx: Tx, batch: Batch, ids: Sequence[str]) -> list[EnqueueResult]:
    """Add new jobs that differ only in id and payload."""
    count = len(ids)
    if not count:
        return []
    options, run_at = _options(batch), _run_at(tx, batch)
    numbers = tx.numbers(count)
    model = StoredJob("", batch.queue, batch.name, b"", options, State.WAITING, tx.now, run_at)
    model.pk, model.expires_at = 0, None if options.ttl is None else tx.now + options.ttl
    if run_at > tx.now:
        model.state = State.DELAYED
    row = stored.new_row(model, rows.pack_options(options))
    (before, between, after), last = (row[1:2], row[3:6], row[7:]), numbers[-1]
    tx.insert(
        "djqueue_job",
        NEW_JOB,
        [
            (number, *before, id, *between, payload, *after)
            for number, id, payload in zip(numbers, ids, batch.payloads, strict=True)
        ],
    )
    if model.state is State.DELAYED:
        tx.insert("djqueue_delayed", DELAYED, [(number, batch.queue, run_at) for number in numbers])
    elif stored.is_grouped(tx, model):
        jobs = []
        for number in numbers:
            model.pk = number
            jobs.append(copy(model))
        stored.group_of(tx, model).admit(jobs)
    else:
        ready = ready_row(model, last)
        tx.insert("djqueue_ready", READY, [(number, *ready[1:3], number, *ready[4:]) for number in numbers])
    tx.count(batch.queue, "enqueued", count)
    tx.shift(batch.queue, None, model.state, count)
    tx.woken.add(batch.queue)
    if tx.is_observed(batch.queue):
        for id in ids:
            model.id = id
            tx.note(model, "enqueued")
    return [EnqueueResult(id, "queued", batch.queue) for id in ids]


def _options(batch: Batch) -> JobOptions:
    return batch.options if not batch.delay else replace(batch.options, delay=batch.delay)


def _run_at(tx: Tx, batch: Batch) -> int:
    return batch.run_at if batch.run_at is not None else tx.now + (batch.delay or 0)


def _each(tx: Tx, batch: Batch, *, drops: bool) -> list[EnqueueResult]:
    options, run_at = _options(batch), _run_at(tx, batch)
    packed = rows.pack_options(options)
    ids = batch.ids if batch.ids is not None else tx.database.ids.many(len(batch.payloads), tx.now)
    known: dict[str, StoredJob] = {}
    if batch.ids is not None and not batch.fresh:
        known = _known(tx, batch)
    results: list[EnqueueResult] = []
    added: list[StoredJob] = []
    for id, payload in zip(ids, batch.payloads, strict=True):
        existing = known.get(id)
        if existing is not None and (options.rejected is not None or existing.state not in REUSABLE):
            results.append(_duplicate(tx, batch, existing))
            continue
        job = StoredJob(id, batch.queue, batch.name, payload, options, State.WAITING, tx.now, run_at)
        [job.pk] = tx.numbers(1)
        job.expires_at = None if options.ttl is None else tx.now + options.ttl
        if options.rejected is not None:
            tx.insert("djqueue_job", NEW_JOB, [stored.new_row(job, packed)])
            transitions.reject(tx, job)
            known[id] = job
            results.append(EnqueueResult(id, "rejected", batch.queue))
            continue
        handover = None
        if options.unique_key is not None:
            owner, handover = dependencies.hand_over_key(tx, job)
            if handover is None:
                assert owner is not None
                results.append(EnqueueResult(owner.id, "duplicate", batch.queue, owner.state))
                continue
            if handover.replaced is not None:
                if handover.keeps_time and handover.replaced.state is not State.BLOCKED:
                    job.run_at = min(job.run_at, handover.replaced.run_at)
                transitions.cancel_pending(tx, handover.replaced, REPLACED)
                known[handover.replaced.id] = handover.replaced
        replaced = None if handover is None else handover.replaced
        if drops and replaced is None and not _make_room(tx, job):
            # This is the first job of the batch: an earlier one could be dropped for it.
            raise full_error(batch.queue, tx.database.policy(batch.queue).max_size, len(batch.payloads))
        if existing is not None:
            transitions.make_way(tx, existing)
        _admit(tx, job, packed, behind=None if handover is None else handover.behind)
        known[id] = job
        added.append(job)
        results.append(
            EnqueueResult(id, "queued", batch.queue, replaced=None if replaced is None else replaced.id)
        )
    for job in added:
        if options.depends_on:
            transitions.bind(tx, job, options.depends_on)
    return results


def _known(tx: Tx, batch: Batch) -> dict[str, StoredJob]:
    """Return the jobs that have a batch's ids, and lock those that may make way for new ones."""
    known = stored.by_ids(tx, batch.queue, batch.ids or (), lock=False)
    reusable = [job.id for job in known.values() if job.state in REUSABLE]
    if reusable and batch.options.rejected is None and tx.dialect.for_update:
        locked = stored.by_ids(tx, batch.queue, reusable)
        known = {id: job for id, job in known.items() if id not in reusable} | locked
    return known


def _duplicate(tx: Tx, batch: Batch, existing: StoredJob) -> EnqueueResult:
    """Return the result for an id that is in use."""
    if batch.options.rejected is not None:
        return EnqueueResult(existing.id, "rejected", batch.queue, existing.state)
    if existing.state is not State.COMPLETED:
        return EnqueueResult(existing.id, "duplicate", batch.queue, existing.state)
    kept = "SELECT result FROM djqueue_job_result WHERE queue = ? AND job_id = ?"
    result = tx.value(kept, batch.queue, existing.id)
    return EnqueueResult(
        existing.id, "completed", batch.queue, existing.state, None if result is None else bytes(result)
    )


def _admit(tx: Tx, job: StoredJob, packed: bytes, *, behind: StoredJob | None) -> None:
    """Add a new job whose id is free, with its unique key unless it waits `behind` the owner."""
    is_blocked = behind is not None or bool(job.options.depends_on)
    if is_blocked:
        job.state = State.BLOCKED
    elif job.run_at > tx.now:
        job.state = State.DELAYED
    tx.insert("djqueue_job", NEW_JOB, [stored.new_row(job, packed)])
    if behind is None:
        dependencies.take_key(tx, job)
    else:
        dependencies.wait_for_key(tx, job, behind)
    place(tx, job, is_blocked=is_blocked)
    tx.count(job.queue, "enqueued")
    tx.shift(job.queue, None, job.state)
    tx.woken.add(job.queue)
    tx.note(job, "enqueued")


# Room.


def _check_room(tx: Tx, batch: Batch, growth: int | None, chunk: int) -> None:
    """Raise QueueFullError if the queue has no room for a batch's new jobs."""
    limit = tx.database.policy(batch.queue).max_size
    assert limit is not None
    most = limit if chunk <= limit else limit + chunk - 1
    room = most - pending(tx, batch.queue)
    if len(batch.payloads) > room:
        growth = _growth(tx, batch) if growth is None else growth
        if growth > max(0, room):
            raise full_error(batch.queue, limit, len(batch.payloads))


def pending(tx: Tx, queue: str) -> int:
    """Return the number of pending jobs of a queue."""
    counts = tx.counts(queue)
    return sum(counts[state] for state in PENDING)


def _growth(tx: Tx, batch: Batch) -> int:
    """Return how many more jobs would wait after a batch, without duplicates and replacements."""
    new = len(batch.payloads)
    if batch.ids is not None:
        known = {} if batch.fresh else stored.by_ids(tx, batch.queue, batch.ids, lock=False)
        new = len({id for id in batch.ids if id not in known or known[id].state in REUSABLE})
    if batch.options.unique_key is None or not new:
        return new
    model = StoredJob("", batch.queue, batch.name, b"", batch.options, State.WAITING, tx.now, tx.now)
    owner, handover = dependencies.hand_over_key(tx, model)
    if owner is None:
        return 1
    return int(handover is not None and handover.replaced is None)


def _make_room(tx: Tx, job: StoredJob) -> bool:
    """Drop a job if a new one needs room; False if none may be dropped."""
    policy = tx.database.policy(job.queue)
    assert policy.max_size is not None
    if pending(tx, job.queue) < policy.max_size:
        return True
    by_priority = policy.when_full == "drop_lowest"
    order = "priority, created_at, id" if by_priority else "created_at, id"
    allowed = "AND priority <= ?" if by_priority else "AND ? IS NOT NULL"
    row = tx.row(
        "SELECT id FROM djqueue_job WHERE queue = ? AND state IN ('waiting', 'delayed', 'blocked') "
        f"AND started_at IS NULL {allowed} ORDER BY {order} LIMIT 1",
        *(job.queue, job.options.priority),
    )
    if row is None:
        return False
    [dropped] = stored.by_keys(tx, [row[0]])
    transitions.cancel_pending(tx, dropped, DROPPED)
    return True
