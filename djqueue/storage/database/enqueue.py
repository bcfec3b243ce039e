"""Enqueues: duplicates, unique keys, and the room that a queue has."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter

from djqueue.core.errors import OptionError
from djqueue.core.flow import Substitutes, outside
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.policies import DROPPED, REPLACED, full_error
from djqueue.core.states import PENDING, REUSABLE, State
from djqueue.storage.tables import rows

from . import dependencies, stored, transitions
from .dialects import Row
from .stored import DELAYED, NEW_JOB, READY, UNTOUCHED, StoredJob, place, ready_row
from .transaction import Database, Tx, group_lock, key_lock

DROPPING = ("drop_oldest", "drop_lowest")
"""Values of `when_full` that drop a job for a new one."""
AT_ONCE = 1_000
"""Jobs of a call up to which their numbers come with the beginning of its transaction."""
ID = itemgetter(NEW_JOB.index("queue"), NEW_JOB.index("job_id"))
"""Returns the queue and the id of a row of `NEW_JOB`."""


def enqueue(tx: Tx, batches: Sequence[Batch], *, chunk: int = 0) -> list[EnqueueResult]:
    """Add jobs, and return a result for each job, in order: see `Storage.enqueue`.

    Args:
        chunk: Number of jobs, if the batches are a staged chunk. A chunk that is larger than the queue's
            `MAX_SIZE` would never fit, so it is added as long as the queue is not full.
    """
    policies = {batch.queue: tx.database.policy(batch.queue) for batch in batches}
    for batch in batches:
        batch.check_ids()
        policies[batch.queue].check_batch(batch)
    tx.lock(*(f"room:{queue}" for queue, policy in policies.items() if policy.max_size is not None))
    _check_dependencies(tx, batches)
    _lock_shared(tx, batches)
    results: list[EnqueueResult] = []
    substitutes = Substitutes()
    new: list[tuple[StoredJob, list[Row]]] = []
    known: dict[JobKey, StoredJob] | None = None
    for number, given in enumerate(batches):
        batch = substitutes.in_(given) if results else given
        if not _is_uniform(tx, batch):
            _write(tx, new)
            known = None
        elif known is None:
            # Those of the batches up to the next one that has to be enqueued job by job.
            known = _known(tx, list(takewhile(partial(_is_uniform, tx), islice(batches, number, None))))
        answers = _enqueue(tx, batch, chunk, known, new)
        substitutes.note(batch, answers)
        results += answers
    _write(tx, new)
    tx.results += results
    return results


def numbers(database: Database, batches: Sequence[Batch]) -> int:
    """Return how many numbers a call needs at once, if it waits for nothing before: 0 otherwise, because the
    order of the numbers is that of the jobs.
    """
    waits = any(
        batch.options.unique_key is not None
        or batch.options.concurrency_key is not None
        or batch.options.depends_on
        or database.policy(batch.queue).max_size is not None
        for batch in batches
    )
    count = sum(len(batch.payloads) for batch in batches)
    return 0 if waits or count > AT_ONCE else count


def _write(tx: Tx, new: list[tuple[StoredJob, list[Row]]]) -> None:
    """Insert new jobs, in the order of their ids: two calls that insert the same ones in orders of their own
    would wait for each other.
    """
    tx.insert("djqueue_job", NEW_JOB, sorted((row for _, some in new for row in some), key=ID), UNTOUCHED)
    for model, some in new:
        tx.note_new(model, [row[2] for row in some])
    new.clear()


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


def _enqueue(
    tx: Tx,
    batch: Batch,
    chunk: int,
    known: dict[JobKey, StoredJob] | None,
    new: list[tuple[StoredJob, list[Row]]],
) -> list[EnqueueResult]:
    """Add the jobs of a batch; the rows of uniform ones to `new`, if their ids are not `known`."""
    stored.use(tx, batch.queue)
    is_uniform = known is not None
    known = _known(tx, [batch]) if known is None else known
    if not _drops(tx, batch.queue) and batch.options.rejected is None:
        _check_room(tx, batch, known, chunk)
    if not is_uniform:
        return _each(tx, batch, known)
    model = _model(tx, batch)
    ids = batch.ids or tx.database.ids.many(len(batch.payloads), tx.now)
    results: list[EnqueueResult] = []
    added: dict[str, bytes] = {}
    for id, payload in zip(ids, batch.payloads, strict=True):
        existing = known.get((batch.queue, id))
        if existing is not None and existing.state not in REUSABLE:
            results.append(_duplicate(tx, batch, id, existing))
            continue
        if existing is not None:
            transitions.make_way(tx, existing)
        known[batch.queue, id] = model
        added[id] = payload
        results.append(EnqueueResult(id, "queued", batch.queue))
    _insert(tx, model, added, new)
    return results


def _is_uniform(tx: Tx, batch: Batch) -> bool:
    """Return whether all new jobs of a batch wait in the same way."""
    options = batch.options
    is_plain = options.unique_key is None and not options.depends_on and options.rejected is None
    return is_plain and not options.lifo and not _drops(tx, batch.queue)


def _drops(tx: Tx, queue: str) -> bool:
    policy = tx.database.policy(queue)
    return policy.max_size is not None and policy.when_full in DROPPING


def _model(tx: Tx, batch: Batch) -> StoredJob:
    """Return what the new jobs of a uniform batch have in common."""
    options, run_at = _options(batch), _run_at(tx, batch)
    state = State.DELAYED if run_at > tx.now else State.WAITING
    model = StoredJob("", batch.queue, batch.name, b"", options, state, tx.now, run_at)
    model.pk, model.expires_at = 0, None if options.ttl is None else tx.now + options.ttl
    return model


def _insert(
    tx: Tx, model: StoredJob, payloads: Mapping[str, bytes], new: list[tuple[StoredJob, list[Row]]]
) -> None:
    """Add new jobs that differ only in id and payload."""
    count = len(payloads)
    if not count:
        return
    numbers = tx.numbers(count)
    row = stored.new_row(model, rows.pack_options(model.options))
    (before, between, after), last = (row[1:2], row[3:6], row[7:]), numbers[-1]
    given = zip(numbers, payloads.items(), strict=True)
    new.append((model, [(number, *before, id, *between, payload, *after) for number, (id, payload) in given]))
    if model.state is State.DELAYED:
        tx.insert("djqueue_delayed", DELAYED, [(number, model.queue, model.run_at) for number in numbers])
    elif stored.is_grouped(tx, model):
        jobs = []
        for number in numbers:
            model.pk = number
            jobs.append(copy(model))
        stored.group_of(tx, model).admit(jobs)
    else:
        ready = ready_row(model, last)
        tx.insert("djqueue_ready", READY, [(number, *ready[1:3], number, *ready[4:]) for number in numbers])
    tx.count(model.queue, "enqueued", count)
    tx.shift(model.queue, None, model.state, count)
    tx.woken.add(model.queue)


def _options(batch: Batch) -> JobOptions:
    return batch.options if not batch.delay else replace(batch.options, delay=batch.delay)


def _run_at(tx: Tx, batch: Batch) -> int:
    return batch.run_at if batch.run_at is not None else tx.now + (batch.delay or 0)


def _each(tx: Tx, batch: Batch, known: dict[JobKey, StoredJob]) -> list[EnqueueResult]:
    options, run_at, drops = _options(batch), _run_at(tx, batch), _drops(tx, batch.queue)
    packed = rows.pack_options(options)
    ids = batch.ids if batch.ids is not None else tx.database.ids.many(len(batch.payloads), tx.now)
    results: list[EnqueueResult] = []
    added: list[StoredJob] = []
    for id, payload in zip(ids, batch.payloads, strict=True):
        existing = known.get((batch.queue, id))
        if existing is not None and (options.rejected is not None or existing.state not in REUSABLE):
            results.append(_duplicate(tx, batch, id, existing))
            continue
        job = StoredJob(id, batch.queue, batch.name, payload, options, State.WAITING, tx.now, run_at)
        [job.pk] = tx.numbers(1)
        job.expires_at = None if options.ttl is None else tx.now + options.ttl
        if options.rejected is not None:
            tx.insert("djqueue_job", NEW_JOB, [stored.new_row(job, packed)], UNTOUCHED)
            transitions.reject(tx, job)
            known[batch.queue, id] = job
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
                known[batch.queue, handover.replaced.id] = handover.replaced
        replaced = None if handover is None else handover.replaced
        if drops and replaced is None and not _make_room(tx, job):
            # This is the first job of the batch: an earlier one could be dropped for it.
            raise full_error(batch.queue, tx.database.policy(batch.queue).max_size, len(batch.payloads))
        if existing is not None:
            transitions.make_way(tx, existing)
        _admit(tx, job, packed, behind=None if handover is None else handover.behind)
        known[batch.queue, id] = job
        added.append(job)
        results.append(
            EnqueueResult(id, "queued", batch.queue, replaced=None if replaced is None else replaced.id)
        )
    for job in added:
        if options.depends_on:
            transitions.bind(tx, job, options.depends_on)
    return results


def _known(tx: Tx, batches: Sequence[Batch]) -> dict[JobKey, StoredJob]:
    """Return the jobs that have the ids of batches, and lock those that may make way for new ones."""
    given: dict[tuple[str, bool], list[str]] = {}
    for batch in batches:
        if batch.ids is not None and not batch.fresh:
            given.setdefault((batch.queue, batch.options.rejected is None), []).extend(batch.ids)
    found: dict[JobKey, StoredJob] = {}
    for (queue, may_reuse), ids in sorted(given.items()):
        known = stored.by_ids(tx, queue, ids, lock=False)
        reusable = [job.id for job in known.values() if job.state in REUSABLE]
        if reusable and may_reuse and tx.dialect.for_update:
            locked = stored.by_ids(tx, queue, reusable)
            known = {id: job for id, job in known.items() if id not in reusable} | locked
        found.update({(queue, id): job for id, job in known.items()})
    return found


def _duplicate(tx: Tx, batch: Batch, id: str, existing: StoredJob) -> EnqueueResult:
    """Return the result for an id that is in use."""
    if batch.options.rejected is not None:
        return EnqueueResult(id, "rejected", batch.queue, existing.state)
    if existing.state is not State.COMPLETED:
        return EnqueueResult(id, "duplicate", batch.queue, existing.state)
    kept = "SELECT result FROM djqueue_job_result WHERE queue = ? AND job_id = ?"
    result = tx.value(kept, batch.queue, id)
    return EnqueueResult(
        id, "completed", batch.queue, existing.state, None if result is None else bytes(result)
    )


def _admit(tx: Tx, job: StoredJob, packed: bytes, *, behind: StoredJob | None) -> None:
    """Add a new job whose id is free, with its unique key unless it waits `behind` the owner."""
    is_blocked = behind is not None or bool(job.options.depends_on)
    if is_blocked:
        job.state = State.BLOCKED
    elif job.run_at > tx.now:
        job.state = State.DELAYED
    tx.insert("djqueue_job", NEW_JOB, [stored.new_row(job, packed)], UNTOUCHED)
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


def _check_room(tx: Tx, batch: Batch, known: Mapping[JobKey, StoredJob], chunk: int) -> None:
    """Raise QueueFullError if the queue has no room for a batch's new jobs."""
    limit = tx.database.policy(batch.queue).max_size
    if limit is None:
        return
    most = limit if chunk <= limit else limit + chunk - 1
    room = most - pending(tx, batch.queue)
    if len(batch.payloads) > room and _growth(tx, batch, known) > max(0, room):
        raise full_error(batch.queue, limit, len(batch.payloads))


def pending(tx: Tx, queue: str) -> int:
    """Return the number of pending jobs of a queue."""
    counts = tx.counts(queue)
    return sum(counts[state] for state in PENDING)


def _growth(tx: Tx, batch: Batch, known: Mapping[JobKey, StoredJob]) -> int:
    """Return how many more jobs would wait after a batch, without duplicates and replacements."""
    new = len(batch.payloads)
    if batch.ids is not None:
        found = {id: known.get((batch.queue, id)) for id in batch.ids}
        new = sum(job is None or job.state in REUSABLE for job in found.values())
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
