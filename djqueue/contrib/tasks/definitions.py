"""Tasks with the options of djqueue, the decorator that defines them, and `OPTIONS` of the backend."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from django.db import connections

from djqueue.client.keywords import BackoffRule, CommonKeywords, HandlerKeywords, ScheduleKeywords
from djqueue.core.errors import OptionError
from djqueue.core.options import PARSERS
from djqueue.core.permissions import Permissions
from djqueue.core.policies import UNSET, Unset
from djqueue.core.suggest import nearest, nearest_option

from .compat import (
    DEFAULT_TASK_BACKEND_ALIAS,
    DEFAULT_TASK_PRIORITY,
    DEFAULT_TASK_QUEUE_NAME,
    AnyTask,
    AnyTaskContext,
    GenericTask,
    InvalidTask,
    task_backends,
)

P = ParamSpec("P")
R = TypeVar("R")


class TaskUsingKeywords(CommonKeywords, total=False):
    """Options of `DjqueueTask.using` besides those of Django."""

    backoff: BackoffRule


class TaskKeywords(CommonKeywords, HandlerKeywords, ScheduleKeywords, total=False):
    """Options of `task` besides those of Django."""


class TaskDefinitionKeywords(TaskKeywords, total=False):
    """All options of `task` but `takes_context`."""

    priority: int
    queue_name: str
    backend: str


PER_ENQUEUE = tuple(sorted(TaskUsingKeywords.__optional_keys__))
"""Options that both the decorator and `using` accept."""
PER_TASK = tuple(sorted(TaskKeywords.__optional_keys__ - TaskUsingKeywords.__optional_keys__))
"""Options that only the decorator accepts: executor, permissions and schedules."""
DEFAULTS: dict[str, Any] = {"max_attempts": 1, "result_ttl": 86_400}
"""Default options of tasks: results are kept for a day, and as with the backends of Django, a task that fails
is not retried."""
BACKEND_DEFAULTS = ("backoff", "max_attempts", "max_stalls", "result_ttl", "retention", "timeout", "ttl")
"""Job options that `OPTIONS` may set for all tasks of a backend."""
ON_COMMIT = "enqueue_on_commit"
"""Key of `OPTIONS` that delays enqueues until the transaction commits: True, or the alias of a database."""


def _option() -> Any:
    # Values such as a mapping of limits have no hash.
    return field(default=UNSET, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DjqueueTask(GenericTask[P, R], Generic[P, R]):
    """A task of a `DjqueueBackend`. Options that are not given have the defaults of the backend."""

    # Has no default in Django 6.0.
    run_after: datetime | None = None

    max_attempts: int | Unset = _option()
    """Maximum number of attempts, including the first."""
    max_stalls: int | Unset = _option()
    """Maximum number of stalled attempts."""
    backoff: Any = _option()
    """Wait before the next attempt, as for `@job`."""
    timeout: Any = _option()
    """Maximum length of one attempt: seconds, or a timedelta."""
    ttl: Any = _option()
    """Time after which a task that has not started expires."""
    unique_key: str | Unset | None = _option()
    """Key that at most one live job of a queue has. A second enqueue returns the result of the first."""
    unique_ttl: Any = _option()
    """Time after which the key is free although its job is live."""
    on_duplicate: str | Unset = _option()
    """Behavior of an enqueue whose `unique_key` is taken, as for `@job`."""
    concurrency_key: str | Unset | None = _option()
    """Key whose jobs run one at a time in a queue, or as many at once as the queue allows."""
    weight: int | Unset = _option()
    """Slots of the queue's concurrency that the task takes."""
    result_ttl: Any = _option()
    """Time for which `get_result` finds the ended task; None keeps it."""
    retention: Any = _option()
    """Time for which the record of the ended job is kept, if longer than its result."""
    tags: Iterable[str] | Unset = _option()
    """Labels stored with the job."""
    subject: Any = _option()
    """Model instance, or text, that the job is about."""
    headers: Mapping[str, Any] | Unset = _option()
    """Values carried with the job beside its arguments."""

    executor: str | Unset | None = _option()
    """Where workers run the task: `inline`, `isolated` or `subprocess`."""
    limits: Mapping[str, Any] | Unset = _option()
    """Limits of a job in a process of its own."""
    permissions: Permissions | Unset | None = _option()
    """Resources that the task may use, in a process of its own."""
    allow_unenforced: Iterable[str] | Unset = _option()
    """Permissions that may stay without guarantee where the system cannot enforce them."""

    cron: str | Unset | None = _option()
    """Cron expression by which the task is enqueued, without arguments."""
    every: Any = _option()
    """Interval at which the task is enqueued, without arguments."""
    timezone: str | Unset = _option()
    """Time zone of the schedule; this and the following are options of `djqueue.schedules.Schedule`."""
    start_at: datetime | Unset | None = _option()
    end_at: datetime | Unset | None = _option()
    max_executions: int | Unset | None = _option()
    jitter: Any = _option()
    overlap: str | Unset = _option()
    missed: str | Unset = _option()
    missed_window: Any = _option()
    blackouts: Iterable[str] | Unset = _option()
    on_blackout: str | Unset = _option()

    def __repr__(self) -> str:
        # Lists what was given. Values of headers may be secret, and a repr gets into logs and error reports.
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        given = {name: value for name, value in values.items() if value is not UNSET}
        if isinstance(given.get("headers"), Mapping):
            given["headers"] = list(given["headers"])
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        **options: Unpack[TaskUsingKeywords],
    ) -> Self:
        """Return a task with other options.

        Raises:
            InvalidTask: An option is unknown or invalid.
        """
        django_options: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
        }
        try:
            check_using(options)
        except OptionError as error:
            raise InvalidTask(str(error)) from error
        changes = {name: value for name, value in django_options.items() if value is not None}
        return replace(self, **{**changes, **options})


