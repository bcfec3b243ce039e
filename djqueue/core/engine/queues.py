"""Operations on whole queues and limiters: limits, pauses, concurrency keys, removal of many jobs, totals."""

from collections.abc import Iterator, Sequence
from typing import Unpack

from ..enginejob import EngineJob
from ..errors import StorageError
from ..overview import LimiterState, Totals
from ..policies import (
    NO_LIMIT,
    UNSET,
    Hold,
    KeyLimit,
    KeyLimitChanges,
    Rate,
    SetConcurrency,
    SetRate,
    hold_on,
    standing,
)
from ..states import State
from .changes import PendingChanges, counted, counted_if_answered
from .context import EngineContext
from .settlement import Settlement

AT_ONCE = 1_000
"""Jobs that are removed under one hold of the lock."""


class EngineQueues:
    """Controls of queues, made by the engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    def names(self) -> list[str]:
        """Return the names of the queues that have been used, sorted."""
        return self._context.queue_names()

    @counted
    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Limit starts per time, and active jobs, of a queue; a limit that is not given stays as it is."""
        with self._settlement.changing(queue, is_kept=True) as (job_queue, changes):
            job_queue.limiter.set(rate, concurrency, self._context.clock.monotonic())
            changes.woken.add(queue)

    @counted
    def set_key_limit(self, queue: str, key: str | None, **overrides: Unpack[KeyLimitChanges]) -> None:
        """Override limits of a concurrency key, or the default for keys without their own if `key` is None.

        None removes an override: the default of the queue, or of its policy, applies again.
        """
        with self._settlement.changing(queue, is_kept=True) as (job_queue, changes):
            if key is None:
                job_queue.limit_groups(job_queue.key_limit._replace(**overrides))
                job_queue.regroup(job_queue.groups.names())
            else:
                job_queue.groups.set_own(key, job_queue.groups.own(key)._replace(**overrides))
                job_queue.regroup([key])
            changes.woken.add(queue)

    @counted
    def pause_key(self, queue: str, key: str) -> None:
        """Stop claims of a concurrency key's jobs until `resume_key`."""
        with self._settlement.changing(queue, is_kept=True) as (job_queue, _):
            job_queue.groups.set_own(key, job_queue.groups.own(key)._replace(paused=True))
            job_queue.regroup([key])

    @counted
    def resume_key(self, queue: str, key: str) -> None:
        """End a concurrency key's pause."""
        with self._settlement.changing(queue) as (job_queue, changes):
            job_queue.groups.set_own(key, job_queue.groups.own(key)._replace(paused=False))
            job_queue.regroup([key])
            changes.woken.add(queue)

    def key_limits(self, queue: str) -> dict[str | None, KeyLimit]:
        """Return the overrides of a queue's concurrency keys; under None, the default for the others."""
        shard = self._context.shard(queue)
        with shard.lock:
            job_queue = shard.find(queue)
            overrides: dict[str | None, KeyLimit] = dict(job_queue.groups.overrides().items())
            if job_queue.key_limit != NO_LIMIT:
                overrides[None] = job_queue.key_limit
        return overrides

    @counted
    def pause(self, queue: str) -> None:
        """Stop claims from a queue until `resume`."""
        with self._settlement.changing(queue, is_kept=True) as (job_queue, _):
            job_queue.paused = True

    @counted
    def resume(self, queue: str) -> None:
        """End a pause."""
        with self._settlement.changing(queue) as (job_queue, changes):
            job_queue.paused = False
            changes.woken.add(queue)

    def is_paused(self, queue: str) -> bool:
        """Return whether a queue is paused."""
        job_queue = self._context.existing(queue)
        return job_queue is not None and job_queue.paused

    @counted
    def hold(self, queue: str, name: str, until: int | None, reason: str) -> None:
        """Stop claims of the jobs of one name until a time, or until `release`."""
        with self._settlement.changing(queue, is_kept=True) as (job_queue, changes):
            others = {one.name: one for one in standing(job_queue.holds.values(), changes.now)}
            job_queue.holds = {**others, name: Hold(name, changes.now, until, reason)}

    @counted
    def release(self, queue: str, name: str) -> bool:
        """End a hold; return whether there was one."""
        with self._settlement.changing(queue) as (job_queue, changes):
            changes.woken.add(queue)
            held = hold_on(name, job_queue.holds.values(), changes.now)
            job_queue.holds.pop(name, None)
            return held is not None

    def limits(self, queue: str) -> tuple[Rate | None, int | None]:
        """Return the current rate and concurrency of a queue."""
        job_queue = self._context.existing(queue)
        if job_queue is None:
            return None, None
        bucket = job_queue.limiter.bucket
        return bucket.rate if bucket is not None else None, job_queue.limiter.concurrency

    @counted_if_answered
    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """Remove jobs in these states that ended, or were enqueued, before a time in UTC milliseconds.

        Active jobs are never removed. Returns the number of removed jobs.
        """
        return sum(self.clean_in_parts(queue, states, before, limit))

    @counted
    def clean_in_parts(
        self, queue: str, states: frozenset[State], before: int, limit: int | None = None
    ) -> Iterator[int]:
        """Remove jobs like `clean`, and yield the number of each part: no lock is held in between."""

        def is_meant(job: EngineJob) -> bool:
            return job.state in states and (job.finished_at or job.created_at) < before

        shard = self._context.shard(queue)
        with shard.lock:
            candidates = [job for job in shard.find(queue).jobs.values() if is_meant(job)]
        # Dependents first: they would end with their dependencies otherwise, and stay.
        blocked = [job for job in candidates if job.state is State.BLOCKED]
        if blocked:
            candidates = [*reversed(blocked), *(job for job in candidates if job.state is not State.BLOCKED)]
        left = len(candidates) if limit is None else limit
        for first in range(0, len(candidates), AT_ONCE):
            with self._settlement.changing(queue) as (job_queue, changes):
                jobs = [
                    job
                    for job in candidates[first : first + AT_ONCE]
                    if job_queue.jobs.get(job.id) is job
                    and is_meant(job)
                    and not self._context.is_active(job)
                ][:left]
                job_queue.remove(jobs, changes)
            left -= len(jobs)
            yield len(jobs)
            if not left:
                return

    @counted
    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """Remove a queue with all its jobs; return the number of removed jobs.

        Raises StorageError if some are active, unless `force` is set; then their outcomes are refused.
        """
        with self._settlement.changing(queue) as (job_queue, changes):
            active = [job for job in job_queue.jobs.values() if self._context.is_active(job)]
            if active and not force:
                raise StorageError(
                    f"queue {queue!r} has active jobs: wait until they finish, or pass force=True"
                )
            for job in active:
                processing = self._context.processing_shard(job.id)
                with processing.lock:
                    released = processing.release(job.token, job_queue.name, job.id)
                if released is not None:
                    job_queue.cancel_active(job, "obliterated", changes)
            jobs = list(job_queue.jobs.values())
            job_queue.remove(jobs, changes)
            self._context.shard(queue).queues.pop(queue, None)
            if job_queue.shared is not None:
                job_queue.shared.forget(queue, changes.woken)
            changes.woken.discard(queue)
        self._context.metrics.forget(queue)
        return len(jobs)


