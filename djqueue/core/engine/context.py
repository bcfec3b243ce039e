"""The state that the parts of an engine share: shards, claims, configuration, sources of time and ids."""

import os
from collections.abc import Mapping, Sequence
from itertools import count
from random import Random

from ..clock import Clock
from ..enginejob import EngineJob
from ..ids import IdSource, fnv1a32, shard_count
from ..policies import NO_LIMITS, LimiterPolicy, QueuePolicy
from ..states import State
from .changes import ChangeCounter, Journal
from .indexes import DependencyTracker
from .limiters import SharedLimiter
from .metricstore import MetricKeeper
from .queue import JobQueue
from .shard import ProcessingShard, Shard


class EngineContext:
    """Shards of queues, processing shards of active jobs, and the configuration of both.

    Locks are taken in one order: a shard, then a processing shard, then a queue's finished records or a
    limiter. Only a move holds the locks of several shards: those of both queues, and of the jobs that wait
    for the job. It takes them in the order of the shards. Everything
    else that crosses queues (dependencies) is a step of its own on each side, repeated until both agree.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        ids: IdSource,
        random: Random,
        journal: Journal | None,
        policies: Mapping[str, QueuePolicy],
        default_policy: QueuePolicy,
        limiters: Mapping[str, LimiterPolicy],
        metrics: MetricKeeper,
        cores: int | None,
    ) -> None:
        self.clock = clock
        self.ids = ids
        self.random = random
        self.journal = journal
        self.metrics = metrics
        self.policies = dict(policies)
        """Policies of single queues."""
        self.default_policy = default_policy
        self.limiters = {name: SharedLimiter(policy, clock) for name, policy in limiters.items()}
        every = (*self.policies.values(), default_policy)
        self.may_block = any(policy.when_full == "block" for policy in every)
        """True if the producers of some queue wait for room."""
        shards = shard_count(cores if cores is not None else os.cpu_count())
        self.mask = shards - 1
        self.shards = [Shard(journal, self.new_queue) for _ in range(shards)]
        self.processing = [ProcessingShard() for _ in range(shards)]
        self.least_token = clock.now() << 20
        """Claims made by earlier engines have lower tokens."""
        self.tokens = count(self.least_token)
        self.changes = ChangeCounter()
        self.started = f"{clock.now()}:{self.random.getrandbits(32)}"
        """Identifies this engine in versions: another engine's version says nothing about its jobs."""
        self._rotation = count()

    # Queues and their jobs.

    def shard(self, queue: str) -> Shard:
        """Return the shard of a queue."""
        return self.shards[fnv1a32(queue) & self.mask]

    def existing(self, queue: str) -> JobQueue | None:
        """Return a queue; None if it was never used."""
        return self.shard(queue).queues.get(queue)

    def queue_names(self) -> list[str]:
        """Return the names of the queues that have been used, sorted."""
        return sorted(name for shard in self.shards for name in list(shard.queues))

    def policy(self, queue: str) -> QueuePolicy:
        """Return the configuration of a queue."""
        return self.policies.get(queue, self.default_policy)

    def limiter(self, name: str) -> SharedLimiter:
        """Return a shared limiter, created on first use if it is not configured."""
        return self.limiters.setdefault(name, self.find_limiter(name))

    def find_limiter(self, name: str) -> SharedLimiter:
        """Return a shared limiter for reading; if there is none, one without limits, which is not kept."""
        return self.limiters.get(name) or SharedLimiter(NO_LIMITS, self.clock)

    def serving(self, names: Sequence[str] | None) -> list[tuple[Shard, JobQueue]]:
        """Return the queues that a claim may take from, starting with another one each time."""
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

    def new_queue(
        self, name: str, journal: Journal | None, dependencies: DependencyTracker, *, is_kept: bool
    ) -> JobQueue:
        """Return a new queue of a shard with its configuration; one that is not kept creates no limiter."""
        policy = self.policy(name)
        limiter = self.limiter if is_kept else self.find_limiter
        return JobQueue(
            name,
            policy,
            self.clock.monotonic,
            random=self.random,
            shared=None if policy.limiter is None else limiter(policy.limiter),
            journal=journal,
            dependencies=dependencies,
        )

    # Active jobs.

    def processing_shard(self, job_id: str) -> ProcessingShard:
        """Return the processing shard of a job."""
        # FNV-1a in Python takes 2 µs for an id; Python caches the hash of a string.
        return self.processing[hash(job_id) & self.mask]

    def is_active(self, job: EngineJob) -> bool:
        """Return whether a job is active; the completion of a job that is not has been recorded entirely."""
        with self.processing_shard(job.id).lock:
            return job.state is State.ACTIVE

    def active_in(self, queue: str) -> int:
        """Return the number of active jobs of a queue."""
        return sum([processing.counts.get(queue, 0) for processing in self.processing])

    def extra_in(self, queue: str) -> int:
        """Return by how much the weights of a queue's active jobs exceed their number."""
        return sum([processing.extra.get(queue, 0) for processing in self.processing])

    def taken_in(self, queue: str) -> int:
        """Return the slots of a queue's concurrency that its active jobs take."""
        return self.active_in(queue) + self.extra_in(queue)

    def start_tokens_above(self, token: int) -> None:
        """Make all new tokens higher than this one, whatever the clock says."""
        if token >= self.least_token:
            self.least_token = token + 1
            self.tokens = count(self.least_token)
