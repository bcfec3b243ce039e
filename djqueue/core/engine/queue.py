"""One queue of the engine: its jobs, each in the structure of its state, and its totals.

Active jobs and their leases are in separate shards, so that claims do not wait for finishes.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from random import Random

from ..enginejob import EngineJob
from ..overview import NO_TOTALS, Totals
from ..policies import (
    GLOBAL,
    NO_LIMIT,
    PREDECESSOR,
    GroupLimit,
    QueuePolicy,
)
from ..states import PENDING, State
from .deadletters import DeadLetters
from .finished import FinishedJobs
from .groups import GROUP_WAITING, Groups
from .indexes import SubjectIndex, UniqueKeys
from .joblists import DelayedJobs, DropOrder, ReadyJobs
from .limiters import QueueLimiter, SharedLimiter


class Tally:
    """Counters for `Totals`, guarded by the lock of the queue's shard.

    Completions are counted by the finished records, because a plain job completes without that lock.
    """

    __slots__ = ("cancelled", "enqueued", "failed", "noted", "retried", "stalled", "started")

    def __init__(self) -> None:
        self.enqueued = 0
        self.started = 0
        self.retried = 0
        self.failed = 0
        self.cancelled = 0
        self.stalled = 0
        self.noted = NO_TOTALS
        """Totals that the metrics have."""

    def totals(self, completed: int) -> Totals:
        """Return the current totals."""
        return Totals(
            self.enqueued,
            self.started,
            completed,
            self.retried,
            self.failed,
            self.cancelled,
            self.stalled,
        )


class JobQueue:
    """Jobs of one queue, each in the structure of its state. Guarded by the lock of its shard."""

    __slots__ = (
        "_deadlines",
        "_numbers",
        "blocked",
        "dead",
        "delayed",
        "drops",
        "finished",
        "group_limit",
        "groups",
        "is_grouped",
        "jobs",
        "limiter",
        "name",
        "observed",
        "paused",
        "policy",
        "ready",
        "shared",
        "subjects",
        "tally",
        "unique",
    )

    def __init__(
        self,
        name: str,
        policy: QueuePolicy,
        monotonic: Callable[[], int],
        *,
        random: Random | None = None,
        shared: SharedLimiter | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.jobs: dict[str, EngineJob] = {}
        """Every job that has a record, by id."""
        self.subjects = SubjectIndex()
        self.ready = ReadyJobs()
        self.delayed = DelayedJobs()
        self.blocked = 0
        self.unique = UniqueKeys()
        self.groups = Groups(monotonic)
        self.groups.weights = policy.group_weights
        self.is_grouped = policy.group_mode != GLOBAL
        """True if groups hold jobs back."""
        self.limit_groups(NO_LIMIT)
        self.limiter = QueueLimiter()
        self.limiter.set(policy.rate, policy.concurrency, monotonic())
        self.shared = shared
        """Limiter shared with other queues, whose permits its jobs need, too."""
        self.dead = DeadLetters(policy.dead_letters, random or Random())
        self.finished = FinishedJobs(retention=policy.retention, jobs=self.jobs)
        self.paused = False
        self.tally = Tally()
        self.observed = False
        """True if events have subscribers."""
        self.drops: DropOrder | None = None
        if policy.max_size is not None and policy.when_full in ("drop_oldest", "drop_lowest"):
            self.drops = DropOrder(self.is_there, by_priority=policy.when_full == "drop_lowest")
        self._deadlines: list[tuple[int, int, EngineJob]] = []
        """Heap of (expiry, number, job) of jobs with a ttl."""
        self._numbers = count()

    def is_there(self, job: EngineJob) -> bool:
        """Return whether the job still has its id."""
        return self.jobs.get(job.id) is job

    def keep(self, job: EngineJob) -> None:
        """Add the record of a job whose id is free."""
        self.jobs[job.id] = job
        if job.options.subject is not None:
            self.subjects.add([job], job.options.subject)

    @property
    def pending(self) -> int:
        """Number of pending jobs."""
        return self.waiting + self.delayed.size + self.blocked

    @property
    def waiting(self) -> int:
        """Number of waiting jobs, ready or held back by their group."""
        return self.ready.size + self.groups.group_waiting

    def place(self, job: EngineJob, now: int, *, front: bool = False) -> None:
        """Put a pending job into the structure for its dependencies, time and group."""
        if job.unmet:
            job.state = State.BLOCKED
            self.blocked += 1
        elif job.run_at > now:
            job.state = State.DELAYED
            self.delayed.push(job)
        else:
            job.state = State.WAITING
            front = front or job.options.lifo
            if job.options.group is None or not self.is_grouped or self.groups.admit(job, front=front):
                self.ready.push(job, front=front)

    def admit(self, job: EngineJob, now: int, *, behind: EngineJob | None = None) -> None:
        """Add a new job whose id is free, with its unique key unless it waits `behind` the owner."""
        if job.options.depends_on:
            job.unmet = set(job.options.depends_on)
        self.keep(job)
        if behind is None:
            self.unique.take(job)
        else:
            job.unmet = {PREDECESSOR, *(job.unmet or ())}
            self.unique.wait(job, behind)
        self.watch_deadline(job)
        self.place(job, now)
        if self.drops is not None:
            self.drops.push(job, self.pending)

    def put_back(self, job: EngineJob, now: int, *, front: bool) -> None:
        """Make an active job pending again."""
        if front and job.options.group is not None and job.run_at <= now and self.is_grouped:
            # The group's next job must not overtake it.
            job.state = State.WAITING
            if self.groups.readmit(job):
                self.ready.push(job, front=True)
            return
        self.leave_group(job)
        self.place(job, now, front=front)

    def displace(self, job: EngineJob) -> None:
        """Take a pending job out of its structure."""
        if job.state is State.BLOCKED:
            self.blocked -= 1
        elif job.state is State.DELAYED:
            self.delayed.remove(job)
        elif job.generation == GROUP_WAITING:
            self._push(self.groups.remove(job))
        else:
            self.ready.remove(job)
            self.leave_group(job, was_ready=True)

    def prioritize(self, job: EngineJob, priority: int, now: int) -> None:
        """Change the priority of a pending job; a ready job goes behind those that have this priority."""
        is_ready = job.state is State.WAITING and job.generation != GROUP_WAITING
        if is_ready:
            self.ready.remove(job)
        job.options = replace(job.options, priority=priority)
        if self.drops is not None:
            self.drops.push(job, self.pending)
        if is_ready:
            job.run_at = now  # Its turn in the group, like a new job.
            self.ready.push(job)

    def claimed(self, job: EngineJob) -> None:
        """Record that a ready job of a group became active; the group's next job may be ready."""
        self._push(self.groups.claimed(job))

    def leave_group(self, job: EngineJob, *, was_ready: bool = False) -> None:
        """Record that a job of a group is no longer active or ready; the group's next job may be ready."""
        if job.options.group is not None and self.is_grouped:
            self._push(self.groups.leave(job, was_ready=was_ready))

    def limit_groups(self, overrides: GroupLimit) -> None:
        """Set the default for groups without overrides; `regroup` applies it to their jobs."""
        self.group_limit = overrides
        self.groups.limit = overrides.concurrency or self.policy.group_concurrency
        self.groups.rate = overrides.rate or self.policy.group_rate

    def end_rests(self, tick: int) -> bool:
        """Resume groups whose next token was available at a time; return whether a job became ready."""
        waiting = self.ready.size
        for name in self.groups.rests.due(tick):
            self._push(self.groups.advance(name))
        return self.ready.size > waiting

    def regroup(self, names: list[str]) -> None:
        """Apply changed limits of groups to their jobs."""
        for name in names:
            for job in self.groups.hold_back(name):
                self.ready.remove(job)
                self.groups.park(job)
            self._push(self.groups.advance(name))

    def _push(self, freed: Sequence[EngineJob]) -> None:
        for job in freed:
            self.ready.push(job)

    def watch_deadline(self, job: EngineJob) -> None:
        """Add a job with a ttl to the deadlines."""
        if job.options.ttl is not None:
            heapq.heappush(self._deadlines, (expiry(job), next(self._numbers), job))

    def expired(self, now: int) -> list[EngineJob]:
        """Return jobs past their ttl that have not started."""
        jobs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if self._may_expire(job) and is_expired(job, now):
                jobs.append(job)
        # A job that was moved away and back has two entries.
        jobs = list(dict.fromkeys(jobs))
        # Jobs that have started or ended leave stale entries behind.
        if len(self._deadlines) > 2 * self.pending:
            self._deadlines = [entry for entry in self._deadlines if self._may_expire(entry[2])]
            heapq.heapify(self._deadlines)
        return jobs

    def _may_expire(self, job: EngineJob) -> bool:
        return job.state in PENDING and not job.started_at and self.jobs.get(job.id) is job

    def drop(self, job: EngineJob) -> None:
        """Remove the record of a job that is in no structure."""
        del self.jobs[job.id]
        if job.options.subject is not None:
            self.subjects.drop(job, job.options.subject)
        self.dead.forget(job.id)


def expiry(job: EngineJob) -> int:
    """Return when a job with a ttl expires, in UTC milliseconds."""
    return job.created_at + (job.options.ttl or 0)


def is_expired(job: EngineJob, now: int) -> bool:
    """Return whether a pending job is past its ttl; a job that has started, or was retried, never is."""
    ttl = job.options.ttl
    if ttl is None or job.created_at + ttl > now:
        return False
    return not job.started_at and job.error is None
