"""Records of completed and cancelled jobs, with their attempts and log lines, until they expire."""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock

from ..enginejob import EngineJob, size_of
from ..policies import NO_RETENTION, Retention
from ..states import TERMINAL, State

COMPACT_FROM = 64
"""Minimum number of entries for removing stale ones."""
COMPACT_ABOVE = 0.2
"""Share of stale entries above which they are removed."""


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

    def sweep(self, now: int, limit: int) -> list[EngineJob]:
        """Drop expired details of up to `limit` jobs; return the ended jobs among these."""
        ended: list[EngineJob] = []
        while self._due and self._due[0][0] <= now and len(ended) < limit:
            job = self._jobs.get(heapq.heappop(self._due)[1])
            if job is not None and job.state in TERMINAL:
                self._drop(job, now)
                ended.append(job)
        return ended

    def _drop(self, job: EngineJob, now: int) -> None:
        """Drop the expired details of a job, which may have ended again in the meantime."""
        attempts, logs = self._retention.attempts.age, self._retention.logs.age
        if attempts is not None and job.finished_at + attempts <= now:
            job.history, job.noted = None, 0
        if logs is not None and job.finished_at + logs <= now:
            job.logs = None


Fifos = dict[int, deque[tuple[int, EngineJob]]]
"""For each retention time, inverted for cancelled jobs: (expiry, job), oldest first."""
FOREVER = 1 << 62
RETURNED = FOREVER + 1
"""Key, in place of a retention time, of records that were held."""


