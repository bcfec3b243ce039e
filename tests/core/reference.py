"""What the engine should do, said as simply as can be: one list of jobs, looked through each time."""

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from operator import itemgetter
from typing import Any

from djqueue.core.engine import EXPIRED
from djqueue.core.finished import FOREVER, RETURNED
from djqueue.core.groups import GroupLimit
from djqueue.core.job import AttemptRecord, Batch, DeadLetterRecord, JobFailure
from djqueue.core.limiter import Rate
from djqueue.core.maintenance import Swept
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import NO_RETENTION
from djqueue.core.sizes import size_of_error
from djqueue.core.stalls import stalled_error
from djqueue.core.states import LIVE, PENDING, REUSABLE, TERMINAL, State
from djqueue.core.unique import PREDECESSOR
from djqueue.testing.clock import FakeClock

ERROR = JobFailure("ValueError", "no")
"""What every run raises that fails."""


@dataclass(eq=False)
class RefJob:
    queue: str
    id: str
    name: str
    payload: bytes
    options: JobOptions
    created_at: int
    run_at: int
    state: State | None = None
    order: int = 0
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
    runs: list[AttemptRecord] = field(default_factory=list)
    admitted: int = 0
    holders: set["RefJob"] = field(default_factory=set)
    put_off: bool = False
    passed: bool = False

    @property
    def key(self) -> JobKey:
        return self.queue, self.id


