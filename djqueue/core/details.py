"""Attempts and log lines of ended jobs that are kept for a shorter time than the records."""

import heapq
from collections.abc import Mapping

from .enginejob import EngineJob
from .retention import Retention
from .states import TERMINAL

COMPACT_FROM = 64


class Details:
    """Ended jobs of one queue, by the times at which their details expire.

    Guarded by the lock of the queue's shard, or of the finished records.

    Args:
        jobs: the queue's records by id.
    """

    __slots__ = ("_due", "_jobs", "_retention")

    def __init__(self, retention: Retention, jobs: Mapping[str, EngineJob]) -> None:
        self._retention = retention
        self._jobs = jobs
        self._due: list[tuple[int, str]] = []
        """Heap of (time, id); may contain jobs that are gone, or live again."""

    def add(self, job: EngineJob) -> None:
        """Add a job that has ended."""
        ages = {self._retention.attempts.age} if job.history else set()
        if job.logs:
            ages.add(self._retention.logs.age)
        for age in ages:
            if age is not None:
                heapq.heappush(self._due, (job.finished_at + age, job.id))
        if len(self._due) > COMPACT_FROM + 3 * len(self._jobs):
            self._due = [entry for entry in set(self._due) if self._counts(*entry)]
            heapq.heapify(self._due)

    def _counts(self, due: int, job_id: str) -> bool:
        """Return whether an entry is from the last end of an existing job."""
        job = self._jobs.get(job_id)
        ages = (self._retention.attempts.age, self._retention.logs.age)
        return job is not None and due - job.finished_at in ages

    def sweep(self, now: int, limit: int) -> int:
        """Drop expired details of up to `limit` jobs; return the number of entries considered."""
        considered = 0
        while self._due and self._due[0][0] <= now and considered < limit:
            considered += 1
            job = self._jobs.get(heapq.heappop(self._due)[1])
            if job is not None and job.state in TERMINAL:
                self._drop(job, now)
        return considered

    def _drop(self, job: EngineJob, now: int) -> None:
        """Drop the expired details of a job, which may have ended again in the meantime."""
        attempts, logs = self._retention.attempts.age, self._retention.logs.age
        if attempts is not None and job.finished_at + attempts <= now:
            job.history, job.noted = None, 0
        if logs is not None and job.finished_at + logs <= now:
            job.logs = None
