"""Jobs that an engine did not enqueue itself: from tables and snapshots, claims that workers announce, and
the replacement of everything.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from ..enginejob import EngineJob, end_without_record
from ..job import Claimed, DeadLetterRecord
from ..options import JobKey
from ..policies import PREDECESSOR
from ..states import TERMINAL, State
from .changes import PendingChanges, counted
from .context import EngineContext
from .limiters import SharedLimiter
from .queue import JobQueue
from .settlement import Settlement
from .shard import ProcessingShard, Shard


class PersistentEngine:
    """Takes over jobs as they were stored, and claims that workers have."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self.changes = context.changes
        self._context = context
        self._settlement = settlement

    @counted
    def restore(self, jobs: Iterable[EngineJob], letters: Iterable[DeadLetterRecord] = ()) -> None:
        """Load jobs as they were stored.

        Active jobs have the tokens of their claims, get a full lease, and come before the jobs that wait for
        them or for their share of a limit.
        """
        names = set()
        unbound = []
        now = self._context.clock.now()
        for job in jobs:
            shard = self._context.shard(job.queue)
            with shard.lock:
                queue = shard.queue(job.queue)
                names.add(job.queue)
                queue.keep(job)
                if job.state in TERMINAL:
                    if job.state is not State.FAILED:
                        queue.finished.add(job)
                    continue
                if job.options.depends_on and job.state is State.BLOCKED:
                    job.unmet = set(job.options.depends_on)
                if job.options.unique_key is None:
                    pass
                elif (owner := queue.unique.owner(job.options.unique_key, now)) is None:
                    queue.unique.take(job)
                elif owner.state is State.ACTIVE and job.state is State.BLOCKED:
                    job.unmet = {PREDECESSOR, *(job.unmet or ())}
                    queue.unique.wait(job, owner)
                if job.state is State.ACTIVE:
                    self._resume(queue, job)
                    continue
                queue.watch_deadline(job)
                stored_state = job.state
                if stored_state is State.WAITING:
                    job.run_at = min(job.run_at, now)  # The wall clock may have been set back.
                queue.place(job, now)
                if queue.drops is not None:
                    queue.drops.push(job, queue.pending)
                if job.state is not stored_state:
                    queue.changed(job)  # It is due by now.
                if job.unmet:
                    unbound.append(job)
        for letter in letters:
            shard = self._context.shard(letter.queue)
            with shard.lock:
                queue = shard.queue(letter.queue)
                if letter.id in queue.jobs:
                    queue.dead.restore(letter, queue.jobs[letter.id])
                    queue.finished.note_failed([queue.jobs[letter.id]])
        for job in unbound:
            keys = tuple((job.unmet or set()) - {PREDECESSOR})
            missing = end_without_record(job, self._states(keys))
            self._settlement.bind(job, keys, missing=missing)
        changes = PendingChanges(now)
        changes.woken.update(names)
        self._settlement.settle(changes)

    def _states(self, keys: Iterable[JobKey]) -> list[State]:
        """Return the states of the jobs among these that have a record."""
        found = (self._context.shard(name).find(name).jobs.get(job_id) for name, job_id in keys)
        return [job.state for job in found if job is not None]

    def _resume(self, queue: JobQueue, job: EngineJob) -> None:
        """Continue a claim that another engine made, and count it against all limits."""
        self._hold(queue, job)
        if job.options.concurrency_key is not None and queue.is_grouped:
            queue.groups.resume(job)
        if queue.shared is not None:
            queue.shared.take(job.options.weight)

    def _hold(self, queue: JobQueue, job: EngineJob) -> None:
        job.lease_until = self._context.clock.monotonic() + queue.policy.lease
        processing = self._context.processing_shard(job.id)
        with processing.lock:
            processing.hold(job)
        self._context.start_tokens_above(job.token)

    @counted
    def adopt(self, claimed: Claimed, worker: str, process: str) -> bool:
        """Continue a claim that a worker has, whatever the tables know of it; return whether it holds.

        It does not if the job has been claimed again, or if the attempt has ended.
        """
        context = self._context
        changes = PendingChanges(context.clock.now())
        shard, processing = context.shard(claimed.queue), context.processing_shard(claimed.id)
        with shard.lock:
            queue = shard.queue(claimed.queue)
            job = queue.jobs.get(claimed.id)
            if job is None:
                job = self._claimed_job(queue, claimed)
            elif job.state in TERMINAL or max(job.token, job.last_token) >= claimed.token:
                return job.state is State.ACTIVE and job.token == claimed.token
            elif job.state is State.ACTIVE:
                with processing.lock:
                    processing.release(job.token, job.queue, job.id)
            else:
                queue.displace(job, changes)
            is_counted = job.state is State.ACTIVE
            job.state = State.ACTIVE
            job.token, job.attempts = claimed.token, claimed.attempts
            job.failures, job.stalls = claimed.failures, claimed.stalls
            job.worker, job.process = worker, process
            job.started_at = changes.now
            job.cancel_requested = False
            if is_counted:
                self._hold(queue, job)
            else:
                self._resume(queue, job)
            queue.changed(job)
        self._settlement.settle(changes)
        return True

    def _claimed_job(self, queue: JobQueue, claimed: Claimed) -> EngineJob:
        """Add the job of a claim whose row was never written."""
        at = claimed.created_at
        job = EngineJob(
            claimed.id, queue.name, claimed.name, claimed.payload, claimed.options, State.WAITING, at, at
        )
        queue.keep(job)
        key = job.options.unique_key
        if key is not None and queue.unique.owner(key, self._context.clock.now()) is None:
            queue.unique.take(job)
        if self._context.journal is not None:
            self._context.journal.added([job])
        return job


