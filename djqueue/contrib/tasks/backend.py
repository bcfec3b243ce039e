"""The backend of `django.tasks`, which enqueues tasks as jobs, and the tasks that are registered."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from threading import Lock
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.core import checks
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils import timezone
from django.utils.module_loading import autodiscover_modules

from djqueue.client import envelope, get_storage, hints, job
from djqueue.client.arguments import Arguments
from djqueue.client.sending import send_one
from djqueue.conf import is_wrong, read_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, UnknownQueueError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import check_text
from djqueue.core.suggest import nearest
from djqueue.runtime.immediate import ImmediateStorage

from .attempts import runner_of
from .compat import (
    AnyTask,
    AnyTaskResult,
    BaseTaskBackend,
    InvalidTask,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from .definitions import (
    ON_COMMIT,
    PER_ENQUEUE,
    PER_TASK,
    DjqueueTask,
    backend_problems,
    defaults_of,
    given_options,
)
from .results import ALIAS_HEADER, add_pending, enqueued_at, find_pending, result_of

MODULES = ("jobs", "tasks")
"""Modules of every app that may define tasks."""


class RegisteredTasks:
    """The tasks that this process has defined, by the name of their job type, which is `module_path`."""

    def __init__(self) -> None:
        self._tasks: dict[str, AnyTask] = {}
        self._lock = Lock()
        self._discovered = False

    def add(self, task: AnyTask, defaults: Mapping[str, Any]) -> None:
        """Register a task's function as a job type, unless it is.

        Args:
            defaults: Default job options of its backend.

        Raises:
            OptionError: An option of the task is invalid.
        """
        name = task.module_path
        known = self._tasks.get(name)
        if known is not None and known.func is task.func:
            return
        register: Callable[[Callable[..., Any]], Any] = job(
            name=name,
            check_arguments=False,
            queue=task.queue_name,
            priority=task.priority,
            **{**defaults, **given_options(task, PER_ENQUEUE)},
            **given_options(task, PER_TASK),
        )
        register(runner_of(task))
        self._tasks[name] = task

    def find(self, name: str) -> AnyTask | None:
        """Return a task by name; None if no app defines it.

        Imports the apps' modules if the name is unknown, and never one that the name stands for.
        """
        task = self._tasks.get(name)
        if task is None and not self._discovered:
            with self._lock:
                autodiscover_modules(*MODULES)
                self._discovered = True
            task = self._tasks.get(name)
        return task


def check_arguments(task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ArgumentsError if a task's function cannot be called with these arguments."""
    arguments = _arguments_of(task.func, task.takes_context)
    if arguments is not None:
        arguments.check(task.module_path, args, kwargs)


