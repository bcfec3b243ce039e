"""One queue of the engine: its jobs, each in the structure of its state."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from .capacity import DropOrder
from .clocksteps import keep_lengths
from .deadletters import DeadLetterPolicy, DeadLetters
from .delayed import DelayedJobs
from .enginejob import EngineJob
from .errors import ConfigurationError, OptionError
from .finished import FinishedJobs
from .groups import NO_LIMIT, PARKED, GroupLimit, Groups
from .job import Batch, Event
from .limiter import QueueLimiter, Rate
from .ready import ReadyJobs
from .retention import NO_RETENTION, Retention
from .sharing import SharedLimiter
from .states import LIVE, PENDING, State
from .summaries import SubjectIndex
from .tally import Tally
from .unique import PREDECESSOR, UniqueKeys

EventHandler = Callable[[Event], None]


OPTIONAL, KEYED, GLOBAL = "optional", "keyed", "global"
GROUP_MODES = (OPTIONAL, KEYED, GLOBAL)
"""A group is given or not; each job needs one; groups are words only, and hold nobody back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """What a queue is configured to do."""

    lease: int = 30_000
    """Milliseconds for which a claim holds unless renewed."""
    rate: Rate | None = None
    concurrency: int | None = None
    """Jobs of the queue active at once, over all workers."""
    limiter: str | None = None
    """The limiter that it shares with other queues."""
    group_concurrency: int = 1
    """Jobs of one group active at once."""
    group_rate: Rate | None = None
    """Jobs of one group started in a time."""
    group_weights: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The turns of groups for each one of another group."""
    group_mode: str = OPTIONAL
    """See `GROUP_MODES`."""
    dead_letters: DeadLetterPolicy = field(default_factory=DeadLetterPolicy)
    retention: Retention = NO_RETENTION
    """How long, and how many, records of completed and cancelled jobs are kept at most."""
    max_size: int | None = None
    """Jobs that may wait in the queue: waiting, delayed and blocked ones."""
    when_full: str = "reject"
    """What happens to an enqueue above that: see `capacity.WHEN_FULL`."""
    block_timeout: int = 30_000
    """Milliseconds for which `block` waits for room."""
    objective: int | None = None
    """Milliseconds within which a job should start: for those who look at the queue, and for nothing else."""
    outbox: bool = False
    """Whether jobs for Redis are written to a table in transactions, and while Redis is away."""

    @property
    def group_limit(self) -> int:
        """Jobs of one group active at once; 0: groups hold nobody back."""
        return 0 if self.group_mode == GLOBAL else self.group_concurrency

    def check_batch(self, batch: Batch) -> None:
        """Refuse what the queue does not take. Raises OptionError."""
        if self.group_mode == KEYED and batch.options.group is None and batch.options.rejected is None:
            raise OptionError(
                f"group: jobs of queue {batch.queue!r} require a group, because its GROUP_MODE is 'keyed'"
            )

    def check_mode(self, queue: str, recorded: str) -> None:
        """Raises ConfigurationError if the queue is used in another mode."""
        if recorded != self.group_mode:
            raise ConfigurationError(
                f"queue {queue!r}: its stored GROUP_MODE is {recorded!r}, but the settings have "
                f"{self.group_mode!r}: use the same mode, or obliterate the queue first"
            )


class JobQueue:
    """Jobs of one queue. Its shard's lock guards it all."""

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
        "handlers",
        "is_grouped",
        "jobs",
        "limiter",
        "name",
        "paused",
        "policy",
        "ready",
        "shared",
        "subjects",
        "tally",
        "unique",
        "watchers",
    )

    def __init__(
        self,
        name: str,
        policy: QueuePolicy,
        monotonic: Callable[[], int],
        *,
        random: Random | None = None,
        keep_finished: bool = True,
        shared: SharedLimiter | None = None,
    ) -> None:
        self.name = name
        self.jobs: dict[str, EngineJob] = {}
        """Every job that has a record, by id."""
        self.subjects = SubjectIndex()
        self.ready = ReadyJobs()
        self.delayed = DelayedJobs()
        self.blocked = 0
        self.unique = UniqueKeys()
        self.groups = Groups(monotonic)
        self.is_grouped = policy.group_mode != GLOBAL
        """Whether groups hold jobs back."""
        self.group_limit = NO_LIMIT
        """What was said to all groups while the queue ran."""
        self.limit_groups(policy, self.group_limit)
        self.limiter = QueueLimiter()
        self.limiter.set(policy.rate, policy.concurrency, monotonic())
        self.shared = shared
        """The limiter of several queues that its jobs need permits of, besides."""
        self.dead = DeadLetters(policy.dead_letters, random or Random())
        self.finished = FinishedJobs(keeps=keep_finished, retention=policy.retention, jobs=self.jobs)
        self.paused = False
        self.tally = Tally()
        self.handlers: list[EventHandler] = []
        self.watchers: dict[str, list[EventHandler]] = {}
        """Handlers of one job's events, by its id."""
        self.configure(policy)
        self._deadlines: list[tuple[int, int, EngineJob]] = []
        """Heap of (expiry, number, job) of jobs with a ttl."""
        self._numbers = count()

    def configure(self, policy: QueuePolicy) -> None:
        """Have another policy from now on, as far as it concerns how many jobs may wait."""
        self.policy = policy
        self.drops: DropOrder | None = None
        if policy.max_size is not None and policy.when_full in ("drop_oldest", "drop_lowest"):
            self.drops = DropOrder(self.is_there, by_priority=policy.when_full == "drop_lowest")
            self.drops.extend(job for job in self.jobs.values() if job.state in PENDING)

    def is_there(self, job: EngineJob) -> bool:
        """Whether the job is still the one that has its id."""
        return self.jobs.get(job.id) is job

    def keep(self, job: EngineJob) -> None:
        """Have the record of a job, whose id is free."""
        self.jobs[job.id] = job
        if job.options.subject is not None:
            self.subjects.add([job], job.options.subject)

    @property
    def pending(self) -> int:
        """Jobs that wait, for whatever it is."""
        return self.waiting + self.delayed.size + self.blocked

    @property
    def waiting(self) -> int:
        """Jobs in state waiting: the ready ones and those that their group holds back."""
        return self.ready.size + self.groups.parked

    def place(self, job: EngineJob, now: int, *, front: bool = False) -> None:
        """Put a pending job where its dependencies, its time and its group say."""
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
        """Take in a new job, whose id is free, and its unique key too unless it waits `behind` the owner."""
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
        """Put a job that was active among the pending ones again."""
        if front and job.options.group is not None and job.run_at <= now and self.is_grouped:
            # The next of its group must not overtake it.
            job.state = State.WAITING
            if self.groups.readmit(job):
                self.ready.push(job, front=True)
            return
        self.leave_group(job)
        self.place(job, now, front=front)

    def displace(self, job: EngineJob) -> None:
        """Take a pending job out of the structure that it is in."""
        if job.state is State.BLOCKED:
            self.blocked -= 1
        elif job.state is State.DELAYED:
            self.delayed.remove(job)
        elif job.generation == PARKED:
            self._push(self.groups.remove(job))
        else:
            self.ready.remove(job)
            self.leave_group(job, was_ready=True)

    def prioritize(self, job: EngineJob, priority: int, now: int) -> None:
        """Give a pending job another priority; if it is ready, it goes behind those that have that one."""
        is_ready = job.state is State.WAITING and job.generation != PARKED
        if is_ready:
            self.ready.remove(job)
        job.options = replace(job.options, priority=priority)
        if self.drops is not None:
            self.drops.push(job, self.pending)
        if is_ready:
            job.run_at = now  # its turn, as one that comes anew
            self.ready.push(job)

    def claimed(self, job: EngineJob) -> None:
        """A ready job of a group, out of its list, is active; its group's next may be ready."""
        self._push(self.groups.claimed(job))

    def leave_group(self, job: EngineJob, *, was_ready: bool = False) -> None:
        """A job that was active, or ready, is neither any more; its group's next may be ready."""
        if job.options.group is not None and self.is_grouped:
            self._push(self.groups.leave(job, was_ready=was_ready))

    def limit_groups(self, policy: QueuePolicy, said: GroupLimit) -> None:
        """What counts for groups to which nothing else was said; `regroup` has it count for their jobs."""
        self.group_limit = said
        self.groups.limit = said.concurrency or policy.group_concurrency
        self.groups.rate = said.rate or policy.group_rate
        self.groups.weights = policy.group_weights

    def end_rests(self, tick: int) -> bool:
        """Have groups go on whose next token is there; whether a job is ready because of that."""
        waiting = self.ready.size
        for name in self.groups.rests.due(tick):
            self._push(self.groups.advance(name))
        return self.ready.size > waiting

    def regroup(self, names: list[str]) -> None:
        """Have other limits of some groups count."""
        for name in names:
            for job in self.groups.hold_back(name):
                self.ready.remove(job)
                self.groups.park(job)
            self._push(self.groups.advance(name))

    def _push(self, freed: Sequence[EngineJob]) -> None:
        for job in freed:
            self.ready.push(job)

    def watch_deadline(self, job: EngineJob) -> None:
        """Remember when a job with a ttl expires."""
        if job.options.ttl is not None:
            heapq.heappush(self._deadlines, (expiry(job), next(self._numbers), job))

    def expired(self, now: int) -> list[EngineJob]:
        """Jobs past their ttl that have not started."""
        jobs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            job = heapq.heappop(self._deadlines)[2]
            if self._may_expire(job) and is_expired(job, now):
                jobs.append(job)
        # One that was moved away and back has two entries.
        jobs = list(dict.fromkeys(jobs))
        # Jobs that have started or ended leave their entries behind.
        if len(self._deadlines) > 2 * self.pending:
            self._deadlines = [entry for entry in self._deadlines if self._may_expire(entry[2])]
            heapq.heapify(self._deadlines)
        return jobs

    def follow_step(self, step: int) -> list[EngineJob]:
        """Keep the lengths of delays and time limits: the wall clock was set by so many milliseconds.

        Returns the jobs whose records have changed.
        """
        changed = [job for job in self.jobs.values() if job.state in LIVE and keep_lengths(job, step)]
        self.delayed.reorder()
        self.unique.follow_step(step)
        self._deadlines = [(expiry(job), number, job) for _, number, job in self._deadlines]
        heapq.heapify(self._deadlines)
        return changed

    def _may_expire(self, job: EngineJob) -> bool:
        return job.state in PENDING and not job.started_at and self.jobs.get(job.id) is job

    def drop(self, job: EngineJob) -> None:
        """Forget the record of a job that is in no structure."""
        del self.jobs[job.id]
        if job.options.subject is not None:
            self.subjects.drop(job, job.options.subject)
        self.dead.forget(job.id)

    @property
    def observed(self) -> bool:
        """Whether anybody wants to be told of events."""
        return bool(self.handlers or self.watchers)


def expiry(job: EngineJob) -> int:
    """When a job with a ttl expires: UTC milliseconds."""
    return job.created_at + job.stepped + (job.options.ttl or 0)


def is_expired(job: EngineJob, now: int) -> bool:
    """Whether a pending job is past its ttl; one that has started, or died and was retried, never is."""
    ttl = job.options.ttl
    if ttl is None or job.created_at + job.stepped + ttl > now:
        return False
    return not job.started_at and job.error is None
