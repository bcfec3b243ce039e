"""Records of jobs that have ended, until their time is over."""

from collections import deque
from threading import Lock

from .job import Job
from .retention import NO_RETENTION, Retention
from .states import State

Fifos = dict[int, deque[tuple[int, Job]]]
"""For each length of time, inverted for cancelled jobs: (its end, job), oldest first."""
FOREVER = 1 << 62

COMPACT_ABOVE = 0.2
COMPACT_FROM = 64


class FinishedJobs:
    """Completed and cancelled jobs in order of expiry: a FIFO for each length of time they are kept.

    A failed job is kept by its dead letter instead. The lock is this object's own: a plain job ends
    without its queue's.
    """

    __slots__ = (
        "_keeps",
        "_lock",
        "_records",
        "_results",
        "_size",
        "_stale",
        "cancelled",
        "completed",
        "retention",
    )

    def __init__(self, *, keeps: bool, retention: Retention = NO_RETENTION) -> None:
        self.retention = retention
        self._lock = Lock()
        self._keeps = keeps
        """Whether records expire here; else whoever keeps them elsewhere evicts them."""
        self._records: Fifos = {}
        self._results: Fifos = {}
        """Of jobs whose results expire before their records."""
        self._size = 0
        """Entries of `_records`."""
        self._stale = 0
        """Those of jobs that were taken away before their time."""
        self.completed = 0
        """Records of completed jobs."""
        self.cancelled = 0

    def add(self, job: Job) -> None:
        """Keep a job from its end for as long as its options say, and the queue allows."""
        kept = job.options.kept
        if self.retention is not NO_RETENTION:
            kept = self.retention.of(job.state).shorten(kept)
        with self._lock:
            self._count(job, 1)
            if not self._keeps:
                return
            if kept is None:
                if self.retention is NO_RETENTION:
                    return
                kept = FOREVER
            self._enter(self._records, kept, job)
            self._size += 1
            readable = job.options.result_ttl
            if readable is not None and readable < kept and job.result is not None:
                self._enter(self._results, readable, job)

    def remove(self, job: Job) -> None:
        """Account for a record that is taken away."""
        with self._lock:
            self._count(job, -1)
            job.generation = GONE
            if self._keeps and (job.options.kept is not None or self.retention is not NO_RETENTION):
                self._stale += 1
                if not self.completed and not self.cancelled:
                    self._records.clear()
                    self._results.clear()
                    self._size = self._stale = 0
                elif self._size >= COMPACT_FROM and self._stale > self._size * COMPACT_ABOVE:
                    self._compact()

    def expired(self, now: int, limit: int) -> list[Job]:
        """Up to `limit` jobs whose time is over; the caller removes them."""
        with self._lock:
            jobs = self._due(self._records, now, limit)
            self._size -= len(jobs)
            # The caller's removal of those that are still there counts them as stale.
            self._stale -= len(jobs)
        return [job for job in jobs if job.generation != GONE]

    def surplus(self, limit: int) -> list[Job]:
        """Up to `limit` jobs above what the queue keeps of their outcome; the caller removes them."""
        if self.retention is NO_RETENTION:
            return []
        jobs: list[Job] = []
        with self._lock:
            for state, there in ((State.COMPLETED, self.completed), (State.CANCELLED, self.cancelled)):
                most = self.retention.of(state).count
                if most is not None:
                    jobs += self._first(state, min(there - most, limit - len(jobs)))
        return jobs

    def _first(self, state: State, count: int) -> list[Job]:
        """So many of the records with an outcome whose time would be over first."""
        jobs: list[Job] = []
        while len(jobs) < count:
            is_completed = state is State.COMPLETED
            fifos = {key: fifo for key, fifo in self._records.items() if (key >= 0) is is_completed}
            if not fifos:
                break
            key = min(fifos, key=lambda key: fifos[key][0][0])
            job = fifos[key].popleft()[1]
            self._size -= 1
            self._stale -= 1
            if job.generation != GONE:
                jobs.append(job)
            if not fifos[key]:
                del self._records[key]
        return jobs

    def drop_results(self, now: int, limit: int) -> None:
        """Forget up to `limit` results whose time is over while their jobs' records are kept on."""
        with self._lock:
            for job in self._due(self._results, now, limit):
                job.result = None

    def _count(self, job: Job, change: int) -> None:
        if job.state is State.COMPLETED:
            self.completed += change
        else:
            self.cancelled += change

    @staticmethod
    def _enter(fifos: Fifos, kept: int, job: Job) -> None:
        key = kept if job.state is State.COMPLETED else ~kept
        fifo = fifos.get(key)
        if fifo is None:
            fifo = fifos[key] = deque()
        fifo.append((job.finished_at + kept, job))

    @staticmethod
    def _due(fifos: Fifos, now: int, limit: int) -> list[Job]:
        jobs: list[Job] = []
        for key in sorted(fifos):
            fifo = fifos[key]
            while fifo and fifo[0][0] <= now and len(jobs) < limit:
                jobs.append(fifo.popleft()[1])
            if not fifo:
                del fifos[key]
        return jobs

    def _compact(self) -> None:
        for fifos in (self._records, self._results):
            for key, fifo in list(fifos.items()):
                fifos[key] = deque(entry for entry in fifo if entry[1].generation != GONE)
                if not fifos[key]:
                    del fifos[key]
        self._size = sum(map(len, self._records.values()))
        self._stale = 0


GONE = -(1 << 61)
"""Generation of a finished job whose record has been taken away."""
