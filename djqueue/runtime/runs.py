"""The runs of a worker: its attempts at jobs, from the claim until the storage knows their outcomes.

A `Run` is one attempt as the worker and its executors see it, and a `JobContext` is the same attempt as its
handler sees it. `Stop` and `Cancelled` ask a handler to stop.
"""

import asyncio
import mmap
import struct
from asyncio import Task, TimerHandle
from collections import deque
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from datetime import datetime
from enum import IntEnum
from functools import cached_property
from threading import Event, Lock
from typing import Any, Protocol

from djqueue.client.info import outcome
from djqueue.core.errors import JobCancelledError, JobNotFoundError
from djqueue.core.headers import Headers
from djqueue.core.job import Claimed, JobFailure, JobRecord, Lease, Outcome
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.storage.base import Storage

from .handlers import Handler, call_arguments

Records = list[JobRecord | None]


class Child:
    """One of the jobs in `depends_on`, as it was when it was read."""

    def __init__(self, key: JobKey, record: JobRecord | None) -> None:
        self.queue, self.id = key
        self._record = record

    def __repr__(self) -> str:
        return f"<Child {self.id} of queue {self.queue}: {self.state or 'not found'}>"

    @property
    def name(self) -> str:
        """The job's name; empty if the job no longer exists."""
        return self._record.name if self._record is not None else ""

    @property
    def state(self) -> State | None:
        """The job's final state; None if the job was removed or its retention is over."""
        return self._record.state if self._record is not None else None

    @property
    def error(self) -> JobFailure | None:
        """The exception of a failed job: type, message and traceback."""
        return self._record.error if self._record is not None else None

    @cached_property
    def result(self) -> Any:
        """The job's result.

        Raises JobFailedError or JobCancelledError if the job did not complete, JobNotFoundError if the job or
        its result no longer exists.
        """
        value = outcome(self._record, self.id)
        if self._record is not None and self._record.result is None:
            raise JobNotFoundError(f"the result of job {self.id!r} has expired", job_id=self.id)
        return value


def read(storage: Storage, keys: Sequence[JobKey]) -> Records:
    """Return the records of jobs, in the order of their keys; None for a job that no longer exists."""
    pages = [(queue, ids, storage.reads.jobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, pages)


async def aread(storage: Storage, keys: Sequence[JobKey]) -> Records:
    """Async version of `read`."""
    pages = [(queue, ids, await storage.reads.ajobs(queue, ids)) for queue, ids in _by_queue(keys)]
    return _in_order(keys, pages)


def children(keys: Sequence[JobKey], records: Records) -> list[Child]:
    """Return the jobs of these keys, with their records."""
    return [Child(key, record) for key, record in zip(keys, records, strict=True)]


def _by_queue(keys: Iterable[JobKey]) -> Iterable[tuple[str, list[str]]]:
    ids: dict[str, list[str]] = {}
    for queue, job_id in keys:
        ids.setdefault(queue, []).append(job_id)
    return ids.items()


def _in_order(keys: Sequence[JobKey], pages: Iterable[tuple[str, list[str], Records]]) -> Records:
    records = {
        (queue, job_id): record
        for queue, ids, page in pages
        for job_id, record in zip(ids, page, strict=True)
    }
    return [records[key] for key in keys]


CURRENT: ContextVar["Run | None"] = ContextVar("djqueue_current_run", default=None)
"""The run that this thread or task executes."""
_NUMBER = struct.Struct("<q")
_stopping = Lock()
"""Guards `stop` and `_cancelled` of all runs. One lock suffices: only a stop, or a handler that uses
`cancelled`, takes it."""


class Stop(IntEnum):
    """Why a handler is asked to stop. The highest of several reasons counts."""

    NO = 0
    SHUTDOWN = 1
    TIMEOUT = 2
    REQUESTED = 3
    """A user or another job cancelled the job."""
    LOST = 4
    """The lease is lost: the job may be running on another worker."""


class Cancelled:
    """An event that is set when a job should stop: cancelled, timed out, lease lost, or worker stopping."""

    __slots__ = ("_event", "_lock", "_sleepers")

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[bool]]] = []

    def __repr__(self) -> str:
        return f"<Cancelled: {self._event.is_set()}>"

    def is_set(self) -> bool:
        """Return whether the job should stop."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds until the job should stop, and return whether it should.

        In a thread, this blocks and returns the bool; on an event loop, it returns an awaitable of it.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._event.wait(timeout)
        return self._sleep(timeout)

    def set(self) -> None:
        """Ask the handler to stop. Called by the worker, from any thread."""
        with self._lock:
            self._event.set()
            sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # That loop is closed, and its waiters are gone with it.
                continue

    async def _sleep(self, timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._event.is_set():
                return True
            future: asyncio.Future[bool] = loop.create_future()
            entry = (loop, future)
            self._sleepers.append(entry)
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return False
        finally:
            with self._lock:
                if entry in self._sleepers:
                    self._sleepers.remove(entry)


class ItemSink(Protocol):
    """Takes the items that a generator yields."""

    def put(self, value: Any) -> None:
        """Send an item; block the thread while too many items wait. Raises ItemError."""

    async def aput(self, value: Any) -> None:
        """Async version of `put`."""

    def wake(self) -> None:
        """Let a thread that waits for room check whether its run is over."""


class JobReports(Protocol):
    """Sends what a running job reports to the storage, and reads for it, in whichever process it runs."""

    worker_id: str
    """Id of the worker that claimed the jobs."""

    def progress(self, run: "Run", value: Any) -> None:
        """Report a job's progress. Raises SerializationError."""

    def log(self, run: "Run", line: object) -> None:
        """Add a log line to a job."""

    def open(self, run: "Run") -> ItemSink:
        """Begin the stream of a run that yields items."""

    def children(self, run: "Run") -> list[Child]:
        """Read the jobs that a job depends on."""

    async def achildren(self, run: "Run") -> list[Child]:
        """Async version of `children`."""


