"""What time does to the jobs of an engine. Any number of maintainers may run: a second finds nothing."""

from typing import NamedTuple

from .engine import EXPIRED, Engine
from .job import Job, JobError
from .shard import Changes

SWEEP_LIMIT = 1_000
"""Records that one sweep takes from a queue, so that no lock is held for long."""


class Swept(NamedTuple):
    """What a sweep did."""

    promoted: int = 0
    stalled: int = 0
    expired: int = 0
    retried: int = 0
    removed: int = 0


def sweep(engine: Engine, worker_ttl: int) -> Swept:
    """One round: due jobs, lost leases, ttls, dead letters, old records.

    worker_ttl: milliseconds after which a silent worker counts as gone.
    """
    engine.forget_workers(worker_ttl)
    stalled = _sweep_leases(engine)
    totals = [0, 0, 0, 0]
    for name in engine.queues():
        for index, count in enumerate(_sweep_queue(engine, name)):
            totals[index] += count
    promoted, expired, retried, removed = totals
    return Swept(promoted, stalled, expired, retried, removed)


def _sweep_leases(engine: Engine) -> int:
    tick = engine.clock.monotonic()
    overdue: list[tuple[int, Job]] = []
    for place in engine.processing:
        with place.lock:
            overdue += place.overdue(tick)
    # The last to be claimed goes back first: before it, then, go those that were claimed earlier.
    overdue.sort(key=lambda entry: entry[0], reverse=True)
    return sum(_stall(engine, token, job, tick) for token, job in overdue)


def _stall(engine: Engine, token: int, job: Job, tick: int) -> bool:
    shard, place = engine.shard(job.queue), engine.place(job.id)
    changes = Changes()
    now = engine.clock.now()
    with shard.lock:
        queue = shard.find(job.queue)
        with place.lock:
            # Renewed, finished or swept by another since it was seen.
            if job.token != token or job.lease_until > tick:
                return False
            if place.release(token, job.queue, job.id) is None:
                return False
        if job.cancel_requested:
            shard.cancel_active(queue, job, "cancelled", now, changes)
            shard.incident(job, "cancelled", changes)
        elif job.stalls >= job.options.max_stalls:
            alive = any(info.id == job.worker for info in engine.workers())
            reason = "stalled" if alive else "worker_lost"
            text = f"lost {job.stalls + 1} times with its worker, last with {job.worker}"
            error = JobError("djqueue.core.errors.StorageError", text)
            shard.incident(job, "stalled", changes)
            shard.fail_active(queue, job, reason, error, now, changes)
            shard.incident(job, "failed", changes)
        else:
            shard.put_back(queue, job, "stalled", 0, None, now, changes)
            shard.incident(job, "stalled", changes)
    engine.settle(changes)
    return True


def _sweep_queue(engine: Engine, name: str) -> tuple[int, int, int, int]:
    shard = engine.shard(name)
    now = engine.clock.now()
    changes = Changes()
    with shard.lock:
        queue = shard.queues.get(name)
        if queue is None:
            return 0, 0, 0, 0  # obliterated since
        before = queue.delayed.size
        shard.promote_due(queue, now, changes)
        promoted = before - queue.delayed.size
        expired = queue.expired(now)
        for job in expired:
            shard.fail_pending(queue, job, "ttl_expired", EXPIRED, now, changes)
        queue.unique.sweep(now)
        over = queue.dead.expired(now)[:SWEEP_LIMIT]
        shard.bury_for_good(queue, over, changes, now)
        queue.finished.drop_results(now, SWEEP_LIMIT)
        old = queue.finished.expired(now, SWEEP_LIMIT)
        shard.remove(queue, old, now, changes)
        surplus = queue.finished.surplus(SWEEP_LIMIT)
        shard.remove(queue, surplus, now, changes)
        due = [letter.id for letter in queue.dead.due(now)[:SWEEP_LIMIT]]
    engine.settle(changes)
    answers = engine.retry(name, due, by_itself=True)
    return promoted, len(expired), answers.count("retried"), len(old) + len(surplus) + len(over)
