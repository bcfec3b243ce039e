"""Claims: which waiting jobs become active, within the limits of their queues."""

from ..enginejob import EngineJob
from ..job import Claimed, ClaimRequest, Claims, JobFailure
from ..policies import standing
from ..states import State
from .changes import PendingChanges
from .context import EngineContext
from .joblists import STALLED, ReadyJobs
from .limiters import SharedLimiter
from .queue import JobQueue, is_expired
from .settlement import Settlement

EXPIRED = JobFailure("djqueue.core.errors.JobTimeoutError", "the ttl expired before the job started")


class Claimer:
    """Moves waiting jobs to active, each with a lease and a token."""

    def __init__(self, context: EngineContext, settlement: Settlement) -> None:
        self._context = context
        self._settlement = settlement

    def claim(self, request: ClaimRequest) -> Claims:
        """Move waiting jobs to active: see `Engine.claim`."""
        claimed: list[Claimed] = []
        hints: list[int] = []
        now, tick = self._context.clock.now(), self._context.clock.monotonic()
        for shard, queue in self._context.serving(request.queues):
            slots = request.slots - len(claimed)
            if slots <= 0:
                break
            if not queue.ready.size and not queue.delayed.size and not queue.groups.rests:
                continue
            changes = PendingChanges(now)
            with shard.lock:
                if shard.queues.get(queue.name) is not queue:
                    continue  # It was obliterated in the meantime.
                hint = self._take(queue, request, slots, tick, claimed, changes)
            if hint is not None:
                hints.append(hint)
            self._settlement.settle(changes)
            if claimed and claimed[-1].stalls:
                break
        return Claims(claimed, min(hints, default=None))

    def _take(
        self,
        queue: JobQueue,
        request: ClaimRequest,
        slots: int,
        tick: int,
        claimed: list[Claimed],
        changes: PendingChanges,
    ) -> int | None:
        """Claim from one queue; return the milliseconds until time alone may make more jobs claimable."""
        if queue.paused:
            return None
        if queue.delayed.size:
            queue.promote_due(tick, changes)
        limiter, shared, groups = queue.limiter, queue.shared, queue.groups
        group_waiting, before = groups.group_waiting, len(claimed)
        if groups.rests:
            queue.end_rests(tick)
        hints = []
        if queue.holds:
            held = [
                hold for hold in standing(queue.holds.values(), changes.now) if hold.name in request.names
            ]
            hints += [
                hold.until - changes.now
                for hold in held
                if hold.until is not None and queue.ready.has({hold.name, hold.name + STALLED})
            ]
            request = request._replace(names=request.names - {hold.name for hold in held})
        names = request.names
        while slots > 0 and queue.ready.size:
            count = slots
            if queue.ready.stalled and request.stalled:
                names = queue.ready.with_stalled(request.names)
                # One at a time, up to the first job with a stalled attempt.
                head, count = queue.ready.head(names), 1
                if head is not None and head.stalls and claimed:
                    if self._may_start(queue, head, tick):
                        hints.append(0)
                    break
            if shared is not None:
                is_served = len(claimed) > before
                count, weight = _reserve(queue, shared, names, count, tick, changes, is_served)
                if not count:
                    break
            if limiter.bucket is None and limiter.concurrency is None:
                jobs = queue.ready.pop(count, names)
            else:
                jobs = self._allowed(queue, names, count, tick)
            started = 0
            if jobs:
                started = self._start(queue, jobs, request, tick, claimed, changes)
                limiter.started(started)
            if shared is not None and started < count:
                shared.give_back(queue.name, count - started, weight, changes.woken)
            if not jobs:
                break
            slots -= started  # Slots of expired jobs go to others.
            if started and claimed[-1].stalls:
                break
        if groups.group_waiting < group_waiting and queue.ready.size:
            changes.woken.add(queue.name)
        bucket = limiter.bucket
        if bucket is not None and queue.ready.has(names) and (wait := bucket.wait(tick)):
            hints.append(wait)
        if shared is not None and slots > 0 and queue.ready.has(names):
            hints += shared.waits(queue.name, tick)
        if (due := queue.delayed.next_due()) is not None:
            hints.append(max(0, due - changes.now))
        if groups.rests and (rested := groups.rests.next()) is not None:
            hints.append(max(0, rested - tick))
        return min(hints, default=None)

    def _allowed(self, queue: JobQueue, names: frozenset[str], slots: int, tick: int) -> list[EngineJob]:
        """Take the ready jobs, best first, that may start within the queue's limits.

        A job that weighs more than what is free waits, and no other job overtakes it. A job that weighs more
        than the limit counts as much as the limit, and so runs alone.
        """
        limiter, ready = queue.limiter, queue.ready
        concurrency = limiter.concurrency
        if concurrency is None:
            return ready.pop(limiter.allowance(slots, 0, tick), names)
        while True:
            taken = self._context.taken_in(queue.name)
            # A finish frees its slot first and reads `full` then, so that one of both sees the other.
            is_full = concurrency - taken <= slots or ready.heavy > 0
            if is_full and not limiter.full:
                limiter.full = True
                continue
            limiter.full = is_full
            allowed = limiter.allowance(slots, taken, tick)
            if ready.heavy:
                return _fitting(ready, names, allowed, concurrency, taken)
            return ready.pop(allowed, names)

    def _may_start(self, queue: JobQueue, job: EngineJob, tick: int) -> bool:
        """Return whether a ready job may start within the queue's own limits."""
        limiter, concurrency = queue.limiter, queue.limiter.concurrency
        if limiter.bucket is not None and limiter.bucket.wait(tick):
            return False
        if concurrency is None:
            return True
        return self._context.taken_in(queue.name) + min(job.options.weight, concurrency) <= concurrency

    def _start(
        self,
        queue: JobQueue,
        jobs: list[EngineJob],
        request: ClaimRequest,
        tick: int,
        claimed: list[Claimed],
        changes: PendingChanges,
    ) -> int:
        """Start jobs taken from the ready ones, and return how many; expired ones fail."""
        now, lease = changes.now, queue.policy.lease
        until = tick + lease
        context, observed = self._context, queue.observed
        journal, tokens, shards, mask = context.journal, context.tokens, context.processing, context.mask
        worker, process = request.worker, request.process
        # Faster than the constructor: this runs for every job.
        new = tuple.__new__
        started = 0
        grouped = len(queue.groups) > 0
        for job in jobs:
            if is_expired(job, now):
                # It was popped: put it back, so that it fails like any pending job.
                queue.ready.push(job)
                queue.fail_pending(job, "ttl_expired", EXPIRED, changes)
                continue
            started += 1
            job.state = State.ACTIVE
            job.attempts = attempts = job.attempts + 1
            job.token = token = next(tokens)
            job.worker = worker
            job.process = process
            job.started_at = now
            job.lease_until = until
            job.cancel_requested = False
            processing = shards[hash(job.id) & mask]
            with processing.lock:
                processing.hold(job)
            if grouped and job.options.concurrency_key is not None:
                queue.note_claimed(job)
            if journal is not None:
                journal.changed(job)
            if observed:
                queue.note(job, "started", changes)
            since = job.run_at if job.run_at > job.created_at else job.created_at
            fields = (
                job.id,
                job.queue,
                job.name,
                job.payload,
                job.options,
                token,
                attempts,
                job.failures,
                job.stalls,
                job.created_at,
                lease,
                now - since if now > since else 0,
            )
            claimed.append(new(Claimed, fields))
        queue.tally.started += started
        return started


def _reserve(
    queue: JobQueue,
    shared: SharedLimiter,
    names: frozenset[str],
    slots: int,
    tick: int,
    changes: PendingChanges,
    is_served: bool,
) -> tuple[int, int]:
    """Reserve permits of a shared limiter; return for how many ready jobs, and the weight of each."""
    ready = queue.ready
    wanted, weight = min(slots, ready.size), 1
    if not ready.has(names):
        return 0, 1
    if ready.heavy and (head := ready.head(names)) is not None:
        wanted, weight = 1, head.options.weight
    granted = shared.reserve(queue.name, wanted, weight, tick, changes.woken, is_served=is_served)
    return granted, weight


def _fitting(ready: ReadyJobs, names: frozenset[str], count: int, slots: int, taken: int) -> list[EngineJob]:
    """Take ready jobs, best first, up to the first that does not fit in `slots`, of which some are taken."""
    jobs: list[EngineJob] = []
    while len(jobs) < count and (head := ready.head(names)) is not None:
        taken += min(head.options.weight, slots)
        if taken > slots:
            break
        jobs += ready.pop(1, names)
    return jobs