class EngineLimiters:
    """Limiters, held by the engine."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted
    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """Change the limits of a limiter while its queues run."""
        changes = PendingChanges(self._context.clock.now())
        self._context.limiter(name).change(rate, concurrency, changes.woken)
        self._settlement.settle(changes)

    def state(self, name: str) -> LimiterState:
        """Return what a limiter allows, and how much of it is in use."""
        return self._context.find_limiter(name).state()

    def pass_turns_on(self) -> None:
        """Give turns that a queue did not use to the next queue in line."""
        changes = PendingChanges(self._context.clock.now())
        for limiter in list(self._context.limiters.values()):
            limiter.pass_on(changes.woken)
        if changes.woken:
            self._settlement.settle(changes)


def record_totals(context: EngineContext) -> None:
    """Add what the totals of queues have risen by since the last call to the metrics."""
    now = context.clock.now()
    for queue in context.queue_names():
        increase = _take_increase(context, queue)
        if increase:
            try:
                context.metrics.count(queue, increase, now)
                context.changes.bump()
            except BaseException:
                _give_back(context, queue, increase)
                raise


def _take_increase(context: EngineContext, queue: str) -> list[int]:
    """Return what the totals of a queue have risen by; empty if nothing has changed."""
    shard = context.shard(queue)
    with shard.lock:
        job_queue = shard.queues.get(queue)
        if job_queue is None:
            return []
        totals, noted = job_queue.tally.totals(job_queue.finished.completions), job_queue.tally.noted
        if totals == noted:
            return []
        job_queue.tally.noted = totals
    return [now - before for now, before in zip(totals, noted, strict=True)]


def _give_back(context: EngineContext, queue: str, increase: Sequence[int]) -> None:
    """Undo `_take_increase`, so that the next call adds it again."""
    shard = context.shard(queue)
    with shard.lock:
        job_queue = shard.queues.get(queue)
        if job_queue is not None:
            noted = zip(job_queue.tally.noted, increase, strict=True)
            job_queue.tally.noted = Totals(*(now - more for now, more in noted))
