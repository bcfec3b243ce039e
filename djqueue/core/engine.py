"""The in-memory engine: enqueue, claim, finish, over shards and processing shards."""

from collections.abc import Container, Sequence
from dataclasses import replace

from .base import DEFAULT_POLICY as DEFAULT_POLICY
from .capacity import full_error
from .collector import gc_paused
from .errors import OptionError, QueueFullError
from .facts import FactFinding
from .flow import Substitutes
from .job import (
    DEAD_LETTER_REASONS,
    Batch,
    Claimed,
    ClaimRequest,
    Claims,
    EngineJob,
    EnqueueResult,
    Finished,
    JobFailure,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
)
from .jobcontrols import JobControls
from .links import Linking
from .moving import Moving
from .observers import Observers
from .persistent import PersistentEngine
from .queue import JobQueue, is_expired
from .queuecontrols import QueueControls
from .reads import Reads
from .ready import ReadyJobs
from .shard import NO_RIVAL, PendingChanges, Shard
from .sharing import SharedLimiter
from .states import REUSABLE, State
from .streams import Streams
from .versions import counted


@counted
class Engine(
    JobControls, Moving, QueueControls, Reads, FactFinding, Linking, Streams, Observers, PersistentEngine
):
    """All queues of one process.

    policies: what single queues are configured to do; `default_policy` is for the others.
    limiters: what those that queues share are configured to allow.
    journal: told of every change; None for jobs that live in memory alone.
    keep_finished: whether records of ended jobs expire here; else the journal's owner evicts them.
    cores: decides the number of shards, which is then fixed.
    """

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs; one answer for each, in order. A duplicate is an answer, not an error.

        Raises QueueFullError, with none of a batch enqueued.
        """
        self._check(batches)
        with gc_paused(sum(len(batch.payloads) for batch in batches)):
            if len(batches) == 1:
                return self._enqueue(batches[0])
            results: list[EnqueueResult] = []
            substitutes = Substitutes()
            for batch in batches:
                answers = self._enqueue(substitutes.in_(batch))
                substitutes.note(batch, answers)
                results += answers
        return results

    def _enqueue(self, batch: Batch) -> list[EnqueueResult]:
        changes = PendingChanges()
        shard = self.shard(batch.queue)
        options = batch.options
        is_timed = batch.delay or options.ttl is not None or options.unique_ttl is not None
        now = self._now_for_lengths() if is_timed else self.clock.now()
        added: list[EngineJob] = []
        with shard.lock:
            queue = shard.queue(batch.queue)
            if queue.policy.max_size is not None and queue.drops is None and batch.options.rejected is None:
                check_room(queue, batch, now)
            if is_uniform(batch) and queue.drops is None:
                answers = self._enqueue_uniform(shard, queue, batch, now, changes)
            else:
                answers, added = self._enqueue_each(shard, queue, batch, now, changes)
        self.settle(changes)
        if batch.options.depends_on:
            for job in added:
                self.bind(job, batch.options.depends_on)
        return answers

    def _enqueue_uniform(
        self, shard: Shard, queue: JobQueue, batch: Batch, now: int, changes: PendingChanges
    ) -> list[EnqueueResult]:
        name, options, label = batch.name, batch.options, queue.name
        ids = self._ids.many(len(batch.payloads), now)
        jobs = [
            EngineJob(job_id, label, name, payload, options, State.WAITING, now, now)
            for job_id, payload in zip(ids, batch.payloads, strict=True)
        ]
        queue.jobs.update(zip(ids, jobs, strict=True))
        if options.subject is not None:
            queue.subjects.add(jobs, options.subject)
        queue.ready.extend(jobs, name, options.priority)
        queue.tally.enqueued += len(jobs)
        if self._journal is not None:
            self._journal.added(jobs)
        if queue.observed:
            for job in jobs:
                shard.tell(queue, job, "queued", now, changes)
        changes.woken.add(label)
        new = tuple.__new__
        return [new(EnqueueResult, (job_id, "queued", label, None, None, None)) for job_id in ids]

    def _enqueue_each(
        self, shard: Shard, queue: JobQueue, batch: Batch, now: int, changes: PendingChanges
    ) -> tuple[list[EnqueueResult], list[EngineJob]]:
        options = batch.options if not batch.delay else replace(batch.options, delay=batch.delay)
        run_at = batch.run_at if batch.run_at is not None else now + (batch.delay or 0)
        ids = batch.ids if batch.ids is not None else self._ids.many(len(batch.payloads), now)
        results: list[EnqueueResult] = []
        added: list[EngineJob] = []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            there = queue.jobs.get(job_id)
            # Once: a job that is active now may have completed at the next look.
            state = there.state if there is not None else None
            if there is not None and options.rejected is not None:
                results.append(EnqueueResult(job_id, "rejected", queue.name, state))
                continue
            if there is not None and state not in REUSABLE:
                done = state is State.COMPLETED
                status, result = ("completed", there.result) if done else ("duplicate", None)
                results.append(EnqueueResult(job_id, status, queue.name, state, result))
                continue
            job = EngineJob(job_id, queue.name, batch.name, payload, options, State.WAITING, now, run_at)
            if options.rejected is not None:
                if self._journal is not None:
                    self._journal.added([job])
                shard.reject(queue, job, now, changes)
                results.append(EnqueueResult(job_id, "rejected", queue.name))
                continue
            rivals = NO_RIVAL
            if options.unique_key is not None:
                owner = queue.unique.owner(options.unique_key, now)
                if owner is not None:
                    found = shard.succeed(queue, job, owner, now, changes)
                    if found is None:
                        results.append(EnqueueResult(owner.id, "duplicate", queue.name, owner.state))
                        continue
                    rivals = found
            grows = queue.drops is not None and rivals.replaced is None
            if grows and not shard.make_room(queue, options.priority, now, changes):
                # Then none was before it either: it would be one that may be dropped.
                raise full(queue, len(batch.payloads))
            if there is not None:
                job.has_dependents = shard.make_way(queue, there, now, changes)
            queue.admit(job, now, behind=rivals.behind)
            queue.tally.enqueued += 1
            added.append(job)
            shard.tell(queue, job, "queued", now, changes)
            replaced = rivals.replaced.id if rivals.replaced is not None else None
            results.append(EnqueueResult(job_id, "queued", queue.name, replaced=replaced))
        if added:
            changes.woken.add(queue.name)
            if self._journal is not None:
                self._journal.added(added)
        return results, added

    # Claim and finish.

    def claim(self, request: ClaimRequest) -> Claims:
        """Waiting jobs to active, as many as the request has slots, each under a lease and a token.

        Queues take turns in being served first; within a queue, priority decides, then arrival. A job with
        a stalled attempt is claimed alone, or not at all if the request says so.
        """
        claimed: list[Claimed] = []
        hints: list[int] = []
        now, tick = self.clock.now(), self.clock.monotonic()
        self.notice_step(now, tick)
        for shard, queue in self._serving(request.queues):
            slots = request.slots - len(claimed)
            if slots <= 0:
                break
            if not queue.ready.size and not queue.delayed.size and not queue.groups.rests:
                continue
            changes = PendingChanges()
            with shard.lock:
                if shard.queues.get(queue.name) is not queue:
                    continue  # obliterated since
                hint = self._take(shard, queue, request, slots, now, tick, claimed, changes)
            if hint is not None:
                hints.append(hint)
            self.settle(changes)
            if claimed and claimed[-1].stalls:
                break
        return Claims(claimed, min(hints, default=None))

    def _take(
        self,
        shard: Shard,
        queue: JobQueue,
        request: ClaimRequest,
        slots: int,
        now: int,
        tick: int,
        claimed: list[Claimed],
        changes: PendingChanges,
    ) -> int | None:
        """Claim from one queue; milliseconds until the clock alone may bring more, if it may."""
        if queue.paused:
            return None
        if queue.delayed.size:
            shard.promote_due(queue, now, changes)
        limiter, shared, groups = queue.limiter, queue.shared, queue.groups
        parked, found = groups.parked, len(claimed)
        if groups.rests:
            queue.end_rests(tick)
        hints = []
        names = request.names
        while slots > 0 and queue.ready.size:
            most = slots
            if queue.ready.stalled and request.stalled:
                names = queue.ready.with_stalled(request.names)
                # One at a time, up to the first with a stalled attempt.
                head, most = queue.ready.head(names), 1
                if head is not None and head.stalls and claimed:
                    if self._may_start(queue, head, tick):
                        hints.append(0)
                    break
            if shared is not None:
                is_served = len(claimed) > found
                most, weight = _reserve(queue, shared, names, most, tick, changes, is_served)
                if not most:
                    break
            if limiter.bucket is None and limiter.concurrency is None:
                jobs = queue.ready.pop(most, names)
            else:
                jobs = self._allowed(queue, names, most, tick)
            started = 0
            if jobs:
                started = self._start(shard, queue, jobs, request, now, tick, claimed, changes)
                limiter.started(started)
            if shared is not None and started < most:
                shared.give_back(queue.name, most - started, weight, changes.woken)
            if not jobs:
                break
            slots -= started  # Others take the place of those that had expired.
            if started and claimed[-1].stalls:
                break
        if groups.parked < parked and queue.ready.size:
            changes.woken.add(queue.name)
        bucket = limiter.bucket
        if bucket is not None and queue.ready.has(names) and (wait := bucket.wait(tick)):
            hints.append(wait)
        if shared is not None and slots > 0 and queue.ready.has(names):
            hints += shared.waits(queue.name, tick)
        if (due := queue.delayed.next_due()) is not None:
            hints.append(max(0, due - now))
        if groups.rests and (rested := groups.rests.next()) is not None:
            hints.append(max(0, rested - tick))
        return min(hints, default=None)

    def _allowed(self, queue: JobQueue, names: frozenset[str], slots: int, tick: int) -> list[EngineJob]:
        """Ready jobs, best first, that the queue's limits let start.

        One that is too heavy for what is free waits, and nobody overtakes it; one that weighs more than the
        limit counts as much as that, and so runs alone.
        """
        limiter, ready = queue.limiter, queue.ready
        most = limiter.concurrency
        if most is None:
            return ready.pop(limiter.allowance(slots, 0, tick), names)
        while True:
            taken = self.taken_in(queue.name)
            # Whoever ends a run frees its place first and looks at this then: one of both sees the other.
            is_full = most - taken <= slots or ready.heavy > 0
            if is_full and not limiter.full:
                limiter.full = True
                continue
            limiter.full = is_full
            allowed = limiter.allowance(slots, taken, tick)
            if ready.heavy:
                return _fitting(ready, names, allowed, most, taken)
            return ready.pop(allowed, names)

    def _may_start(self, queue: JobQueue, job: EngineJob, tick: int) -> bool:
        """Whether the queue's own limits would let a ready job start."""
        limiter, most = queue.limiter, queue.limiter.concurrency
        if limiter.bucket is not None and limiter.bucket.wait(tick):
            return False
        return most is None or self.taken_in(queue.name) + min(job.options.weight, most) <= most

    def _start(
        self,
        shard: Shard,
        queue: JobQueue,
        jobs: list[EngineJob],
        request: ClaimRequest,
        now: int,
        tick: int,
        claimed: list[Claimed],
        changes: PendingChanges,
    ) -> int:
        lease = queue.policy.lease
        until = tick + lease
        journal, observed = self._journal, queue.observed
        tokens, processing, mask = self._tokens, self.processing, self._mask
        worker, process = request.worker, request.process
        new = tuple.__new__
        started = 0
        grouped = len(queue.groups) > 0
        for job in jobs:
            if is_expired(job, now):
                # Popped, so in no structure: as if it had been active.
                queue.ready.push(job)
                shard.fail_pending(queue, job, "ttl_expired", EXPIRED, now, changes)
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
            place = processing[hash(job.id) & mask]
            with place.lock:
                place.hold(job)
            if grouped and job.options.group is not None:
                queue.claimed(job)
            if journal is not None:
                journal.changed(job)
            if observed:
                shard.tell(queue, job, "active", now, changes)
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

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """End runs, each if its token still holds, and claim the next jobs in the same call."""
        changes = PendingChanges()
        is_timed = False
        for outcome in outcomes:
            if outcome.kind not in OUTCOMES:
                raise OptionError(f"unknown outcome {outcome.kind!r}")
            if outcome.delay:
                is_timed = True
        now = self._now_for_lengths() if is_timed else self.clock.now()
        accepted = [self._finish_one(outcome, now, changes) for outcome in outcomes]
        some = changes.events or changes.ended or changes.woken
        if some or changes.incidents or changes.unbound or changes.freed:
            self.settle(changes)
        return Finished(accepted, self.claim(then) if then is not None else NO_CLAIMS)

    def _finish_one(self, outcome: Outcome, now: int, changes: PendingChanges) -> bool:
        place = self.processing[hash(outcome.id) & self._mask]
        shard = self.shard(outcome.queue)
        queue = shard.queues.get(outcome.queue)
        if queue is None:
            return False
        if outcome.kind == "complete":
            with place.lock:
                job = place.active.get(outcome.token)
                if job is None:
                    return False
                if job.options.plain and not job.has_dependents:
                    if place.release(outcome.token, outcome.queue, outcome.id) is None:
                        return False
                    shard.complete(queue, job, outcome.result, now, changes)
                    return True
        with shard.lock:
            with place.lock:
                job = place.release(outcome.token, outcome.queue, outcome.id)
            if job is None:
                return False
            self._apply(shard, queue, job, outcome, now, changes)
        return True

    def _apply(
        self,
        shard: Shard,
        queue: JobQueue,
        job: EngineJob,
        outcome: Outcome,
        now: int,
        changes: PendingChanges,
    ) -> None:
        if outcome.kind == "complete":
            shard.complete(queue, job, outcome.result, now, changes)
        elif outcome.kind == "fail":
            reason = outcome.reason if outcome.reason in DEAD_LETTER_REASONS else "unknown"
            shard.fail_active(queue, job, reason, outcome.error, now, changes)
        elif outcome.kind == "cancel" or job.cancel_requested:
            shard.cancel_active(queue, job, outcome.reason or "cancelled", now, changes)
            if outcome.kind != "cancel":
                shard.incident(job, "cancelled", changes)  # of which the worker does not know
        else:
            word = "retried" if outcome.kind == "retry" else "released"
            shard.put_back(queue, job, word, outcome.delay, outcome.error, now, changes)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims to a whole lease from now, each if its token still holds."""
        tick = self.clock.monotonic()
        renewals = []
        for lease in leases:
            place = self.place(lease.id)
            with place.lock:
                job = place.active.get(lease.token)
                if job is None or job.id != lease.id or job.queue != lease.queue:
                    renewals.append(Renewal(False))
                    continue
                job.lease_until = tick + self.policy(job.queue).lease
                if self._journal is not None and job.process:
                    self._journal.renewed(job)
                renewals.append(Renewal(True, job.cancel_requested))
        return renewals

    def renew_all(self) -> None:
        """Extend all claims to a whole lease from now."""
        tick = self.clock.monotonic()
        for place in self.processing:
            with place.lock:
                for job in place.active.values():
                    job.lease_until = tick + self.policy(job.queue).lease

    def postpone_leases(self, by: int) -> None:
        """Extend all claims: for so many milliseconds nobody could renew them."""
        for place in self.processing:
            with place.lock:
                for job in place.active.values():
                    job.lease_until += by

    def processes(self) -> set[str]:
        """Return the processes that hold claims, without the engine's own."""
        found: set[str] = set()
        for place in self.processing:
            with place.lock:
                found.update(job.process for job in place.active.values())
        found.discard("")
        return found

    def end_leases(self, processes: Container[str], tick: int) -> None:
        """Let the claims of some processes run out by a monotonic time: the next sweep takes them back."""
        for place in self.processing:
            with place.lock:
                for job in place.active.values():
                    if job.process in processes:
                        job.lease_until = min(job.lease_until, tick)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """Progress and log lines of running jobs, each if its token still holds."""
        changes = PendingChanges()
        now = self.clock.now()
        accepted = []
        for report in reports:
            shard = self.shard(report.queue)
            queue = shard.queues.get(report.queue)
            place = self.place(report.id)
            with place.lock:
                job = place.active.get(report.token)
                if queue is None or job is None or job.id != report.id or job.queue != report.queue:
                    accepted.append(False)
                    continue
                if report.progress is not None:
                    job.progress = report.progress
                if report.lines:
                    most = queue.policy.retention.logs.count
                    job.logs = [*(job.logs or ()), *report.lines][-most:]
                if self._journal is not None:
                    self._journal.reported(job, report.lines)
                if report.progress is not None:
                    shard.tell(queue, job, "progress", now, changes)
            accepted.append(True)
        self.settle(changes)
        return accepted


