"""Errors for callers that waited too long: the job's state, why it has not finished, and the remedy."""

import logging
from collections.abc import Callable
from datetime import timedelta

from djqueue.core.deadlines import within
from djqueue.core.errors import DjqueueError, JobTimeoutError, StorageUnavailableError
from djqueue.core.explain import MAX_BEFORE, Explanation
from djqueue.core.job import JobRecord
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.core.units import to_datetime
from djqueue.storage.base import Storage

from .steps import Steps, in_thread

logger = logging.getLogger("djqueue.client")

LOOKING = 0.25
"""Maximum seconds of the search for the job."""
NO_ANSWER = "The storage did not return the job's state."


def timed_out(
    storage: Storage, queue: str, job_id: str, wait: float | timedelta, away: StorageUnavailableError | None
) -> Steps[JobTimeoutError]:
    """Return the error for a caller that waited too long.

    Args:
        away: The error of the last read of the job, if the storage did not respond.
    """
    text = NO_ANSWER if away is not None else (yield in_thread(storage, _look, storage, queue, job_id))
    return _error(queue, job_id, wait, text)


def _error(queue: str, job_id: str, wait: float | timedelta, text: str) -> JobTimeoutError:
    time = str(wait) if isinstance(wait, timedelta) else f"{wait:g} s"
    return JobTimeoutError(
        f"Job {job_id!r} of queue {queue!r} did not finish within {time}, and was not stopped. {text}",
        job_id=job_id,
    )


def _look(storage: Storage, queue: str, job_id: str) -> str:
    """Return the state of the job and the explanation, if the storage responds at once."""
    record = explanation = None
    try:
        with within(LOOKING):
            record = storage.reads.jobs(queue, [job_id])[0]
            if record is not None and record.state in PENDING:
                explanation = storage.reads.explain(queue, job_id)
    except DjqueueError as error:
        logger.debug("Could not explain why job %s of queue %r has not finished: %s", job_id, queue, error)
    return NO_ANSWER if record is None else _where(record, explanation)


def _where(record: JobRecord, found: Explanation | None) -> str:
    if record.state is State.ACTIVE:
        attempt = f" (attempt {record.attempts})" if record.attempts > 1 else ""
        return f"It is running on worker {record.worker}{attempt}."
    if record.state in TERMINAL:
        return f"It has finished in the meantime ({record.state})."
    if record.failures:
        start = f"Attempt {record.attempts} failed; the next one has not started"
    else:
        start = "It has not started"
    reason = REASONS.get(found.verdict) if found is not None else None
    if found is None or reason is None:
        return "It is still waiting in its queue."
    return f"{start}: {reason(found)}."


def _no_handler(found: Explanation) -> str:
    return (
        f"no live worker of queue {found.queue!r} has a handler for {found.name!r}. Restart the workers if "
        "they run an older version of the code"
    )


def _blocked(found: Explanation) -> str:
    listed = ", ".join(f"{one.id!r} of queue {one.queue!r} ({one.state or 'unknown'})" for one in found.unmet)
    return f"it waits for other jobs: {listed}" if listed else "it waits for other jobs"


def _ahead(found: Explanation, text: str) -> str:
    if not found.before:
        return text
    count = f"{found.before:,}" + (" or more" if found.before >= MAX_BEFORE else "")
    return f"{text}, and {count} {'job is' if found.before == 1 else 'jobs are'} ahead of it"


def _due(found: Explanation) -> str:
    return "later" if found.until is None else f"at {to_datetime(found.until).isoformat(timespec='seconds')}"


REASONS: dict[str, Callable[[Explanation], str]] = {
    "paused": lambda found: f"queue {found.queue!r} is paused",
    "group_paused": lambda found: f"its group {found.group!r} is paused",
    "delayed": lambda found: f"it is due {_due(found)}",
    "blocked": _blocked,
    "no_worker": lambda found: (
        f"no live worker serves queue {found.queue!r}. Start one with `manage.py runworkers`"
    ),
    "no_handler": _no_handler,
    "group_rate": lambda found: (
        f"the rate limit of its group {found.group!r} allows the next job {_due(found)}"
    ),
    "group_busy": lambda found: _ahead(
        found, f"its group {found.group!r} has reached its concurrency limit of {found.limit}"
    ),
    "behind_rate": lambda found: _ahead(
        found, f"the rate limit of queue {found.queue!r} allows the next job {_due(found)}"
    ),
    "concurrency_full": lambda found: _ahead(
        found, f"queue {found.queue!r} has reached its concurrency limit of {found.limit}"
    ),
    "too_heavy": lambda found: (
        f"it needs {found.weight} slots of queue {found.queue!r}, of which {found.free} are free"
    ),
    "limiter_rate": lambda found: _ahead(
        found, f"the rate limit of limiter {found.limiter!r} allows the next job {_due(found)}"
    ),
    "limiter_full": lambda found: _ahead(
        found,
        f"limiter {found.limiter!r} has {found.free} of {found.limit} slots free; it needs {found.weight}",
    ),
    "workers_busy": lambda found: _ahead(found, "all workers that could run it are busy"),
    "waiting_turn": lambda found: _ahead(found, "it can start at any time"),
}
"""Reasons why a job has not started, by verdict of `djqueue.core.explain`."""
