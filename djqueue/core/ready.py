"""The waiting jobs of one queue: a priority queue for each job name, taken in one common order.

A worker claims only names that it handles. Because names are kept apart, a claim never scans past jobs that
it cannot take. Jobs with a stalled attempt are kept apart from the others of their name for the same reason:
a claim may leave them out.
"""

import heapq
from collections.abc import Iterator

from .enginejob import EngineJob
from .heap import PriorityQueue

STALLED = "\0"
"""Suffix of the key for the stalled jobs of a name; no name contains it."""


class ReadyJobs:
    """Waiting jobs by name."""

    __slots__ = ("_by_name", "_next", "heavy", "size", "stalled")

    def __init__(self) -> None:
        self._by_name: dict[str, PriorityQueue] = {}
        self._next = 1
        """Generation of the next entry; entries put in front have it negated."""
        self.size = 0
        self.heavy = 0
        """Number of jobs with a weight above 1."""
        self.stalled = 0
        """Number of jobs with a stalled attempt."""

    def push(self, job: EngineJob, *, front: bool = False) -> None:
        """Add a job behind or, with `front`, before those of its priority."""
        job.generation = -self._next if front else self._next
        self._next += 1
        self._named(_key(job)).push(job, front=front)
        self.size += 1
        if job.options.weight > 1:
            self.heavy += 1
        if job.stalls:
            self.stalled += 1

    def extend(self, jobs: list[EngineJob], name: str, priority: int) -> None:
        """Add jobs of one name and priority, each of weight 1, in order."""
        if not jobs:
            return
        self._named(name).extend(jobs, self._next, priority)
        self._next += len(jobs)
        self.size += len(jobs)

    def pop(self, limit: int, names: frozenset[str]) -> list[EngineJob]:
        """Take up to `limit` jobs with these names, by priority, then in order of arrival."""
        present = [queue for name in names & self._by_name.keys() if (queue := self._by_name[name]).size]
        if len(present) == 1:
            jobs = present[0].pop(limit)
        else:
            jobs = list(self._merge(present, limit))
        self.size -= len(jobs)
        if self.heavy:
            self.heavy -= sum(job.options.weight > 1 for job in jobs)
        if self.stalled:
            self.stalled -= sum(job.stalls > 0 for job in jobs)
        for name in names & self._by_name.keys():
            if not self._by_name[name].size:
                del self._by_name[name]
        return jobs

    def with_stalled(self, names: frozenset[str]) -> frozenset[str]:
        """Return the keys of all jobs with these names; a name alone is the key of jobs without a stall."""
        return names.union(name + STALLED for name in names) if self.stalled else names

    def head(self, names: frozenset[str]) -> EngineJob | None:
        """Return the first job that `pop` would take."""
        heads = [found for name in names & self._by_name.keys() if (found := self._by_name[name].first())]
        return min(heads)[2] if heads else None

    def remove(self, job: EngineJob) -> None:
        """Remove a job."""
        key = _key(job)
        queue = self._by_name[key]
        queue.remove(job)
        self.size -= 1
        if job.options.weight > 1:
            self.heavy -= 1
        if job.stalls:
            self.stalled -= 1
        if not queue.size:
            del self._by_name[key]

    def has(self, names: frozenset[str]) -> bool:
        """Return whether a job with one of these names waits."""
        return not self._by_name.keys().isdisjoint(names)

    def oldest_at(self) -> int | None:
        """Return when the oldest waiting job could be claimed, considering the first job of each priority."""
        first: dict[tuple[int, bool], tuple[int, EngineJob]] = {}
        for queue in self._by_name.values():
            for priority, generation, job in queue.longest():
                position = (priority, generation < 0)
                other = first.get(position)
                if other is None or abs(generation) < abs(other[0]):
                    first[position] = (generation, job)
        return min((job.claimable_at for _, job in first.values()), default=None)

    def before(self, job: EngineJob, limit: int) -> int:
        """Return the number of jobs of any name before a job, up to `limit`."""
        count = 0
        for queue in self._by_name.values():
            count += queue.before(job.options.priority, job.generation, limit - count)
        return count

    def counts(self) -> dict[str, int]:
        """Return the number of waiting jobs by name."""
        counts: dict[str, int] = {}
        for key, queue in self._by_name.items():
            name = key.removesuffix(STALLED)
            counts[name] = counts.get(name, 0) + queue.size
        return counts

    def _merge(self, queues: list[PriorityQueue], limit: int) -> Iterator[EngineJob]:
        heads = [(head, index) for index, queue in enumerate(queues) if (head := queue.head())]
        heapq.heapify(heads)
        while heads and limit > 0:
            _, index = heads[0]
            yield from queues[index].pop(1)
            limit -= 1
            head = queues[index].head()
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, index))

    def _named(self, name: str) -> PriorityQueue:
        queue = self._by_name.get(name)
        if queue is None:
            queue = self._by_name[name] = PriorityQueue()
        return queue


def _key(job: EngineJob) -> str:
    return job.name + STALLED if job.stalls else job.name
