"""`@job`: functions that can be enqueued as jobs."""

from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from copy import copy
from datetime import timedelta
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from djqueue.conf import Settings, get_settings
from djqueue.core.backoff import BackoffFunction
from djqueue.core.errors import ArgumentsError, OptionError
from djqueue.core.executors import (
    INLINE,
    ISOLATED,
    LIMITS,
    NO_LIMITS,
    parse_executor,
    parse_limits,
    parse_permissions,
    parse_unenforced,
)
from djqueue.core.job import Batch, EnqueueResult, R_co
from djqueue.core.options import EnqueueOptions, check_text, merge_given
from djqueue.core.permissions import PERMISSIONS, Permissions
from djqueue.core.policies import UNSET, Unset
from djqueue.core.suggest import FOREIGN_TIMES, explain_job_attribute, nearest_option
from djqueue.core.threads import gc_paused
from djqueue.core.units import milliseconds
from djqueue.storage.base import Storage

from . import declarations, envelope, hints, results
from .arguments import Arguments, check_calls, read_arguments, split_calls
from .declarations import BatchRule, Registry, check_importable, declared, parse_batch, split_options
from .flows import Node
from .keywords import JobKeywords, Redact, ScheduleKeywords, UsingKeywords
from .results import DEFAULT_WAIT, storage_of
from .sending import asend, asend_one, checked_first, chunks, send, send_one
from .steps import apart
from .storages import get_storage
from .streaming import OnRestart, Streaming, Wait, is_generator
from .transactions import enqueued

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
IteratorT = TypeVar("IteratorT", bound=Iterator[Any] | AsyncIterator[Any])
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Returned_co = TypeVarWithDefault("Returned_co", covariant=True, default=R_co)
else:
    Returned_co = TypeVar("Returned_co", covariant=True)

OF_JOB = JobKeywords.__optional_keys__ | {"batch"}
"""All options of `@job`."""
ONLY_JOB = OF_JOB - UsingKeywords.__optional_keys__
"""Options of `@job` that `using` does not have."""
CALLING: dict[str, Any] = {"wait": DEFAULT_WAIT, "on_restart": "raise"}
"""Arguments of the calls that wait, in addition to the function's, with their defaults."""

Call = tuple[Sequence[Any], dict[str, Any]]