class Run:
    """One attempt of a claimed job. Attributes that few runs need have a class default until they are set."""

    payload: Any = None
    """The decoded payload, once the handler is about to be called."""
    stop = Stop.NO
    task: "Task[None] | None" = None
    timer: TimerHandle | None = None
    deadline: int | None = None
    """UTC milliseconds at which the timeout is over."""
    ended = 0
    """Monotonic milliseconds at which the claim loop saw that the run had ended."""
    outcome: Outcome | None = None
    error: BaseException | None = None
    """The exception that the handler raised, until the outcome has been reported."""
    items: ItemSink | None = None
    """The items that the handler yields, while a generator is running."""
    in_process = False
    """Whether it runs in a process of its own."""
    _cancelled: Cancelled | None = None

    def __init__(self, claimed: Claimed, handler: Handler, reports: JobReports, since: int) -> None:
        self.claimed = claimed
        self.handler = handler
        self.reports = reports
        self.since = since
        """Monotonic milliseconds of the dispatch."""

    @property
    def context(self) -> "JobContext":
        """The job as its handler sees it."""
        # Not stored: a reference cycle would keep both alive until the garbage collector runs.
        return JobContext(self)

    @property
    def cancelled(self) -> Cancelled:
        """The event that asks the handler to stop."""
        with _stopping:
            if self._cancelled is None:
                self._cancelled = Cancelled()
                if self.stop:
                    self._cancelled.set()
            return self._cancelled

    @property
    def overran(self) -> bool:
        """Whether the run was asked to stop because of its timeout."""
        return self.stop is Stop.TIMEOUT

    def overran_by(self, now: int) -> int:
        """Return the milliseconds since the timeout, at a monotonic time."""
        return now - self.since - (self.claimed.options.timeout or 0)

    def ask_to_stop(self, reason: Stop) -> bool:
        """Set the reason and the handler's event; return False if a reason as high was set before."""
        with _stopping:
            if reason <= self.stop:
                return False
            self.stop = reason
            if self._cancelled is not None:
                self._cancelled.set()
        if (items := self.items) is not None:
            items.wake()
        return True


class Runs:
    """The runs of one worker."""

    def __init__(self) -> None:
        self.executing: dict[Run, Run] = {}
        """Runs that occupy a slot, in the order of their start. Keyed by run, because tokens of two queues
        may be equal."""
        self.ended: deque[Run] = deque()
        """Runs that have ended since the claim loop last looked."""
        self.unreported: dict[Run, Run] = {}
        """Runs whose outcomes the storage has not acknowledged."""

    def settle(self, run: Run, outcome: Outcome) -> bool:
        """End a run, from any thread; return False if it has already ended, and ignore the outcome."""
        # The pop makes this atomic if another thread ends the run at the same time.
        if self.executing.pop(run, None) is None:
            return False
        run.outcome = outcome
        self.ended.append(run)
        return True

    def collect(self) -> list[Run]:
        """Take the runs that have ended. Called by the claim loop only."""
        ended = self.ended
        runs = [ended.popleft() for _ in range(len(ended))]
        for run in runs:
            if run.timer is not None:
                run.timer.cancel()
        return runs

    def held(self) -> list[Run]:
        """Return every run whose lease is still needed, from any thread."""
        # In the order in which a run moves from one to the next, so that none is missed.
        runs = [*self.executing.copy().values(), *self.ended.copy(), *self.unreported.copy()]
        return [run for run in runs if run.stop is not Stop.LOST]


