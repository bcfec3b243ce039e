"""`@job`: functions that can be enqueued, and the registry in which workers look names up."""

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar, overload

from djqueue.conf import Settings, get_settings
from djqueue.core.backoff import BackoffFunction
from djqueue.core.errors import OptionError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import EnqueueOptions, check_text
from djqueue.storage.base import Storage

from . import envelope, waiting
from .batches import BatchRule, parse_batch
from .declared import declared, split_options
from .flows import Node
from .generating import is_generator
from .registered import Registry, registry
from .sending import asend, send
from .storages import get_storage
from .streaming import Streaming, Wait

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_WAIT = 30.0
"""Seconds that `enqueue_and_wait` waits unless told."""
BULK = 1_000
"""Jobs of `enqueue_many` in one call of the storage."""

Call = tuple[Sequence[Any], dict[str, Any]]
Redact = Callable[[Any, str], Any]
"""A value, and whether that is a job's `payload` or its `result`; returns what of it may be shown."""


class JobType(Generic[P, R]):
    """A function that workers run under a name. Calling it runs it here and now."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str,
        given: dict[str, Any],
        backoff: BackoffFunction | None = None,
        job_id: str | None = None,
        batch: BatchRule | None = None,
        redact: Redact | None = None,
    ) -> None:
        self.function = function
        self.name = name
        self.backoff_function = backoff
        """A backoff of the user's own, which only the worker knows."""
        self.batch = batch
        """How many jobs the function takes in one call; None: it is called with the arguments of one."""
        self.redact_function = redact
        """What of its jobs' values the dashboard may show; None: what the settings say."""
        self._given = given
        self._id = job_id
        self._resolved: tuple[Settings, EnqueueOptions] | None = None
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.name}>"

    @property
    def options(self) -> EnqueueOptions:
        """The options of its jobs: the settings' defaults, the decorator's, those of `using`."""
        settings = get_settings()
        if self._resolved is None or self._resolved[0] is not settings:
            self._resolved = settings, envelope.resolve(self._given)
        return self._resolved[1]

    def using(self, **options: Any) -> "JobType[P, R]":
        """The same job with other options. `id` names the one job to enqueue.

        Raises OptionError, naming the option.
        """
        job_id = options.pop("id", None)
        if job_id is not None:
            check_text("id", job_id)
        # A word about the start replaces an earlier one of either form.
        earlier = dict(self._given)
        if "delay" in options or "run_at" in options:
            earlier.pop("delay", None)
            earlier.pop("run_at", None)
        changed = JobType(
            self.function,
            self.name,
            {**earlier, **options},
            self.backoff_function,
            job_id or self._id,
            self.batch,
            self.redact_function,
        )
        envelope.resolve(changed._given)
        return changed

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> EnqueueResult:
        """Have a worker call the function with these arguments."""
        return send(get_storage(), [self._batch([(args, kwargs)])])[0]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> EnqueueResult:
        """See `enqueue`."""
        return (await asend(get_storage(), [self._batch([(args, kwargs)])]))[0]

    def enqueue_many(self, calls: Iterable[Call]) -> list[EnqueueResult]:
        """One job for each (args, kwargs), in order; much faster than one by one.

        If one of them cannot be serialised, none is stored.
        """
        return send(get_storage(), [self._batch(chunk) for chunk in chunks(calls)])

    async def aenqueue_many(self, calls: Iterable[Call]) -> list[EnqueueResult]:
        """See `enqueue_many`."""
        return await asend(get_storage(), [self._batch(chunk) for chunk in chunks(calls)])

    def enqueue_and_wait(self, *args: Any, wait: float | timedelta = DEFAULT_WAIT, **kwargs: Any) -> Any:
        """Enqueue, and return what the job returns: see `djqueue.client.waiting`.

        wait: seconds, or a timedelta.
        """
        return waiting.enqueue_and_wait(get_storage(), self._batch([(args, kwargs)]), wait)

    async def aenqueue_and_wait(
        self, *args: Any, wait: float | timedelta = DEFAULT_WAIT, **kwargs: Any
    ) -> Any:
        """See `enqueue_and_wait`."""
        return await waiting.aenqueue_and_wait(get_storage(), self._batch([(args, kwargs)]), wait)

    def enqueue_and_stream(
        self, *args: Any, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise", **kwargs: Any
    ) -> Generator[Any, None, Any]:
        """Enqueue, and give what the job, a generator, yields, as it comes: see `djqueue.client.streaming`.

        The job is enqueued when the first item is asked for.
        """
        return Streaming(get_storage(), wait, on_restart).enqueue(self._batch([(args, kwargs)]))

    def aenqueue_and_stream(
        self, *args: Any, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise", **kwargs: Any
    ) -> AsyncIterator[Any]:
        """See `enqueue_and_stream`: `async for item in job.aenqueue_and_stream(…)`."""
        return Streaming(get_storage(), wait, on_restart).aenqueue(self._batch([(args, kwargs)]))

    def stream(
        self, result: EnqueueResult, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise"
    ) -> Generator[Any, None, Any]:
        """What a job that was enqueued yields, from its first item on: see `enqueue_and_stream`."""
        return Streaming(get_storage(), wait, on_restart).of(result.queue, result.id)

    def astream(
        self, result: EnqueueResult, *, wait: Wait = DEFAULT_WAIT, on_restart: str = "raise"
    ) -> AsyncIterator[Any]:
        """See `stream`."""
        return Streaming(get_storage(), wait, on_restart).aof(result.queue, result.id)

    def node(self, *args: P.args, **kwargs: P.kwargs) -> Node:
        """A job of a flow with these arguments: see `djqueue.flow`."""
        return Node(self.options, self.name, _value(args, kwargs), self._id, get_storage)

    def schedule(
        self, name: str, *, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **when: Any
    ) -> None:
        """Declare a schedule that enqueues the job with these arguments, which are values of JSON.

        name: of the schedule; another one of the same name and job replaces it.
        when: `cron` or `every`, and the other options of schedules: see `djqueue.schedules.Schedule`.

        Raises OptionError, naming what is wrong.
        """
        declared.add(declared.check(name, self.name, when, args, kwargs))

    def _batch(self, calls: Sequence[Call]) -> Batch:
        values = [_value(args, kwargs) for args, kwargs in calls]
        ids = [self._id] * len(calls) if self._id is not None else None
        return envelope.batch(self.options, self.name, values, ids)