class JobType(Generic[P, R_co, Returned_co]):
    """A function that workers run as a job. Calling it runs the function in this process.

    For type checkers, it has the parameters of the function, the type of its jobs' result and the type that a
    call returns. `JobType[..., str]` is enough for a function whose calls return the result.
    """

    if not TYPE_CHECKING:
        __class_getitem__ = classmethod(GenericAlias)

    def __init__(
        self,
        function: Callable[P, Returned_co],
        name: str,
        options: dict[str, Any],
        *,
        backoff: BackoffFunction | None = None,
        batch: BatchRule | None = None,
        redact: Redact | None = None,
        arguments: Arguments | None = None,
        executor: str | None = None,
        limits: Mapping[str, Any] = NO_LIMITS,
        permissions: Permissions | None = None,
        allow_unenforced: tuple[str, ...] = (),
    ) -> None:
        self.function = function
        self.name = name
        self.backoff_function = backoff
        """A custom backoff function, which only the worker knows."""
        self.batch = batch
        """The rule for several jobs per call; None if each call runs one job."""
        self.redact_function = redact
        """Selects the values that the dashboard may show; None applies the settings."""
        self.arguments = arguments
        """The parameters of the function; None if its jobs' arguments are not checked."""
        self.executor = executor
        """Where workers run its jobs; None: the queue or the settings decide."""
        self.limits = limits
        """Limits of its jobs in processes of their own, as fields of `JobLimits`."""
        self.permissions = permissions
        """Resources that its handler may use, in a process of its own; None for all."""
        self.allow_unenforced = allow_unenforced
        """Names of permissions that may stay without guarantee where the system cannot enforce them."""
        self._given = options
        """The options of `@job` and `using`, without the defaults of the settings."""
        self._calling: dict[str, Any] = {}
        """`wait` and `on_restart` as given to `using`, for the calls that wait."""
        self._id: str | None = None
        """The id given to `using`, of the one job to enqueue."""
        self._resolved: tuple[Settings, EnqueueOptions] | None = None
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__wrapped__ = function

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Returned_co:
        """Run the function itself."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.name}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only called for missing attributes. Calls of other job queues get an error that names our
            # call.
            raise AttributeError(
                explain_job_attribute(type(self).__name__, self.__dict__.get("__name__"), name)
            )

    @property
    def options(self) -> EnqueueOptions:
        """Options of its jobs: defaults of the settings, the decorator's options, those of `using`."""
        settings = get_settings()
        if self._resolved is None or self._resolved[0] is not settings:
            self._resolved = settings, envelope.resolve(self._given)
        return self._resolved[1]

    @property
    def declared_queue(self) -> str | None:
        """The queue given to `@job` or `using`; None if the settings decide."""
        queue: str | None = self._given.get("queue")
        return queue

    def using(self, *wrong: Never, **options: Unpack[UsingKeywords]) -> Self:
        """Return the same job type with other options.

        Args:
            options: Job options, and besides them: `id`, the id of the one job to enqueue;
                `check_arguments=False`, which enqueues without comparing the arguments with the function's
                signature; `wait` and `on_restart`, which the calls that wait use unless they are given their
                own. After `using(wait=...)`, an argument `wait` of a call goes to a function that takes one.

        Raises:
            OptionError: An option is unknown or wrong; the message names it.
        """
        if wrong:
            raise OptionError(
                f"using: expected keyword arguments, such as using(queue=...); got {wrong[0]!r}"
            )
        given: dict[str, Any] = {**options}
        job_id = given.pop("id", None)
        if job_id is not None:
            check_text("id", job_id)
        checks_arguments = _flag("check_arguments", given.pop("check_arguments", True))
        calling = {name: given.pop(name) for name in CALLING if name in given}
        if "wait" in calling:
            milliseconds("wait", calling["wait"])
        # A new start time replaces an earlier one in either form.
        earlier = dict(self._given)
        if "delay" in given or "run_at" in given:
            earlier.pop("delay", None)
            earlier.pop("run_at", None)
        for name in given.keys() & ONLY_JOB:
            raise OptionError(f"{name}: set the option on the job type: @job({name}=...)")
        changed = copy(self)
        changed._given = merge_given(earlier, given)
        changed._calling = {**self._calling, **calling}
        changed._id = job_id or self._id
        changed._resolved = None
        if not checks_arguments:
            changed.arguments = None
        envelope.check(changed._given)
        return changed

    def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> EnqueueResult[R_co]:
        """Enqueue one job that calls the function with these arguments.

        Raises:
            ArgumentsError: The function does not accept the arguments.
            SerializationError: An argument cannot be stored.
            StorageError: The job was not enqueued.
        """
        return send_one(self._storage(), self._one(args, kwargs), self.options.enqueue_on_commit)

    async def aenqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> EnqueueResult[R_co]:
        """Async version of `enqueue`."""
        batch = await apart(self.options.job.content_type, self._one, args, kwargs)
        return await asend_one(self._storage(), batch, self.options.enqueue_on_commit)

    def enqueue_many(self, calls: Iterable[Call]) -> list[EnqueueResult[R_co]]:
        """Enqueue one job for each pair (args, kwargs), in order; much faster than one by one.

        The jobs of a list, or of another collection with a length, are all checked first: if one is wrong,
        none is stored. An iterator is read a thousand pairs at a time while earlier ones are sent; the jobs
        before an error remain enqueued, and a note on the exception says how many.

        Raises:
            ArgumentsError: An entry is not a pair (args, kwargs), or the function does not accept it.
        """
        return send(self._storage(), self._many(calls), self.options.enqueue_on_commit)

    async def aenqueue_many(self, calls: Iterable[Call]) -> list[EnqueueResult[R_co]]:
        """Async version of `enqueue_many`."""
        content_type = self.options.job.content_type
        batches = await apart(content_type, self._many, calls)
        return await asend(self._storage(), batches, self.options.enqueue_on_commit, content_type)

    @overload
    def enqueue_and_wait(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def enqueue_and_wait(self, /, *args: Any, wait: float | timedelta, **kwargs: Any) -> R_co: ...
    def enqueue_and_wait(self, /, *args: Any, wait: Any = UNSET, **kwargs: Any) -> Any:
        """Enqueue one job, wait for it, and return its result: see `djqueue.client.results`.

        Args:
            wait: Maximum seconds to wait, or a timedelta; 30 seconds by default. If the function has a
                parameter `wait`, pass the time to wait to `using(wait=...)` instead; then this argument
                goes to the function.
        """
        limit, _ = self._waiting(wait, UNSET, kwargs)
        on_commit = self.options.enqueue_on_commit
        return results.enqueue_and_wait(self._storage(), self._one(args, kwargs), limit, on_commit)

    @overload
    async def aenqueue_and_wait(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    async def aenqueue_and_wait(self, /, *args: Any, wait: float | timedelta, **kwargs: Any) -> R_co: ...
    async def aenqueue_and_wait(self, /, *args: Any, wait: Any = UNSET, **kwargs: Any) -> Any:
        """Async version of `enqueue_and_wait`."""
        limit, _ = self._waiting(wait, UNSET, kwargs)
        on_commit = self.options.enqueue_on_commit
        batch = await apart(self.options.job.content_type, self._one, args, kwargs)
        return await results.aenqueue_and_wait(self._storage(), batch, limit, on_commit)

    def enqueue_and_stream(
        self: "JobType[P, R, Iterable[T] | AsyncIterable[T]]",
        /,
        *args: Any,
        wait: Wait | Unset = UNSET,
        on_restart: OnRestart | Unset = UNSET,
        **kwargs: Any,
    ) -> Generator[T, None, R]:
        """Enqueue one job, a generator, and yield its items as they come: see `djqueue.client.streaming`.

        The job is enqueued when the first item is requested. `wait` and `on_restart` are distinguished from
        parameters of the function as in `enqueue_and_wait`.
        """
        limit, restart = self._waiting(wait, on_restart, kwargs)
        streaming = Streaming(self._storage(), limit, restart)
        return streaming.enqueue(self._one(args, kwargs), self.options.enqueue_on_commit)

    def aenqueue_and_stream(
        self: "JobType[P, R, Iterable[T] | AsyncIterable[T]]",
        /,
        *args: Any,
        wait: Wait | Unset = UNSET,
        on_restart: OnRestart | Unset = UNSET,
        **kwargs: Any,
    ) -> AsyncIterator[T]:
        """Async version of `enqueue_and_stream`: `async for item in job.aenqueue_and_stream(…)`."""
        limit, restart = self._waiting(wait, on_restart, kwargs)
        options, streaming = self.options, Streaming(self._storage(), limit, restart)
        return streaming.aenqueue(
            options.job.content_type, lambda: (self._one(args, kwargs), options.enqueue_on_commit)
        )

    def stream(
        self: "JobType[P, R, Iterable[T] | AsyncIterable[T]]",
        result: EnqueueResult,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: OnRestart = "raise",
    ) -> Generator[T, None, R]:
        """Yield the items of an enqueued job, from its first, as `enqueue_and_stream` does."""
        result = enqueued(result)
        return Streaming(storage_of(result), wait, on_restart).of(result.queue, result.id)

    def astream(
        self: "JobType[P, R, Iterable[T] | AsyncIterable[T]]",
        result: EnqueueResult,
        *,
        wait: Wait = DEFAULT_WAIT,
        on_restart: OnRestart = "raise",
    ) -> AsyncIterator[T]:
        """Async version of `stream`."""
        result = enqueued(result)
        return Streaming(storage_of(result), wait, on_restart).aof(result.queue, result.id)

    def node(self, /, *args: P.args, **kwargs: P.kwargs) -> Node:
        """Return a node of a flow with these arguments: see `djqueue.flow`."""
        if self.arguments is not None:
            self.arguments.check(self.name, args, kwargs)
        return Node(self.options, self.name, _value(args, kwargs), self._id)

    def schedule(
        self,
        name: str,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        **when: Unpack[ScheduleKeywords],
    ) -> None:
        """Declare a schedule that enqueues the job with these arguments.

        Args:
            name: The schedule's name. It replaces an earlier schedule of this name and job.
            args: Positional arguments, which must be JSON-serializable, like `kwargs`.
            when: `cron` or `every`, and the other options of `djqueue.schedules.Schedule`.

        Raises:
            OptionError: An option is invalid, or another job has a schedule of this name.
        """
        entry = declared.check(name, self.name, when, args, kwargs)
        if self.arguments is not None:
            self.arguments.check(self.name, entry.args, entry.kwargs)
        declared.add(entry)

    def _storage(self) -> Storage:
        storage = get_storage()
        if self.arguments is not None or self.batch is not None:
            hints.check_job(storage, self.name)
        return storage

    def _one(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Batch:
        if self.arguments is not None:
            self.arguments.check(self.name, args, kwargs)
        ids = None if self._id is None else [self._id]
        return envelope.batch(self.options, self.name, [_value(args, kwargs)], ids)

    def _many(self, calls: Iterable[Call]) -> Iterable[Batch]:
        if not isinstance(calls, Iterable):
            raise ArgumentsError(
                "enqueue_many: expected a list or another iterable of (args, kwargs) pairs, got an "
                f"object of type {type(calls).__name__}; to enqueue one job, use enqueue()"
            )
        return checked_first(self._batches(calls), calls)

    def _batches(self, calls: Iterable[Call]) -> Iterator[Batch]:
        first = 0
        for chunk in chunks(calls):
            with gc_paused(len(chunk)):
                args, kwargs = split_calls(chunk, first)
                if self.arguments is not None:
                    check_calls(self.arguments, self.name, first, args, kwargs)
                ids = None if self._id is None else [self._id] * len(chunk)
                batch = envelope.batch_of_calls(self.options, self.name, args, kwargs, ids)
            yield batch
            first += len(chunk)

    def _waiting(self, wait: Any, on_restart: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Separate the caller's `wait` and `on_restart` from the function's, which are put into kwargs."""
        if "timeout" in kwargs and self.arguments is not None and not self.arguments.takes("timeout"):
            raise ArgumentsError(
                f"{self.name}{self.arguments.signature}: got an unexpected keyword argument 'timeout'. To "
                f"limit how long the caller waits, pass wait={kwargs['timeout']!r}; to limit how long the "
                f"job runs, use {self.__name__}.using(timeout={kwargs['timeout']!r})."
            )
        options = []
        for name, value in (("wait", wait), ("on_restart", on_restart)):
            option = self._calling.get(name, CALLING[name])
            if value is not UNSET:
                if self._accepts(name, value):
                    kwargs[name] = value
                else:
                    option = value
            options.append(option)
        return options[0], options[1]

    def _accepts(self, name: str, value: Any) -> bool:
        """Return whether an argument of the waiting calls belongs to the function."""
        if self.arguments is None:
            return False
        is_own = self.arguments.has_parameter(name)
        if name in self._calling:
            return is_own or self.arguments.takes_any_name
        if is_own:
            raise ArgumentsError(
                f"{self.name}{self.arguments.signature}: {name}={value!r} is ambiguous: both the function "
                "and enqueue() have a parameter of this name. Pass the job option with "
                f"using({name}=...); then {name}= in the call is the function's argument."
            )
        return False


registry = cast("Registry[JobType[..., Any]]", declarations.registry)
"""The job types of this process: `@job` has made every one of them."""


class JobDecorator(Protocol):
    """The type of `job(...)` with options: the function that makes a job type of a function."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> JobType[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(
        self, function: Callable[P, Generator[T, Any, R]], /
    ) -> JobType[P, R, Generator[T, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, IteratorT], /) -> JobType[P, Any, IteratorT]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> JobType[P, R]: ...


@overload
def job(function: Callable[P, Coroutine[Any, Any, R]], /) -> JobType[P, R, Coroutine[Any, Any, R]]: ...
@overload
def job(function: Callable[P, Generator[T, Any, R]], /) -> JobType[P, R, Generator[T, Any, R]]: ...
@overload
def job(function: Callable[P, IteratorT], /) -> JobType[P, Any, IteratorT]: ...
@overload
def job(function: Callable[P, R], /) -> JobType[P, R]: ...
@overload
def job(
    *, batch: int | Mapping[str, Any], **options: Unpack[JobKeywords]
) -> Callable[[Callable[..., Any]], JobType[..., Any]]: ...
@overload
def job(**options: Unpack[JobKeywords]) -> JobDecorator: ...
def job(
    function: Any = None, /, *, name: str | None = None, redact: Redact | None = None, **options: Any
) -> Any:
    """Register a function as a job: `@job`, or `@job(queue="emails", max_attempts=5, timeout=30)`.

    Define the function at module level, so that workers can import it. A function defined elsewhere, such as
    a lambda, needs a name, and workers must import a module that runs its definition. Methods cannot be jobs.

    Args:
        name: The job's name, by which workers find the function; its dotted path by default.
        check_arguments: Whether enqueues compare the arguments with the function's signature. Pass False if
            the code is in another project, and this function only stands for it.
        batch: Makes the function take a list of jobs: the maximum number, or a mapping of `size`, `min_size`
            and `wait`.
        redact: A function (value, part) that returns the value to show in the dashboard; `part` is `payload`
            or `result`. See `djqueue.dashboard.redaction`.
        executor: Where workers run the jobs: `inline` (in the worker, the default), `isolated` (in a process
            that runs jobs of this type only), or `subprocess` (in a new process for each job).
        limits: Limits of a job in a process of its own, such as `{"memory": "256 MiB", "cpu": 60}`; see
            `djqueue.core.executors.JobLimits`.
        permissions: Files, hosts, variables and programs that the handler may use, as `djqueue.Permissions`;
            the kernel refuses everything else. Implies `isolated`.
        allow_unenforced: Names of permissions that the job does without on systems that cannot enforce them,
            if `DJQUEUE["SANDBOX"]` is `degrade`.
        options: Job options, see `djqueue.core.options`; `backoff` may be a function (failures, exception)
            that returns seconds. `cron` or `every` adds a schedule, with the options of
            `djqueue.schedules.Schedule`.

    Raises:
        OptionError: An option is unknown or invalid.
        JobNameError: The name is taken, or the function needs one.
    """

    if isinstance(function, str):
        raise OptionError(f"job: options must be keyword arguments: @job(queue={function!r})")

    def decorate(function: Callable[P, R]) -> JobType[P, R]:
        given = dict(options)
        for option in CALLING.keys() & given.keys():
            raise OptionError(f"{option}: set the option per job, with .using({option}=...)")
        _check_names(given)
        checked = _flag("check_arguments", given.pop("check_arguments", True))
        when = split_options(given)
        execution = _parse_execution(given)
        backoff = given.pop("backoff") if callable(given.get("backoff")) else None
        batch = parse_batch(given.pop("batch")) if "batch" in given else None
        _check_execution(function, batch, **execution)
        if redact is not None and not callable(redact):
            raise OptionError(f"redact: expected a function, got {redact!r}")
        check_importable(function, name)
        path = f"{function.__module__}.{function.__qualname__}" if name is None else name
        job_name = check_text("name", path)
        arguments = read_arguments(function) if checked and batch is None else None
        job_type = JobType(
            function,
            job_name,
            given,
            backoff=backoff,
            batch=batch,
            redact=redact,
            arguments=arguments,
            **execution,
        )
        envelope.check(given)
        schedule = declared.check(job_name, job_name, when) if when else None
        if schedule is not None and arguments is not None:
            arguments.check_scheduled(job_name)
        registry.add(job_type)
        if schedule is not None:
            declared.add(schedule)
        return job_type

    return decorate if function is None else decorate(function)


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise OptionError, with the name that is meant, for an option that `@job` does not have."""
    for name in given:
        if name in OF_JOB:
            continue
        if name in LIMITS:
            hint = f"; use limits={{{name!r}: ...}}"
        elif name in PERMISSIONS:
            hint = f"; use permissions=Permissions({name}=...)"
        elif name in FOREIGN_TIMES:
            hint = f"; did you mean {FOREIGN_TIMES[name]!r}?"
        else:
            hint = nearest_option(name, OF_JOB)
        raise OptionError(f"unknown option {name!r}{hint}")


def _parse_execution(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that say where jobs run, and return them, checked. Raises OptionError."""
    executor = parse_executor(options.pop("executor")) if "executor" in options else None
    limits = parse_limits(options.pop("limits")) if "limits" in options else NO_LIMITS
    permissions = parse_permissions(options.pop("permissions", None))
    unenforced = parse_unenforced(options.pop("allow_unenforced", ()))
    if unenforced and permissions is None:
        raise OptionError("allow_unenforced: requires permissions")
    if permissions is not None:
        if executor == INLINE:
            raise OptionError("permissions: inline jobs have those of the worker; use 'isolated'")
        executor = executor or ISOLATED
    return {
        "executor": executor,
        "limits": limits,
        "permissions": permissions,
        "allow_unenforced": unenforced,
    }


def _check_execution(
    function: Callable[..., Any],
    batch: BatchRule | None,
    *,
    executor: str | None,
    limits: Mapping[str, Any],
    **_: object,
) -> None:
    """Raise OptionError for batches and limits that the executor does not have."""
    if batch is not None:
        if is_generator(function):
            raise OptionError(
                "batch: a generator function cannot process batches, because its items belong to one job"
            )
        if executor not in (None, INLINE):
            raise OptionError(f"executor: a function of batches runs inline only, not {executor}")
        if limits:
            raise OptionError("limits: a function of batches runs in the worker, which has no limits")
    elif limits and executor == INLINE:
        raise OptionError("limits: inline jobs run in the worker, which has no limits; use 'isolated'")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{name}: expected True or False, got {value!r}")
    return value


def _value(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"args": list(args), "kwargs": dict(kwargs)}
