"""Records of jobs that have ended, until their time is over."""

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from threading import Lock

from .details import Details
from .enginejob import EngineJob
from .retention import NO_RETENTION, Retention
from .sizes import size_of
from .states import State

Fifos = dict[int, deque[tuple[int, EngineJob]]]
"""For each length of time, inverted for cancelled jobs: (its end, job), oldest first."""
FOREVER = 1 << 62
RETURNED = FOREVER + 1
"""In place of a length of time: those that had been held."""

COMPACT_ABOVE = 0.2
COMPACT_FROM = 64


class FinishedJobs:
    """Completed and cancelled jobs in order of expiry: a FIFO for each length of time they are kept.

    A failed job is kept by its dead letter instead. The lock is this object's own: a plain job ends
    without its queue's. What is held is guarded by the queue's.
    """

    __slots__ = (
        "_details",
        "_keeps",
        "_listed",
        "_lock",
        "_measures",
        "_parked",
        "_passed",
        "_records",
        "_results",
        "_size",
        "_stale",
        "cancelled",
        "cancelled_bytes",
        "completed",
        "completed_bytes",
        "completions",
        "elsewhere",
        "held",
        "result_bytes",
        "retention",
    )

    def __init__(
        self, *, keeps: bool, retention: Retention = NO_RETENTION, jobs: Mapping[str, EngineJob] | None = None
    ) -> None:
        """jobs: the queue's records by id, for a queue that keeps attempts or log lines for a time."""
        self._lock = Lock()
        self._keeps = keeps
        """True if records expire here; else whoever keeps them elsewhere evicts them."""
        self._records: Fifos = {}
        self._results: Fifos = {}
        """Of completed jobs whose results expire before their records, of all where the bytes of results
        count; by inverted times, of those that have items and no result.
        """
        self._listed = 0
        """Entries of `_results`."""
        self._size = 0
        """Entries of `_records`."""
        self._stale = 0
        """Those of jobs that were taken away before their time."""
        self._parked: dict[EngineJob, None] = {}
        """Those whose time was over, or that were too many, while they were held."""
        self._passed: dict[EngineJob, None] = {}
        """Those whose results were: these are in `_results` no more."""
        self.held: dict[State, dict[EngineJob, None]] = {State.COMPLETED: {}, State.CANCELLED: {}}
        """Records that are kept for jobs that depend on theirs."""
        self.completed = 0
        """Records of completed jobs."""
        self.cancelled = 0
        self.completions = 0
        """Jobs that have completed here, whatever became of their records."""
        self.elsewhere = {State.COMPLETED: 0, State.CANCELLED: 0}
        """Records that whoever keeps them elsewhere has, and this has not; the queue's lock guards it."""
        self.completed_bytes = 0
        """Of the records of completed jobs without their results, where bytes count; as the next two, without
        those that are held.
        """
        self.cancelled_bytes = 0
        self.result_bytes = 0
        self._begin(retention, {} if jobs is None else jobs)

    def _begin(self, retention: Retention, jobs: Mapping[str, EngineJob]) -> None:
        self.retention = retention
        self._measures = self._keeps and retention.measures
        ages = (retention.attempts.age, retention.logs.age)
        self._details = Details(retention, jobs) if self._keeps and any(ages) else None

    def configure(self, retention: Retention, jobs: Mapping[str, EngineJob]) -> None:
        """Have other bounds, also for what is there. The caller sees to it that no job ends meanwhile."""
        ended = [job for job in jobs.values() if job.state is State.COMPLETED or job.state is State.CANCELLED]
        for entries in (self._records, self._results, self._parked, self._passed):
            entries.clear()
        self._listed = self._size = self._stale = self.completed = self.cancelled = 0
        self.completed_bytes = self.cancelled_bytes = self.result_bytes = 0
        self._begin(retention, jobs)
        for job in sorted(ended, key=_end):
            self.add(job)
        self.note_failed(job for job in jobs.values() if job.state is State.FAILED)

    def add(self, job: EngineJob, completions: int = 0) -> None:
        """Keep a job from its end for as long as its options say, and the queue allows.

        completions: 1 for a job that completes now.
        """
        kept = job.options.kept
        if self.retention is not NO_RETENTION:
            kept = self.retention.of(job.state).shorten(kept)
        with self._lock:
            self.completions += completions
            self._count(job, 1)
            if not self._keeps:
                return
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
        """What only queues with bounds ask of a job that has ended."""
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
        """Jobs that have failed: their dead letters keep them, but not all that is theirs."""
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
        """Account for a record that is taken away."""
        with self._lock:
            self._count(job, -1)
            if self._measures and job not in self.held[job.state]:
                self._weigh(job, -1)
            job.generation = GONE
            if self.held[job.state]:
                self.held[job.state].pop(job, None)
            if self._passed:
                self._passed.pop(job, None)
            if self._keeps and (job.options.kept is not None or self.retention is not NO_RETENTION):
                if self._parked and job in self._parked:
                    del self._parked[job]
                else:
                    self._stale += 1
                if not self.completed and not self.cancelled:
                    self._records.clear()
                    self._results.clear()
                    self._listed = self._size = self._stale = 0
                elif self._size >= COMPACT_FROM and self._stale > self._size * COMPACT_ABOVE:
                    self._compact()

    def expired(self, now: int, limit: int) -> list[EngineJob]:
        """Up to `limit` jobs whose time is over; the caller removes them."""
        with self._lock:
            jobs = self._due(self._records, now, limit)
            self._size -= len(jobs)
            jobs = self._unheld(jobs)
            # The caller's removal of those that are still there counts them as stale.
            self._stale -= len(jobs)
        return [job for job in jobs if job.generation != GONE]

    def surplus(self, limit: int) -> list[EngineJob]:
        """Up to `limit` jobs above what the queue keeps of their outcome; the caller removes them."""
        if self.retention is NO_RETENTION:
            return []
        jobs: list[EngineJob] = []
        with self._lock:
            for state in (State.COMPLETED, State.CANCELLED):
                keep = self.retention.of(state)
                is_completed = state is State.COMPLETED
                there = (self.completed if is_completed else self.cancelled) - len(self.held[state])
                taken = self.completed_bytes + self.result_bytes if is_completed else self.cancelled_bytes
                count = 0 if keep.count is None else there - keep.count
                size = 0 if keep.bytes is None else taken - keep.bytes
                jobs += self._first(state, count, size, limit - len(jobs))
        return jobs

    def _first(self, state: State, count: int, size: int, limit: int) -> list[EngineJob]:
        """Records with an outcome whose time would be over first: so many, and so many bytes, at least."""
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

    def drop_details(self, now: int, limit: int) -> int:
        """Forget attempts and log lines that are too old; looks at `limit` jobs, and returns at how many."""
        if self._details is None:
            return 0
        with self._lock:
            return self._details.sweep(now, limit)

    def drop_results(self, now: int, limit: int) -> int:
        """Forget up to `limit` results whose time is over while their jobs' records are kept on, or that are
        above what the queue keeps, with the jobs' items; returns how many were looked at.
        """
        if not self._results:
            return 0
        held = self.held[State.COMPLETED]
        with self._lock:
            due = self._due(self._results, now, limit)
            for job in due:
                if job in held:
                    _forget_items(job)
                    self._passed[job] = None
                else:
                    self._forget_result(job)
            looked_at = len(due)
            most = self.retention.results.bytes
            while most is not None and self.result_bytes > most and looked_at < limit:
                fifos = {key: fifo for key, fifo in self._results.items() if key >= 0}
                if not fifos:
                    break
                key = _next_of(fifos)
                job = fifos[key].popleft()[1]
                looked_at += 1
                if job in held:
                    self._passed[job] = None
                else:
                    self._forget_result(job)
                if not fifos[key]:
                    del self._results[key]
            self._listed -= looked_at
        return looked_at

    def _forget_result(self, job: EngineJob) -> None:
        if job.generation == GONE:
            return
        if self._measures and job.result is not None:
            self.result_bytes -= len(job.result)
        job.result = None
        _forget_items(job)

    def hold(self, job: EngineJob) -> None:
        """Keep a record that is here with its result, whatever its time and the queue's bounds, for which it
        does not count, until it is let go. What it has sent has its time all the same.
        """
        held = self.held[job.state]
        if self._measures and job not in held:
            with self._lock:
                self._weigh(job, -1)
        held[job] = None

    def let_go(self, job: EngineJob, now: int) -> None:
        """From now on a record's own time counts again, and the queue's bounds: the next look finds it."""
        held = self.held.get(job.state)
        if held is None or job not in held:
            return
        del held[job]
        if self._keeps:
            with self._lock:
                self._count_again(job, now)

    def _count_again(self, job: EngineJob, now: int) -> None:
        if self._measures:
            self._weigh(job, 1)
        if job in self._parked:
            del self._parked[job]
            self._return(self._records, self._kept(job), job)
            self._size += 1
        if job.state is State.COMPLETED:
            was_passed = job in self._passed
            self._passed.pop(job, None)
            readable = self._readable(job)
            if job.finished_at + readable <= now:
                self._forget_result(job)
            elif was_passed:
                self._return(self._results, readable, job)
                self._listed += 1

    def _unheld(self, jobs: list[EngineJob]) -> list[EngineJob]:
        """Without those that are held, which are put off until they are let go."""
        if any(self.held.values()):
            held = dict.fromkeys(job for job in jobs if job in self.held[job.state])
            self._parked.update(held)
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
        """Put an entry back that was taken out of its turn: among others of its kind, by their times."""
        key = RETURNED if job.state is State.COMPLETED else ~RETURNED
        insort(fifos.setdefault(key, deque()), (job.finished_at + kept, job), key=_time)

    @staticmethod
    def _due(fifos: Fifos, now: int, limit: int) -> list[EngineJob]:
        jobs: list[EngineJob] = []
        for key in sorted(fifos):
            fifo = fifos[key]
            # One that is gone holds up nobody, though the clock was set back after it ended.
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
    """Leave the entries of jobs that are gone out; returns how many there are then."""
    for key, fifo in list(fifos.items()):
        fifos[key] = deque(entry for entry in fifo if entry[1].generation != GONE)
        if not fifos[key]:
            del fifos[key]
    return sum(map(len, fifos.values()))


def _next_of(fifos: Fifos) -> int:
    """Return the one whose first entry's time is over first."""
    return min(fifos, key=lambda key: (fifos[key][0][0], key))


def _end(job: EngineJob) -> int:
    return job.finished_at


def _time(entry: tuple[int, EngineJob]) -> int:
    return entry[0]


GONE = -(1 << 61)
"""Generation of a finished job whose record has been taken away."""


def _has_more(job: EngineJob) -> bool:
    """Return whether there is anything of a job that goes before its record."""
    return job.state is State.COMPLETED and (job.result is not None or job.stream is not None)


def _forget_items(job: EngineJob) -> None:
    if job.stream is not None:
        job.stream.items = []