class EngineReplacement:
    """An empty copy of an engine to be filled, and put in place of the engine's contents.

    It has the configuration, the clocks and the tokens of the engine, and sends no events.
    """

    def __init__(self, context: EngineContext) -> None:
        self._live = context
        self.context = twin = copy.copy(context)
        twin.limiters = {
            name: SharedLimiter(limiter.policy, context.clock) for name, limiter in context.limiters.items()
        }
        twin.shards = [Shard(None, twin.new_queue) for _ in context.shards]
        twin.processing = [ProcessingShard() for _ in context.processing]
        self.settlement = Settlement(twin)
        self.persistence = PersistentEngine(twin, self.settlement)

    def replace(self, settlement: Settlement, is_allowed: Callable[[], bool]) -> bool:
        """Put the contents in place, unless `is_allowed` returns False: it is called under all locks.

        Claims of the engine end: their outcomes are refused.

        Args:
            settlement: That of the engine; workers are woken.
        """
        live, twin = self._live, self.context
        changes = PendingChanges(live.clock.now())
        with ExitStack() as held:
            for shard in live.shards:
                held.enter_context(shard.lock)
            for processing in live.processing:
                held.enter_context(processing.lock)
            if not is_allowed():
                return False
            for old, new in zip(live.shards, twin.shards, strict=True):
                old.replace(new)
                changes.woken.update(old.queues)
            for current, other in zip(live.processing, twin.processing, strict=True):
                current.active, current.counts, current.extra = other.active, other.counts, other.extra
            # The same dict, because queues that are made later look limiters up in it.
            live.limiters.clear()
            live.limiters.update(twin.limiters)
            twin.limiters = live.limiters
        live.changes.bump()
        settlement.settle(changes)
        return True


def all_jobs(context: EngineContext) -> list[EngineJob]:
    """Return all jobs as of one moment. The caller changes none of them."""
    with ExitStack() as held:
        for shard in context.shards:
            held.enter_context(shard.lock)
        return [
            job for shard in context.shards for queue in shard.queues.values() for job in queue.jobs.values()
        ]