class FinishedJobs:
    """Completed and cancelled jobs in order of expiry: a FIFO for each retention time.

    A failed job is kept by its dead letter instead. The lock is this object's own, because a plain job ends
    without the lock of its shard. Held records are guarded by the lock of the shard.
    """

    __slots__ = (
        "_details",
        "_listed",
        "_lock",
        "_measures",
        "_postponed",
        "_postponed_results",
        "_records",
        "_results",
        "_size",
        "_stale",
        "cancelled",
        "cancelled_bytes",
        "completed",
        "completed_bytes",
        "completions",
        "held",
        "result_bytes",
        "retention",
    )

    def __init__(
        self, *, retention: Retention = NO_RETENTION, jobs: Mapping[str, EngineJob] | None = None
    ) -> None:
        """Initialize; `jobs` are the queue's records by id, for a queue that keeps attempts or log lines for
        a time.
        """
        self._lock = Lock()
        self._records: Fifos = {}
        self._results: Fifos = {}
        """Completed jobs whose results expire before their records, or all if the bytes of results are
        limited.

        Jobs with items and no result are under inverted times.
        """
        self._listed = 0
        """Number of entries in `_results`."""
        self._size = 0
        """Number of entries in `_records`."""
        self._stale = 0
        """Number of entries of jobs that were removed before they expired."""
        self._postponed: dict[EngineJob, None] = {}
        """Records that expired, or exceeded a limit, while they were held."""
        self._postponed_results: dict[EngineJob, None] = {}
        """Records whose results did; these are no longer in `_results`."""
        self.held: dict[State, dict[EngineJob, None]] = {State.COMPLETED: {}, State.CANCELLED: {}}
        """Records that are kept for live jobs that depend on them."""
        self.completed = 0
        """Number of records of completed jobs."""
        self.cancelled = 0
        self.completions = 0
        """Number of jobs that have completed here, with or without a record."""
        self.completed_bytes = 0
        """Bytes of the records of completed jobs without their results, if bytes are limited.

        Like the next two, without held records.
        """
        self.cancelled_bytes = 0
        self.result_bytes = 0
        self.retention = retention
        self._measures = retention.measures
        ages = (retention.attempts.age, retention.logs.age)
        self._details = Details(retention, {} if jobs is None else jobs) if any(ages) else None

    def add(self, job: EngineJob, completions: int = 0) -> None:
        """Add a job that has ended, for as long as its options and the queue's limits say.

        Args:
            completions: 1 for a job that completes now.
        """
        kept = job.options.kept
        if self.retention is not NO_RETENTION:
            kept = self.retention.of(job.state).shorten(kept)
        with self._lock:
            self.completions += completions
            self._count(job, 1)
            if kept is None:
                if self.retention is NO_RETENTION:
                    return
                kept = FOREVER
            self._enter(self._records, kept, job)
            self._size += 1
            if self.retention is not NO_RETENTION:
                self._bound(job, kept)
                return
            readable = job.options.result_ttl
            if readable is not None and readable < kept and _has_more(job):
                self._list(job, readable)

    def _bound(self, job: EngineJob, kept: int) -> None:
        """Apply the limits that only some queues have to a job that has ended."""
        if self._measures and job not in self.held[job.state]:
            self._weigh(job, 1)
        if _has_more(job):
            readable = self._readable(job)
            if readable < kept or (job.result is not None and self.retention.results.bytes is not None):
                self._list(job, readable)
                if self._listed > COMPACT_FROM + 2 * self.completed:
                    self._listed = _compact(self._results)
        if self._details is not None:
            self._details.add(job)

    def _list(self, job: EngineJob, readable: int) -> None:
        key = readable if job.result is not None else ~readable
        self._results.setdefault(key, deque()).append((job.finished_at + readable, job))
        self._listed += 1

    def _kept(self, job: EngineJob) -> int:
        kept = self.retention.of(job.state).shorten(job.options.kept)
        return FOREVER if kept is None else kept

    def _readable(self, job: EngineJob) -> int:
        readable = self.retention.results.shorten(job.options.result_ttl)
        return FOREVER if readable is None else readable

    def note_failed(self, jobs: Iterable[EngineJob]) -> None:
        """Add failed jobs: their dead letters keep them, but their details may expire earlier."""
        if self._details is not None:
            with self._lock:
                for job in jobs:
                    self._details.add(job)

    def _weigh(self, job: EngineJob, sign: int) -> None:
        size = sign * size_of(job)
        if job.state is State.COMPLETED:
            self.completed_bytes += size
            if job.result is not None:
                self.result_bytes += sign * len(job.result)
        else:
            self.cancelled_bytes += size

    def remove(self, job: EngineJob) -> None:
        """Account for a removed record."""
        with self._lock:
            self._count(job, -1)
            if self._measures and job not in self.held[job.state]:
                self._weigh(job, -1)
            job.generation = GONE
            if self.held[job.state]:
                self.held[job.state].pop(job, None)
            if self._postponed_results:
                self._postponed_results.pop(job, None)
            if job.options.kept is not None or self.retention is not NO_RETENTION:
                if self._postponed and job in self._postponed:
                    del self._postponed[job]
                else:
                    self._stale += 1
                if not self.completed and not self.cancelled:
                    self._records.clear()
                    self._results.clear()
                    self._listed = self._size = self._stale = 0
                elif self._size >= COMPACT_FROM and self._stale > self._size * COMPACT_ABOVE:
                    self._compact()

    def expired(self, now: int, limit: int) -> list[EngineJob]:
        """Return up to `limit` expired jobs; the caller removes them."""
        with self._lock:
            jobs = self._due(self._records, now, limit)
            self._size -= len(jobs)
            jobs = self._unheld(jobs)
            # The caller's removal of the remaining records counts them as stale.
            self._stale -= len(jobs)
        return [job for job in jobs if job.generation != GONE]

    def surplus(self, limit: int) -> list[EngineJob]:
        """Return up to `limit` jobs above the queue's limits; the caller removes them."""
        if self.retention is NO_RETENTION:
            return []
        jobs: list[EngineJob] = []
        with self._lock:
            for state in (State.COMPLETED, State.CANCELLED):
                keep = self.retention.of(state)
                is_completed = state is State.COMPLETED
                records = (self.completed if is_completed else self.cancelled) - len(self.held[state])
                total = self.completed_bytes + self.result_bytes if is_completed else self.cancelled_bytes
                count = 0 if keep.count is None else records - keep.count
                size = 0 if keep.bytes is None else total - keep.bytes
                jobs += self._first(state, count, size, limit - len(jobs))
        return jobs

    def _first(self, state: State, count: int, size: int, limit: int) -> list[EngineJob]:
        """Take the records of one outcome that expire first: at least this number, and this many bytes."""
        jobs: list[EngineJob] = []
        while (len(jobs) < count or size > 0) and len(jobs) < limit:
            is_completed = state is State.COMPLETED
            fifos = {key: fifo for key, fifo in self._records.items() if (key >= 0) is is_completed}
            if not fifos:
                break
            key = _next_of(fifos)
            job = fifos[key].popleft()[1]
            self._size -= 1
            for free in self._unheld([job]):
                self._stale -= 1
                if free.generation != GONE:
                    jobs.append(free)
                    size -= size_of(free) + len(free.result or b"")
            if not fifos[key]:
                del self._records[key]
        return jobs

    def drop_details(self, now: int, limit: int) -> list[EngineJob]:
        """Drop expired attempts and log lines of up to `limit` jobs, and return these jobs."""
        if self._details is None:
            return []
        with self._lock:
            return self._details.sweep(now, limit)

    def drop_results(self, now: int, limit: int) -> list[EngineJob]:
        """Drop up to `limit` results, with the jobs' items, that expire before their records or exceed the
        limit; return the jobs considered.
        """
        if not self._results:
            return []
        held = self.held[State.COMPLETED]
        with self._lock:
            due = self._due(self._results, now, limit)
            for job in due:
                if job in held:
                    _forget_items(job)
                    self._postponed_results[job] = None
                else:
                    self._forget_result(job)
            max_bytes = self.retention.results.bytes
            while max_bytes is not None and self.result_bytes > max_bytes and len(due) < limit:
                fifos = {key: fifo for key, fifo in self._results.items() if key >= 0}
                if not fifos:
                    break
                key = _next_of(fifos)
                job = fifos[key].popleft()[1]
                due.append(job)
                if job in held:
                    self._postponed_results[job] = None
                else:
                    self._forget_result(job)
                if not fifos[key]:
                    del self._results[key]
            self._listed -= len(due)
        return due

    def _forget_result(self, job: EngineJob) -> None:
        if job.generation == GONE:
            return
        if self._measures and job.result is not None:
            self.result_bytes -= len(job.result)
        job.result = None
        _forget_items(job)

    def hold(self, job: EngineJob) -> None:
        """Keep a record with its result, whatever its time and the queue's limits, until `let_go`.

        It does not count against the limits. Its streamed items expire all the same.
        """
        held = self.held[job.state]
        if self._measures and job not in held:
            with self._lock:
                self._weigh(job, -1)
        held[job] = None

    def let_go(self, job: EngineJob, now: int) -> None:
        """Let a record's own time and the queue's limits apply again."""
        held = self.held.get(job.state)
        if held is None or job not in held:
            return
        del held[job]
        with self._lock:
            self._count_again(job, now)

    def _count_again(self, job: EngineJob, now: int) -> None:
        if self._measures:
            self._weigh(job, 1)
        if job in self._postponed:
            del self._postponed[job]
            self._return(self._records, self._kept(job), job)
            self._size += 1
        if job.state is State.COMPLETED:
            was_postponed = job in self._postponed_results
            self._postponed_results.pop(job, None)
            readable = self._readable(job)
            if job.finished_at + readable <= now:
                self._forget_result(job)
            elif was_postponed:
                self._return(self._results, readable, job)
                self._listed += 1

    def _unheld(self, jobs: list[EngineJob]) -> list[EngineJob]:
        """Return the jobs that are not held; held ones are postponed until `let_go`."""
        if any(self.held.values()):
            held = dict.fromkeys(job for job in jobs if job in self.held[job.state])
            self._postponed.update(held)
            jobs = [job for job in jobs if job not in held]
        return jobs

    def _count(self, job: EngineJob, change: int) -> None:
        if job.state is State.COMPLETED:
            self.completed += change
        else:
            self.cancelled += change

    @staticmethod
    def _enter(fifos: Fifos, kept: int, job: EngineJob) -> None:
        key = kept if job.state is State.COMPLETED else ~kept
        fifo = fifos.get(key)
        if fifo is None:
            fifo = fifos[key] = deque()
        fifo.append((job.finished_at + kept, job))

    @staticmethod
    def _return(fifos: Fifos, kept: int, job: EngineJob) -> None:
        """Put back an entry that was taken out, sorted by time among others that were."""
        key = RETURNED if job.state is State.COMPLETED else ~RETURNED
        insort(fifos.setdefault(key, deque()), (job.finished_at + kept, job), key=_time)

    @staticmethod
    def _due(fifos: Fifos, now: int, limit: int) -> list[EngineJob]:
        jobs: list[EngineJob] = []
        for key in sorted(fifos):
            fifo = fifos[key]
            # Removed jobs must not hold up others, even if the clock was set back after they ended.
            while fifo and (fifo[0][0] <= now or fifo[0][1].generation == GONE) and len(jobs) < limit:
                jobs.append(fifo.popleft()[1])
            if not fifo:
                del fifos[key]
        return jobs

    def _compact(self) -> None:
        self._size = _compact(self._records)
        self._listed = _compact(self._results)
        self._stale = 0


def _compact(fifos: Fifos) -> int:
    """Drop the entries of removed jobs; return the number of entries left."""
    for key, fifo in list(fifos.items()):
        fifos[key] = deque(entry for entry in fifo if entry[1].generation != GONE)
        if not fifos[key]:
            del fifos[key]
    return sum(map(len, fifos.values()))


def _next_of(fifos: Fifos) -> int:
    """Return the key whose first entry expires first."""
    return min(fifos, key=lambda key: (fifos[key][0][0], key))


def _time(entry: tuple[int, EngineJob]) -> int:
    return entry[0]


GONE = -(1 << 61)
"""Generation of a finished job whose record was removed."""


def _has_more(job: EngineJob) -> bool:
    """Return whether a job has a result or items, which may expire before its record."""
    return job.state is State.COMPLETED and (job.result is not None or job.stream is not None)


def _forget_items(job: EngineJob) -> None:
    if job.stream is not None:
        job.stream.items = []
