"""Jobs that are not yet due."""

import heapq
from itertools import count

from .enginejob import EngineJob

Entry = tuple[int, int, EngineJob]
"""(run_at, generation, job): stale once the job has another generation."""

COMPACT_ABOVE = 0.2
COMPACT_FROM = 64


class DelayedJobs:
    """A binary heap on `run_at`, with lazy removal by generation.

    Its keys are nearly all distinct, for which `heapq` beats a FIFO per key.
    """

    __slots__ = ("_heap", "_numbers", "size")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        # Above the generations of ready jobs, which a job's current entry may have.
        self._numbers = count(1 << 62)
        self.size = 0

    def push(self, job: EngineJob) -> None:
        """Add a job under its `run_at`."""
        job.generation = next(self._numbers)
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

    def reorder(self) -> None:
        """Restore the order after the `run_at` of jobs has changed."""
        self._heap = [
            (entry[2].run_at, entry[1], entry[2]) for entry in self._heap if entry[2].generation == entry[1]
        ]
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