def check_room(queue: JobQueue, batch: Batch, now: int) -> None:
    """Raise QueueFullError if a batch's new jobs are more than the queue may take."""
    most = queue.policy.max_size
    assert most is not None
    room = most - queue.pending
    if len(batch.payloads) > room and growth(queue, batch, now) > max(0, room):
        raise full(queue, len(batch.payloads))


def growth(queue: JobQueue, batch: Batch, now: int) -> int:
    """How many more jobs would wait if a batch were enqueued: not counting duplicates and replacements."""
    key, policy = batch.options.unique_key, batch.options.on_duplicate
    new = len(batch.payloads)
    if batch.ids is not None:
        known = ((job_id, queue.jobs.get(job_id)) for job_id in batch.ids)
        new = len({job_id for job_id, job in known if job is None or job.state in REUSABLE})
    if key is None or not new:
        return new
    owner = queue.unique.owner(key, now)
    if owner is None:
        return 1
    follows = owner.state is State.ACTIVE and policy == "keep_last_if_active"
    return int(follows and queue.unique.waiting(key) is None)


def full(queue: JobQueue, count: int) -> QueueFullError:
    """What a caller gets whose jobs have no room."""
    return full_error(queue.name, queue.policy.max_size, count)


def is_uniform(batch: Batch) -> bool:
    """Whether a batch's jobs are all new and go, as they are, to the end of one list."""
    options = batch.options
    return (
        batch.ids is None
        and not batch.delay
        and batch.run_at is None
        and options.plain
        and options.weight == 1
        and not options.lifo
        and options.ttl is None
        and not options.depends_on
    )


