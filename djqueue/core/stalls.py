"""The error of a job that was lost with its worker too often."""

from collections.abc import Sequence
from datetime import UTC, datetime

from .job import AttemptRecord, JobFailure

LISTED = 10
"""Stalled attempts that the error lists, the last ones."""


def stalled_error(stalls: int, attempts: Sequence[AttemptRecord]) -> JobFailure:
    """Return the error of a job with so many stalls: which attempts were lost, on which workers, and when.

    attempts: the ended attempts that are known, the one that has just stalled being the last.
    """
    lost = [attempt for attempt in attempts if attempt.outcome == "stalled"][-min(stalls, LISTED) :]
    listed = "; ".join(
        f"attempt {one.attempt} on {one.worker}, started {_utc(one.started_at)}, lost {_utc(one.finished_at)}"
        for one in lost
    )
    text = f"lost {stalls} times with its worker, last with {attempts[-1].worker}: {listed}"
    return JobFailure("djqueue.core.errors.StorageError", text)


def _utc(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds // 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
