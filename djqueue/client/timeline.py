"""The history of a job, in order."""

from datetime import datetime
from typing import NamedTuple

from djqueue.core.job import JobFailure, JobRecord
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


def timeline(record: JobRecord) -> tuple[Moment, ...]:
    """Return the history of a job, as `JobInfo.timeline` has it."""
    moments = [Moment(to_datetime(record.created_at), "enqueued")]
    ended = record.finished_at if record.state in TERMINAL else 0
    for run in record.all_attempts():
        _add_retry(moments, record, run.started_at)
        moments.append(Moment(to_datetime(run.started_at), "started", run.attempt, run.worker))
        last = run.outcome == str(record.state) and run.finished_at == ended
        reason = record.reason if last else ""
        if last:
            ended = 0  # told by this run
        at = to_datetime(run.finished_at)
        moments.append(Moment(at, run.outcome, run.attempt, run.worker, reason, run.error))
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
