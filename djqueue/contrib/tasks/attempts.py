"""One attempt of a task, in a worker: its context and its signals."""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from asgiref.sync import sync_to_async
from django.dispatch import Signal

from djqueue.client.storages import get_storage
from djqueue.core.errors import DjqueueError
from djqueue.core.job import JobRecord
from djqueue.core.logs import Log
from djqueue.runtime.outcomes import after_error
from djqueue.runtime.runs import JobContext, Stop, current_job, run_of
from djqueue.runtime.tracebacks import job_error

from .compat import (
    AnyTask,
    AnyTaskResult,
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from .results import EarlierAttempts, alias_in, as_time, bound_task, enqueued_at, now

logger = Log("djqueue.worker")

UNKNOWN_WORKER = "unknown"
"""Stands for the workers of earlier attempts in a process that cannot read the storage."""


def runner_of(task: AnyTask) -> Callable[..., Any]:
    """Return the function that workers call for a task: it runs the task's, and sends the signals of Django.

    Outside of a worker, it only calls the task's function.
    """
    function = task.func
    if iscoroutinefunction(function):

        @wraps(function)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            job = current_job()
            if job is None:
                return await function(*args, **kwargs)
            attempt = Attempt(task, job, await _arecords(job))
            await _asend(task_started, attempt.result)
            try:
                value = normalize_json(await function(*attempt.arguments, **attempt.result.kwargs))
            except GeneratorExit:
                raise  # The loop discards the coroutine, which must not wait any more.
            except BaseException as error:
                if attempt.failed(error):
                    # Sent while the exception is handled: the log of Django shows its traceback.
                    await _asend(task_finished, attempt.result)
                raise
            attempt.succeeded(value)
            await _asend(task_finished, attempt.result)
            return value

        return run_async

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        job = current_job()
        if job is None:
            return function(*args, **kwargs)
        attempt = Attempt(task, job, _records(job))
        _send(task_started, attempt.result)
        try:
            value = normalize_json(function(*attempt.arguments, **attempt.result.kwargs))
        except BaseException as error:
            if attempt.failed(error):
                _send(task_finished, attempt.result)
            raise
        attempt.succeeded(value)
        _send(task_finished, attempt.result)
        return value

    return run


class Attempt:
    """A running attempt, and the result of its task as far as it is known."""

    def __init__(self, task: AnyTask, job: JobContext, records: Sequence[JobRecord | None]) -> None:
        self._job = job
        [record] = records or [None]
        earlier = EarlierAttempts.of(record.history if record is not None else ())
        missing = max(0, job.attempts - 1 - len(earlier.workers))
        started = now()
        alias = alias_in(job.options.headers, task)
        self.result: AnyTaskResult = TaskResult(
            task=bound_task(task, alias, job.queue, job.options.priority),
            id=job.id,
            status=TaskResultStatus.RUNNING,
            enqueued_at=enqueued_at(job.id) or as_time(job.created_at),
            started_at=earlier.started_at or started,
            finished_at=None,
            last_attempted_at=started,
            args=list(job.args),
            kwargs=job.kwargs,
            backend=alias,
            errors=list(earlier.errors),
            worker_ids=[*([UNKNOWN_WORKER] * missing), *earlier.workers, job.worker],
        )

    @property
    def arguments(self) -> list[Any]:
        """The positional arguments of the task's function."""
        context = [TaskContext(task_result=self.result)] if self.result.task.takes_context else []
        return [*context, *self.result.args]

    def failed(self, error: BaseException) -> bool:
        """Record an exception; return whether it ends the task."""
        run = run_of(self._job)
        if run.stop is Stop.LOST:
            return False  # Another worker has the job, and this attempt does not count.
        outcome = after_error(run.claimed, error, run.stop, _no_delay)
        if outcome.kind != "release":
            described = outcome.error or job_error(error)
            self.result.errors.append(
                TaskError(exception_class_path=described.type, traceback=described.traceback)
            )
        if outcome.kind in ("release", "retry"):
            _set(self.result, "status", TaskResultStatus.READY)
            return False
        _set(self.result, "status", TaskResultStatus.FAILED)
        _set(self.result, "finished_at", now())
        return True

    def succeeded(self, value: Any) -> None:
        """Record the return value."""
        _set(self.result, "_return_value", value)
        _set(self.result, "status", TaskResultStatus.SUCCESSFUL)
        _set(self.result, "finished_at", now())


def _no_delay(_: BaseException) -> int:
    return 0


def _set(result: Any, name: str, value: Any) -> None:
    object.__setattr__(result, name, value)


def _send(signal: Signal, result: Any) -> None:
    # A receiver that fails is logged by Django, and must not fail the task.
    signal.send_robust(sender=type(task_backends[result.backend]), task_result=result)


async def _asend(signal: Signal, result: Any) -> None:
    # Receivers may use the database. Unlike `asend_robust`, this keeps the exception that is handled.
    await sync_to_async(_send)(signal, result)


def _records(job: JobContext) -> Sequence[JobRecord | None]:
    """Read the earlier attempts of a job, if there are any."""
    storage = get_storage()
    if job.attempts <= 1 or storage.capabilities.relayed:
        return []
    try:
        return storage.reads.jobs(job.queue, [job.id])
    except DjqueueError as error:
        return _unread(job, error)


async def _arecords(job: JobContext) -> Sequence[JobRecord | None]:
    """Async version of `_records`."""
    storage = get_storage()
    if job.attempts <= 1 or storage.capabilities.relayed:
        return []
    try:
        return await storage.reads.ajobs(job.queue, [job.id])
    except DjqueueError as error:
        return _unread(job, error)


def _unread(job: JobContext, error: DjqueueError) -> Sequence[JobRecord | None]:
    logger.warning(
        "Could not read the earlier attempts of task %s [%s]; its context does not list them: %s",
        job.name,
        job.id,
        error,
    )
    return []
