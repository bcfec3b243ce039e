"""The waiting jobs of one queue: a priority queue for each job name, taken in one common order.

A worker claims only names that it handles. Because names are kept apart, a claim never scans past jobs that
it cannot take. Jobs with a stalled attempt are kept apart from the others of their name for the same reason:
a claim may leave them out.
"""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Set
from itertools import count
from typing import NamedTuple

from ..enginejob import EngineJob
from ..states import PENDING

COMPACT_ABOVE = 0.2
"""Share of stale entries above which they are removed."""
COMPACT_FROM = 64
"""Minimum number of entries for removing stale ones."""


class PriorityQueue:
    """A small heap of distinct priorities over a FIFO each, with lazy removal by generation.

    A FIFO holds generations and, in the same order, their jobs; an entry is stale once its job has another
    generation. Push and pop cost O(log p) for p distinct priorities, removal O(1). A 4-ary heap has the same
    bounds in the number of jobs; tools/benchmarks/structures.py shows why it is not used.
    """

    __slots__ = ("_fifos", "_order", "_stale", "size")

    def __init__(self) -> None:
        self._fifos: dict[int, Fifo] = {}
        self._order: list[int] = []
        """Heap of the negated priorities that have a FIFO."""
        self._stale = 0
        self.size = 0
        """Number of live entries."""

    def push(self, job: EngineJob, *, front: bool = False) -> None:
        """Add a job under its current generation, behind or before the jobs of its priority."""
        generations, jobs = self._fifo(job.options.priority)
        if front:
            generations.appendleft(job.generation)
            jobs.appendleft(job)
        else:
            generations.append(job.generation)
            jobs.append(job)
        self.size += 1

    def extend(self, jobs: list[EngineJob], first: int, priority: int) -> None:
        """Add jobs of one priority behind the others, with generations from `first` on."""
        # One list, so that a job and its entry share the number.
        new = list(range(first, first + len(jobs)))
        for job, generation in zip(jobs, new, strict=True):
            job.generation = generation
        fifo = self._fifo(priority)
        fifo.generations.extend(new)
        fifo.jobs.extend(jobs)
        self.size += len(jobs)

    def head(self) -> tuple[int, int] | None:
        """Return (negated priority, generation) of the next job; None if empty. Lower goes first."""
        head = self.first()
        return None if head is None else head[:2]

    def first(self) -> tuple[int, int, EngineJob] | None:
        """Like `head`, with the job itself."""
        while self._order:
            generations, jobs = fifo = self._fifos[-self._order[0]]
            self._drop_stale(fifo)
            if generations:
                return self._order[0], generations[0], jobs[0]
            del self._fifos[-heapq.heappop(self._order)]
        return None

    def longest(self) -> Iterator[tuple[int, int, EngineJob]]:
        """Yield (priority, generation, job) of the oldest job of each priority, for jobs pushed to either
        end.

        Jobs pushed to the front have descending generations below zero, the others ascending ones.
        """
        for priority, fifo in self._fifos.items():
            self._drop_stale(fifo)
            generations, jobs = fifo
            middle = bisect_left(generations, 0) if generations and generations[0] < 0 else 0
            for indexes in (range(middle - 1, -1, -1), range(middle, len(generations))):
                index = next((at for at in indexes if jobs[at].generation == generations[at]), None)
                if index is not None:
                    yield priority, generations[index], jobs[index]

    def before(self, priority: int, generation: int, limit: int) -> int:
        """Return the number of entries before this priority and generation, up to `limit`."""
        count = 0
        for other, (fifo, jobs) in self._fifos.items():
            if other < priority:
                continue
            for entry, job in zip(fifo, jobs, strict=True):
                if count == limit or (other == priority and entry >= generation):
                    break
                count += job.generation == entry
        return count

    def pop(self, limit: int) -> list[EngineJob]:
        """Take up to `limit` jobs, best first."""
        taken: list[EngineJob] = []
        order = self._order
        while order and limit > 0:
            generations, jobs = self._fifos[-order[0]]
            next_generation, next_job = generations.popleft, jobs.popleft
            while generations and limit > 0:
                job = next_job()
                if job.generation != next_generation():
                    self._stale -= 1
                else:
                    job.generation = 0
                    taken.append(job)
                    limit -= 1
            if not generations:
                del self._fifos[-heapq.heappop(order)]
        self.size -= len(taken)
        return taken

    def remove(self, job: EngineJob) -> None:
        """Remove a job; its entry becomes stale."""
        job.generation = 0
        self.size -= 1
        self._stale += 1
        total = self.size + self._stale
        if total >= COMPACT_FROM and self._stale > total * COMPACT_ABOVE:
            self._compact()

    def _drop_stale(self, fifo: "Fifo") -> None:
        """Drop the entries before the first one that is not stale."""
        generations, jobs = fifo
        while generations and jobs[0].generation != generations[0]:
            generations.popleft()
            jobs.popleft()
            self._stale -= 1

    def _fifo(self, priority: int) -> "Fifo":
        fifo = self._fifos.get(priority)
        if fifo is None:
            fifo = self._fifos[priority] = Fifo(deque(), deque())
            heapq.heappush(self._order, -priority)
        return fifo

    def _compact(self) -> None:
        for priority, fifo in list(self._fifos.items()):
            live = [(entry, job) for entry, job in zip(*fifo, strict=True) if job.generation == entry]
            if live:
                entries, jobs = zip(*live, strict=True)
                self._fifos[priority] = Fifo(deque(entries), deque(jobs))
            else:
                del self._fifos[priority]
        self._order = [-priority for priority in self._fifos]
        heapq.heapify(self._order)
        self._stale = 0


