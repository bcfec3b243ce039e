"""Shards: some of the queues under one lock, and some of the active jobs under another."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock
from typing import Protocol

from ..enginejob import EngineJob
from ..job import Event
from ..options import JobKey
from .changes import Journal
from .indexes import DependencyTracker
from .queue import JobQueue


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
        """Add a claim. The caller holds the lock, as for the other methods."""
        self.active[job.token] = job
        self.counts[job.queue] += 1
        if job.options.weight > 1:
            self.extra[job.queue] += job.options.weight - 1

    def held(self, token: int, queue: str, job_id: str) -> EngineJob | None:
        """Return the job that a token holds; None if it no longer holds it."""
        job = self.active.get(token)
        return None if job is None or job.id != job_id or job.queue != queue else job

    def release(self, token: int, queue: str, job_id: str) -> EngineJob | None:
        """End a claim; return its job, or None if the token no longer holds it."""
        job = self.held(token, queue, job_id)
        if job is None:
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


MAX_MOVED = 1_000
"""Moved jobs whose new queue is remembered."""

EventHandler = Callable[[Event], None]
Subscribers = dict[str | None, list[EventHandler]]
"""Event handlers of one queue, by the job that they are for; None: of all jobs."""


class NewQueue(Protocol):
    """Makes a queue of a shard; one that is not kept is for reading."""

    def __call__(
        self, name: str, journal: Journal | None, dependencies: DependencyTracker, *, is_kept: bool
    ) -> JobQueue: ...


class Shard:
    """Queues by name, their subscribers, and the jobs that wait for jobs of these queues."""

    __slots__ = ("_moved", "_new_queue", "dependencies", "journal", "lock", "queues", "subscribers")

    def __init__(self, journal: Journal | None, new_queue: NewQueue) -> None:
        self.lock = Lock()
        self.queues: dict[str, JobQueue] = {}
        self.subscribers: dict[str, Subscribers] = {}
        """By queue, whether it exists or not."""
        self.dependencies = DependencyTracker()
        self.journal = journal
        self._new_queue = new_queue
        self._moved: OrderedDict[JobKey, JobKey] = OrderedDict()
        """New keys of the jobs that were moved last, for jobs that begin to wait for them meanwhile."""

    def queue(self, name: str) -> JobQueue:
        """Return the queue of this name, created on first use."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = self._new_queue(name, self.journal, self.dependencies, is_kept=True)
            queue.observed = name in self.subscribers
        return queue

    def find(self, name: str) -> JobQueue:
        """Return the queue of this name for reading; if there is none, an empty one, which is not kept."""
        return self.queues.get(name) or self._new_queue(name, self.journal, self.dependencies, is_kept=False)

    def replace(self, other: "Shard") -> None:
        """Take over the queues and dependencies of a shard that nothing else uses, instead of its own."""
        self.queues = other.queues
        for name, queue in self.queues.items():
            queue.observed = name in self.subscribers
            queue.journal = self.journal
        self.dependencies = other.dependencies
        self._moved.clear()

    def moved_on(self, old: JobKey, new: JobKey) -> None:
        """Record the new key of a job that was moved."""
        self._moved[old] = new
        if len(self._moved) > MAX_MOVED:
            self._moved.popitem(last=False)

    def is_at(self, key: JobKey) -> None:
        """Record that a job is here, whatever was recorded before."""
        self._moved.pop(key, None)

    def has_moved(self, key: JobKey) -> bool:
        """Return whether the new key of a job that is not here is known."""
        return key in self._moved

    def whereabouts(self, key: JobKey) -> JobKey | None:
        """Return the new key of a job that was moved; None if it is here, or unknown."""
        if not self._moved:
            return None
        with self.lock:
            queue = self.queues.get(key[0])
            return None if queue is not None and key[1] in queue.jobs else self._moved.get(key)

    def wait_elsewhere(self, job: EngineJob, old: JobKey, new: JobKey) -> bool:
        """Replace the key of a dependency that was moved; return whether the job waits for it."""
        if not job.unmet or old not in job.unmet:
            return False
        depends_on = dict.fromkeys(new if key == old else key for key in job.options.depends_on)
        job.options = replace(job.options, depends_on=tuple(depends_on))
        job.unmet.discard(old)
        job.unmet.add(new)
        if self.journal is not None:
            self.journal.added([job])
            self.journal.changed(job)
        return True

    def let_go(self, keys: Iterable[JobKey], dependent: EngineJob, now: int) -> None:
        """Release the records that an ended job depended on."""
        for key in keys:
            if self.dependencies.let_go(key, dependent):
                queue = self.queues.get(key[0])
                job = queue.jobs.get(key[1]) if queue is not None else None
                if queue is not None and job is not None:
                    queue.finished.let_go(job, now)
                if self.journal is not None:
                    self.journal.let_go(key)