def _value(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"args": list(args), "kwargs": dict(kwargs)}


def chunks(entries: Iterable[Any], size: int = BULK) -> Iterable[list[Any]]:
    """Lists of at most `size` entries."""
    chunk: list[Any] = []
    for entry in entries:
        chunk.append(entry)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


@overload
def job(function: Callable[P, Awaitable[R]], /) -> JobType[P, Awaitable[R]]: ...
@overload
def job(function: Callable[P, R], /) -> JobType[P, R]: ...
@overload
def job(
    *, batch: int | Mapping[str, Any], name: str | None = None, **options: Any
) -> Callable[[Callable[..., Any]], JobType[..., Any]]: ...
@overload
def job(*, name: str | None = None, **options: Any) -> Callable[[Callable[P, R]], JobType[P, R]]: ...
def job(
    function: Any = None, /, *, name: str | None = None, redact: Redact | None = None, **options: Any
) -> Any:
    """Make a function a job: `@job`, or `@job(queue="emails", max_attempts=5, timeout=30)`.

    name: under which workers find it; else the function's dotted path.
    batch: the function takes a list of jobs: at most so many, or {"size": …, "min_size": …, "wait": …}.
    redact: a function (value, part) -> what of it the dashboard shows; part: `payload` or `result`. See
        `djqueue.dashboard.redaction`.
    options: see `djqueue.core.options`; `backoff` may be a function (failures, exception) -> seconds. With
        `cron` or `every` it has a schedule, too: see `djqueue.schedules.Schedule` for what else that takes.

    Raises OptionError, naming the option; JobNameError if the name is taken.
    """

    def decorate(function: Callable[P, R]) -> JobType[P, R]:
        given = dict(options)
        when = split_options(given)
        backoff = given.pop("backoff") if callable(given.get("backoff")) else None
        batch = parse_batch(given.pop("batch")) if "batch" in given else None
        if batch is not None and is_generator(function):
            raise OptionError("batch: a generator function has the items of one job, and cannot take several")
        if redact is not None and not callable(redact):
            raise OptionError(f"redact: expected a function, got {redact!r}")
        path = f"{function.__module__}.{function.__qualname__}"
        label = check_text("name", path if name is None else name)
        job_type = JobType(function, label, given, backoff, batch=batch, redact=redact)
        envelope.resolve(given)
        schedule = declared.check(label, label, when) if when else None
        registry.add(job_type)
        if schedule is not None:
            declared.add(schedule)
        return job_type

    return decorate if function is None else decorate(function)


__all__ = ["JobType", "Registry", "Storage", "job", "registry"]