@lru_cache(maxsize=4_096)
def _arguments_of(function: Callable[..., Any], takes_context: bool) -> Arguments | None:
    """Return the parameters of a task's function, without the context that its worker passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    if takes_context:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return Arguments(signature)


registered_tasks = RegisteredTasks()
_ids = IdSource()


class DjqueueBackend(BaseTaskBackend):
    """Enqueues tasks as jobs, which `runworkers` runs beside those of `@job`."""

    runs_djqueue_jobs = True
    """Tells this class and its subclasses from other backends, without importing it."""
    task_class = DjqueueTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)  # type: ignore[arg-type, unused-ignore]
        # The checks report invalid options; until then they are left out.
        self._is_valid = not backend_problems(self.options)
        options = self.options if self._is_valid else {}
        self._defaults = defaults_of(options)
        self._on_commit = options.get(ON_COMMIT, False)

    def validate_task(self, task: AnyTask) -> None:
        """Check a task and its options, and register its function for workers.

        Raises:
            InvalidTask: The task is invalid; the message says why.
        """
        super().validate_task(task)
        try:
            registered_tasks.add(task, self._defaults)
            envelope.check(self._job_options(task))
        except (OptionError, UnknownQueueError) as error:
            raise InvalidTask(str(error)) from error

    def enqueue(self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Enqueue a task.

        In a transaction of the database that has the jobs, the job starts after the commit, and a rollback
        undoes it. With the option `enqueue_on_commit`, this is so for every database and storage.

        Returns:
            The result, which is ready. For a task whose `unique_key` is taken, the result of the other one.

        Raises:
            InvalidTask: The task is invalid.
            TypeError: An argument is not JSON-serializable, or the task's function does not accept it.
        """
        self.validate_task(task)
        check_arguments(task, args, kwargs)
        id = _ids.new(SYSTEM_CLOCK.now())
        result: AnyTaskResult = TaskResult(
            task=task,
            id=id,
            status=TaskResultStatus.READY,
            enqueued_at=enqueued_at(id),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        batch = self._batch(result)
        alias = self._transaction_for(batch)
        if alias is None:
            return self._send(batch, result)
        add_pending(alias, result, lambda: self._send(batch, result))
        return result

    def get_result(self, result_id: str) -> AnyTaskResult:
        """Return the result of a task, from any thread or process.

        Raises:
            TaskResultDoesNotExist: No task has this id, or its result is no longer kept.
        """
        try:
            check_text("id", result_id)
        except OptionError as error:
            raise TaskResultDoesNotExist(str(error)) from error
        pending = find_pending(result_id)
        if pending is not None:
            return replace(pending)
        storage = get_storage()
        queues = sorted(self.queues)
        jobs = storage.reads.find(result_id, queues) if queues else []
        # A job may have been moved to another queue.
        for queue, _ in jobs or storage.reads.find(result_id):
            [record] = storage.reads.jobs(queue, [result_id])
            task = None if record is None else registered_tasks.find(record.name)
            if record is not None and task is not None:
                return result_of(record, task)
        raise TaskResultDoesNotExist(result_id)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Return the problems of this backend's settings."""
        setting = f"TASKS[{self.alias!r}]"
        messages: list[checks.CheckMessage] = [
            checks.Error(
                f"{setting}: {problem}.",
                hint="See the options of DjqueueBackend in the docs, under Django tasks.",
                id="djqueue.E012",
            )
            for problem in backend_problems(self.options)
        ]
        if not apps.is_installed("djqueue"):
            messages.append(
                checks.Error(
                    f"{setting} is a DjqueueBackend, but 'djqueue' is not in INSTALLED_APPS.",
                    hint="Add 'djqueue' to INSTALLED_APPS.",
                    id="djqueue.E013",
                )
            )
        raw_settings = getattr(django_settings, "DJQUEUE", {})
        settings = None if is_wrong(raw_settings) else read_settings(raw_settings)
        if settings is not None and settings.strict_queues:
            messages += [
                checks.Error(
                    f"{setting}: queue {queue!r} is not in DJQUEUE['QUEUES'], and STRICT_QUEUES is on"
                    f"{nearest(queue, settings.queues)}.",
                    hint="Add the queue to DJQUEUE['QUEUES'], or remove it from TASKS.",
                    id="djqueue.E009",
                )
                for queue in sorted(self.queues - set(settings.queues))
            ]
        return messages

    def _transaction_for(self, batch: Batch) -> str | None:
        """Return the database whose open transaction must commit before a job is enqueued; None for none."""
        if not self._on_commit:
            return None
        capabilities = get_storage().capabilities
        alias = self._on_commit if isinstance(self._on_commit, str) else capabilities.database
        alias = alias or DEFAULT_DB_ALIAS
        if not connections[alias].in_atomic_block or capabilities.transactions.alias_for(batch) == alias:
            return None  # A job that joins the transaction waits for its commit by itself.
        return alias

    def _send(self, batch: Batch, result: AnyTaskResult) -> AnyTaskResult:
        storage = get_storage()
        hints.check_job(storage, batch.name)
        alias = storage.capabilities.transactions.alias_for(batch)
        # The signal comes before those of the attempt.
        with storage.run_after() if isinstance(storage, ImmediateStorage) else nullcontext():
            answer = send_one(storage, batch)
            if answer.status == "queued":
                if alias is not None:
                    add_pending(alias, result)
                task_enqueued.send(sender=type(self), task_result=result)
        return result if answer.status == "queued" else self._existing(answer, result)

    def _existing(self, answer: EnqueueResult, result: AnyTaskResult) -> AnyTaskResult:
        """Return the result of the job that has the unique key of a new one."""
        object.__setattr__(result, "id", answer.id)
        try:
            return self.get_result(answer.id)
        except TaskResultDoesNotExist:
            return result  # It has ended in the meantime, or is no task.

    def _batch(self, result: AnyTaskResult) -> Batch:
        task = result.task
        options = self._job_options(task)
        definition = registered_tasks.find(task.module_path)
        if definition is None or definition.backend != self.alias:
            options["headers"] = {**options.get("headers", {}), ALIAS_HEADER: self.alias}
        value = {"args": result.args, "kwargs": result.kwargs}
        batch = envelope.batch(envelope.resolve(options), task.module_path, [value], [result.id])
        return batch._replace(fresh=True)

    def _job_options(self, task: AnyTask) -> dict[str, Any]:
        """Return the options of a task's jobs."""
        options = {**self._defaults, **given_options(task, PER_ENQUEUE)}
        if callable(options.get("backoff")):
            del options["backoff"]  # The worker has it from the registered task.
        options.update(queue=task.queue_name, priority=int(task.priority))
        if task.run_after is not None:
            at = task.run_after
            options["run_at"] = at if timezone.is_aware(at) else timezone.make_aware(at)
        return options
