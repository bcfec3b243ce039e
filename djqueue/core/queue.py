"""One queue of the engine: its jobs, each in the structure of its state, and its totals.

Active jobs and their leases are in separate shards, so that claims do not wait for finishes.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from threading import Lock

from .capacity import DropOrder
from .deadletters import DeadLetterPolicy, DeadLetters
from .enginejob import EngineJob
from .errors import ConfigurationError, OptionError
from .finished import FinishedJobs
from .groups import GROUP_WAITING, NO_LIMIT, GroupLimit, Groups
from .job import Batch
from .joblists import DelayedJobs, ReadyJobs
from .limiter import QueueLimiter, Rate
from .overview import NO_TOTALS, Totals
from .retention import NO_RETENTION, Retention
from .sharing import SharedLimiter
from .states import PENDING, State
from .summaries import SubjectIndex
from .unique import PREDECESSOR, UniqueKeys


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


OPTIONAL, KEYED, GLOBAL = "optional", "keyed", "global"
GROUP_MODES = (OPTIONAL, KEYED, GLOBAL)
"""Groups are optional; every job needs a group; groups are labels that hold no job back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """Configuration of a queue."""

    lease: int = 30_000
    """Milliseconds until a lease expires unless it is renewed."""
    rate: Rate | None = None
    concurrency: int | None = None
    """Maximum weight of active jobs, over all workers."""
    limiter: str | None = None
    """Name of the limiter that the queue shares with others."""
    group_concurrency: int = 1
    """Maximum number of active jobs of one group."""
    group_rate: Rate | None = None
    """Maximum starts per time of one group."""
    group_weights: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Turns of a group for each turn of a group with weight 1."""
    group_mode: str = OPTIONAL
    """One of `GROUP_MODES`."""
    dead_letters: DeadLetterPolicy = field(default_factory=DeadLetterPolicy)
    retention: Retention = NO_RETENTION
    """Time, number and size up to which records of completed and cancelled jobs are kept."""
    max_size: int | None = None
    """Maximum number of pending jobs: waiting, delayed and blocked."""
    when_full: str = "reject"
    """Behavior of an enqueue above `max_size`: one of `capacity.WHEN_FULL`."""
    block_timeout: int = 30_000
    """Milliseconds for which `block` waits for room."""
    objective: int | None = None
    """Milliseconds within which jobs should start; only displayed."""
    outbox: bool = False
    """True if jobs for Redis are written to a table in transactions, and during outages of Redis."""
    executor: str | None = None
    """Executor of jobs whose job type names none; None: the settings decide."""

    @property
    def group_limit(self) -> int:
        """Return the maximum number of active jobs of one group; 0: groups hold no job back."""
        return 0 if self.group_mode == GLOBAL else self.group_concurrency

    def check_batch(self, batch: Batch) -> None:
        """Raise OptionError for jobs that the queue does not accept."""
        if self.group_mode == KEYED and batch.options.group is None and batch.options.rejected is None:
            raise OptionError(
                f"group: jobs of queue {batch.queue!r} require a group, because its GROUP_MODE is 'keyed'"
            )

    def check_mode(self, queue: str, recorded: str) -> None:
        """Raise ConfigurationError if the queue is used in another group mode."""
        if recorded != self.group_mode:
            raise ConfigurationError(
                f"queue {queue!r}: its stored GROUP_MODE is {recorded!r}, but the settings have "
                f"{self.group_mode!r}: use the same mode, or obliterate the queue first"
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


class ProcessingShard:
    """Some of the active jobs, by fencing token, under their own lock."""

    __slots__ = ("active", "counts", "extra", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.active: dict[int, EngineJob] = {}
        self.counts: Counter[str] = Counter()
        """Number of active jobs by queue."""
        self.extra: Counter[str] = Counter()
        """By queue: by how much the weights of its active jobs exceed their number."""

    def hold(self, job: EngineJob) -> None:
        """Add a claim. The caller holds the lock, as for `release`."""
        self.active[job.token] = job
        self.counts[job.queue] += 1
        if job.options.weight > 1:
            self.extra[job.queue] += job.options.weight - 1

    def release(self, token: int, queue: str, job_id: str) -> EngineJob | None:
        """End a claim; return its job, or None if the token no longer holds it."""
        job = self.active.get(token)
        if job is None or job.id != job_id or job.queue != queue:
            return None
        del self.active[token]
        left = self.counts[queue] - 1
        if left:
            self.counts[queue] = left
        else:
            del self.counts[queue]
        if job.options.weight > 1:
            self.extra[queue] -= job.options.weight - 1
            if not self.extra[queue]:
                del self.extra[queue]
        job.token, job.last_token = 0, token
        return job

    def overdue(self, tick: int) -> list[tuple[int, EngineJob]]:
        """Return (token, job) of the expired leases."""
        return [(token, job) for token, job in self.active.items() if job.lease_until <= tick]
