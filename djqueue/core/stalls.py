"""The error of a job that stalled too often."""

from collections.abc import Sequence
from datetime import UTC, datetime

from .job import AttemptRecord, JobFailure

LISTED = 10
"""Number of stalled attempts that the error lists, the last ones."""


def stalled_error(stalls: int, attempts: Sequence[AttemptRecord]) -> JobFailure:
    """Return the error of a job with this number of stalls: which attempts were lost, on which workers, and
    when.

    Args:
        attempts: the known ended attempts; the last one has just stalled.
    """
    lost = [attempt for attempt in attempts if attempt.outcome == "stalled"][-min(stalls, LISTED) :]
    listed = "; ".join(
        f"attempt {one.attempt} on {one.worker}, started {_utc(one.started_at)}, lost {_utc(one.finished_at)}"
        for one in lost
    )
    text = f"stalled {stalls} times, last on {attempts[-1].worker}: {listed}"
    return JobFailure("djqueue.core.errors.StorageError", text)


def _utc(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds // 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
