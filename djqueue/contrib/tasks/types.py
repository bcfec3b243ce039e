"""Tasks with the options of djqueue, and the decorator that defines them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.permissions import Permissions

from .compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    AnyTask,
    InvalidTask,
    task_backends,
)
from .options import NOT_GIVEN, PER_ENQUEUE, PER_TASK, NotGiven, check_names, check_using


def _option() -> Any:
    # Values such as a mapping of limits have no hash.
    return field(default=NOT_GIVEN, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DjqueueTask(AnyTask):
    """A task of a `DjqueueBackend`. Options that are not given have the defaults of the backend."""

    # Has no default in Django 6.0.
    run_after: datetime | None = None

    max_attempts: int | NotGiven = _option()
    """Maximum number of attempts, including the first."""
    max_stalls: int | NotGiven = _option()
    """Maximum number of attempts that may end with their worker."""
    backoff: Any = _option()
    """Wait before the next attempt, as for `@job`."""
    timeout: Any = _option()
    """Maximum length of one attempt: seconds, or a timedelta."""
    ttl: Any = _option()
    """Time after which a task that has not started expires."""
    unique_key: str | NotGiven | None = _option()
    """Key that at most one live job of a queue has. A second enqueue returns the result of the first."""
    unique_ttl: Any = _option()
    """Time after which the key is free although its job is live."""
    on_duplicate: str | NotGiven = _option()
    """Behavior of an enqueue whose `unique_key` is taken, as for `@job`."""
    group: str | NotGiven | None = _option()
    """Group whose jobs run one at a time, or as many at once as the queue allows."""
    weight: int | NotGiven = _option()
    """Slots of the queue's concurrency that the task takes."""
    result_ttl: Any = _option()
    """Time for which `get_result` finds the ended task; None keeps it."""
    retention: Any = _option()
    """Time for which the record of the ended job is kept, if longer than its result."""
    tags: Iterable[str] | NotGiven = _option()
    """Labels stored with the job."""
    subject: Any = _option()
    """Model instance, or text, that the job is about."""
    headers: Mapping[str, Any] | NotGiven = _option()
    """Values carried with the job beside its arguments."""

    executor: str | NotGiven | None = _option()
    """Where workers run the task: `inline`, `isolated` or `subprocess`."""
    limits: Mapping[str, Any] | NotGiven = _option()
    """Limits of a job in a process of its own."""
    permissions: Permissions | NotGiven | None = _option()
    """Resources that the task may use, in a process of its own."""
    allow_unenforced: Iterable[str] | NotGiven = _option()
    """Permissions that may stay without guarantee where the system cannot enforce them."""

    cron: str | NotGiven | None = _option()
    """Cron expression by which the task is enqueued, without arguments."""
    every: Any = _option()
    """Interval at which the task is enqueued, without arguments."""
    timezone: str | NotGiven = _option()
    """Time zone of the schedule; this and the following are options of `djqueue.schedules.Schedule`."""
    start_at: datetime | NotGiven | None = _option()
    end_at: datetime | NotGiven | None = _option()
    max_executions: int | NotGiven | None = _option()
    jitter: Any = _option()
    overlap: str | NotGiven = _option()
    missed: str | NotGiven = _option()
    missed_window: Any = _option()
    blackouts: Iterable[str] | NotGiven = _option()
    on_blackout: str | NotGiven = _option()

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        **options: Any,
    ) -> "DjqueueTask":
        """Return a task with other options.

        Raises:
            InvalidTask: An option is unknown or invalid.
        """
        given: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
        }
        try:
            check_using(options)
        except OptionError as error:
            raise InvalidTask(str(error)) from error
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return replace(self, **{**changes, **options})


def options_per_enqueue(task: AnyTask) -> dict[str, Any]:
    """Return the job options that a task was given, without those of Django."""
    return _given(task, PER_ENQUEUE)


def options_per_task(task: AnyTask) -> dict[str, Any]:
    """Return the options that only the decorator accepts."""
    return _given(task, PER_TASK)


def _given(task: Any, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(task, DjqueueTask):
        return {}
    found = ((name, getattr(task, name)) for name in names)
    return {name: value for name, value in found if value is not NOT_GIVEN}


def task(
    function: Callable[..., Any] | None = None,
    *,
    priority: int = DEFAULT_TASK_PRIORITY,
    queue_name: str = DEFAULT_TASK_QUEUE_NAME,
    backend: str = DEFAULT_TASK_BACKEND_ALIAS,
    takes_context: bool = False,
    **options: Any,
) -> Any:
    """Define a task, as `django.tasks.task` does, with the options of `DjqueueTask` on every Django.

    The task may have a backend that is not a `DjqueueBackend`, as in tests. It ignores the other options.

    Raises:
        InvalidTask: An option is unknown or invalid.
    """
    if "run_after" in options:
        raise TypeError("run_after cannot be set on a task; use using(run_after=...) for each enqueue")

    def decorate(function: Callable[..., Any]) -> DjqueueTask:
        try:
            check_names(options)
        except OptionError as error:
            raise InvalidTask(str(error)) from error
        kind = task_backends[backend].task_class
        if not issubclass(kind, DjqueueTask):
            kind = DjqueueTask
        return kind(
            func=function,
            priority=priority,
            queue_name=queue_name,
            backend=backend,
            takes_context=takes_context,
            **options,
        )

    return decorate if function is None else decorate(function)
