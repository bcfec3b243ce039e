"""End the attempts whose process is gone, when the jobs of a storage are loaded."""

from collections.abc import Iterable, Sequence
from random import Random

from .deadletters import letter_of
from .enginejob import EngineJob
from .job import DeadLetterRecord
from .options import JobKey
from .queue import QueuePolicy
from .shard import note_attempt
from .stalls import stalled_error
from .states import PENDING, State
from .unique import REPLACED


def interrupt(job: EngineJob, policy: QueuePolicy, now: int, random: Random) -> DeadLetterRecord | None:
    """Count a stall for an active job, and let it wait again; return its dead letter if it may not.

    A job whose cancellation was requested is cancelled instead.
    """
    limit = policy.retention.attempts.count
    note_attempt(job, "cancelled" if job.cancel_requested else "stalled", now, None, limit)
    job.worker = ""
    if job.cancel_requested:
        job.state = State.CANCELLED
        job.reason = "cancelled"
        job.finished_at = now
        return None
    job.stalls += 1
    if job.stalls <= job.options.max_stalls:
        job.state = State.WAITING
        job.run_at = now
        return None
    job.state = State.FAILED
    job.reason = "worker_lost"
    job.finished_at = now
    job.error = stalled_error(job.stalls, job.history or ())
    return letter_of(job, now, 0, policy.dead_letters, random)


def supersede(job: EngineJob, now: int) -> None:
    """Cancel a pending job that has a successor: see `superseded`."""
    job.state = State.CANCELLED
    job.reason = REPLACED
    job.finished_at = now


def superseded(jobs: Sequence[EngineJob], now: int) -> Iterable[EngineJob]:
    """Return the pending jobs that got a successor while they were active; the newer one is kept."""
    newest: dict[JobKey, EngineJob] = {}
    for job in jobs:
        if job.options.on_duplicate == "keep_last_if_active" and (key := job.options.unique_key):
            there = newest.get((job.queue, key))
            if there is None or _age(job) >= _age(there):
                newest[job.queue, key] = job
    for job in jobs if newest else ():
        key, ttl = job.options.unique_key, job.options.unique_ttl
        last = newest.get((job.queue, key)) if key is not None else None
        if last is None or last is job or job.state not in PENDING or _age(job) > _age(last):
            continue
        if ttl is None or job.created_at + ttl > now:
            yield job


def _age(job: EngineJob) -> tuple[int, bool]:
    return job.created_at, job.state is State.BLOCKED
