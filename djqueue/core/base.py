"""What every part of the engine stands on: shards, locks, dependencies, and what follows a change."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count, groupby
from operator import itemgetter
from random import Random
from threading import Lock

from .clock import SYSTEM_CLOCK, Clock
from .clocksteps import StepDetector
from .errors import OptionError
from .flow import outside
from .hashing import fnv1a32, shard_count
from .ids import IdSource
from .job import (
    Batch,
    EngineJob,
    Event,
    Incident,
    JobFailure,
)
from .journal import Journal
from .options import JobKey
from .processing import ProcessingShard
from .queue import JobQueue, QueuePolicy
from .shard import PendingChanges, Shard
from .sharing import NO_LIMITS, LimiterPolicy, SharedLimiter
from .states import LIVE, State
from .versions import ChangeCounter
from .workers import Workers

Wake = Callable[[], None]
Unsubscribe = Callable[[], None]
DEFAULT_POLICY = QueuePolicy()
logger = logging.getLogger("djqueue.engine")


class EngineBase:
    """Shards of queues, processing shards of active jobs, and who is told of changes.

    Lock order, always: a shard, then a processing shard, then a queue's finished records or a limiter.
    Two shards' locks are held at once by a move alone, which takes them in the shards' order: what else
    crosses queues (dependencies) is a step of its own on each side, repeated until both agree.
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
        limiters: Mapping[str, LimiterPolicy] | None = None,
        keep_finished: bool = True,
        cores: int | None = None,
        incidents: Callable[[list[Incident]], None] | None = None,
    ) -> None:
        self.clock = clock
        self._on_incidents = incidents
        self.random = random or Random()
        self._ids = ids or IdSource()
        self._journal = journal
        self._policies = dict(policies or {})
        self._default_policy = default_policy
        self._limiters = {name: SharedLimiter(policy, clock) for name, policy in dict(limiters or {}).items()}
        every = (*self._policies.values(), default_policy)
        self.may_block = any(policy.when_full == "block" for policy in every)
        """Whether some queue has its producers wait for room."""
        shards = shard_count(cores if cores is not None else os.cpu_count())
        self._mask = shards - 1
        self.shards = [Shard(journal, self._new_queue) for _ in range(shards)]
        self._keep_finished = keep_finished
        self.processing = [ProcessingShard() for _ in range(shards)]
        self.least_token = clock.now() << 20
        """Tokens of claims that another engine made are lower."""
        self._tokens = count(self.least_token)
        self._rotation = count()
        self.knowing: Callable[[Iterable[JobKey]], AbstractContextManager[None]] = _known
        """While it lasts, the engine knows these jobs, also those that are kept elsewhere alone."""
        self._listeners: list[tuple[frozenset[str] | None, Wake]] = []
        self._workers = Workers(clock)
        self._registry = Lock()
        self._steps = StepDetector(clock)
        self.changes = ChangeCounter()
        self.started = f"{clock.now()}:{self.random.getrandbits(32)}"
        """Which engine this is: versions of another one say nothing about its jobs."""

    def outbid(self, token: int) -> None:
        """Have all new tokens be higher than this one, wherever the clock stands."""
        if token >= self.least_token:
            self.least_token = token + 1
            self._tokens = count(self.least_token)

    # Dependencies.

    def _check(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            if batch.ids is not None and len(batch.ids) != len(batch.payloads):
                raise ValueError(f"expected one id per payload ({len(batch.payloads)}), got {len(batch.ids)}")
            if batch.queue in self._policies or self._default_policy is not DEFAULT_POLICY:
                self.policy(batch.queue).check_batch(batch)
        for name, job_id in outside(batches):
            queue = self.existing(name)
            if queue is None or job_id not in queue.jobs:
                raise OptionError(f"depends_on: queue {name!r} has no job {job_id!r}")

    def bind(
        self,
        job: EngineJob,
        dependencies: Iterable[JobKey],
        missing: State = State.CANCELLED,
        into: PendingChanges | None = None,
    ) -> None:
        """Have a blocked job hear of its dependencies' ends, those that lie in the past included.

        missing: how a dependency ended whose record is gone.
        into: what others have done just before, and is told of first.
        """
        changes = PendingChanges() if into is None else into
        for dependency in dependencies:
            key, ended = self._await(dependency, job, missing)
            if ended is not None:
                self._resolve(job, key, ended, changes)
        if into is None:
            self.settle(changes)
        with self._held_shard(job) as shard:
            lives = job.state in LIVE and shard.find(job.queue).is_there(job)
        if not lives:
            # It ended before this: what ends it looked for its dependencies too early.
            self._unbind(job, job.options.depends_on)

    def notice_step(self, now: int, tick: int) -> None:
        """Follow the wall clock if it was set: first, or what comes in now would be moved with the rest."""
        if self._steps.look(now, tick):
            self.follow_clock()

    def follow_clock(self) -> None:
        """Keep the lengths of delays and time limits if the wall clock was set."""
        with self._registry:
            step = self._steps.follow(self.clock.now(), self.clock.monotonic())
        if not step:
            return
        self.changes.bump()
        # In one transaction: a scheduler that starts later must not follow the step again.
        with nullcontext() if self._journal is None else self._journal.together():
            for shard in self.shards:
                for name in list(shard.queues):
                    with shard.lock:
                        queue = shard.queues.get(name)
                        for job in () if queue is None else queue.follow_step(step):
                            shard.stepped(job)
                        for letter in () if queue is None else queue.dead.follow_step(step):
                            shard.postponed(letter)
            if self._journal is not None:
                self._journal.clock_set(self._steps.offset)

    @property
    def clock_offset(self) -> int:
        """See `StepDetector.offset`."""
        return self._steps.offset

    def _now_for_lengths(self) -> int:
        """Return the wall clock's time for a time that is counted from now on: earlier steps are followed."""
        now = self.clock.now()
        self.notice_step(now, self.clock.monotonic())
        return now

    def follow(self, job: EngineJob, key: JobKey) -> JobKey:
        """Where what a blocked job waits for is by now, should it have been moved."""
        while (new := self.shard(key[0]).whereabouts(key)) is not None:
            with self._held_shard(job) as shard:
                if job.state is State.BLOCKED:
                    shard.wait_elsewhere(job, key, new)
            key = new
        return key

    @contextmanager
    def _held_shard(self, job: EngineJob) -> Iterator[Shard]:
        """The shard of the queue that a job is in, locked: while one waits for it, the job may be moved."""
        while True:
            shard = self.shard(job.queue)
            with shard.lock:
                if self.shard(job.queue) is shard:
                    yield shard
                    return

    def _await(self, dependency: JobKey, job: EngineJob, missing: State) -> tuple[JobKey, State | None]:
        """Note that a job waits for another, wherever that is; else how that ended."""
        key = dependency
        while True:
            key = self.follow(job, key)
            shard = self.shard(key[0])
            with shard.lock:
                queue = shard.queues.get(key[0])
                there = queue.jobs.get(key[1]) if queue is not None else None
                if queue is None or there is None:
                    if shard.has_moved(key):
                        continue  # since it was looked for
                    return key, missing
                # A plain job completes under its processing shard's lock alone.
                with self.place(there.id).lock:
                    # Should a failed one be retried and complete, a dependent that waits is told. So does a
                    # retried one, which has the error of its own failure.
                    is_patient = job.options.on_dependency_failure == "wait" or job.error is not None
                    waits = there.state is State.FAILED and is_patient
                    if there.state not in LIVE and not waits:
                        if there.state is not State.FAILED:
                            shard.hold(queue, there, job)
                        return key, there.state
                    there.has_dependents = True
                shard.dependencies.add(key, job)
            return key, None

    def _resolve(self, job: EngineJob, dependency: JobKey, ended: State, changes: PendingChanges) -> bool:
        """Tell a job that one of its dependencies has ended; whether it goes on waiting for it."""
        now = self.clock.now()
        with self._held_shard(job) as shard:
            queue = shard.find(job.queue)
            if job.state is not State.BLOCKED or dependency not in (job.unmet or ()):
                return False
            policy = job.options.on_dependency_failure
            if ended is State.COMPLETED or policy == "ignore":
                shard.unblock(queue, job, dependency, now, changes)
                return False
            if policy == "wait" and ended is State.FAILED:
                return True
            # Who may see this job may not know of the other queue.
            name = f"the job {dependency[1]!r}" if dependency[0] == job.queue else "a job of another queue"
            text = f"{name} that it depends on is {ended}"
            if policy == "cancel":
                shard.cancel_pending(queue, job, "dependency_failed", now, changes)
            else:
                error = JobFailure("djqueue.core.errors.JobFailedError", text)
                shard.fail_pending(queue, job, "dependency_failed", error, now, changes)
        return False

    def settle(self, changes: PendingChanges) -> None:
        """What an operation left to be done without locks: permits, dependents, wake-ups, subscribers."""
        if changes.freed is not None:
            for shared, permits in changes.freed.items():
                shared.release(permits, changes.woken)
        while changes.ended or changes.unbound:
            while changes.unbound:
                self._unbind(*changes.unbound.pop())
            if changes.ended:
                key, state, dependents = changes.ended.pop(0)
                for dependent in dependents:
                    if self._resolve(dependent, key, state, changes):
                        self.bind(dependent, [key], into=changes)
        if changes.woken and self._listeners:
            for queues, wake in self._listeners:
                if queues is None or not queues.isdisjoint(changes.woken):
                    try:
                        wake()
                    except Exception:
                        # What has happened has happened: the caller's operation did not fail.
                        logger.exception(
                            "A wake-up callback raised an exception; the storage operation itself succeeded."
                        )
        for event in changes.events:
            self._publish(event)
        if changes.incidents:
            self.announce(changes.incidents)

    def announce(self, incidents: list[Incident]) -> None:
        """Tell the engine's owner of what has happened to jobs without a worker's word."""
        if incidents and self._on_incidents is not None:
            self._on_incidents(incidents)

    def _unbind(self, job: EngineJob, dependencies: Iterable[JobKey]) -> None:
        """A job has ended: it waits for nothing any more, and needs nobody's record."""
        now = self.clock.now()
        for name, keys in groupby(dependencies, itemgetter(0)):
            shard = self.shard(name)
            with shard.lock:
                shard.let_go(keys, job, now)

    def _publish(self, event: Event) -> None:
        queue = self.existing(event.queue)
        if queue is not None:
            for handler in (*queue.handlers, *queue.watchers.get(event.id, ())):
                try:
                    handler(event)
                except Exception:
                    logger.exception(
                        "An event handler of queue %r raised an exception; the event is not delivered to it "
                        "again.",
                        event.queue,
                    )

    # Finding things.

    def shard(self, queue_name: str) -> Shard:
        """The shard of a queue."""
        return self.shards[fnv1a32(queue_name) & self._mask]

    def _new_queue(self, name: str) -> JobQueue:
        policy = self.policy(name)
        return JobQueue(
            name,
            policy,
            self.clock.monotonic,
            random=self.random,
            keep_finished=self._keep_finished,
            shared=None if policy.limiter is None else self.limiter(policy.limiter),
        )

    def limiter(self, name: str) -> SharedLimiter:
        """The limiter of this name, made on its first use if it is not configured."""
        found = self._limiters.get(name)
        if found is None:
            found = self._limiters.setdefault(name, SharedLimiter(NO_LIMITS, self.clock))
        return found

    def existing(self, queue_name: str) -> JobQueue | None:
        return self.shard(queue_name).queues.get(queue_name)

    def _serving(self, names: Sequence[str] | None) -> list[tuple[Shard, JobQueue]]:
        """The queues that a claim may take from, another one first each time."""
        if names is None:
            serving = [(shard, queue) for shard in self.shards for queue in list(shard.queues.values())]
        else:
            serving = []
            for name in names:
                shard = self.shard(name)
                if (queue := shard.queues.get(name)) is not None:
                    serving.append((shard, queue))
        if len(serving) > 1:
            first = next(self._rotation) % len(serving)
            serving = serving[first:] + serving[:first]
        return serving

    def place(self, job_id: str) -> ProcessingShard:
        # The documents' FNV-1a takes 2 µs for an id in Python; a text's own hash is cached.
        return self.processing[hash(job_id) & self._mask]

    def is_active(self, job: EngineJob) -> bool:
        """Whether a job runs; if it has just completed, all that belongs to that is done."""
        with self.place(job.id).lock:
            return job.state is State.ACTIVE

    def policy(self, queue_name: str) -> QueuePolicy:
        """What a queue is configured to do."""
        return self._policies.get(queue_name, self._default_policy)


def _known(_: Iterable[JobKey]) -> AbstractContextManager[None]:
    return nullcontext()
