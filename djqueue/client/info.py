"""Jobs for callers: decoded values, aware datetimes, the outcome, and the history in order."""

from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from djqueue.codecs import decode
from djqueue.conf import get_settings
from djqueue.core.errors import JobCancelledError, JobFailedError, JobNotFoundError, MaxRetriesError
from djqueue.core.headers import Headers
from djqueue.core.job import AttemptRecord, JobFailure, JobRecord
from djqueue.core.options import JobOptions
from djqueue.core.states import TERMINAL, State
from djqueue.core.units import to_datetime


class Moment(NamedTuple):
    """One thing that happened to a job."""

    at: datetime
    event: str
    """enqueued | started | released | retried | stalled | completed | failed | cancelled | requeued"""
    attempt: int = 0
    """Number of the attempt; 0 for an event outside of attempts."""
    worker: str = ""
    reason: str = ""
    """Reason of the dead letter or the cancellation."""
    error: JobFailure | None = None


class JobStatus(NamedTuple):
    """A short form of a job."""

    id: str
    state: State
    created_at: datetime
    attempts: int
    result: Any = None
    """The job's result, if it has completed and the result is kept."""
    error: str | None = None
    """The last exception, if the job has failed."""


class JobInfo:
    """A job as it was when it was read. Values are decoded on first access."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record

    def __repr__(self) -> str:
        return f"<JobInfo {self.name} {self.id} {self.state}>"

    @property
    def id(self) -> str:
        """The job's id, unique in its queue."""
        return self.record.id

    @property
    def queue(self) -> str:
        """Name of the queue."""
        return self.record.queue

    @property
    def name(self) -> str:
        """The job's name, which selects its handler."""
        return self.record.name

    @property
    def state(self) -> State:
        """The job's state."""
        return self.record.state

    @property
    def options(self) -> JobOptions:
        """Options of the job."""
        return self.record.options

    @property
    def subject(self) -> str | None:
        """The object that the job is about: `app_label.model:pk`, or any other string."""
        return self.options.subject

    @property
    def headers(self) -> Headers:
        """Values carried with the job beside its payload, as an immutable mapping."""
        return self.options.headers

    @property
    def attempts(self) -> int:
        """Number of attempts started, without those that were released."""
        return self.record.attempts

    @property
    def failures(self) -> int:
        """Number of attempts that failed."""
        return self.record.failures

    @property
    def stalls(self) -> int:
        """Number of attempts that stalled: their lease expired."""
        return self.record.stalls

    @property
    def worker(self) -> str:
        """The worker that runs the job, or ran it last."""
        return self.record.worker

    @property
    def reason(self) -> str:
        """Reason why the job failed or was cancelled, in one word."""
        return self.record.reason

    @property
    def error(self) -> JobFailure | None:
        """Last exception of the handler: type, message, traceback."""
        return self.record.error

    @property
    def progress(self) -> Any:
        """The latest progress that the handler reported."""
        return self.record.progress

    @property
    def items(self) -> int:
        """Number of items that the last attempt of a generator has sent."""
        return self.record.items

    @property
    def logs(self) -> tuple[tuple[datetime, str], ...]:
        """Log lines of the job, with their times."""
        return tuple((to_datetime(at), line) for at, line in self.record.logs)

    @property
    def history(self) -> tuple[AttemptRecord, ...]:
        """All ended attempts."""
        return self.record.all_attempts()

    @property
    def created_at(self) -> datetime:
        """Time at which the job was enqueued."""
        return to_datetime(self.record.created_at)

    @property
    def run_at(self) -> datetime:
        """Earliest time at which the job may start."""
        return to_datetime(self.record.run_at)

    @property
    def started_at(self) -> datetime | None:
        """Start of the last attempt."""
        return _time(self.record.started_at)

    @property
    def finished_at(self) -> datetime | None:
        """Time at which the job ended."""
        return _time(self.record.finished_at)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """History of the job, in order: enqueue, start and end of each attempt, end of the job."""
        return timeline(self.record)

    @cached_property
    def payload(self) -> Any:
        """Payload of the job. Raises SerializationError if its content type is not accepted."""
        return _decode(self.record, self.record.payload)

    @cached_property
    def result(self) -> Any:
        """Result of the job; None if it has not completed, or the result has expired."""
        return None if self.record.result is None else _decode(self.record, self.record.result)

    def status(self) -> JobStatus:
        """Return a short form of the job."""
        error = self.error.message if self.error is not None and self.state is State.FAILED else None
        return JobStatus(self.id, self.state, self.created_at, self.attempts, self.result, error)


def outcome(record: JobRecord | None, job_id: str) -> Any:
    """Return the result of an ended job, or raise the error of its other outcomes."""
    if record is None:
        raise JobNotFoundError(f"job {job_id!r} does not exist, or its record has expired", job_id=job_id)
    if record.state is State.COMPLETED:
        if record.result is None:
            raise JobNotFoundError(f"job {job_id!r} completed, but its result has expired", job_id=job_id)
        return JobInfo(record).result
    if record.state is State.CANCELLED:
        raise JobCancelledError(f"job {job_id!r} was cancelled", job_id=job_id)
    error = record.error or JobFailure("", "")
    exhausted = record.reason == "max_attempts_exceeded"
    raise (MaxRetriesError if exhausted else JobFailedError)(
        f"job {job_id!r} failed ({record.reason}): {error.type.rpartition('.')[2]}: {error.message}",
        job_id=job_id,
        reason=record.reason,
        error_type=error.type,
        error_message=error.message,
        traceback=error.traceback,
        payload=JobInfo(record).payload,
    )


def _decode(record: JobRecord, data: bytes) -> Any:
    return decode(data, record.options.content_type, accept=get_settings().accept_content)


def _time(milliseconds: int) -> datetime | None:
    return to_datetime(milliseconds) if milliseconds else None


def timeline(record: JobRecord) -> tuple[Moment, ...]:
    """Return the history of a job, as `JobInfo.timeline` has it."""
    moments = [Moment(to_datetime(record.created_at), "enqueued")]
    ended = record.finished_at if record.state in TERMINAL else 0
    for attempt in record.all_attempts():
        _add_retry(moments, record, attempt.started_at)
        moments.append(Moment(to_datetime(attempt.started_at), "started", attempt.attempt, attempt.worker))
        is_last = attempt.outcome == str(record.state) and attempt.finished_at == ended
        reason = record.reason if is_last else ""
        if is_last:
            ended = 0  # this attempt's end is the job's
        at = to_datetime(attempt.finished_at)
        moments.append(Moment(at, attempt.outcome, attempt.attempt, attempt.worker, reason, attempt.error))
    if record.state is State.ACTIVE:
        _add_retry(moments, record, record.started_at)
        moments.append(Moment(to_datetime(record.started_at), "started", record.attempts, record.worker))
    elif ended:
        _add_retry(moments, record, ended)
        end = Moment(to_datetime(ended), str(record.state), reason=record.reason, error=record.error)
        moments.append(end)
    elif record.state not in TERMINAL:
        _add_retry(moments, record, record.run_at)
    return tuple(moments)


def _add_retry(moments: list[Moment], record: JobRecord, before: int) -> None:
    """Add the retry of a dead letter, if one must have come between the last moment and this time.

    Records have the time of the last retry. An earlier one is shown at the time of what followed.
    """
    if moments[-1].event == "failed":
        last, end = to_datetime(record.run_at), to_datetime(before)
        moments.append(Moment(last if moments[-1].at <= last <= end else end, "requeued"))
