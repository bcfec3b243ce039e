"""What a handler may ask of the job that it runs, and tell about it."""

from contextvars import ContextVar
from datetime import datetime
from typing import TYPE_CHECKING, Any

from djqueue.core.durations import to_datetime
from djqueue.core.errors import JobCancelledError
from djqueue.core.options import JobOptions

from . import children
from .cancelled import Cancelled
from .children import Child
from .handlers import call_arguments

if TYPE_CHECKING:
    from .runs import Run


class JobContext:
    """One run of one job, as its handler sees it."""

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
        """Unique in its queue."""
        return self._run.claimed.id

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._run.claimed.queue

    @property
    def name(self) -> str:
        """The job's name, by which the handler was found."""
        return self._run.claimed.name

    @property
    def payload(self) -> Any:
        """What it was given; for a function under `@job`: `{"args": [...], "kwargs": {...}}`."""
        return self._run.payload

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments that a function under `@job` was enqueued with."""
        return tuple(call_arguments(self._run.payload)[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        """Its keyword arguments."""
        return call_arguments(self._run.payload)[1]

    @property
    def options(self) -> JobOptions:
        """How it is to be run."""
        return self._run.claimed.options

    @property
    def subject(self) -> str | None:
        """What the job is about: `app_label.model:pk`, or another text."""
        return self.options.subject

    @property
    def attempts(self) -> int:
        """Runs begun, this one included."""
        return self._run.claimed.attempts

    @property
    def failures(self) -> int:
        """Earlier runs that failed."""
        return self._run.claimed.failures

    @property
    def stalls(self) -> int:
        """Earlier runs that were lost with their worker."""
        return self._run.claimed.stalls

    @property
    def created_at(self) -> datetime:
        """When it was enqueued."""
        return to_datetime(self._run.claimed.created_at)

    @property
    def deadline(self) -> datetime | None:
        """When its timeout is over; None without one."""
        at = self._run.deadline
        return None if at is None else to_datetime(at)

    @property
    def cancelled(self) -> Cancelled:
        """An event, set when the handler should stop. Nothing but this stops a handler in a thread."""
        return self._run.cancelled

    def raise_if_cancelled(self) -> None:
        """Raise JobCancelledError if the handler was asked to stop; else do nothing.

        The exception ends the job as the reason of the request demands: `cancelled` if somebody cancelled
        the job, given back if the worker stops, a failure with JobTimeoutError after its timeout.
        """
        if self._run.cancelled.is_set():
            raise JobCancelledError(f"job {self.id!r} was asked to stop", job_id=self.id)

    def children(self) -> list[Child]:
        """The jobs that it has waited for, in the order of `depends_on`, with their results and errors.

        They are read now; not on an event loop: see `achildren`.
        """
        return children.read(self._run.reports.storage, self.options.depends_on)

    async def achildren(self) -> list[Child]:
        """See `children`."""
        return await children.aread(self._run.reports.storage, self.options.depends_on)

    def progress(self, value: Any) -> None:
        """Say how far the job is, with anything that a payload may hold; the latest word counts.

        Raises SerializationError.
        """
        self._run.reports.progress(self._run, value)

    def log(self, line: object) -> None:
        """Keep a line with the job; of more than 1,000 the oldest go."""
        self._run.reports.log(self._run, line)


def run_of(job: JobContext) -> "Run":
    """The run that a handler sees as its job."""
    return job._run


CURRENT: ContextVar["Run | None"] = ContextVar("djqueue_current_run", default=None)


def current_job() -> JobContext | None:
    """The job that this thread or task runs; None outside of handlers."""
    run = CURRENT.get()
    return None if run is None else run.context
