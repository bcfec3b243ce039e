"""The in-memory engine: shards, processing shards, and the verbs of the storage contract over them.

Lock order, always: a shard, then a processing shard, then a queue's finished records. Two shards'
locks are never held at once: what crosses queues (dependencies) is a step of its own on each side,
repeated until both agree.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from random import Random
from threading import Lock

from .clock import SYSTEM_CLOCK, Clock
from .errors import OptionError
from .hashing import fnv1a32, shard_count
from .ids import IdSource
from .job import (
    Batch,
    CancelResult,
    Claimed,
    ClaimRequest,
    Claims,
    DeadLetter,
    EnqueueResult,
    Event,
    Finished,
    Job,
    JobError,
    JobRecord,
    Lease,
    Outcome,
    Renewal,
    Report,
    WorkerInfo,
)
from .journal import Journal
from .limiter import Rate
from .options import JobKey
from .processing import ProcessingShard
from .queue import EventHandler, JobQueue, QueuePolicy, is_expired
from .shard import Changes, Shard
from .states import LIVE, PENDING, REUSABLE, TERMINAL, State

Wake = Callable[[], None]
Unsubscribe = Callable[[], None]

MAX_LOG_LINES = 1_000
"""Log lines kept of one job; the oldest go first."""
DEFAULT_POLICY = QueuePolicy()


class Engine:
    """All queues of one process.

    policies: what single queues are configured to do; `default_policy` is for the others.
    journal: told of every change; None for jobs that live in memory alone.
    keep_finished: whether records of ended jobs expire here; else the journal's owner evicts them.
    cores: decides the number of shards, which is then fixed.
    """

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM_CLOCK,
        ids: IdSource | None = None,
        random: Random | None = None,
        journal: Journal | None = None,
        policies: Mapping[str, QueuePolicy] | None = None,
        default_policy: QueuePolicy = DEFAULT_POLICY,
        keep_finished: bool = True,
        cores: int | None = None,
    ) -> None:
        self.clock = clock
        self.random = random or Random()
        self._ids = ids or IdSource()
        self._journal = journal
        self._policies = dict(policies or {})
        self._default_policy = default_policy
        shards = shard_count(cores if cores is not None else os.cpu_count())
        self._mask = shards - 1
        self.shards = [Shard(journal, keep_finished=keep_finished) for _ in range(shards)]
        self.processing = [ProcessingShard() for _ in range(shards)]
        # Tokens of an earlier engine, before a restart, are lower than any of this one.
        self._tokens = count(clock.now() << 20)
        self._rotation = count()
        self._listeners: list[tuple[frozenset[str] | None, Wake]] = []
        self._workers: dict[str, tuple[WorkerInfo, int]] = {}
        self._registry = Lock()

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs; one answer for each, in order. A duplicate is an answer, not an error."""
        results: list[EnqueueResult] = []
        for batch in batches:
            self._check_dependencies(batch)
        for batch in batches:
            changes = Changes()
            shard, queue = self._locate(batch.queue)
            now = self.clock.now()
            with shard.lock:
                if is_uniform(batch):
                    results += self._enqueue_uniform(shard, queue, batch, now, changes)
                    added = []
                else:
                    answers, added = self._enqueue_each(shard, queue, batch, now, changes)
                    results += answers
            self._settle(changes)
            if batch.options.depends_on:
                for job in added:
                    self._bind(job, batch.options.depends_on)
        return results

    def _enqueue_uniform(
        self, shard: Shard, queue: JobQueue, batch: Batch, now: int, changes: Changes
    ) -> list[EnqueueResult]:
        name, options, label = batch.name, batch.options, queue.name
        ids = self._ids.many(len(batch.payloads), now)
        jobs = [
            Job(job_id, label, name, payload, options, State.WAITING, now, now)
            for job_id, payload in zip(ids, batch.payloads, strict=True)
        ]
        queue.jobs.update(zip(ids, jobs, strict=True))
        queue.ready.extend(jobs, name, options.priority)
        if self._journal is not None:
            self._journal.added(jobs)
        if queue.observed:
            for job in jobs:
                shard.tell(queue, job, "queued", now, changes)
        changes.woken.add(label)
        new = tuple.__new__
        return [new(EnqueueResult, (job_id, "queued", label, None, None)) for job_id in ids]

    def _enqueue_each(
        self, shard: Shard, queue: JobQueue, batch: Batch, now: int, changes: Changes
    ) -> tuple[list[EnqueueResult], list[Job]]:
        options = batch.options
        run_at = batch.run_at if batch.run_at is not None else now + (batch.delay or 0)
        ids = batch.ids if batch.ids is not None else self._ids.many(len(batch.payloads), now)
        results: list[EnqueueResult] = []
        added: list[Job] = []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            there = queue.jobs.get(job_id)
            if there is not None and there.state not in REUSABLE:
                status = "completed" if there.state is State.COMPLETED else "duplicate"
                results.append(EnqueueResult(job_id, status, queue.name, there.state, there.result))
                continue
            if options.unique_key is not None:
                owner = queue.unique.owner(options.unique_key, now)
                if owner is not None:
                    results.append(EnqueueResult(owner.id, "duplicate", queue.name, owner.state))
                    continue
            if there is not None:
                shard.remove(queue, [there], now, changes)
            job = Job(job_id, queue.name, batch.name, payload, options, State.WAITING, now, run_at)
            self._admit(queue, job, now)
            added.append(job)
            shard.tell(queue, job, "queued", now, changes)
            results.append(EnqueueResult(job_id, "queued", queue.name))
        if added:
            changes.woken.add(queue.name)
            if self._journal is not None:
                self._journal.added(added)
        return results, added

    def _admit(self, queue: JobQueue, job: Job, now: int) -> None:
        if job.options.depends_on:
            job.unmet = set(job.options.depends_on)
        queue.jobs[job.id] = job
        queue.unique.take(job)
        queue.watch_deadline(job)
        queue.place(job, now)

    # Claim and finish.

    def claim(self, request: ClaimRequest) -> Claims:
        """Waiting jobs to active, as many as the request has slots, each under a lease and a token.

        Queues take turns in being served first; within a queue, priority decides, then arrival.
        """
        claimed: list[Claimed] = []
        hints: list[int] = []
        now, tick = self.clock.now(), self.clock.monotonic()
        for shard, queue in self._serving(request.queues):
            slots = request.slots - len(claimed)
            if slots <= 0:
                break
            if not queue.ready.size and not queue.delayed.size:
                continue
            changes = Changes()
            with shard.lock:
                hint = self._take(shard, queue, request, slots, now, tick, claimed, changes)
            if hint is not None:
                hints.append(hint)
            changes.woken.clear()
            self._settle(changes)
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
        changes: Changes,
    ) -> int | None:
        """Claim from one queue; milliseconds until the clock alone may bring more, if it may."""
        if queue.paused:
            return None
        if queue.delayed.size:
            shard.promote_due(queue, now, changes)
        limiter = queue.limiter
        if queue.ready.size:
            if limiter.bucket is not None or limiter.concurrency is not None:
                slots = limiter.allowance(slots, self.active_in(queue.name), tick)
            if slots > 0:
                jobs = queue.ready.pop(slots, request.names)
                started = self._start(shard, queue, jobs, request.worker, now, tick, claimed, changes)
                limiter.started(started)
            elif limiter.bucket is not None and (wait := limiter.bucket.wait(tick)):
                return wait
        due = queue.delayed.next_due()
        return None if due is None else max(0, due - now)

    def _start(
        self,
        shard: Shard,
        queue: JobQueue,
        jobs: list[Job],
        worker: str,
        now: int,
        tick: int,
        claimed: list[Claimed],
        changes: Changes,
    ) -> int:
        lease = queue.policy.lease
        until = tick + lease
        journal, observed = self._journal, queue.observed
        tokens, processing, mask = self._tokens, self.processing, self._mask
        new = tuple.__new__
        started = 0
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
            job.started_at = now
            job.lease_until = until
            job.cancel_requested = False
            place = processing[hash(job.id) & mask]
            with place.lock:
                place.hold(job)
            if journal is not None:
                journal.changed(job)
            if observed:
                shard.tell(queue, job, "active", now, changes)
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
            )
            claimed.append(new(Claimed, fields))
        return started

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """End runs, each if its token still holds, and claim the next jobs in the same call."""
        changes = Changes()
        now = self.clock.now()
        accepted = [self._finish_one(outcome, now, changes) for outcome in outcomes]
        if changes.events or changes.ended or changes.woken:
            self._settle(changes)
        return Finished(accepted, self.claim(then) if then is not None else NO_CLAIMS)

    def _finish_one(self, outcome: Outcome, now: int, changes: Changes) -> bool:
        place = self.processing[hash(outcome.id) & self._mask]
        shard = self.shards[fnv1a32(outcome.queue) & self._mask]
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
        self, shard: Shard, queue: JobQueue, job: Job, outcome: Outcome, now: int, changes: Changes
    ) -> None:
        if outcome.kind == "complete":
            shard.complete(queue, job, outcome.result, now, changes)
        elif outcome.kind == "fail":
            shard.fail_active(queue, job, outcome.reason or "unknown", outcome.error, now, changes)
        elif outcome.kind == "cancel" or job.cancel_requested:
            shard.cancel_active(queue, job, outcome.reason or "cancelled", now, changes)
        elif outcome.kind in ("retry", "release"):
            word = "retried" if outcome.kind == "retry" else "released"
            shard.put_back(queue, job, word, outcome.delay, outcome.error, now, changes)
        else:
            with self._place(job.id).lock:
                job.token = next(self._tokens)
                self._place(job.id).hold(job)
            raise ValueError(f"unknown outcome {outcome.kind!r}")

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """Extend claims to a whole lease from now, each if its token still holds."""
        tick = self.clock.monotonic()
        renewals = []
        for lease in leases:
            place = self._place(lease.id)
            with place.lock:
                job = place.active.get(lease.token)
                if job is None:
                    renewals.append(Renewal(False))
                    continue
                job.lease_until = tick + self.policy(job.queue).lease
                renewals.append(Renewal(True, job.cancel_requested))
        return renewals

    def report(self, reports: Sequence[Report]) -> list[bool]:
        """Progress and log lines of running jobs, each if its token still holds."""
        changes = Changes()
        now = self.clock.now()
        accepted = []
        for report in reports:
            shard, queue = self._locate(report.queue)
            place = self._place(report.id)
            with place.lock:
                job = place.active.get(report.token)
                if job is None or job.id != report.id or job.queue != report.queue:
                    accepted.append(False)
                    continue
                if report.progress is not None:
                    job.progress = report.progress
                if report.lines:
                    job.logs = [*(job.logs or ()), *report.lines][-MAX_LOG_LINES:]
                if self._journal is not None:
                    self._journal.reported(job, report.lines)
                if report.progress is not None:
                    shard.tell(queue, job, "progress", now, changes)
            accepted.append(True)
        self._settle(changes)
        return accepted

    # Single jobs.

    def cancel(self, queue_name: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """Take jobs back: a pending one never starts, an active one is asked to stop."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        now = self.clock.now()
        results = []
        with shard.lock:
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None:
                    results.append(CancelResult(job_id, "not_found"))
                elif job.state in PENDING:
                    shard.cancel_pending(queue, job, reason, now, changes)
                    results.append(CancelResult(job_id, "cancelled"))
                elif job.state is State.ACTIVE:
                    job.cancel_requested = True
                    shard.tell(queue, job, "cancel_requested", now, changes)
                    results.append(CancelResult(job_id, "requested"))
                else:
                    results.append(CancelResult(job_id, str(job.state)))
        self._settle(changes)
        return results

    def promote(self, queue_name: str, ids: Sequence[str]) -> list[bool]:
        """Delayed jobs to waiting, now; False for one that is not delayed."""
        now = self.clock.now()
        return self._move(queue_name, ids, now, "promoted", frozenset({State.DELAYED}))

    def reschedule(self, queue_name: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """Jobs that have not started to another time (UTC milliseconds); False for the others."""
        states = frozenset({State.DELAYED, State.WAITING})
        return self._move(queue_name, ids, run_at, "delayed", states)

    def _move(
        self, queue_name: str, ids: Sequence[str], run_at: int, event: str, states: frozenset[State]
    ) -> list[bool]:
        changes = Changes()
        shard, queue = self._locate(queue_name)
        now = self.clock.now()
        moved = []
        with shard.lock:
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is not None and job.state in states:
                    shard.move(queue, job, run_at, event, now, changes)
                    moved.append(True)
                else:
                    moved.append(False)
        self._settle(changes)
        return moved

    def retry(self, queue_name: str, ids: Sequence[str], *, by_itself: bool = False) -> list[str]:
        """Dead letters back to waiting: retried | not_found | not_failed | unique_key_taken, for each."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        now = self.clock.now()
        answers = []
        with shard.lock:
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None:
                    answers.append("not_found")
                elif job.state is not State.FAILED:
                    answers.append("not_failed")
                elif (key := job.options.unique_key) is not None and queue.unique.owner(key, now):
                    answers.append("unique_key_taken")
                else:
                    shard.revive(queue, job, now, changes, by_itself=by_itself)
                    answers.append("retried")
        self._settle(changes)
        return answers

    def remove(self, queue_name: str, ids: Sequence[str]) -> list[bool]:
        """Forget jobs that are not active; False for one that is, or that is not there."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        now = self.clock.now()
        removed = []
        with shard.lock:
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None or job.state is State.ACTIVE:
                    removed.append(False)
                else:
                    shard.remove(queue, [job], now, changes)
                    removed.append(True)
        self._settle(changes)
        return removed

    # Queues.

    def configure(self, queue_name: str, policy: QueuePolicy) -> None:
        """Give a queue another policy, at once."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        with shard.lock:
            self._policies[queue_name] = policy
            queue.policy = policy
            queue.dead.policy = policy.dead_letters
            queue.limiter.set(policy.rate, policy.concurrency, self.clock.monotonic())
            for job in queue.groups.resize(policy.group_concurrency):
                queue.ready.push(job)
            changes.woken.add(queue_name)
        self._settle(changes)

    def set_limits(self, queue_name: str, rate: Rate | None, concurrency: int | None) -> None:
        """Change the limits of a queue while it runs."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        with shard.lock:
            queue.limiter.set(rate, concurrency, self.clock.monotonic())
            changes.woken.add(queue_name)
        self._settle(changes)

    def pause(self, queue_name: str) -> None:
        """Nothing of the queue is claimed until `resume`; enqueues go on, and so do running jobs."""
        shard, queue = self._locate(queue_name)
        with shard.lock:
            queue.paused = True

    def resume(self, queue_name: str) -> None:
        """End a pause."""
        changes = Changes()
        shard, queue = self._locate(queue_name)
        with shard.lock:
            queue.paused = False
            changes.woken.add(queue_name)
        self._settle(changes)

    def is_paused(self, queue_name: str) -> bool:
        """Whether the queue is paused."""
        queue = self._existing(queue_name)
        return queue is not None and queue.paused

    def limits(self, queue_name: str) -> tuple[Rate | None, int | None]:
        """Rate and concurrency of the queue, as they are now."""
        queue = self._existing(queue_name)
        if queue is None:
            return None, None
        bucket = queue.limiter.bucket
        return bucket.rate if bucket is not None else None, queue.limiter.concurrency

    def clean(
        self, queue_name: str, states: frozenset[State], before: int, limit: int | None = None
    ) -> int:
        """Forget jobs in these states (not active) that ended, or were enqueued, before a time.

        Returns how many. `before` is in UTC milliseconds.
        """
        changes = Changes()
        shard, queue = self._locate(queue_name)
        with shard.lock:
            jobs = [
                job
                for job in queue.jobs.values()
                if job.state in states
                and job.state is not State.ACTIVE
                and (job.finished_at or job.created_at) < before
            ][:limit]
            shard.remove(queue, jobs, self.clock.now(), changes)
        self._settle(changes)
        return len(jobs)

    def obliterate(self, queue_name: str, *, force: bool = False) -> int:
        """Forget a queue and all its jobs; with active ones only by `force`, whose ends are then refused.

        Returns how many jobs are gone, or -1 if active ones forbade it.
        """
        changes = Changes()
        shard, queue = self._locate(queue_name)
        now = self.clock.now()
        with shard.lock:
            active = [job for job in queue.jobs.values() if job.state is State.ACTIVE]
            if active and not force:
                return -1
            for job in active:
                place = self._place(job.id)
                with place.lock:
                    released = place.release(job.token, queue.name, job.id)
                if released is not None:
                    shard.cancel_active(queue, job, "obliterated", now, changes)
            jobs = list(queue.jobs.values())
            shard.remove(queue, jobs, now, changes)
            if not queue.observed:
                del shard.queues[queue_name]
        changes.woken.clear()
        self._settle(changes)
        return len(jobs)

    # Reads.

    def queues(self) -> list[str]:
        """Names of the queues that have been used."""
        return sorted(name for shard in self.shards for name in list(shard.queues))

    def jobs(self, queue_name: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """Records as they are now."""
        shard, queue = self._locate(queue_name)
        records: list[JobRecord | None] = []
        with shard.lock:
            for job_id in ids:
                job = queue.jobs.get(job_id)
                if job is None:
                    records.append(None)
                    continue
                with self._place(job_id).lock:
                    records.append(job.record())
        return records

    def states(self, queue_name: str, ids: Sequence[str]) -> list[State | None]:
        """States as they are now."""
        queue = self._existing(queue_name)
        if queue is None:
            return [None] * len(ids)
        return [job.state if (job := queue.jobs.get(job_id)) is not None else None for job_id in ids]

    def counts(self, queue_name: str) -> dict[State, int]:
        """How many jobs of the queue are in each state."""
        queue = self._existing(queue_name)
        if queue is None:
            return dict.fromkeys(State, 0)
        return {
            State.WAITING: queue.waiting,
            State.DELAYED: queue.delayed.size,
            State.BLOCKED: queue.blocked,
            State.ACTIVE: self.active_in(queue_name),
            State.COMPLETED: queue.finished.counts[State.COMPLETED],
            State.FAILED: len(queue.dead),
            State.CANCELLED: queue.finished.counts[State.CANCELLED],
        }

    def waiting_names(self, queue_name: str) -> dict[str, int]:
        """Jobs ready to be claimed, by job name: shows those that no worker handles."""
        queue = self._existing(queue_name)
        return {} if queue is None else queue.ready.counts()

    def page(
        self, queue_name: str, state: State | None, limit: int, after: str | None = None
    ) -> list[JobRecord]:
        """Records of one state (None: of all) in order of time and id, `limit` at most, after an id."""
        shard, queue = self._locate(queue_name)
        with shard.lock:
            jobs = [job for job in queue.jobs.values() if state is None or job.state is state]
            jobs.sort(key=lambda job: (job.created_at, job.id))
            start = 0
            if after is not None:
                start = next((at for at, job in enumerate(jobs, 1) if job.id == after), len(jobs))
            return [job.record() for job in jobs[start : start + limit]]

    def dead_letters(self, queue_name: str) -> list[DeadLetter]:
        """The queue's dead letters, oldest first."""
        queue = self._existing(queue_name)
        return [] if queue is None else queue.dead.letters()

    def active_in(self, queue_name: str) -> int:
        """Active jobs of a queue."""
        return sum(place.counts.get(queue_name, 0) for place in self.processing)

    # Subscriptions.

    def listen(self, queues: Iterable[str] | None, wake: Wake) -> Unsubscribe:
        """Call `wake`, from any thread, when a job of these queues (None: any) may be claimable."""
        entry = (None if queues is None else frozenset(queues), wake)
        with self._registry:
            self._listeners = [*self._listeners, entry]
        return lambda: self._unlisten(entry)

    def _unlisten(self, entry: tuple[frozenset[str] | None, Wake]) -> None:
        with self._registry:
            self._listeners = [other for other in self._listeners if other is not entry]

    def subscribe(
        self, queue_name: str, handler: EventHandler, job_id: str | None = None
    ) -> Unsubscribe:
        """Call `handler`, from any thread, for each event of a queue, or of one job of it."""
        shard, queue = self._locate(queue_name)
        with shard.lock:
            if job_id is None:
                queue.handlers = [*queue.handlers, handler]
            else:
                queue.watchers[job_id] = [*queue.watchers.get(job_id, ()), handler]

        def unsubscribe() -> None:
            with shard.lock:
                if job_id is None:
                    queue.handlers = [entry for entry in queue.handlers if entry is not handler]
                    return
                left = [entry for entry in queue.watchers.get(job_id, ()) if entry is not handler]
                if left:
                    queue.watchers[job_id] = left
                else:
                    queue.watchers.pop(job_id, None)

        return unsubscribe

    # Workers.

    def register_worker(self, info: WorkerInfo) -> None:
        """Note a worker, or that it is alive."""
        with self._registry:
            seen = info._replace(seen_at=self.clock.now())
            self._workers[info.id] = (seen, self.clock.monotonic())

    def unregister_worker(self, worker_id: str) -> None:
        """Forget a worker that has stopped."""
        with self._registry:
            self._workers.pop(worker_id, None)

    def workers(self) -> list[WorkerInfo]:
        """The workers that have been heard of lately."""
        with self._registry:
            return [info for info, _ in self._workers.values()]

    def forget_workers(self, older_than: int) -> list[WorkerInfo]:
        """Forget those not heard of for so many milliseconds; returns them."""
        tick = self.clock.monotonic()
        with self._registry:
            gone = [info for info, seen in self._workers.values() if tick - seen > older_than]
            for info in gone:
                del self._workers[info.id]
        return gone

    # Records that are kept elsewhere.

    def restore(self, jobs: Iterable[Job], letters: Iterable[DeadLetter] = ()) -> int:
        """Take in jobs as they were kept; one whose id is already here is passed over.

        The caller has given every job a state that is not active. A dependency that is not known any
        more has completed: had it ended otherwise, its dependent would have ended with it. Returns how
        many are new here.
        """
        restored = []
        for job in jobs:
            shard, queue = self._locate(job.queue)
            now = self.clock.now()
            with shard.lock:
                if job.id in queue.jobs:
                    continue
                restored.append(job)
                queue.jobs[job.id] = job
                if job.state in TERMINAL:
                    if job.state is not State.FAILED:
                        queue.finished.add(job)
                    continue
                if job.options.depends_on and job.state is State.BLOCKED:
                    job.unmet = set(job.options.depends_on)
                owner = queue.unique.owner(job.options.unique_key, now) if job.options.unique_key else None
                if owner is None:
                    queue.unique.take(job)
                queue.watch_deadline(job)
                queue.place(job, now)
        for letter in letters:
            shard, queue = self._locate(letter.queue)
            with shard.lock:
                if letter.id in queue.jobs:
                    queue.dead.restore(letter)
        for job in restored:
            if job.unmet:
                self._bind(job, tuple(job.unmet), missing=State.COMPLETED)
        changes = Changes()
        changes.woken.update({job.queue for job in restored})
        self._settle(changes)
        return len(restored)

    def accept(self, jobs: Iterable[Job]) -> int:
        """Take in new jobs that a producer has already written where the journal writes, ids and all.

        One whose id is live here is passed over; one whose unique key is taken by now is cancelled.
        Returns how many were taken in.
        """
        taken = 0
        for job in jobs:
            changes = Changes()
            shard, queue = self._locate(job.queue)
            now = self.clock.now()
            with shard.lock:
                there = queue.jobs.get(job.id)
                if there is not None and there.state not in REUSABLE:
                    continue
                if there is not None:
                    shard.remove(queue, [there], now, changes)
                key = job.options.unique_key
                if key is not None and queue.unique.owner(key, now) is not None:
                    queue.jobs[job.id] = job
                    job.state = State.CANCELLED
                    job.reason = "duplicate"
                    job.finished_at = now
                    queue.finished.add(job)
                else:
                    self._admit(queue, job, now)
                    changes.woken.add(queue.name)
                taken += 1
                if there is not None and self._journal is not None:
                    self._journal.added([job])
                shard.changed(job)
                event = "cancelled" if job.state is State.CANCELLED else "queued"
                shard.tell(queue, job, event, now, changes)
            self._settle(changes)
            if job.unmet:
                self._bind(job, tuple(job.unmet), missing=State.COMPLETED)
        return taken

    def evict(self, jobs: Iterable[Job]) -> None:
        """Forget completed and cancelled jobs that are kept elsewhere; the others stay."""
        for job in jobs:
            shard, queue = self._locate(job.queue)
            with shard.lock:
                ended = job.state is State.COMPLETED or job.state is State.CANCELLED
                if ended and queue.jobs.get(job.id) is job:
                    queue.finished.remove(job)
                    queue.drop(job)

    # Dependencies.

    def _check_dependencies(self, batch: Batch) -> None:
        for name, job_id in batch.options.depends_on:
            queue = self._existing(name)
            if queue is None or job_id not in queue.jobs:
                raise OptionError(f"depends_on: queue {name!r} has no job {job_id!r}")

    def _bind(
        self, job: Job, dependencies: Iterable[JobKey], missing: State = State.FAILED
    ) -> None:
        """Have a blocked job hear of its dependencies' ends, those that lie in the past included."""
        me = (job.queue, job.id)
        for key in dependencies:
            shard, queue = self._locate(key[0])
            with shard.lock:
                there = queue.jobs.get(key[1])
                if there is not None and there.state in LIVE:
                    with self._place(there.id).lock:
                        if there.state in LIVE:
                            there.has_dependents = True
                            shard.dependencies.add(key, me)
                            continue
                ended = missing if there is None else there.state
                if ended is State.FAILED and there is not None:
                    # Should it be retried and complete, a dependent that waits is told.
                    there.has_dependents = True
                    shard.dependencies.add(key, me)
            changes = Changes()
            self._resolve(me, key, ended, changes)
            self._settle(changes)

    def _resolve(self, dependent: JobKey, dependency: JobKey, ended: State, changes: Changes) -> bool:
        """Tell a job that one of its dependencies has ended; whether it goes on waiting for it."""
        shard, queue = self._locate(dependent[0])
        now = self.clock.now()
        with shard.lock:
            job = queue.jobs.get(dependent[1])
            if job is None or job.state is not State.BLOCKED or dependency not in (job.unmet or ()):
                return False
            policy = job.options.on_dependency_failure
            if ended is State.COMPLETED or policy == "ignore":
                assert job.unmet is not None
                job.unmet.discard(dependency)
                if not job.unmet:
                    queue.displace(job)
                    job.unmet = None
                    queue.place(job, now)
                    changes.woken.add(queue.name)
                    shard.changed(job)
                    shard.tell(queue, job, "unblocked", now, changes)
                return False
            if policy == "wait":
                return True
            text = f"the job {dependency[1]!r} of queue {dependency[0]!r} that it depends on is {ended}"
            if policy == "cancel":
                shard.cancel_pending(queue, job, "dependency_failed", now, changes)
            else:
                error = JobError("djqueue.core.errors.JobFailedError", text)
                shard.fail_pending(queue, job, "dependency_failed", error, now, changes)
        return False

    def _settle(self, changes: Changes) -> None:
        """What an operation left to be done without locks: dependents, wake-ups, subscribers."""
        while changes.ended:
            key, state, dependents = changes.ended.pop()
            for dependent in dependents:
                if self._resolve(dependent, key, state, changes):
                    self._rebind(dependent, key)
        if changes.woken and self._listeners:
            for queues, wake in self._listeners:
                if queues is None or not queues.isdisjoint(changes.woken):
                    wake()
        for event in changes.events:
            self._publish(event)

    def _rebind(self, dependent: JobKey, dependency: JobKey) -> None:
        _, queue = self._locate(dependent[0])
        job = queue.jobs.get(dependent[1])
        if job is not None:
            self._bind(job, [dependency])

    def _publish(self, event: Event) -> None:
        queue = self._existing(event.queue)
        if queue is not None:
            for handler in (*queue.handlers, *queue.watchers.get(event.id, ())):
                handler(event)

    # Finding things.

    def _locate(self, queue_name: str) -> tuple[Shard, JobQueue]:
        shard = self.shards[fnv1a32(queue_name) & self._mask]
        queue = shard.queues.get(queue_name)
        if queue is None:
            with shard.lock:
                queue = shard.queue(queue_name, self.policy(queue_name), self.clock.monotonic())
        return shard, queue

    def _existing(self, queue_name: str) -> JobQueue | None:
        return self.shards[fnv1a32(queue_name) & self._mask].queues.get(queue_name)

    def _serving(self, names: Sequence[str] | None) -> list[tuple[Shard, JobQueue]]:
        """The queues that a claim may take from, another one first each time."""
        if names is None:
            serving = [(shard, queue) for shard in self.shards for queue in list(shard.queues.values())]
        else:
            serving = []
            for name in names:
                shard = self.shards[fnv1a32(name) & self._mask]
                if (queue := shard.queues.get(name)) is not None:
                    serving.append((shard, queue))
        if len(serving) > 1:
            first = next(self._rotation) % len(serving)
            serving = serving[first:] + serving[:first]
        return serving

    def _place(self, job_id: str) -> ProcessingShard:
        # The documents' FNV-1a takes 2 µs for an id in Python; a text's own hash is cached.
        return self.processing[hash(job_id) & self._mask]

    def policy(self, queue_name: str) -> QueuePolicy:
        """What a queue is configured to do."""
        return self._policies.get(queue_name, self._default_policy)


def is_uniform(batch: Batch) -> bool:
    """Whether a batch's jobs are all new and go, as they are, to the end of one list."""
    options = batch.options
    return (
        batch.ids is None
        and not batch.delay
        and batch.run_at is None
        and options.plain
        and not options.lifo
        and options.ttl is None
        and not options.depends_on
    )


NO_CLAIMS = Claims([], None)
EXPIRED = JobError("djqueue.core.errors.JobTimeoutError", "its ttl was over before it started")