def _reserve(
    queue: JobQueue,
    shared: SharedLimiter,
    names: frozenset[str],
    slots: int,
    tick: int,
    changes: PendingChanges,
    is_served: bool,
) -> tuple[int, int]:
    """(how many ready jobs a shared limiter lets start, what each of them weighs)."""
    ready = queue.ready
    wanted, weight = min(slots, ready.size), 1
    if not ready.has(names):
        return 0, 1
    if ready.heavy and (head := ready.head(names)) is not None:
        wanted, weight = 1, head.options.weight
    granted = shared.reserve(queue.name, wanted, weight, tick, changes.woken, is_served=is_served)
    return granted, weight


def _fitting(ready: ReadyJobs, names: frozenset[str], many: int, most: int, taken: int) -> list[EngineJob]:
    """Ready jobs, best first, up to the first that `most` slots, of which some are taken, cannot hold."""
    jobs: list[EngineJob] = []
    while len(jobs) < many and (head := ready.head(names)) is not None:
        taken += min(head.options.weight, most)
        if taken > most:
            break
        jobs += ready.pop(1, names)
    return jobs


OUTCOMES = frozenset({"complete", "retry", "release", "fail", "cancel"})
NO_CLAIMS = Claims([], None)
EXPIRED = JobFailure("djqueue.core.errors.JobTimeoutError", "its ttl was over before it started")
