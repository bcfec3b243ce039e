"""Results of tasks: from records of jobs, or of tasks whose transaction is still open."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db import connections, transaction
from django.utils import timezone

from djqueue.client.info import JobInfo
from djqueue.core.job import AttemptRecord, JobRecord, is_call
from djqueue.core.states import State
from djqueue.core.units import to_datetime

from .compat import (
    AnyTask,
    AnyTaskResult,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
)

ALIAS_HEADER = "task_backend"
"""Header with the alias of the backend, on jobs of another one than that of their task's definition."""
ENDED = (TaskResultStatus.SUCCESSFUL, TaskResultStatus.FAILED)
STATUSES = {
    State.ACTIVE: TaskResultStatus.RUNNING,
    State.COMPLETED: TaskResultStatus.SUCCESSFUL,
    State.FAILED: TaskResultStatus.FAILED,
    State.CANCELLED: TaskResultStatus.FAILED,
}
"""Statuses by state; jobs in all other states are ready."""
ERROR_TYPES = {
    State.CANCELLED: "djqueue.core.errors.JobCancelledError",
    State.FAILED: "djqueue.core.errors.JobFailedError",
}
"""Exceptions that stand for ends without one."""
MADE_ID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""A UUIDv7: its first 48 bits are UTC milliseconds."""
STALLED = "djqueue.core.errors.WorkerCrashedError"
"""Exception that stands for an attempt that ended with its worker."""


def result_of(record: JobRecord, task: AnyTask) -> AnyTaskResult:
    """Return the record of a job as the result of its task.

    Raises:
        TaskResultDoesNotExist: The task was successful, and its return value is no longer kept.
    """
    status = STATUSES.get(record.state, TaskResultStatus.READY)
    if status == TaskResultStatus.SUCCESSFUL and record.result is None:
        raise TaskResultDoesNotExist(f"{record.id}: the return value has expired (see result_ttl)")
    attempts = EarlierAttempts.of(record.all_attempts())
    workers, errors = list(attempts.workers), list(attempts.errors)
    started, last = attempts.started_at, attempts.last_started_at
    if record.state is State.ACTIVE:
        last = as_time(to_datetime(record.started_at))
        started = started or last
        workers.append(record.worker)
    if status == TaskResultStatus.FAILED and not errors:
        errors.append(_error_of(record))
    info = JobInfo(record)
    payload = info.payload
    alias = alias_in(record.options.headers, task)
    is_deferred = not attempts.workers and record.run_at > record.created_at
    run_after = as_time(to_datetime(record.run_at)) if is_deferred else None
    result: AnyTaskResult = TaskResult(
        task=bound_task(task, alias, record.queue, record.options.priority, run_after),
        id=record.id,
        status=status,
        enqueued_at=enqueued_at(record.id) or as_time(to_datetime(record.created_at)),
        started_at=started,
        finished_at=as_time(to_datetime(record.finished_at)) if status in ENDED else None,
        last_attempted_at=last,
        args=payload["args"] if is_call(payload) else [],
        kwargs=payload["kwargs"] if is_call(payload) else {},
        backend=alias,
        errors=errors,
        worker_ids=workers,
    )
    if status == TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", info.result)
    return result


class PendingResult:
    """An on-commit callback with a result.

    Django drops it when the transaction or its savepoint rolls back.
    """

    def __init__(self, result: AnyTaskResult, then: Callable[[], Any] | None) -> None:
        self.result = result
        self._then = then
        self.is_over = False
        """Whether the storage has the task, or its enqueue failed. Tests call callbacks that Django keeps."""
        self.__qualname__ = type(self).__qualname__  # Django logs it if the callback fails.

    def __call__(self) -> None:
        """Call the function registered for the commit."""
        if self._then is not None:
            self.is_over = True
            self._then()


def add_pending(alias: str, result: AnyTaskResult, then: Callable[[], Any] | None = None) -> None:
    """Keep a result until the open transaction of a database ends, and call `then` after its commit."""
    # Without `then`, the job joins the transaction, and nothing can fail after the commit.
    transaction.on_commit(PendingResult(result, then), using=alias)


def find_pending(id: str) -> AnyTaskResult | None:
    """Return a result that this thread has enqueued in a transaction that is still open."""
    for connection in connections.all(initialized_only=True):
        if connection.in_atomic_block:
            for entry in connection.run_on_commit:
                pending = entry[1]
                if isinstance(pending, PendingResult) and pending.result.id == id and not pending.is_over:
                    return pending.result
    return None


@dataclass(frozen=True, slots=True)
class EarlierAttempts:
    """The ended attempts of a job, without those that were released."""

    workers: tuple[str, ...]
    errors: tuple[TaskError, ...]
    started_at: datetime | None
    last_started_at: datetime | None

    @classmethod
    def of(cls, history: Iterable[AttemptRecord]) -> "EarlierAttempts":
        """Read the attempts of a job."""
        counted = [attempt for attempt in history if attempt.outcome != "released"]
        starts = [as_time(to_datetime(attempt.started_at)) for attempt in counted]
        return cls(
            tuple(attempt.worker for attempt in counted),
            tuple(_error_in(attempt) for attempt in counted if attempt.outcome != "completed"),
            starts[0] if starts else None,
            starts[-1] if starts else None,
        )


def bound_task(
    task: AnyTask, alias: str, queue: str, priority: int, run_after: datetime | None = None
) -> AnyTask:
    """Return a task as it was enqueued.

    It is not validated again: the settings may have changed since then, and the result exists all the same.
    """
    changes = {"backend": alias, "queue_name": queue, "priority": priority, "run_after": run_after}
    kind = type(task)
    bound = object.__new__(kind)
    for item in fields(kind):
        value = changes[item.name] if item.name in changes else getattr(task, item.name)
        object.__setattr__(bound, item.name, value)
    return bound


def alias_in(headers: Mapping[str, Any], task: AnyTask) -> str:
    """Return the alias of the backend that enqueued a job."""
    return str(headers.get(ALIAS_HEADER, task.backend))


def as_time(aware: datetime) -> datetime:
    """Return a time as Django's setting USE_TZ wants it."""
    return aware if settings.USE_TZ else timezone.make_naive(aware)


def now() -> datetime:
    """Return the current time, in milliseconds as storages keep it."""
    at = timezone.now()
    return at.replace(microsecond=at.microsecond // 1_000 * 1_000)


def enqueued_at(id: str) -> datetime | None:
    """Return the time in an id that the backend made; None for other ids, such as those of schedules.

    It is what `enqueue` returned, whatever clock the storage has.
    """
    match = MADE_ID.fullmatch(id)
    return None if match is None else as_time(to_datetime(int(match[1] + match[2], 16)))


def _error_in(attempt: AttemptRecord) -> TaskError:
    if attempt.error is not None:
        return TaskError(exception_class_path=attempt.error.type, traceback=attempt.error.traceback)
    if attempt.outcome == "stalled":
        return TaskError(
            exception_class_path=STALLED,
            traceback=f"Attempt {attempt.attempt} ended with its worker {attempt.worker}.",
        )
    return TaskError(
        exception_class_path=ERROR_TYPES[State.CANCELLED],
        traceback=f"Attempt {attempt.attempt} was {attempt.outcome}.",
    )


def _error_of(record: JobRecord) -> TaskError:
    if record.error is not None:
        return TaskError(exception_class_path=record.error.type, traceback=record.error.traceback)
    return TaskError(
        exception_class_path=ERROR_TYPES[record.state],
        traceback=f"The task ended without a result: {record.reason or record.state}.",
    )
