"""When attempts and log lines of ended jobs go, should their queue keep them shorter than the records."""

import heapq
from collections.abc import Mapping

from .enginejob import EngineJob
from .retention import Retention
from .states import TERMINAL

COMPACT_FROM = 64


class Details:
    """Jobs of one queue that have ended, by the times at which something of theirs goes.

    jobs: the queue's records by id. The queue's shard lock, or the finished records', guards this.
    """

    __slots__ = ("_due", "_jobs", "_retention")

    def __init__(self, retention: Retention, jobs: Mapping[str, EngineJob]) -> None:
        self._retention = retention
        self._jobs = jobs
        self._due: list[tuple[int, str]] = []
        """Heap of (when, id); also of jobs that are gone, or live again."""

    def add(self, job: EngineJob) -> None:
        """A job has ended."""
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
        """Return whether an entry is of the last end of a job that is there."""
        job = self._jobs.get(job_id)
        ages = (self._retention.attempts.age, self._retention.logs.age)
        return job is not None and due - job.finished_at in ages

    def sweep(self, now: int, limit: int) -> int:
        """Forget what is too old, of up to `limit` jobs; returns how many were looked at."""
        looked_at = 0
        while self._due and self._due[0][0] <= now and looked_at < limit:
            looked_at += 1
            job = self._jobs.get(heapq.heappop(self._due)[1])
            if job is not None and job.state in TERMINAL:
                self._drop(job, now)
        return looked_at

    def _drop(self, job: EngineJob, now: int) -> None:
        """What is too old of a job, which may have ended anew meanwhile."""
        attempts, logs = self._retention.attempts.age, self._retention.logs.age
        if attempts is not None and job.finished_at + attempts <= now:
            job.history, job.noted = None, 0
        if logs is not None and job.finished_at + logs <= now:
            job.logs = None
