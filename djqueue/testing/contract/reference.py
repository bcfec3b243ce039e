"""The reference model of a storage: one list of jobs, searched again for every question.

It does what every storage must do, in the plainest way. Storages may differ where nothing is promised;
`Reference` says where in its docstring.
"""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from operator import itemgetter
from typing import Any, NamedTuple

from djqueue.core.engine import EXPIRED
from djqueue.core.engine.finished import FOREVER, RETURNED
from djqueue.core.enginejob import size_of_error, stalled_error
from djqueue.core.job import AttemptRecord, Batch, DeadLetterRecord, JobFailure, Swept
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.policies import NO_RETENTION, PREDECESSOR, KeyLimit, QueuePolicy, Rate
from djqueue.core.states import LIVE, PENDING, REUSABLE, TERMINAL, State

from ..clock import FakeClock

ERROR = JobFailure("ValueError", "no")
"""Error of every attempt that fails."""


ModelEvent = tuple[str, str, str, State]
"""(queue, id, event, state)."""


class Choices(NamedTuple):
    """Rules that the contract leaves to a storage; the defaults are those of the engine.

    More rules hold for all storages. Whatever has expired may be hidden or removed before a sweep, so the
    machine sweeps as soon as something has expired. Events of different jobs may arrive in any order. A job
    that makes way for a new one with its id may be removed without an event.
    """

    ties_by_id: bool = False
    """True if jobs whose times are equal are taken in the order of their ids, not of their arrival."""
    ends_waits_late: bool = False
    """True if a group that waits for its rate continues only with a claim or sweep."""
    replaces_later: bool = False
    """True if a batch is answered before its jobs replace others, whose ids it still finds in use."""
    postpones_retries: bool = False
    """True if an automatic retry whose unique key is taken is tried again after another delay, not in every
    sweep."""


@dataclass(eq=False)
class ModelJob:
    """A job of the model: the fields of a `JobRecord`, and what decides over its future."""

    queue: str
    id: str
    name: str
    payload: bytes
    options: JobOptions
    created_at: int
    run_at: int
    state: State | None = None
    order: int = 0
    """Position among the jobs of its state and priority."""
    group_waiting: bool = False
    attempts: int = 0
    failures: int = 0
    stalls: int = 0
    token: int = 0
    lease_until: int = 0
    worker: str = ""
    started_at: int = 0
    finished_at: int = 0
    result: bytes | None = None
    error: JobFailure | None = None
    reason: str = ""
    progress: Any = None
    items: list[bytes] = field(default_factory=list)
    sent: int = 0
    cancel_requested: bool = False
    unmet: set[JobKey] = field(default_factory=set)
    outcomes: list[tuple[int, str]] = field(default_factory=list)
    ended_attempts: list[AttemptRecord] = field(default_factory=list)
    sequence: int = 0
    """Number of its enqueue."""
    holders: set["ModelJob"] = field(default_factory=set)
    """Live dependents, for which its record is kept."""
    record_skipped: bool = False
    result_skipped: bool = False

    @property
    def key(self) -> JobKey:
        return self.queue, self.id


@dataclass
class ModelBucket:
    """Limits of a queue or a group: the tokens of a rate, and a concurrency."""

    rate: Rate | None = None
    concurrency: int | None = None
    tokens: Fraction = Fraction(0)
    at: int = 0

    def refill(self, tick: int) -> None:
        if self.rate is not None:
            gained = Fraction((tick - self.at) * self.rate.capacity, self.rate.per)
            self.tokens = min(Fraction(self.rate.capacity), self.tokens + gained)
        self.at = tick


