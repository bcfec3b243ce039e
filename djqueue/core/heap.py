"""The waiting jobs of one name: by priority, then in order of arrival."""

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from .enginejob import EngineJob

COMPACT_ABOVE = 0.2
"""Share of stale entries above which they are removed."""
COMPACT_FROM = 64
"""Minimum number of entries for removing stale ones."""


class PriorityQueue:
    """A small heap of distinct priorities over a FIFO each, with lazy removal by generation.

    A FIFO holds generations, and an index maps generations to jobs; a generation without a job is stale. Push
    and pop cost O(log p) for p distinct priorities, removal O(1). A 4-ary heap has the same bounds in the
    number of jobs; tests/benchmarks/structures.py shows why it is not used.
    """

    __slots__ = ("_fifos", "_jobs", "_order", "_stale")

    def __init__(self) -> None:
        self._jobs: dict[int, EngineJob] = {}
        """Live entries: jobs by generation."""
        self._fifos: dict[int, deque[int]] = {}
        self._order: list[int] = []
        """Heap of the negated priorities that have a FIFO."""
        self._stale = 0

    @property
    def size(self) -> int:
        """Number of live entries."""
        return len(self._jobs)

    def push(self, job: EngineJob, *, front: bool = False) -> None:
        """Add a job under its current generation, behind or before the jobs of its priority."""
        fifo = self._fifo(job.options.priority)
        if front:
            fifo.appendleft(job.generation)
        else:
            fifo.append(job.generation)
        self._jobs[job.generation] = job

    def extend(self, jobs: list[EngineJob], first: int, priority: int) -> None:
        """Add jobs of one priority behind the others, with generations from `first` on."""
        generations = range(first, first + len(jobs))
        self._fifo(priority).extend(generations)
        self._jobs.update(zip(generations, jobs, strict=True))
        for job, generation in zip(jobs, generations, strict=True):
            job.generation = generation

    def head(self) -> tuple[int, int] | None:
        """Return (negated priority, generation) of the next job; None if empty. Lower goes first."""
        while self._order:
            fifo = self._fifos[-self._order[0]]
            while fifo:
                if fifo[0] in self._jobs:
                    return self._order[0], fifo[0]
                fifo.popleft()
                self._stale -= 1
            del self._fifos[-heapq.heappop(self._order)]
        return None

    def first(self) -> tuple[int, int, EngineJob] | None:
        """Like `head`, with the job itself."""
        head = self.head()
        return None if head is None else (*head, self._jobs[head[1]])

    def longest(self) -> Iterator[tuple[int, int, EngineJob]]:
        """Yield (priority, generation, job) of the oldest job of each priority, for jobs pushed to either
        end.

        Jobs pushed to the front have descending generations below zero, the others ascending ones.
        """
        for priority, fifo in self._fifos.items():
            middle = bisect_left(fifo, 0) if fifo and fifo[0] < 0 else 0
            for indexes in (range(middle - 1, -1, -1), range(middle, len(fifo))):
                generation = next((fifo[at] for at in indexes if fifo[at] in self._jobs), None)
                if generation is not None:
                    yield priority, generation, self._jobs[generation]

    def before(self, priority: int, generation: int, limit: int) -> int:
        """Return the number of entries before this priority and generation, up to `limit`."""
        count = 0
        for other, fifo in self._fifos.items():
            if other < priority:
                continue
            for entry in fifo:
                if count == limit or (other == priority and entry >= generation):
                    break
                count += entry in self._jobs
        return count

    def pop(self, limit: int) -> list[EngineJob]:
        """Take up to `limit` jobs, best first."""
        jobs: list[EngineJob] = []
        order = self._order
        live = self._jobs.pop
        while order and limit > 0:
            fifo = self._fifos[-order[0]]
            popleft = fifo.popleft
            while fifo and limit > 0:
                job = live(popleft(), None)
                if job is None:
                    self._stale -= 1
                else:
                    job.generation = 0
                    jobs.append(job)
                    limit -= 1
            if not fifo:
                del self._fifos[-heapq.heappop(order)]
        return jobs

    def remove(self, job: EngineJob) -> None:
        """Remove a job; its entry becomes stale."""
        del self._jobs[job.generation]
        job.generation = 0
        self._stale += 1
        total = len(self._jobs) + self._stale
        if total >= COMPACT_FROM and self._stale > total * COMPACT_ABOVE:
            self._compact()

    def _fifo(self, priority: int) -> deque[int]:
        fifo = self._fifos.get(priority)
        if fifo is None:
            fifo = self._fifos[priority] = deque()
            heapq.heappush(self._order, -priority)
        return fifo

    def _compact(self) -> None:
        for priority, fifo in list(self._fifos.items()):
            live = [generation for generation in fifo if generation in self._jobs]
            if live:
                self._fifos[priority] = deque(live)
            else:
                del self._fifos[priority]
        self._order = [-priority for priority in self._fifos]
        heapq.heapify(self._order)
        self._stale = 0