class TaskDecorator(Protocol):
    """The type of `task(...)` with options: the function that makes a task of a function."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> DjqueueTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> DjqueueTask[P, R]: ...


class ContextTaskDecorator(Protocol):
    """The type of `task(takes_context=True)`: the context is the first argument of the function."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[AnyTaskContext, P], Coroutine[Any, Any, R]], /
    ) -> DjqueueTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[AnyTaskContext, P], R], /) -> DjqueueTask[P, R]: ...


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> DjqueueTask[P, R]: ...
@overload
def task(function: Callable[P, R], /) -> DjqueueTask[P, R]: ...
@overload
def task(
    *, takes_context: Literal[True], **options: Unpack[TaskDefinitionKeywords]
) -> ContextTaskDecorator: ...
@overload
def task(
    *, takes_context: Literal[False] = False, **options: Unpack[TaskDefinitionKeywords]
) -> TaskDecorator: ...
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

    def decorate(function: Callable[..., Any]) -> DjqueueTask[..., Any]:
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


def given_options(task: AnyTask, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named options that a task was given; none if it is no `DjqueueTask`."""
    if not isinstance(task, DjqueueTask):
        return {}
    values = ((name, getattr(task, name)) for name in names)
    return {name: value for name, value in values if value is not UNSET}


def check_names(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that a task does not have."""
    for name in given:
        if name not in PER_ENQUEUE and name not in PER_TASK:
            raise OptionError(f"unknown option {name!r}{_hint(name)}")


def check_using(given: Mapping[str, Any]) -> None:
    """Raise OptionError for an option that `using` does not accept."""
    for name in given:
        if name in PER_TASK:
            raise OptionError(f"{name}: set the option on the task: @task({name}=...)")
    if callable(given.get("backoff")):
        raise OptionError("backoff: a backoff function must be set on the task: @task(backoff=...)")
    check_names(given)


def _hint(name: str) -> str:
    if name in ("delay", "run_at"):
        return "; use using(run_after=...)"
    if name == "queue":
        return "; use queue_name"
    return nearest_option(name, (*PER_ENQUEUE, *PER_TASK))


def backend_problems(options: Any) -> list[str]:
    """Return the problems of a backend's `OPTIONS`."""
    if not isinstance(options, Mapping):
        return [f"OPTIONS must be a dictionary; got {options!r}"]
    problems = []
    known = (*BACKEND_DEFAULTS, ON_COMMIT)
    for name, value in options.items():
        if name == ON_COMMIT:
            if not isinstance(value, (bool, str)):
                text = "must be True, False or the alias of a database"
                problems.append(f"OPTIONS[{name!r}] {text}; got {value!r}")
            elif isinstance(value, str) and value not in connections:
                problems.append(
                    f"OPTIONS[{name!r}]: {value!r} is not in DATABASES{nearest(value, connections)}"
                )
        elif name not in BACKEND_DEFAULTS:
            problems.append(f"OPTIONS has no option {name!r}{nearest(str(name), known)}")
        else:
            try:
                PARSERS[name](f"OPTIONS[{name!r}]", value)
            except OptionError as error:
                problems.append(str(error))
    return problems


def defaults_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default job options of a backend's tasks."""
    return {**DEFAULTS, **{name: options[name] for name in BACKEND_DEFAULTS if name in options}}
