"""Handlers: the functions that run jobs, by name, each called in one of four styles.

A generator function may be called with its arguments or with the job; its items are sent while it runs.
"""

import inspect
from asyncio import CancelledError
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import aclosing, closing
from enum import Enum
from typing import Any, Protocol

from asgiref.sync import iscoroutinefunction

from djqueue.client import JobType, registry
from djqueue.client.arguments import Arguments
from djqueue.client.declarations import BatchRule
from djqueue.client.streaming import is_async_generator, is_generator
from djqueue.core.backoff import BackoffFunction
from djqueue.core.errors import ArgumentsError, ConfigurationError, UnrecoverableError
from djqueue.core.executors import NO_LIMITS
from djqueue.core.job import is_call
from djqueue.core.options import check_text
from djqueue.core.permissions import Permissions

PermissionGroup = tuple[Permissions, tuple[str, ...]]
"""Permissions, and the names of those that may stay without guarantee."""
Handlers = Mapping[str, JobType[..., Any] | Callable[..., Any]]


class Style(Enum):
    """The way in which a handler is called."""

    ARGUMENTS = "arguments"
    """A `@job` function, with the arguments that the job was enqueued with."""
    JOB = "job"
    """A function of the job's context; its return value is the result."""
    BATCH = "batch"
    """A `@job(batch=…)` function of a list of contexts."""
    CALLBACK = "callback"
    """A function of the context and `done(error=None, result=None)`, which ends the job."""


class HandledRun(Protocol):
    """The part of a `Run` that the call of its handler uses."""

    payload: Any
    stop: Any
    items: Any

    @property
    def context(self) -> Any:
        """The job as its handler sees it."""

    @property
    def reports(self) -> Any:
        """Opens the stream of items of a generator."""


class Handler:
    """A function, and the way to call it."""

    __slots__ = (
        "backoff",
        "batch",
        "call",
        "executor",
        "function",
        "is_async",
        "limits",
        "name",
        "on_loop",
        "permissions",
        "style",
    )

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        style: Style,
        backoff: BackoffFunction | None = None,
        batch: BatchRule | None = None,
        executor: str | None = None,
        limits: Mapping[str, Any] = NO_LIMITS,
        permissions: "PermissionGroup | None" = None,
        arguments: Arguments | None = None,
    ) -> None:
        self.name = name
        self.function = function
        self.style = style
        self.backoff = backoff
        self.batch = batch
        self.executor = executor
        """Where its jobs run; None: the queue or the settings decide."""
        self.limits = limits
        self.permissions = permissions
        """Resources that its jobs may use, in processes of their own; None for all."""
        self.is_async = iscoroutinefunction(function) or iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - inspects the method itself
        )
        yields = is_generator(function)
        if yields:
            self.is_async = is_async_generator(function)
        self.on_loop = self.is_async or style in (Style.CALLBACK, Style.BATCH)
        self.call: Callable[[Any], Any] = (
            _call_with_arguments(name, function, arguments)
            if style is Style.ARGUMENTS
            else _call_with_job(function)
        )
        """Calls the function for one `Run`, and returns its result. Executors may replace it."""
        if yields:
            self.call = _drive(self.call, is_async=self.is_async)

    def continued(self, rest: Callable[[Any], Any]) -> "Handler":
        """Return the same handler with `rest` as its call, for what is left to do."""
        other = Handler(self.name, self.function, self.style, self.backoff)
        other.call = rest
        return other


def read_handlers(handlers: Handlers | None) -> dict[str, Handler]:
    """Return the handlers by name: the `@job` functions unless others are given.

    Raises ConfigurationError, naming the handler, for an object that cannot be called with a job.
    """
    if handlers is None:
        registry.served.update(registry.names())
        return {name: handler_of(job_type, name) for name, job_type in registry.all().items()}
    if not isinstance(handlers, Mapping):
        raise ConfigurationError(f"handlers must be a mapping of names to functions; got {handlers!r}")
    return {check_text("handler", name): _read(name, value) for name, value in handlers.items()}


def handler_of(job_type: JobType[..., Any], name: str | None = None) -> Handler:
    """Return the handler of a job type, under its own name unless another is given."""
    style = Style.ARGUMENTS if job_type.batch is None else Style.BATCH
    return Handler(
        job_type.name if name is None else name,
        job_type.function,
        style,
        job_type.backoff_function,
        job_type.batch,
        job_type.executor,
        job_type.limits,
        None if job_type.permissions is None else (job_type.permissions, job_type.allow_unenforced),
        job_type.arguments,
    )


def call_arguments(payload: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in the payload of a `@job` function.

    Raises UnrecoverableError for a payload of another shape, because a retry would not change it.
    """
    if is_call(payload):
        return payload["args"], payload["kwargs"]
    error = UnrecoverableError(
        'the payload must be {"args": [...], "kwargs": {...}} for a @job function; enqueue the job '
        "through the function, or register a handler that takes the job"
    )
    error.reason = "invalid_payload"
    raise error


def _read(name: str, value: Any) -> Handler:
    if isinstance(value, JobType):
        return handler_of(value, name)
    if not callable(value):
        raise ConfigurationError(f"handlers: {name!r} must be a function; got {value!r}")
    style = _style_of(name, value)
    if style is not Style.JOB and is_generator(value):
        raise ConfigurationError(f"handlers: {name!r} is a generator function, which must take (job) only")
    return Handler(name, value, style, executor=getattr(value, "executor", None))


def _style_of(name: str, function: Callable[..., Any]) -> Style:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return Style.JOB
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    missing = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or missing or not (positional or open_ended):
        raise ConfigurationError(f"handlers: {name!r} must take (job) or (job, done); got {function!r}")
    return Style.CALLBACK if len(required) == 2 else Style.JOB


def _call_with_arguments(
    name: str, function: Callable[..., Any], arguments: Arguments | None
) -> Callable[[Any], Any]:
    def call(run: HandledRun) -> Any:
        args, kwargs = call_arguments(run.payload)
        try:
            return function(*args, **kwargs)
        except TypeError:
            if arguments is not None:
                _check_signature(name, arguments, args, kwargs)
            raise

    return call


def _check_signature(name: str, arguments: Arguments, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentsError, in one sentence, if the function cannot be called with a job's arguments."""
    try:
        arguments.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentsError(
            f"the job was enqueued for other parameters than {name}{arguments.signature} has now: {error}"
        ) from None


def _call_with_job(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def call(run: HandledRun) -> Any:
        return function(run.context)

    return call


def _drive(call: Callable[[Any], Any], *, is_async: bool) -> Callable[[Any], Any]:
    """Return a function that runs a generator to its end, sends its items, and always closes it.

    The function returns what the generator returns (None for an async generator).

    call: Creates the generator for a run.
    """

    def drive_sync(run: HandledRun) -> Any:
        generator: Generator[Any, None, Any] = call(run)
        items = run.reports.open(run)
        try:
            with closing(generator):
                while True:
                    try:
                        item = next(generator)
                    except StopIteration as end:
                        return end.value
                    items.put(item)
                    if run.stop:
                        raise CancelledError("stopped between two items")
        finally:
            run.items = None

    async def drive_async(run: HandledRun) -> None:
        generator: AsyncGenerator[Any, None] = call(run)
        items = run.reports.open(run)
        try:
            async with aclosing(generator):
                async for item in generator:
                    await items.aput(item)
        finally:
            run.items = None

    return drive_async if is_async else drive_sync