class Fifo(NamedTuple):
    """The entries of one priority."""

    generations: deque[int]
    jobs: deque[EngineJob]


STALLED = "\0"
"""Suffix of the key for the stalled jobs of a name; no name contains it."""

_first_generations = count(1, 1 << 40)
"""A range for each queue, because a job that is moved leaves a stale entry behind."""
_delayed_generations = count(1 << 62)
"""Above the generations of ready jobs, which a job's current entry may have."""


class ReadyJobs:
    """Waiting jobs by name."""

    __slots__ = ("_by_name", "_next", "heavy", "size", "stalled")

    def __init__(self) -> None:
        self._by_name: dict[str, PriorityQueue] = {}
        self._next = next(_first_generations)
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
        by_name = self._by_name
        listed = names & by_name.keys()
        if len(listed) == 1:
            [name] = listed
            jobs = by_name[name].pop(limit)
        else:
            jobs = list(self._merge([by_name[name] for name in listed if by_name[name].size], limit))
        self.size -= len(jobs)
        if self.heavy:
            self.heavy -= sum(job.options.weight > 1 for job in jobs)
        if self.stalled:
            self.stalled -= sum(job.stalls > 0 for job in jobs)
        for name in listed:
            if not by_name[name].size:
                del by_name[name]
        return jobs

    def with_stalled(self, names: frozenset[str]) -> frozenset[str]:
        """Return the keys of all jobs with these names; a name alone is the key of jobs without a stall."""
        return names.union(name + STALLED for name in names) if self.stalled else names

    def head(self, names: frozenset[str]) -> EngineJob | None:
        """Return the first job that `pop` would take."""
        heads = [first for name in names & self._by_name.keys() if (first := self._by_name[name].first())]
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

    def has(self, names: Set[str]) -> bool:
        """Return whether a job with one of these names waits."""
        return not self._by_name.keys().isdisjoint(names)

    def oldest_at(self, held: Set[str] = frozenset()) -> int | None:
        """Return when the oldest waiting job could be claimed, considering the first job of each priority
        without held names.
        """
        first: dict[tuple[int, bool], tuple[int, EngineJob]] = {}
        for key, queue in self._by_name.items():
            if held and key.removesuffix(STALLED) in held:
                continue
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


Entry = tuple[int, int, EngineJob]
"""(run_at, generation, job): stale once the job has another generation."""


class DelayedJobs:
    """A binary heap on `run_at`, with lazy removal by generation.

    Its keys are nearly all distinct, for which `heapq` beats a FIFO per key.
    """

    __slots__ = ("_heap", "size")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self.size = 0

    def push(self, job: EngineJob) -> None:
        """Add a job under its `run_at`."""
        job.generation = next(_delayed_generations)
        heapq.heappush(self._heap, (job.run_at, job.generation, job))
        self.size += 1

    def remove(self, job: EngineJob) -> None:
        """Remove a job."""
        job.generation = 0
        self.size -= 1
        stale = len(self._heap) - self.size
        if len(self._heap) >= COMPACT_FROM and stale > len(self._heap) * COMPACT_ABOVE:
            self._heap = [entry for entry in self._heap if entry[2].generation == entry[1]]
            heapq.heapify(self._heap)

    def pop_due(self, now: int, limit: int | None = None) -> list[EngineJob]:
        """Take the jobs that are due, soonest first, up to `limit`."""
        jobs: list[EngineJob] = []
        while self._heap and self._heap[0][0] <= now and (limit is None or len(jobs) < limit):
            _, generation, job = heapq.heappop(self._heap)
            if job.generation == generation:
                job.generation = 0
                self.size -= 1
                jobs.append(job)
        return jobs

    def next_due(self) -> int | None:
        """Return when the next job is due, in UTC milliseconds; None if there is none."""
        while self._heap:
            run_at, generation, job = self._heap[0]
            if job.generation == generation:
                return run_at
            heapq.heappop(self._heap)
        return None


class DropOrder:
    """Pending jobs of one queue that have never run, in the order in which they are dropped.

    The oldest is dropped first, or the oldest of those with the lowest priority.

    Args:
        is_there: returns whether a job still has its id.
    """

    __slots__ = ("_by_priority", "_heap", "_is_there", "_numbers")

    def __init__(self, is_there: Callable[[EngineJob], bool], *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._is_there = is_there
        self._heap: list[tuple[int, int, int, EngineJob]] = []
        self._numbers = count()

    def push(self, job: EngineJob, pending: int) -> None:
        """Add a job, or one whose priority has changed; `pending` is the number of pending jobs."""
        if len(self._heap) > COMPACT_FROM + 2 * pending:
            # Jobs that have started, or are gone, leave stale entries behind.
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(job))

    def first(self, priority: int) -> EngineJob | None:
        """Return the job to drop for a new one with this priority; None if none may be dropped."""
        while self._heap and not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap or (self._by_priority and self._heap[0][0] > priority):
            return None
        return self._heap[0][3]

    def _entry(self, job: EngineJob) -> tuple[int, int, int, EngineJob]:
        rank = job.options.priority if self._by_priority else 0
        return rank, job.created_at, next(self._numbers), job

    def _counts(self, entry: tuple[int, int, int, EngineJob]) -> bool:
        job = entry[3]
        is_current = not self._by_priority or entry[0] == job.options.priority
        return is_current and job.state in PENDING and not job.started_at and self._is_there(job)

    def __len__(self) -> int:
        return len(self._heap)
