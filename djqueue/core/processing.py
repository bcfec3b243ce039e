"""Active jobs and their leases, apart from the queues, so that claims do not wait for finishes."""

from collections import Counter
from threading import Lock

from .enginejob import EngineJob


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