class Reference:
    """The operations of a storage; they return what the storage must return, with `ModelJob` for records."""

    def __init__(
        self,
        clock: FakeClock,
        policies: Mapping[str, QueuePolicy],
        observed: Iterable[str],
        choices: Choices,
    ) -> None:
        self.choices = choices
        self.clock = clock
        self.policies = policies
        self.observed = set(observed)
        self.jobs: list[ModelJob] = []
        self.queues: set[str] = set(observed)
        self.paused: set[str] = set()
        self.held: set[tuple[str, str]] = set()
        self.limits: dict[str, ModelBucket] = {}
        self.key_limits: dict[tuple[str, str | None], KeyLimit] = {}
        self.paused_groups: set[tuple[str, str]] = set()
        self.buckets: dict[tuple[str, str, Rate], ModelBucket] = {}
        self.group_waits: dict[tuple[str, str], int] = {}
        self.dead_letters: dict[str, list[DeadLetterRecord]] = {}
        self.retries: dict[JobKey, int] = {}
        self.keys: dict[tuple[str, str], tuple[ModelJob, int | None]] = {}
        self.followers: dict[tuple[str, str], tuple[ModelJob, ModelJob]] = {}
        self.records: dict[tuple[str, int], list[tuple[int, ModelJob]]] = {}
        self.results: dict[tuple[str, int], list[tuple[int, ModelJob]]] = {}
        self.bindings: dict[tuple[ModelJob, JobKey], int] = {}
        self.ends: list[tuple[JobKey, State]] = []
        self.dependents_ended: list[ModelJob] = []
        self.events: list[ModelEvent] = []
        self.numbers = count(1)

    # Reads.

    @property
    def now(self) -> int:
        return self.clock.now()

    def job(self, queue: str, job_id: str) -> ModelJob | None:
        return next((job for job in self.jobs if job.key == (queue, job_id)), None)

    def of(self, queue: str) -> list[ModelJob]:
        return [job for job in self.jobs if job.queue == queue]

    def ready(self, queue: str, names: Iterable[str] | None = None) -> list[ModelJob]:
        jobs = [
            job
            for job in self.of(queue)
            if job.state is State.WAITING and not job.group_waiting and (names is None or job.name in names)
        ]
        return sorted(jobs, key=lambda job: (-job.options.priority, job.order))

    def delayed(self, queue: str) -> list[ModelJob]:
        jobs = [job for job in self.of(queue) if job.state is State.DELAYED]
        return sorted(jobs, key=lambda job: (job.run_at, self.tie(job, job.order)))

    def tie(self, job: ModelJob, position: Any) -> Any:
        """Return what orders jobs of one time: their ids, or their positions."""
        return job.id.encode() if self.choices.ties_by_id else position

    def active(self, queue: str) -> list[ModelJob]:
        return [job for job in self.of(queue) if job.state is State.ACTIVE]

    def counts(self, queue: str) -> dict[State, int]:
        return {state: sum(job.state is state for job in self.of(queue)) for state in State}

    def owner(self, queue: str, key: str) -> ModelJob | None:
        job, free_at = self.keys.get((queue, key), (None, None))
        if free_at is not None and free_at <= self.now:
            del self.keys[queue, key]
            return None
        return job

    def policy(self, queue: str) -> QueuePolicy:
        return self.policies.get(queue, QueuePolicy())

    def limits_of(self, queue: str) -> ModelBucket:
        return self.limits.setdefault(queue, ModelBucket())

    # Changes of state.

    def emit_event(self, job: ModelJob, event: str) -> None:
        if job.queue in self.observed:
            assert job.state is not None
            self.events.append((job.queue, job.id, event, job.state))

    def make_pending(self, job: ModelJob, *, front: bool = False, was_active: bool = False) -> None:
        front = front or job.options.lifo
        job.group_waiting = False
        if job.unmet:
            job.state = State.BLOCKED
        elif job.run_at > self.now:
            job.order = next(self.numbers)
            job.state = State.DELAYED
        else:
            job.order = next(self.numbers) * (-1 if front else 1)
            job.group_waiting = not self.may_be_ready(job, was_active=was_active)
            job.state = State.WAITING
            if job.group_waiting and job.options.concurrency_key is not None:
                self.note_group_wait(job.queue, job.options.concurrency_key)

    def may_be_ready(self, job: ModelJob, *, was_active: bool = False) -> bool:
        group = job.options.concurrency_key
        if group is None:
            return True
        mine = [
            other
            for other in self.of(job.queue)
            if other.options.concurrency_key == group and other is not job
        ]
        ready = sum(other.state is State.WAITING and not other.group_waiting for other in mine)
        if was_active:
            return ready < self.ready_limit(job.queue, group, job)
        if any(other.group_waiting for other in mine):
            return False
        return ready < min(self.weight(job.queue, group), self.ready_limit(job.queue, group, job))

    def ready_limit(self, queue: str, group: str, besides: ModelJob | None = None) -> int:
        """Return how many jobs of a group may be ready."""
        if (queue, group) in self.paused_groups:
            return 0
        slots = self.free_slots(queue, group, besides)
        bucket = self.bucket(queue, group)
        return slots if bucket is None else min(slots, int(bucket.tokens))

    def free_slots(self, queue: str, group: str, besides: ModelJob | None = None) -> int:
        mine = [
            job for job in self.active(queue) if job.options.concurrency_key == group and job is not besides
        ]
        limit = self.overrides(queue, group).concurrency or self.overrides(queue, None).concurrency
        return (limit or self.policy(queue).key_concurrency) - len(mine)

    def overrides(self, queue: str, group: str | None) -> KeyLimit:
        return self.key_limits.get((queue, group), KeyLimit())

    def weight(self, queue: str, group: str) -> int:
        return self.overrides(queue, group).weight or self.policy(queue).key_weights.get(group, 1)

    def bucket(self, queue: str, group: str) -> ModelBucket | None:
        overrides = self.overrides(queue, group).rate or self.overrides(queue, None).rate
        rate = overrides or self.policy(queue).key_rate
        if rate is None:
            return None
        tick = self.clock.monotonic()
        fresh = ModelBucket(rate, None, Fraction(rate.capacity), tick)
        bucket = self.buckets.setdefault((queue, group, rate), fresh)
        bucket.refill(tick)
        return bucket

    def advance_group(self, queue: str, group: str | None) -> None:
        if group is None:
            return
        mine = [job for job in self.of(queue) if job.options.concurrency_key == group]
        group_waiting = sorted((job for job in mine if job.group_waiting), key=lambda job: job.order)
        ready = sum(job.state is State.WAITING and not job.group_waiting for job in mine)
        share = min(self.weight(queue, group), self.ready_limit(queue, group))
        for job in group_waiting[: max(0, share - ready)]:
            job.group_waiting = False
            job.order = next(self.numbers)
        self.note_group_wait(queue, group)

    def note_group_wait(self, queue: str, group: str) -> None:
        """Note when a group gets its next token, if it waits for nothing else. One that has got it keeps its
        turn until it continues.
        """
        mine = [job for job in self.of(queue) if job.options.concurrency_key == group]
        ready = sum(job.state is State.WAITING and not job.group_waiting for job in mine)
        bucket, paused = self.bucket(queue, group), (queue, group) in self.paused_groups
        before = self.group_waits.pop((queue, group), None)
        if bucket is None or paused or not any(job.group_waiting for job in mine):
            return
        assert bucket.rate is not None
        limit = min(self.weight(queue, group), self.free_slots(queue, group), bucket.rate.capacity)
        if ready < limit:
            wait = (ready + 1 - bucket.tokens) * bucket.rate.per / bucket.rate.capacity
            at = max(bucket.at, bucket.at - (-wait.numerator // wait.denominator))
            self.group_waits[queue, group] = at if before is None or at > bucket.at else min(at, before)

    def end_group_waits(self, queue: str, late: int = 0) -> None:
        """Let groups continue that could do so at a time that has passed `late` milliseconds ago."""
        due = [
            (at, group)
            for (name, group), at in self.group_waits.items()
            if name == queue and at <= self.clock.monotonic() - late
        ]
        for _, group in sorted(due):
            self.group_waits.pop((queue, group), None)
            self.advance_group(queue, group)

    def regroup(self, queue: str, groups: Iterable[str]) -> None:
        for group in groups:
            mine = [job for job in self.of(queue) if job.options.concurrency_key == group]
            ready = [job for job in mine if job.state is State.WAITING and not job.group_waiting]
            ready.sort(key=lambda job: job.order)
            for job in reversed(ready[max(0, self.ready_limit(queue, group)) :]):
                job.group_waiting = True
                job.order = -next(self.numbers)
            self.advance_group(queue, group)

    def set_key_limit(self, queue: str, key: str | None, **overrides: Any) -> None:
        self.queues.add(queue)
        self.key_limits[queue, key] = self.overrides(queue, key)._replace(**overrides)
        groups = {
            job.options.concurrency_key for job in self.of(queue) if job.options.concurrency_key is not None
        }
        self.regroup(queue, sorted(groups) if key is None else [key])

    def pause_key(self, queue: str, key: str) -> None:
        self.queues.add(queue)
        self.paused_groups.add((queue, key))
        self.regroup(queue, [key])

    def resume_key(self, queue: str, key: str) -> None:
        self.paused_groups.discard((queue, key))
        self.regroup(queue, [key])

    def leave_state(self, job: ModelJob) -> None:
        """Take a job out of its state; the next job of its group may take its slot."""
        in_group = job.state in (State.ACTIVE, State.WAITING)
        job.state, job.group_waiting, job.unmet = None, False, set()
        if in_group:
            self.advance_group(job.queue, job.options.concurrency_key)

    def running(self, queue: str, job_id: str, token: int) -> ModelJob | None:
        """Return the job of an attempt, if its token is valid."""
        job = self.job(queue, job_id)
        return job if job is not None and job.state is State.ACTIVE and job.token == token else None

    def renew(self, queue: str, job_id: str, token: int) -> tuple[bool, bool]:
        job = self.running(queue, job_id, token)
        if job is None:
            return False, False
        job.lease_until = self.clock.monotonic() + self.policy(queue).lease
        return True, job.cancel_requested

    def report(self, queue: str, job_id: str, token: int, progress: Any) -> bool:
        job = self.running(queue, job_id, token)
        if job is None:
            return False
        job.progress = progress
        self.emit_event(job, "progress")
        return True

    def emit(self, queue: str, job_id: str, token: int, start: int, items: list[bytes]) -> bool:
        job = self.running(queue, job_id, token)
        if job is None or start > job.sent:
            return False
        new = items[max(0, job.sent - start) :]
        job.items += new
        job.sent += len(new)
        if new:
            self.emit_event(job, "item")
        return True

    def readable(self, job: ModelJob) -> tuple[bytes, ...]:
        ttl = job.options.result_ttl
        is_over = job.state is State.COMPLETED and ttl is not None and job.finished_at + ttl <= self.now
        return () if is_over else tuple(job.items)

    def end(self, job: ModelJob, state: State) -> None:
        job.state = state
        job.finished_at = self.now
        self.free_key(job)
        # Dependents of an earlier job with this id hold the record of that job.
        was_replaced = job.key in (key for key, _ in self.ends)
        self.ends.append((job.key, state))
        self.dependents_ended.append(job)
        if state is State.FAILED:
            return
        job.holders = set() if was_replaced else set(self.waiting_for(job.key))
        retention = self.policy(job.queue).retention
        kept = retention.of(state).shorten(job.options.kept)
        if kept is None and retention == NO_RETENTION:
            return
        kept = FOREVER if kept is None else kept
        line = kept if state is State.COMPLETED else ~kept
        self.records.setdefault((job.queue, line), []).append((self.now + kept, job))
        readable = self.readable_for(job)
        bounded = job.result is not None and retention.results.bytes is not None
        if state is State.COMPLETED and (job.result is not None or job.sent) and (readable < kept or bounded):
            line = readable if job.result is not None else ~readable
            self.results.setdefault((job.queue, line), []).append((self.now + readable, job))

    def readable_for(self, job: ModelJob) -> int:
        readable = self.policy(job.queue).retention.results.shorten(job.options.result_ttl)
        return FOREVER if readable is None else readable

    def take_key(self, job: ModelJob) -> None:
        key, ttl = job.options.unique_key, job.options.unique_ttl
        if key is not None:
            self.keys[job.queue, key] = (job, None if ttl is None else job.created_at + ttl)

    def free_key(self, job: ModelJob) -> None:
        for key, (owner, _) in list(self.keys.items()):
            if owner is job:
                del self.keys[key]
        for key, (follower, leader) in list(self.followers.items()):
            if job in (follower, leader):
                del self.followers[key]
            if job is leader:
                if self.owner(*key) is None:
                    self.take_key(follower)
                follower.unmet.remove(PREDECESSOR)
                if not follower.unmet:
                    self.make_pending(follower)
                    self.emit_event(follower, "unblocked")

    def fail(self, job: ModelJob, reason: str, error: JobFailure, unmet: Iterable[JobKey] = ()) -> None:
        job.reason = reason
        job.error = error
        self.end(job, State.FAILED)
        policy = self.policy(job.queue).dead_letters
        retries = self.retries.pop(job.key, 0)
        retry_at = self.next_retry(job.queue) if retries < policy.auto_retries else 0
        dead_letters = self.dead_letters.setdefault(job.queue, [])
        times = (self.now, self.now + policy.ttl, retries, retry_at)
        dead_letter = DeadLetterRecord(job.queue, job.id, reason, *times, unmet=tuple(sorted(unmet)))
        dead_letters.append(dead_letter)
        self.emit_event(job, "failed")
        for dead_letter in dead_letters[: max(0, len(dead_letters) - policy.max_entries)]:
            self.discard(self.job(dead_letter.queue, dead_letter.id))

    def expire(self, job: ModelJob) -> None:
        self.leave_state(job)
        self.fail(job, "ttl_expired", EXPIRED)

    def is_expired(self, job: ModelJob) -> bool:
        ttl = job.options.ttl
        fresh = job.state in PENDING and not job.started_at and job.error is None
        return fresh and ttl is not None and job.created_at + ttl <= self.now

    def discard(self, job: ModelJob | None) -> None:
        assert job is not None
        state = job.state
        if state in PENDING:
            self.leave_state(job)
            self.free_key(job)
            self.dependents_ended.append(job)
        if state in PENDING or state is State.FAILED:
            self.ends.append((job.key, State.CANCELLED))
        dead_letters = self.dead_letters.get(job.queue, [])
        dead_letters[:] = [dead_letter for dead_letter in dead_letters if dead_letter.id != job.id]
        self.retries.pop(job.key, None)
        self.jobs.remove(job)
        job.state = state
        self.emit_event(job, "removed")

    # Dependencies.

    def waiting_for(self, key: JobKey) -> list[ModelJob]:
        waiting = [job for job in self.jobs if job.state is State.BLOCKED and key in job.unmet]
        waiting = [job for job in waiting if (job, key) in self.bindings]
        return sorted(waiting, key=lambda job: self.bindings[job, key])

    def settle(self) -> None:
        while self.ends or self.dependents_ended:
            for dependent in self.dependents_ended:
                for job in self.jobs:
                    self.release_record(job, dependent)
            self.dependents_ended.clear()
            if self.ends:
                key, state = self.ends.pop(0)
                for job in self.waiting_for(key):
                    self.resolve(job, key, state)

    def release_record(self, job: ModelJob, dependent: ModelJob) -> None:
        if dependent in job.holders:
            job.holders.remove(dependent)
            if not job.holders:
                self.expire_released(job)

    def expire_released(self, job: ModelJob) -> None:
        """Let a record that is no longer held expire; bounds that skipped it apply again."""
        assert job.state is not None
        line = RETURNED if job.state is State.COMPLETED else ~RETURNED
        if job.record_skipped:
            kept = self.policy(job.queue).retention.of(job.state).shorten(job.options.kept)
            end = job.finished_at + (FOREVER if kept is None else kept)
            insort(self.records.setdefault((job.queue, line), []), (end, job), key=itemgetter(0))
        over = job.finished_at + self.readable_for(job)
        if job.state is State.COMPLETED and over <= self.now:
            job.result, job.items = None, []
        elif job.result_skipped:
            insort(self.results.setdefault((job.queue, line), []), (over, job), key=itemgetter(0))
        job.record_skipped = job.result_skipped = False

    def bind(self, job: ModelJob, key: JobKey) -> None:
        existing = self.job(*key)
        waits = existing is not None and (
            existing.state in LIVE
            or (
                existing.state is State.FAILED
                and (job.options.on_dependency_failure == "wait" or job.error is not None)
            )
        )
        self.bindings[job, key] = next(self.numbers)
        if not waits:
            end = existing.state if existing is not None else State.CANCELLED
            assert end is not None
            if existing is not None and end is not State.FAILED:
                existing.holders.add(job)
            self.resolve(job, key, end)
            self.settle()

    def bind_all(self, job: ModelJob, keys: Iterable[JobKey]) -> None:
        for key in keys:
            self.bind(job, key)
        if job.state not in LIVE:
            # It ended because of a dependency, and needs the records of the others no more.
            for other in self.jobs:
                self.release_record(other, job)

    def resolve(self, job: ModelJob, key: JobKey, end: State) -> None:
        if job.state is not State.BLOCKED or key not in job.unmet:
            return
        policy = job.options.on_dependency_failure
        if end is State.COMPLETED or policy == "ignore":
            job.unmet.remove(key)
            if not job.unmet:
                self.make_pending(job)
                self.emit_event(job, "unblocked")
        elif policy == "wait" and end is State.FAILED:
            self.bind(job, key)
        else:
            unmet = job.unmet - {PREDECESSOR}
            self.leave_state(job)
            if policy == "cancel":
                self.end_cancelled(job, "dependency_failed")
            else:
                name = f"dependency {key[1]!r}" if key[0] == job.queue else "a dependency in another queue"
                text = f"{name} ended as {end}"
                error = JobFailure("djqueue.core.errors.JobFailedError", text)
                self.fail(job, "dependency_failed", error, unmet)

    # Operations.

    def enqueue(self, batch: Batch, ids: list[str]) -> list[tuple[str, str, State | None, Any]]:
        """Enqueue a batch; `ids` are those of the caller, or those that the storage has created."""
        self.queues.add(batch.queue)
        options, answers, added = batch.options, [], []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            existing = self.job(batch.queue, job_id)
            if existing is not None and existing.state not in REUSABLE:
                done = existing.state is State.COMPLETED
                answers.append(
                    (
                        job_id,
                        "completed" if done else "duplicate",
                        existing.state,
                        existing.result if done else None,
                    )
                )
                continue
            key, policy = options.unique_key, options.on_duplicate
            owner = self.owner(batch.queue, key) if key is not None else None
            active = owner is not None and owner.state is State.ACTIVE
            if owner is not None and (policy == "keep" or (active and policy != "keep_last_if_active")):
                answers.append((owner.id, "duplicate", owner.state, None))
                continue
            run_at = batch.run_at if batch.run_at is not None else self.now + (batch.delay or 0)
            rival = owner
            if active:
                rival = next((job for job, leader in self.followers.values() if leader is owner), None)
            if rival is not None:
                if rival.state is not State.BLOCKED and policy != "debounce":
                    run_at = min(run_at, rival.run_at)
                self.leave_state(rival)
                self.end_cancelled(rival, "replaced")
            if existing is not None:
                known = len(self.ends)
                self.discard(existing)
                del self.ends[known:]
            job = ModelJob(batch.queue, job_id, batch.name, payload, options, self.now, run_at)
            job.unmet = set(options.depends_on)
            job.sequence = next(self.numbers)
            if active and owner is not None and key is not None:
                job.unmet.add(PREDECESSOR)
                self.followers[batch.queue, key] = (job, owner)
            else:
                self.take_key(job)
            self.jobs.append(job)
            self.make_pending(job)
            self.emit_event(job, "enqueued")
            added.append(job)
            answers.append((job_id, "queued", None, None))
        self.settle()
        for job in added:
            self.bind_all(job, options.depends_on)
        return answers

    def claim(
        self,
        queue: str,
        slots: int,
        names: frozenset[str],
        worker: str,
        tokens: Iterable[int],
        *,
        stalled: bool = True,
    ) -> tuple[list[ModelJob], int | None]:
        claimed: list[ModelJob] = []
        tokens, alone = iter(tokens), ""
        is_waiting = any(name == queue for name, _ in self.group_waits)
        if slots <= 0 or queue in self.paused or not (self.ready(queue) or self.delayed(queue) or is_waiting):
            return claimed, None
        names = frozenset(name for name in names if (queue, name) not in self.held)
        self.promote_due(queue)
        self.end_group_waits(queue)
        limits = self.limits_of(queue)
        limits.refill(self.clock.monotonic())
        if limits.rate is not None:
            slots = min(slots, int(limits.tokens))
        while slots > 0 and (best := self.allowed(queue, names, slots, stalled=stalled)):
            for job in best:
                if self.is_expired(job):
                    self.expire(job)
                    continue
                if job.stalls and claimed:
                    alone = "later"
                    break
                alone = "taken" if job.stalls else ""
                job.state = State.ACTIVE
                job.attempts += 1
                job.token = next(tokens, -1)
                job.worker = worker
                job.started_at = self.now
                job.lease_until = self.clock.monotonic() + self.policy(queue).lease
                job.cancel_requested = False
                limits.tokens -= 1
                slots -= 1
                claimed.append(job)
                if job.options.concurrency_key is not None and (
                    bucket := self.bucket(queue, job.options.concurrency_key)
                ):
                    bucket.tokens -= 1
                self.advance_group(queue, job.options.concurrency_key)
                self.emit_event(job, "started")
                if alone:
                    break
            if alone:
                break
        hints = [0] if alone == "later" else []
        hints += [max(0, job.run_at - self.now) for job in self.delayed(queue)[:1]]
        hints += [at - self.clock.monotonic() for (name, _), at in self.group_waits.items() if name == queue]
        claimable = [job for job in self.ready(queue, names) if stalled or not job.stalls]
        if limits.rate is not None and claimable and limits.tokens < 1:
            missing = (1 - limits.tokens) * limits.rate.per / limits.rate.capacity
            hints.append(-(-missing.numerator // missing.denominator))
        self.settle()
        return claimed, min(hints, default=None)

    def allowed(
        self, queue: str, names: frozenset[str], slots: int, *, stalled: bool = True
    ) -> list[ModelJob]:
        best = [job for job in self.ready(queue, names) if stalled or not job.stalls][:slots]
        limit = self.limits_of(queue).concurrency
        if limit is None:
            return best
        free = limit - sum(job.options.weight for job in self.active(queue))
        for index, job in enumerate(best):
            free -= min(job.options.weight, limit)
            if free < 0:
                return best[:index]
        return best

    def promote_due(self, queue: str) -> int:
        due = [job for job in self.delayed(queue) if job.run_at <= self.now]
        for job in due:
            self.end_group_waits(queue, self.now - job.run_at)
            job.state = None
            self.make_pending(job)
            self.emit_event(job, "promoted")
        return len(due)

    def finish(
        self, queue: str, job_id: str, token: int, kind: str, result: bytes | None, delay: int, reason: str
    ) -> bool:
        job = self.running(queue, job_id, token)
        if job is None:
            return False
        if kind == "complete":
            self.leave_state(job)
            job.result = result
            job.error = None
            self.end(job, State.COMPLETED)
            self.emit_event(job, "completed")
        elif kind == "fail":
            self.fail_active(job, reason)
        elif kind == "cancel" or job.cancel_requested:
            self.note_attempt(job, "cancelled")
            self.leave_state(job)
            self.end_cancelled(job, reason or "cancelled")
        else:
            self.put_back(job, "retried" if kind == "retry" else "released", delay)
        return True

    def note_attempt(self, job: ModelJob, outcome: str) -> None:
        limit = self.policy(job.queue).retention.attempts.count
        attempt = AttemptRecord(job.attempts, job.worker, job.started_at, self.now, outcome)
        job.ended_attempts = [
            *job.ended_attempts[len(job.ended_attempts) - len(job.outcomes) :][-limit:],
            attempt,
        ]
        job.outcomes = [*job.outcomes, (job.attempts, outcome)][-limit:]

    def fail_active(self, job: ModelJob, reason: str) -> None:
        self.note_attempt(job, "stalled" if reason == "worker_lost" else "failed")
        error = ERROR
        if reason == "worker_lost":
            job.stalls += 1
            error = stalled_error(job.stalls, job.ended_attempts)
        else:
            job.failures += 1
        self.leave_state(job)
        if reason == "worker_lost":
            job.state = State.FAILED
            self.emit_event(job, "stalled")
        self.fail(job, reason, error)

    def end_cancelled(self, job: ModelJob, reason: str) -> None:
        job.reason = reason
        self.end(job, State.CANCELLED)
        self.emit_event(job, "cancelled")

    def put_back(self, job: ModelJob, outcome: str, delay: int) -> None:
        self.note_attempt(job, outcome)
        job.attempts -= outcome == "released"
        job.failures += outcome == "retried"
        job.stalls += outcome == "stalled"
        job.error = ERROR if outcome == "retried" else job.error
        if any(leader is job for _, leader in self.followers.values()):
            self.leave_state(job)
            self.end_cancelled(job, "replaced")
            return
        job.items, job.sent = [], 0
        job.worker = ""
        job.run_at = self.now + delay
        front = outcome != "retried"
        was_active = front and not delay
        if was_active:
            job.state = None
        else:
            self.leave_state(job)
        self.make_pending(job, front=front, was_active=was_active)
        self.emit_event(job, outcome)

    def update(self, queue: str, job_id: str, priority: int, payload: bytes) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state not in PENDING:
            return False
        job.payload = payload
        if priority != job.options.priority:
            job.options = replace(job.options, priority=priority)
            if job.state is State.WAITING and not job.group_waiting:
                job.run_at = self.now
                job.order = next(self.numbers)
        return True

    def cancel(self, queue: str, job_id: str, reason: str) -> str:
        job = self.job(queue, job_id)
        if job is None:
            return "not_found"
        if job.state in PENDING:
            self.leave_state(job)
            self.end_cancelled(job, reason)
            self.settle()
            return "cancelled"
        if job.state is State.ACTIVE:
            job.cancel_requested = True
            self.emit_event(job, "cancel_requested")
            return "requested"
        return str(job.state)

    def move(self, queue: str, job_id: str, run_at: int, event: str, states: frozenset[State]) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state not in states:
            return False
        self.leave_state(job)
        job.run_at = run_at
        self.make_pending(job)
        self.emit_event(job, event)
        return True

    def relocate(self, queue: str, job_id: str, to: str) -> str:
        """Move a pending job without a unique key, or a dead letter, to another queue."""
        job = self.job(queue, job_id)
        if job is None:
            return "not_found"
        if job.state not in PENDING and job.state is not State.FAILED:
            return "active" if job.state is State.ACTIVE else "ended"
        existing = self.job(to, job_id)
        if existing is not None and (job.state is State.FAILED or existing.state not in REUSABLE):
            return "duplicate"
        if existing is not None:
            known = len(self.ends)
            self.discard(existing)
            del self.ends[known:]
        old, state, unmet = job.key, job.state, job.unmet
        letters = self.dead_letters.setdefault(queue, [])
        letter = next((letter for letter in letters if letter.id == job_id), None)
        if state in PENDING:
            self.leave_state(job)
            job.unmet = unmet
        job.state = state
        self.emit_event(job, "removed")
        job.queue, job.state = to, None
        self.queues.add(to)
        if old in self.retries:
            self.retries[job.key] = self.retries.pop(old)
        if letter is None:
            self.make_pending(job)
            self.emit_event(job, "enqueued")
        else:
            letters.remove(letter)
            job.state = State.FAILED
            retry_at = (
                self.next_retry(to) if letter.retries < self.policy(to).dead_letters.auto_retries else 0
            )
            self.dead_letters.setdefault(to, []).append(letter._replace(queue=to, next_retry_at=retry_at))
            self.emit_event(job, "failed")
        for dependent in self.waiting_for(old):
            keys = dict.fromkeys(job.key if key == old else key for key in dependent.options.depends_on)
            dependent.options = replace(dependent.options, depends_on=tuple(keys))
            dependent.unmet = {job.key if key == old else key for key in dependent.unmet}
            self.bindings[dependent, job.key] = self.bindings.pop((dependent, old))
        return "moved"

    def retry(self, queue: str, job_id: str, *, automatic: bool = False) -> str:
        job = self.job(queue, job_id)
        if job is None:
            return "not_found"
        if job.state is not State.FAILED:
            return "not_failed"
        key = job.options.unique_key
        if key is not None and self.owner(queue, key) is not None:
            return "unique_key_taken"
        dead_letters = self.dead_letters[queue]
        dead_letter = next(dead_letter for dead_letter in dead_letters if dead_letter.id == job_id)
        found = {key: self.job(*key) for key in dead_letter.unmet}
        states = {key: other and other.state for key, other in found.items()}
        if not automatic and not {None, State.CANCELLED}.isdisjoint(states.values()):
            return "dependency_gone"
        dead_letters.remove(dead_letter)
        if automatic:
            self.retries[job.key] = dead_letter.retries + 1
        job.failures = job.stalls = job.finished_at = 0
        job.items, job.sent = [], 0
        job.reason = job.worker = ""
        job.run_at = self.now
        if key is not None:
            ttl = job.options.unique_ttl
            self.keys[queue, key] = (job, None if ttl is None else job.created_at + ttl)
        job.state = None
        job.unmet = {key for key, state in states.items() if state is not State.COMPLETED}
        answer = "blocked_again" if job.unmet else "retried"
        self.make_pending(job)
        self.emit_event(job, "requeued")
        self.bind_all(job, job.options.depends_on if states else ())
        return answer

    def remove(self, queue: str, job_id: str) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state is State.ACTIVE:
            return False
        self.discard(job)
        self.settle()
        return True

    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        self.queues.add(queue)
        limits = self.limits_of(queue)
        if rate is not None and rate != limits.rate:
            limits.tokens, limits.at = Fraction(rate.capacity), self.clock.monotonic()
        limits.rate, limits.concurrency = rate, concurrency

    def cleanable(self, queue: str, states: frozenset[State], before: int) -> list[ModelJob]:
        """Return the jobs that a clean removes, dependents before their dependencies."""
        jobs = [
            job
            for job in self.of(queue)
            if job.state in states
            and job.state is not State.ACTIVE
            and (job.finished_at or job.created_at) < before
        ]
        blocked = [job for job in reversed(jobs) if job.state is State.BLOCKED]
        return [*blocked, *(job for job in jobs if job.state is not State.BLOCKED)]

    def clean(self, jobs: Iterable[ModelJob]) -> None:
        for job in jobs:
            self.discard(job)
        self.settle()

    def obliterate(self, queue: str, *, force: bool) -> int:
        if self.active(queue) and not force:
            return -1
        for job in self.active(queue):
            self.note_attempt(job, "cancelled")
            self.leave_state(job)
            self.end_cancelled(job, "obliterated")
        jobs = self.of(queue)
        for job in jobs:
            self.discard(job)
        self.paused.discard(queue)
        self.held = {key for key in self.held if key[0] != queue}
        self.limits.pop(queue, None)
        self.key_limits = {key: limit for key, limit in self.key_limits.items() if key[0] != queue}
        self.paused_groups = {key for key in self.paused_groups if key[0] != queue}
        self.buckets = {key: bucket for key, bucket in self.buckets.items() if key[0] != queue}
        self.group_waits = {key: wait for key, wait in self.group_waits.items() if key[0] != queue}
        if queue not in self.observed:
            self.queues.discard(queue)
        for fifos in (self.records, self.results):
            for key in [key for key in fifos if key[0] == queue]:
                del fifos[key]
        self.settle()
        return len(jobs)

    # Time.

    def sweep(self) -> Swept:
        stalled = promoted = expired = retried = removed = 0
        overdue = [
            job
            for job in self.jobs
            if job.state is State.ACTIVE and job.lease_until <= self.clock.monotonic()
        ]
        for job in sorted(overdue, key=lambda job: (job.started_at, -job.token)):
            stalled += 1
            if job.cancel_requested:
                self.note_attempt(job, "cancelled")
                self.leave_state(job)
                self.end_cancelled(job, "cancelled")
            elif job.stalls >= job.options.max_stalls:
                self.fail_active(job, "worker_lost")
            else:
                self.put_back(job, "stalled", 0)
            self.settle()
        for queue in sorted(self.queues):
            promoted += self.promote_due(queue)
            self.end_group_waits(queue)
            late = [job for job in self.of(queue) if self.is_expired(job)]
            late.sort(key=lambda job: (job.created_at + (job.options.ttl or 0), self.tie(job, job.sequence)))
            for job in late:
                if job in self.jobs:
                    self.expire(job)
            expired += len(late)
            for key, (_, free_at) in list(self.keys.items()):
                if key[0] == queue and free_at is not None and free_at <= self.now:
                    del self.keys[key]
            dead_letters = self.dead_letters.setdefault(queue, [])
            over = [dead_letter for dead_letter in dead_letters if dead_letter.expires_at <= self.now]
            for dead_letter in over:
                self.discard(self.job(queue, dead_letter.id))
            heavy = self.surplus_dead_letters(queue)
            for dead_letter in heavy:
                self.discard(self.job(dead_letter.queue, dead_letter.id))
            for _, job in self.due(self.results, queue):
                job.items = []
                job.result_skipped = bool(job.holders)
                if not job.holders:
                    job.result = None
            self.drop_results(queue)
            self.drop_outcomes(queue)
            over_now = [job for _, job in self.due(self.records, queue) if job in self.jobs]
            for job in over_now:
                job.record_skipped = bool(job.holders)
            old = [job for job in over_now if not job.holders]
            for job in old:
                self.discard(job)
            surplus = [*self.surplus(queue, State.COMPLETED), *self.surplus(queue, State.CANCELLED)]
            for job in surplus:
                self.discard(job)
            removed += len(over) + len(heavy) + len(old) + len(surplus)
            due = self.due_retries(queue)
            self.settle()
            answers = [self.retry(queue, job_id, automatic=True) for job_id in due]
            barred = zip(due, answers, strict=True)
            self.postpone(queue, [job_id for job_id, answer in barred if answer == "unique_key_taken"])
            retried += answers.count("retried") + answers.count("blocked_again")
        return Swept(promoted, stalled, expired, retried, removed)

    def due_retries(self, queue: str) -> list[str]:
        """Return the ids of the dead letters that are retried by themselves now, in order."""
        due = [
            (letter.next_retry_at, self.tie(job, position), job.id)
            for position, letter in enumerate(self.dead_letters[queue])
            if 0 < letter.next_retry_at <= self.now and (job := self.job(queue, letter.id)) is not None
        ]
        return [job_id for *_, job_id in sorted(due)]

    def surplus_dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        dead_letters = self.dead_letters.get(queue, [])
        limit = self.policy(queue).dead_letters.max_bytes
        sizes = [self.size(self.job(dead_letter.queue, dead_letter.id)) for dead_letter in dead_letters]
        removed = 0
        while limit is not None and sum(sizes[removed:]) > limit:
            removed += 1
        return dead_letters[:removed]

    def size(self, job: ModelJob | None) -> int:
        assert job is not None
        return len(job.payload) + (0 if job.error is None else size_of_error(job.error))

    def drop_results(self, queue: str) -> None:
        limit = self.policy(queue).retention.results.bytes
        while limit is not None:
            if sum(len(job.result or b"") for job in self.of(queue) if not job.holders) <= limit:
                break
            job = self.first(self.results, queue, State.COMPLETED)
            if job.holders:
                job.result_skipped = True
            else:
                job.result, job.items = None, []

    def drop_outcomes(self, queue: str) -> None:
        age = self.policy(queue).retention.attempts.age
        for job in self.of(queue):
            if age is not None and job.state in TERMINAL and job.finished_at + age <= self.now:
                job.outcomes = []

    def surplus(self, queue: str, state: State) -> list[ModelJob]:
        keep = self.policy(queue).retention.of(state)
        kept = [job for job in self.of(queue) if job.state is state and not job.holders]
        removed: list[ModelJob] = []
        while True:
            size = sum(self.size(job) + len(job.result or b"") for job in kept)
            too_many = keep.count is not None and len(kept) > keep.count
            if not too_many and (keep.bytes is None or size <= keep.bytes):
                return removed
            job = self.first(self.records, queue, state)
            job.record_skipped = bool(job.holders)
            if job in kept:
                kept.remove(job)
                removed.append(job)

    def first(
        self, fifos: dict[tuple[str, int], list[tuple[int, ModelJob]]], queue: str, state: State
    ) -> ModelJob:
        """Take out the job in this state whose time ends first."""
        entries = [
            (end, self.tie(job, (line, index)), job, fifo)
            for (name, line), fifo in fifos.items()
            for index, (end, job) in enumerate(fifo)
            if name == queue and (line >= 0) is (state is State.COMPLETED)
        ]
        end, _, job, fifo = min(entries, key=lambda entry: entry[:2])
        fifo.remove((end, job))
        return job

    def next_retry(self, queue: str) -> int:
        """Return the time of an automatic retry that is noted now."""
        delay = self.policy(queue).dead_letters.auto_retry_delay
        assert isinstance(delay, int)
        return self.now + delay

    def postpone(self, queue: str, ids: Iterable[str]) -> None:
        """Set the next automatic retry of dead letters whose unique keys are taken."""
        if self.choices.postpones_retries:
            retry_at = self.next_retry(queue)
            letters = self.dead_letters[queue]
            letters[:] = [
                letter._replace(next_retry_at=retry_at) if letter.id in ids else letter for letter in letters
            ]

    def has_expired(self) -> bool:
        """Return whether something has expired, or may continue, that a storage may leave to a sweep."""
        fifos = (*self.records.values(), *self.results.values())
        ends = [end for fifo in fifos for end, _ in fifo]
        ends += [letter.expires_at for letters in self.dead_letters.values() for letter in letters]
        for job in self.jobs:
            if job.state in TERMINAL and job.outcomes:
                ends.append(job.finished_at + (self.policy(job.queue).retention.attempts.age or FOREVER))
            if job.state is State.COMPLETED and job.options.result_ttl is not None:
                ends.append(job.finished_at + job.options.result_ttl)
        waits = self.group_waits.values() if self.choices.ends_waits_late else ()
        is_late = any(at <= self.clock.monotonic() for at in waits)
        return is_late or min(ends, default=FOREVER) <= self.now

    def due(
        self, fifos: dict[tuple[str, int], list[tuple[int, ModelJob]]], queue: str
    ) -> list[tuple[int, ModelJob]]:
        """Take out the entries whose time has ended."""
        found = []
        for key, fifo in sorted(fifos.items()):
            while key[0] == queue and fifo and (fifo[0][0] <= self.now or fifo[0][1] not in self.jobs):
                found.append(fifo.pop(0))
        return found