def lease_of(run: Run) -> Lease:
    """Return what renews a run's lease."""
    claimed = run.claimed
    return Lease(claimed.queue, claimed.id, claimed.token)


class AttemptCount:
    """The number of attempts that count toward `--max-jobs`, in memory that outlives a worker process.

    A worker process writes it, and the one that replaces it reads it. Create it in the process that forks
    both.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _NUMBER.size)

    def read(self) -> int:
        """Return the number."""
        number: int = _NUMBER.unpack_from(self._memory)[0]
        return number

    def write(self, number: int) -> None:
        """Replace the number. Call this before the handlers start, because they may crash the process."""
        _NUMBER.pack_into(self._memory, 0, number)


class JobContext:
    """One attempt of one job, as its handler sees it."""

    __slots__ = ("_run",)

    def __init__(self, run: "Run") -> None:
        self._run = run

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobContext) and other._run is self._run

    def __hash__(self) -> int:
        return hash(self._run)

    def __repr__(self) -> str:
        return f"<JobContext {self.name} {self.id}, attempt {self.attempts}>"

    @property
    def id(self) -> str:
        """The job's ID, unique in its queue."""
        return self._run.claimed.id

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._run.claimed.queue

    @property
    def name(self) -> str:
        """The job's name, which selects the handler."""
        return self._run.claimed.name

    @property
    def payload(self) -> Any:
        """The job's payload; for a `@job` function: `{"args": [...], "kwargs": {...}}`."""
        return self._run.payload

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of a `@job` function."""
        return tuple(call_arguments(self._run.payload)[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of a `@job` function."""
        return call_arguments(self._run.payload)[1]

    @property
    def options(self) -> JobOptions:
        """The job's options."""
        return self._run.claimed.options

    @property
    def subject(self) -> str | None:
        """The object that the job is about: `app_label.model:pk`, or other text."""
        return self.options.subject

    @property
    def headers(self) -> Headers:
        """Values carried with the job beside its payload, as an immutable mapping."""
        return self.options.headers

    @property
    def attempts(self) -> int:
        """Number of attempts, including this one."""
        return self._run.claimed.attempts

    @property
    def failures(self) -> int:
        """Number of earlier attempts that failed."""
        return self._run.claimed.failures

    @property
    def stalls(self) -> int:
        """Number of earlier attempts that stalled: their lease expired."""
        return self._run.claimed.stalls

    @property
    def worker(self) -> str:
        """Id of the worker that claimed the job."""
        return self._run.reports.worker_id

    @property
    def created_at(self) -> datetime:
        """Time at which the job was enqueued."""
        return to_datetime(self._run.claimed.created_at)

    @property
    def deadline(self) -> datetime | None:
        """Time at which the job's timeout is over; None without a timeout."""
        at = self._run.deadline
        return None if at is None else to_datetime(at)

    @property
    def cancelled(self) -> Cancelled:
        """An event that is set when the handler should stop: the only way to stop a handler in a thread."""
        return self._run.cancelled

    def raise_if_cancelled(self) -> None:
        """Raise JobCancelledError if the handler should stop; otherwise do nothing.

        The reason determines the outcome: a cancelled job ends as `cancelled`, a job of a stopping worker
        returns to its queue, and a job that exceeded its timeout fails with JobTimeoutError.
        """
        if self._run.cancelled.is_set():
            raise JobCancelledError(f"job {self.id!r} was asked to stop", job_id=self.id)

    def children(self) -> list[Child]:
        """Read the jobs in `depends_on`, in that order, with their results and errors.

        On an event loop, use `achildren`.
        """
        return self._run.reports.children(self._run)

    async def achildren(self) -> list[Child]:
        """Async version of `children`."""
        return await self._run.reports.achildren(self._run)

    def progress(self, value: Any) -> None:
        """Report how far the job is, as any value that a payload can hold; only the latest is kept.

        Raises SerializationError.
        """
        self._run.reports.progress(self._run, value)

    def log(self, line: object) -> None:
        """Add a log line to the job, which keeps the latest 1,000."""
        self._run.reports.log(self._run, line)


def current_job() -> JobContext | None:
    """Return the job that this thread or task is running; None outside of handlers."""
    run = CURRENT.get()
    return None if run is None else run.context


def run_of(job: JobContext) -> Run:
    """Return the run behind a handler's job."""
    return job._run


def _resolve(future: "asyncio.Future[bool]") -> None:
    if not future.done():
        future.set_result(True)
