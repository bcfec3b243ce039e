"""The claimed jobs of a worker, from their dispatch until the storage knows their outcomes."""

from asyncio import Task, TimerHandle
from collections import deque
from threading import Lock
from typing import Any, Protocol

from djqueue.core.job import Claimed, Lease, Outcome

from .context import JobContext
from .dependencies import Child
from .handlers import Handler
from .stopping import Cancelled, Stop


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
    def context(self) -> JobContext:
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


# One lock is enough: only the few runs that are stopped or use their event take it.
_stopping = Lock()


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
