"""Records of jobs that have ended, until their time is over."""

from collections import Counter, deque
from threading import Lock

from .job import Job


class FinishedJobs:
    """Completed and cancelled jobs in order of expiry: a FIFO for each length of time they are kept.

    A failed job is kept by its dead letter instead. The lock is this object's own: a plain job ends
    without its queue's.
    """

    __slots__ = ("_fifos", "_keeps", "_lock", "counts")

    def __init__(self, *, keeps: bool) -> None:
        self._lock = Lock()
        self._fifos: dict[int, deque[tuple[int, Job]]] = {}
        self._keeps = keeps
        """Whether records expire here; else whoever keeps them elsewhere evicts them."""
        self.counts: Counter[str] = Counter()
        """Records by state."""

    def add(self, job: Job) -> None:
        """Keep a job from its end for as long as its options say."""
        with self._lock:
            self.counts[job.state] += 1
            kept = job.options.finished_for()
            if kept is None or not self._keeps:
                return
            fifo = self._fifos.get(kept)
            if fifo is None:
                fifo = self._fifos[kept] = deque()
            fifo.append((job.finished_at + kept, job))

    def remove(self, job: Job) -> None:
        """Account for a record that is taken away."""
        with self._lock:
            self.counts[job.state] -= 1

    def expired(self, now: int, limit: int) -> list[Job]:
        """Up to `limit` entries whose time is over; the caller skips those that it removed before."""
        jobs: list[Job] = []
        with self._lock:
            for kept, fifo in list(self._fifos.items()):
                while fifo and fifo[0][0] <= now and len(jobs) < limit:
                    jobs.append(fifo.popleft()[1])
                if not fifo:
                    del self._fifos[kept]
        return jobs