@dataclass
class RefLimits:
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
    """The verbs of the engine; answers are those of the engine, records are `RefJob`s."""

    def __init__(
        self, clock: FakeClock, policies: Mapping[str, QueuePolicy], observed: Iterable[str]
    ) -> None:
        self.clock = clock
        self.policies = policies
        self.observed = set(observed)
        self.jobs: list[RefJob] = []
        self.queues: set[str] = set(observed)
        self.paused: set[str] = set()
        self.limits: dict[str, RefLimits] = {}
        self.group_limits: dict[tuple[str, str | None], GroupLimit] = {}
        self.paused_groups: set[tuple[str, str]] = set()
        self.buckets: dict[tuple[str, str, Rate], RefLimits] = {}
        self.rests: dict[tuple[str, str], tuple[int, int]] = {}
        self.letters: dict[str, list[DeadLetterRecord]] = {}
        self.retries: dict[JobKey, int] = {}
        self.keys: dict[tuple[str, str], tuple[RefJob, int | None]] = {}
        self.followers: dict[tuple[str, str], tuple[RefJob, RefJob]] = {}
        self.records: dict[tuple[str, int], list[tuple[int, RefJob]]] = {}
        self.results: dict[tuple[str, int], list[tuple[int, RefJob]]] = {}
        self.bindings: dict[tuple[RefJob, JobKey], int] = {}
        self.ended: list[tuple[JobKey, State]] = []
        self.gone: list[RefJob] = []
        self.events: list[tuple[str, str, str, State]] = []
        self.numbers = count(1)

    # Looking.

    @property
    def now(self) -> int:
        return self.clock.now()

    def job(self, queue: str, job_id: str) -> RefJob | None:
        return next((job for job in self.jobs if job.key == (queue, job_id)), None)

    def of(self, queue: str) -> list[RefJob]:
        return [job for job in self.jobs if job.queue == queue]

    def ready(self, queue: str, names: Iterable[str] | None = None) -> list[RefJob]:
        jobs = [
            job
            for job in self.of(queue)
            if job.state is State.WAITING and not job.group_waiting and (names is None or job.name in names)
        ]
        return sorted(jobs, key=lambda job: (-job.options.priority, job.order))

    def delayed(self, queue: str) -> list[RefJob]:
        jobs = [job for job in self.of(queue) if job.state is State.DELAYED]
        return sorted(jobs, key=lambda job: (job.run_at, job.order))

    def active(self, queue: str) -> list[RefJob]:
        return [job for job in self.of(queue) if job.state is State.ACTIVE]

    def counts(self, queue: str) -> dict[State, int]:
        return {state: sum(job.state is state for job in self.of(queue)) for state in State}

    def owner(self, queue: str, key: str) -> RefJob | None:
        job, free_at = self.keys.get((queue, key), (None, None))
        if free_at is not None and free_at <= self.now:
            del self.keys[queue, key]
            return None
        return job

    def policy(self, queue: str) -> QueuePolicy:
        return self.policies.get(queue, QueuePolicy())

    def limits_of(self, queue: str) -> RefLimits:
        return self.limits.setdefault(queue, RefLimits())

    # Moving a job about.

    def tell(self, job: RefJob, event: str) -> None:
        if job.queue in self.observed:
            assert job.state is not None
            self.events.append((job.queue, job.id, event, job.state))

    def place(self, job: RefJob, *, front: bool = False, again: bool = False) -> None:
        front = front or job.options.lifo
        job.group_waiting = False
        if job.unmet:
            job.state = State.BLOCKED
        elif job.run_at > self.now:
            job.order = next(self.numbers)
            job.state = State.DELAYED
        else:
            job.order = next(self.numbers) * (-1 if front else 1)
            job.group_waiting = not self.may_be_ready(job, again=again)
            job.state = State.WAITING
            if job.group_waiting and job.options.group is not None:
                self.note_rest(job.queue, job.options.group)

    def may_be_ready(self, job: RefJob, *, again: bool = False) -> bool:
        group = job.options.group
        if group is None:
            return True
        mine = [other for other in self.of(job.queue) if other.options.group == group and other is not job]
        ready = sum(other.state is State.WAITING and not other.group_waiting for other in mine)
        if again:
            return ready < self.room(job.queue, group, job)
        if any(other.group_waiting for other in mine):
            return False
        return ready < min(self.weight(job.queue, group), self.room(job.queue, group, job))

    def room(self, queue: str, group: str, besides: RefJob | None = None) -> int:
        """How many of a group may be ready."""
        if (queue, group) in self.paused_groups:
            return 0
        room = self.places(queue, group, besides)
        bucket = self.bucket(queue, group)
        return room if bucket is None else min(room, int(bucket.tokens))

    def places(self, queue: str, group: str, besides: RefJob | None = None) -> int:
        mine = [job for job in self.active(queue) if job.options.group == group and job is not besides]
        limit = self.said(queue, group).concurrency or self.said(queue, None).concurrency
        return (limit or self.policy(queue).group_concurrency) - len(mine)

    def said(self, queue: str, group: str | None) -> GroupLimit:
        return self.group_limits.get((queue, group), GroupLimit())

    def weight(self, queue: str, group: str) -> int:
        return self.said(queue, group).weight or self.policy(queue).group_weights.get(group, 1)

    def bucket(self, queue: str, group: str) -> RefLimits | None:
        rate = self.said(queue, group).rate or self.said(queue, None).rate or self.policy(queue).group_rate
        if rate is None:
            return None
        tick = self.clock.monotonic()
        fresh = RefLimits(rate, None, Fraction(rate.capacity), tick)
        bucket = self.buckets.setdefault((queue, group, rate), fresh)
        bucket.refill(tick)
        return bucket

    def advance(self, queue: str, group: str | None) -> None:
        if group is None:
            return
        mine = [job for job in self.of(queue) if job.options.group == group]
        group_waiting = sorted((job for job in mine if job.group_waiting), key=lambda job: job.order)
        ready = sum(job.state is State.WAITING and not job.group_waiting for job in mine)
        share = min(self.weight(queue, group), self.room(queue, group))
        for job in group_waiting[: max(0, share - ready)]:
            job.group_waiting = False
            job.order = next(self.numbers)
        self.note_rest(queue, group)

    def note_rest(self, queue: str, group: str) -> None:
        """A group rests until its next token, if that is all that it waits for."""
        mine = [job for job in self.of(queue) if job.options.group == group]
        ready = sum(job.state is State.WAITING and not job.group_waiting for job in mine)
        bucket, paused = self.bucket(queue, group), (queue, group) in self.paused_groups
        before = self.rests.pop((queue, group), None)
        if bucket is None or paused or not any(job.group_waiting for job in mine):
            return
        assert bucket.rate is not None
        most = min(self.weight(queue, group), self.places(queue, group), bucket.rate.capacity)
        if ready < most:
            wait = (ready + 1 - bucket.tokens) * bucket.rate.per / bucket.rate.capacity
            at = bucket.at - (-wait.numerator // wait.denominator)
            same = before is not None and before[0] == at
            self.rests[queue, group] = before if same and before else (at, next(self.numbers))

    def end_rests(self, queue: str) -> None:
        due = [
            (rest, group)
            for (name, group), rest in self.rests.items()
            if name == queue and rest[0] <= self.clock.monotonic()
        ]
        for _, group in sorted(due):
            self.rests.pop((queue, group), None)
            self.advance(queue, group)

    def regroup(self, queue: str, groups: Iterable[str]) -> None:
        for group in groups:
            mine = [job for job in self.of(queue) if job.options.group == group]
            ready = [job for job in mine if job.state is State.WAITING and not job.group_waiting]
            ready.sort(key=lambda job: job.order)
            for job in reversed(ready[max(0, self.room(queue, group)) :]):
                job.group_waiting = True
                job.order = -next(self.numbers)
            self.advance(queue, group)

    def set_group_limit(self, queue: str, group: str | None, **said: Any) -> None:
        self.queues.add(queue)
        self.group_limits[queue, group] = self.said(queue, group)._replace(**said)
        groups = {job.options.group for job in self.of(queue)} - {None}
        self.regroup(queue, sorted(groups) if group is None else [group])

    def pause_group(self, queue: str, group: str) -> None:
        self.queues.add(queue)
        self.paused_groups.add((queue, group))
        self.regroup(queue, [group])

    def resume_group(self, queue: str, group: str) -> None:
        self.paused_groups.discard((queue, group))
        self.regroup(queue, [group])

    def take_out(self, job: RefJob) -> None:
        """The job is nowhere; the next of its group may take its place."""
        in_group = job.state in (State.ACTIVE, State.WAITING)
        job.state, job.group_waiting, job.unmet = None, False, set()
        if in_group:
            self.advance(job.queue, job.options.group)

    def emit(self, queue: str, job_id: str, token: int, start: int, items: list[bytes]) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state is not State.ACTIVE or job.token != token or start > job.sent:
            return False
        new = items[max(0, job.sent - start) :]
        job.items += new
        job.sent += len(new)
        if new:
            self.tell(job, "item")
        return True

    def readable(self, job: RefJob) -> tuple[bytes, ...]:
        ttl = job.options.result_ttl
        is_over = job.state is State.COMPLETED and ttl is not None and job.finished_at + ttl <= self.now
        return () if is_over else tuple(job.items)

    def end(self, job: RefJob, state: State) -> None:
        job.state = state
        job.finished_at = self.now
        self.free_key(job)
        # Those that still wait for an earlier job with this id hold that one's record.
        are_told = job.key in (key for key, _ in self.ended)
        self.ended.append((job.key, state))
        self.gone.append(job)
        if state is State.FAILED:
            return
        job.holders = set() if are_told else set(self.waiting_for(job.key))
        retention = self.policy(job.queue).retention
        kept = retention.of(state).shorten(job.options.kept)
        if kept is None and retention == NO_RETENTION:
            return
        kept = FOREVER if kept is None else kept
        place = kept if state is State.COMPLETED else ~kept
        self.records.setdefault((job.queue, place), []).append((self.now + kept, job))
        readable = self.readable_for(job)
        bounded = job.result is not None and retention.results.bytes is not None
        if state is State.COMPLETED and (job.result is not None or job.sent) and (readable < kept or bounded):
            place = readable if job.result is not None else ~readable
            self.results.setdefault((job.queue, place), []).append((self.now + readable, job))

    def readable_for(self, job: RefJob) -> int:
        readable = self.policy(job.queue).retention.results.shorten(job.options.result_ttl)
        return FOREVER if readable is None else readable

    def take_key(self, job: RefJob) -> None:
        ttl = job.options.unique_ttl
        self.keys[job.queue, job.options.unique_key] = (job, None if ttl is None else job.created_at + ttl)

    def free_key(self, job: RefJob) -> None:
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
                    self.place(follower)
                    self.tell(follower, "unblocked")

    def bury(self, job: RefJob, reason: str, error: JobFailure, unmet: Iterable[JobKey] = ()) -> None:
        job.reason = reason
        job.error = error
        self.end(job, State.FAILED)
        policy = self.policy(job.queue).dead_letters
        retries = self.retries.pop(job.key, 0)
        again = self.now + policy.auto_retry_delay if retries < policy.auto_retries else 0
        letters = self.letters.setdefault(job.queue, [])
        letter = DeadLetterRecord(job.queue, job.id, reason, self.now, self.now + policy.ttl, retries, again)
        letters.append(letter._replace(unmet=tuple(sorted(unmet))))
        self.tell(job, "failed")
        for letter in letters[: max(0, len(letters) - policy.max_entries)]:
            self.forget(self.job(letter.queue, letter.id))

    def expire(self, job: RefJob) -> None:
        self.take_out(job)
        self.bury(job, "ttl_expired", EXPIRED)

    def is_expired(self, job: RefJob) -> bool:
        ttl = job.options.ttl
        fresh = job.state in PENDING and not job.started_at and job.error is None
        return fresh and ttl is not None and job.created_at + ttl <= self.now

    def forget(self, job: RefJob | None) -> None:
        assert job is not None
        state = job.state
        if state in PENDING:
            self.take_out(job)
            self.free_key(job)
            self.gone.append(job)
        if state in PENDING or state is State.FAILED:
            self.ended.append((job.key, State.CANCELLED))
        letters = self.letters.get(job.queue, [])
        letters[:] = [letter for letter in letters if letter.id != job.id]
        self.retries.pop(job.key, None)
        self.jobs.remove(job)
        job.state = state
        self.tell(job, "removed")

    # Dependencies.

    def waiting_for(self, key: JobKey) -> list[RefJob]:
        waiting = [job for job in self.jobs if job.state is State.BLOCKED and key in job.unmet]
        waiting = [job for job in waiting if (job, key) in self.bindings]
        return sorted(waiting, key=lambda job: self.bindings[job, key])

    def settle(self) -> None:
        while self.ended or self.gone:
            for dependent in self.gone:
                for job in self.jobs:
                    self.let_go(job, dependent)
            self.gone.clear()
            if self.ended:
                key, state = self.ended.pop(0)
                for job in self.waiting_for(key):
                    self.resolve(job, key, state)

    def let_go(self, job: RefJob, dependent: RefJob) -> None:
        if dependent in job.holders:
            job.holders.remove(dependent)
            if not job.holders:
                self.count_again(job)

    def count_again(self, job: RefJob) -> None:
        """Nobody holds a record any more: what had been passed over has its place again."""
        assert job.state is not None
        place = RETURNED if job.state is State.COMPLETED else ~RETURNED
        if job.put_off:
            kept = self.policy(job.queue).retention.of(job.state).shorten(job.options.kept)
            end = job.finished_at + (FOREVER if kept is None else kept)
            insort(self.records.setdefault((job.queue, place), []), (end, job), key=itemgetter(0))
        over = job.finished_at + self.readable_for(job)
        if job.state is State.COMPLETED and over <= self.now:
            job.result, job.items = None, []
        elif job.passed:
            insort(self.results.setdefault((job.queue, place), []), (over, job), key=itemgetter(0))
        job.put_off = job.passed = False

    def bind(self, job: RefJob, key: JobKey) -> None:
        there = self.job(*key)
        waits = there is not None and (
            there.state in LIVE
            or (
                there.state is State.FAILED
                and (job.options.on_dependency_failure == "wait" or job.error is not None)
            )
        )
        self.bindings[job, key] = next(self.numbers)
        if not waits:
            ended = there.state if there is not None else State.CANCELLED
            assert ended is not None
            if there is not None and ended is not State.FAILED:
                there.holders.add(job)
            self.resolve(job, key, ended)
            self.settle()

    def resolve(self, job: RefJob, key: JobKey, ended: State) -> None:
        if job.state is not State.BLOCKED or key not in job.unmet:
            return
        policy = job.options.on_dependency_failure
        if ended is State.COMPLETED or policy == "ignore":
            job.unmet.remove(key)
            if not job.unmet:
                self.place(job)
                self.tell(job, "unblocked")
        elif policy == "wait" and ended is State.FAILED:
            self.bind(job, key)
        else:
            unmet = job.unmet - {PREDECESSOR}
            self.take_out(job)
            if policy == "cancel":
                self.cancel_out(job, "dependency_failed")
            else:
                name = f"dependency {key[1]!r}" if key[0] == job.queue else "a dependency in another queue"
                text = f"{name} ended as {ended}"
                error = JobFailure("djqueue.core.errors.JobFailedError", text)
                self.bury(job, "dependency_failed", error, unmet)

    # The verbs.

    def enqueue(self, batch: Batch, ids: list[str]) -> list[tuple[str, str, State | None, Any]]:
        """`ids` are those that the engine made, where the caller gave none."""
        self.queues.add(batch.queue)
        options, answers, added = batch.options, [], []
        for job_id, payload in zip(ids, batch.payloads, strict=True):
            there = self.job(batch.queue, job_id)
            if there is not None and there.state not in REUSABLE:
                done = there.state is State.COMPLETED
                answers.append(
                    (
                        job_id,
                        "completed" if done else "duplicate",
                        there.state,
                        there.result if done else None,
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
            rival = self.followers.get((batch.queue, key), (None,))[0] if active else owner
            if rival is not None:
                if rival.state is not State.BLOCKED and policy != "debounce":
                    run_at = min(run_at, rival.run_at)
                self.take_out(rival)
                self.cancel_out(rival, "replaced")
            if there is not None:
                known = len(self.ended)
                self.forget(there)
                del self.ended[known:]
            job = RefJob(batch.queue, job_id, batch.name, payload, options, self.now, run_at)
            job.unmet = set(options.depends_on)
            job.admitted = next(self.numbers)
            if active:
                job.unmet.add(PREDECESSOR)
                self.followers[batch.queue, key] = (job, owner)
            elif key is not None:
                self.take_key(job)
            self.jobs.append(job)
            self.place(job)
            self.tell(job, "queued")
            added.append(job)
            answers.append((job_id, "queued", None, None))
        self.settle()
        for job in added:
            for dependency in options.depends_on:
                self.bind(job, dependency)
            if job.state not in LIVE:
                # Ended by one of them: it needs the records of the others no more.
                for other in self.jobs:
                    self.let_go(other, job)
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
    ) -> tuple[list[RefJob], int | None]:
        claimed: list[RefJob] = []
        tokens, alone = iter(tokens), ""
        rests = any(name == queue for name, _ in self.rests)
        if slots <= 0 or queue in self.paused or not (self.ready(queue) or self.delayed(queue) or rests):
            return claimed, None
        self.promote_due(queue)
        self.end_rests(queue)
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
                if job.options.group is not None and (bucket := self.bucket(queue, job.options.group)):
                    bucket.tokens -= 1
                self.advance(queue, job.options.group)
                self.tell(job, "active")
                if alone:
                    break
            if alone:
                break
        hints = [0] if alone == "later" else []
        hints += [max(0, job.run_at - self.now) for job in self.delayed(queue)[:1]]
        hints += [at - self.clock.monotonic() for (name, _), (at, _) in self.rests.items() if name == queue]
        claimable = [job for job in self.ready(queue, names) if stalled or not job.stalls]
        if limits.rate is not None and claimable and limits.tokens < 1:
            missing = (1 - limits.tokens) * limits.rate.per / limits.rate.capacity
            hints.append(-(-missing.numerator // missing.denominator))
        self.settle()
        return claimed, min(hints, default=None)

    def allowed(self, queue: str, names: frozenset[str], slots: int, *, stalled: bool = True) -> list[RefJob]:
        best = [job for job in self.ready(queue, names) if stalled or not job.stalls][:slots]
        most = self.limits_of(queue).concurrency
        if most is None:
            return best
        free = most - sum(job.options.weight for job in self.active(queue))
        for place, job in enumerate(best):
            free -= min(job.options.weight, most)
            if free < 0:
                return best[:place]
        return best

    def promote_due(self, queue: str) -> int:
        due = [job for job in self.delayed(queue) if job.run_at <= self.now]
        for job in due:
            job.state = None
            self.place(job)
            self.tell(job, "promoted")
        return len(due)

    def finish(
        self, queue: str, job_id: str, token: int, kind: str, result: bytes | None, delay: int, reason: str
    ) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state is not State.ACTIVE or job.token != token:
            return False
        if kind == "complete":
            self.take_out(job)
            job.result = result
            job.error = None
            self.end(job, State.COMPLETED)
            self.tell(job, "completed")
        elif kind == "fail":
            self.fail_active(job, reason)
        elif kind == "cancel" or job.cancel_requested:
            self.note(job, "cancelled")
            self.take_out(job)
            self.cancel_out(job, reason)
        else:
            self.put_back(job, "retried" if kind == "retry" else "released", delay)
        return True

    def note(self, job: RefJob, outcome: str) -> None:
        most = self.policy(job.queue).retention.attempts.count
        run = AttemptRecord(job.attempts, job.worker, job.started_at, self.now, outcome)
        job.runs = [*job.runs[len(job.runs) - len(job.outcomes) :][-most:], run]
        job.outcomes = [*job.outcomes, (job.attempts, outcome)][-most:]

    def fail_active(self, job: RefJob, reason: str) -> None:
        self.note(job, "stalled" if reason == "worker_lost" else "failed")
        error = ERROR
        if reason == "worker_lost":
            job.stalls += 1
            error = stalled_error(job.stalls, job.runs)
        else:
            job.failures += 1
        self.take_out(job)
        if reason == "worker_lost":
            job.state = State.FAILED
            self.tell(job, "stalled")
        self.bury(job, reason, error)

    def cancel_out(self, job: RefJob, reason: str) -> None:
        job.reason = reason
        self.end(job, State.CANCELLED)
        self.tell(job, "cancelled")

    def put_back(self, job: RefJob, outcome: str, delay: int) -> None:
        self.note(job, outcome)
        job.attempts -= outcome == "released"
        job.failures += outcome == "retried"
        job.stalls += outcome == "stalled"
        job.error = ERROR if outcome == "retried" else job.error
        if any(leader is job for _, leader in self.followers.values()):
            self.take_out(job)
            self.cancel_out(job, "replaced")
            return
        job.items, job.sent = [], 0
        job.worker = ""
        job.run_at = self.now + delay
        front = outcome != "retried"
        again = front and not delay
        if again:
            job.state = None
        else:
            self.take_out(job)
        self.place(job, front=front, again=again)
        self.tell(job, "failing" if outcome == "retried" else outcome)

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
            self.take_out(job)
            self.cancel_out(job, reason)
            self.settle()
            return "cancelled"
        if job.state is State.ACTIVE:
            job.cancel_requested = True
            self.tell(job, "cancel_requested")
            return "requested"
        return str(job.state)

    def move(self, queue: str, job_id: str, run_at: int, event: str, states: frozenset[State]) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state not in states:
            return False
        self.take_out(job)
        job.run_at = run_at
        self.place(job)
        self.tell(job, event)
        return True

    def retry(self, queue: str, job_id: str, *, by_itself: bool = False) -> str:
        job = self.job(queue, job_id)
        if job is None:
            return "not_found"
        if job.state is not State.FAILED:
            return "not_failed"
        key = job.options.unique_key
        if key is not None and self.owner(queue, key) is not None:
            return "unique_key_taken"
        letters = self.letters[queue]
        letter = next(letter for letter in letters if letter.id == job_id)
        ended = {one: there.state if (there := self.job(*one)) else None for one in letter.unmet}
        if not by_itself and not {None, State.CANCELLED}.isdisjoint(ended.values()):
            return "dependency_gone"
        letters.remove(letter)
        if by_itself:
            self.retries[job.key] = letter.retries + 1
        job.failures = job.stalls = job.finished_at = 0
        job.items, job.sent = [], 0
        job.reason = job.worker = ""
        job.run_at = self.now
        if key is not None:
            ttl = job.options.unique_ttl
            self.keys[queue, key] = (job, None if ttl is None else job.created_at + ttl)
        job.state = None
        job.unmet = {one for one, state in ended.items() if state is not State.COMPLETED}
        word = "blocked_again" if job.unmet else "retried"
        self.place(job)
        self.tell(job, "retried")
        for one in job.options.depends_on if ended else ():
            self.bind(job, one)
        return word

    def remove(self, queue: str, job_id: str) -> bool:
        job = self.job(queue, job_id)
        if job is None or job.state is State.ACTIVE:
            return False
        self.forget(job)
        self.settle()
        return True

    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        self.queues.add(queue)
        limits = self.limits_of(queue)
        if rate is not None and rate != limits.rate:
            limits.tokens, limits.at = Fraction(rate.capacity), self.clock.monotonic()
        limits.rate, limits.concurrency = rate, concurrency

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
        jobs = [
            job
            for job in self.of(queue)
            if job.state in states
            and job.state is not State.ACTIVE
            and (job.finished_at or job.created_at) < before
        ]
        blocked = [job for job in reversed(jobs) if job.state is State.BLOCKED]
        jobs = [*blocked, *(job for job in jobs if job.state is not State.BLOCKED)][:limit]
        for job in jobs:
            self.forget(job)
        self.settle()
        return len(jobs)

    def obliterate(self, queue: str, *, force: bool) -> int:
        if self.active(queue) and not force:
            return -1
        for job in self.active(queue):
            self.note(job, "cancelled")
            self.take_out(job)
            self.cancel_out(job, "obliterated")
        jobs = self.of(queue)
        for job in jobs:
            self.forget(job)
        self.paused.discard(queue)
        self.limits.pop(queue, None)
        self.group_limits = {key: said for key, said in self.group_limits.items() if key[0] != queue}
        self.paused_groups = {key for key in self.paused_groups if key[0] != queue}
        self.buckets = {key: bucket for key, bucket in self.buckets.items() if key[0] != queue}
        self.rests = {key: rest for key, rest in self.rests.items() if key[0] != queue}
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
                self.note(job, "cancelled")
                self.take_out(job)
                self.cancel_out(job, "cancelled")
            elif job.stalls >= job.options.max_stalls:
                self.fail_active(job, "worker_lost")
            else:
                self.put_back(job, "stalled", 0)
            self.settle()
        for queue in sorted(self.queues):
            promoted += self.promote_due(queue)
            self.end_rests(queue)
            late = [job for job in self.of(queue) if self.is_expired(job)]
            late.sort(key=lambda job: (job.created_at + (job.options.ttl or 0), job.admitted))
            for job in late:
                if job in self.jobs:
                    self.expire(job)
            expired += len(late)
            for key, (_, free_at) in list(self.keys.items()):
                if key[0] == queue and free_at is not None and free_at <= self.now:
                    del self.keys[key]
            over = [letter for letter in self.letters.get(queue, []) if letter.expires_at <= self.now]
            for letter in over:
                self.forget(self.job(queue, letter.id))
            heavy = self.heavy_letters(queue)
            for letter in heavy:
                self.forget(self.job(letter.queue, letter.id))
            for _, job in self.due(self.results, queue):
                job.items = []
                job.passed = bool(job.holders)
                if not job.holders:
                    job.result = None
            self.drop_results(queue)
            self.drop_outcomes(queue)
            over_now = [job for _, job in self.due(self.records, queue) if job in self.jobs]
            for job in over_now:
                job.put_off = bool(job.holders)
            old = [job for job in over_now if not job.holders]
            for job in old:
                self.forget(job)
            surplus = [*self.surplus(queue, State.COMPLETED), *self.surplus(queue, State.CANCELLED)]
            for job in surplus:
                self.forget(job)
            removed += len(over) + len(heavy) + len(old) + len(surplus)
            due = [
                letter.id for letter in self.letters.get(queue, []) if 0 < letter.next_retry_at <= self.now
            ]
            self.settle()
            answers = [self.retry(queue, job_id, by_itself=True) for job_id in due]
            retried += answers.count("retried") + answers.count("blocked_again")
        return Swept(promoted, stalled, expired, retried, removed)

    def heavy_letters(self, queue: str) -> list[DeadLetterRecord]:
        letters = self.letters.get(queue, [])
        most = self.policy(queue).dead_letters.max_bytes
        sizes = [self.size(self.job(letter.queue, letter.id)) for letter in letters]
        gone = 0
        while most is not None and sum(sizes[gone:]) > most:
            gone += 1
        return letters[:gone]

    def size(self, job: RefJob | None) -> int:
        assert job is not None
        return len(job.payload) + (0 if job.error is None else size_of_error(job.error))

    def drop_results(self, queue: str) -> None:
        most = self.policy(queue).retention.results.bytes
        while most is not None:
            if sum(len(job.result or b"") for job in self.of(queue) if not job.holders) <= most:
                break
            job = self.first(self.results, queue, State.COMPLETED)
            if job.holders:
                job.passed = True
            else:
                job.result, job.items = None, []

    def drop_outcomes(self, queue: str) -> None:
        age = self.policy(queue).retention.attempts.age
        for job in self.of(queue):
            if age is not None and job.state in TERMINAL and job.finished_at + age <= self.now:
                job.outcomes = []

    def surplus(self, queue: str, state: State) -> list[RefJob]:
        keep = self.policy(queue).retention.of(state)
        there = [job for job in self.of(queue) if job.state is state and not job.holders]
        gone: list[RefJob] = []
        while True:
            size = sum(self.size(job) + len(job.result or b"") for job in there)
            too_many = keep.count is not None and len(there) > keep.count
            if not too_many and (keep.bytes is None or size <= keep.bytes):
                return gone
            job = self.first(self.records, queue, state)
            job.put_off = bool(job.holders)
            if job in there:
                there.remove(job)
                gone.append(job)

    def first(
        self, fifos: dict[tuple[str, int], list[tuple[int, RefJob]]], queue: str, state: State
    ) -> RefJob:
        """The one of an outcome whose time would be over first."""
        mine = [
            (fifo[0][0], place, fifo)
            for (name, place), fifo in fifos.items()
            if name == queue and fifo and (place >= 0) is (state is State.COMPLETED)
        ]
        return min(mine, key=lambda entry: entry[:2])[2].pop(0)[1]

    def due(
        self, fifos: dict[tuple[str, int], list[tuple[int, RefJob]]], queue: str
    ) -> list[tuple[int, RefJob]]:
        """Taken from the front only: where the wall clock was set back, some are kept longer."""
        found = []
        for key, fifo in sorted(fifos.items()):
            while key[0] == queue and fifo and (fifo[0][0] <= self.now or fifo[0][1] not in self.jobs):
                found.append(fifo.pop(0))
        return found
