"""The job as its handler sees it."""

from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

from djqueue.core.errors import JobCancelledError
from djqueue.core.headers import Headers
from djqueue.core.options import JobOptions
from djqueue.core.units import to_datetime

from .dependencies import Child
from .handlers import call_arguments
from .stopping import Cancelled

if TYPE_CHECKING:
    from .runs import Run


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
        """Number of earlier attempts that were lost with their worker."""
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


CURRENT: ContextVar["Run | None"] = ContextVar("djqueue_current_run", default=None)


def current_job() -> JobContext | None:
    """Return the job that this thread or task is running; None outside of handlers."""
    run = CURRENT.get()
    return None if run is None else run.context


def run_of(job: JobContext) -> "Run":
    """Return the run behind a handler's job."""
    return job._run
