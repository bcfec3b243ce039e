"""Declarations in code: the registry of job types, their batches, and their schedules.

`djqueue.client.jobs` sends jobs, so the modules below it know job types only as `RegisteredJob`.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from django.apps import apps

from djqueue.core.errors import ArgumentsError, JobNameError, OptionError, UnknownJobError
from djqueue.core.job import is_call
from djqueue.core.options import EnqueueOptions, check_text
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds
from djqueue.schedules import SCHEDULE_PARSERS, Schedule, parse_schedule

from .arguments import Arguments

MAX_BATCH = 10_000
"""Maximum number of jobs per call of a function."""
MAX_SCHEDULE_NAME = 200
"""Characters: a job's id has the name of its schedule in it."""
MODULE_LEVEL = "apply @job to a module-level function"


class RegisteredJob(Protocol):
    """The part of a job type that the registry, and the code that sends jobs, use."""

    @property
    def name(self) -> str:
        """The job's name."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function that workers run."""

    @property
    def arguments(self) -> Arguments | None:
        """The parameters of the function; None if its jobs' arguments are not checked."""

    @property
    def options(self) -> EnqueueOptions:
        """Options of its jobs."""


J = TypeVar("J", bound=RegisteredJob)


class Registry(Generic[J]):
    """Job types by name. A worker runs nothing else."""

    def __init__(self) -> None:
        self._types: dict[str, J] = {}
        # Django does not import this package if no app defines jobs.
        is_late = apps.ready and apps.is_installed("djqueue")
        self.discovered: frozenset[str] | None = frozenset() if is_late else None
        """Names registered when all modules that workers import had been imported; None before that."""
        self.served: set[str] = set()
        """Names for which a worker of this process has handlers."""

    def add(self, job_type: J) -> None:
        """Register a job type. Raises JobNameError if another function has its name."""
        registered = self._types.get(job_type.name)
        if registered is not None and not _is_same(registered.function, job_type.function):
            raise JobNameError(
                f"two functions are registered as {job_type.name!r}: {_path(registered.function)} and "
                f"{_path(job_type.function)}; pass a different name= to @job for one of them"
            )
        self._types[job_type.name] = job_type

    def get(self, name: str) -> J:
        """Return the job type of a name. Raises UnknownJobError."""
        try:
            return self._types[name]
        except KeyError:
            near = nearest(name, self._types)
            hint = f"{near} If not," if near else ":"
            raise UnknownJobError(
                f"no job is registered as {name!r}{hint} import the module that defines the job"
            ) from None

    def find(self, name: str) -> J | None:
        """Return the job type of a name; None if it is not registered."""
        return self._types.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._types)

    def all(self) -> dict[str, J]:
        """Return all job types by name."""
        return dict(self._types)

    def check_arguments(self, name: str, payloads: Sequence[Any]) -> None:
        """Check payloads for a function under `@job` of this process, as its own `enqueue` does.

        Raises:
            ArgumentsError: The function could not be called with one of them.
        """
        job_type = self.find(name)
        if job_type is None or job_type.arguments is None:
            return
        for payload in payloads:
            if not is_call(payload):
                short = name.rpartition(".")[2]
                raise ArgumentsError(
                    f'Job {name!r} is a @job function: its payload must be {{"args": [...], "kwargs": '
                    f"{{...}}}}, got an object of type {type(payload).__name__}. Enqueue the job with "
                    f"{short}.enqueue(...)."
                )
            job_type.arguments.check(name, payload["args"], payload["kwargs"])


registry: Registry[RegisteredJob] = Registry()
"""The job types of this process."""


def _is_same(function: Callable[..., Any], other: Callable[..., Any]) -> bool:
    if function is other:
        return True
    # A module that is reloaded, or run as __main__ and imported, defines its functions again.
    return (
        function.__qualname__ == other.__qualname__
        and function.__code__.co_filename == other.__code__.co_filename
    )


def check_importable(function: Callable[..., Any], name: str | None) -> None:
    """Raise JobNameError for a function that another process could not find by its path.

    A given name is enough for a function inside another one, which is registered when that runs; it is
    not enough for a method, which would lack its object, or for a class.
    """
    if isinstance(function, type):
        raise JobNameError(f"{_path(function)} is a class: {MODULE_LEVEL}")
    if isinstance(getattr(function, "name", None), str) and hasattr(function, "enqueue"):
        raise JobNameError(f"{function!r} is already a job: apply @job only once")
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise JobNameError(f"{function!r} is not a function: {MODULE_LEVEL}")
    if inspect.isbuiltin(function) and name is None:
        raise JobNameError(
            f"{_path(function)} is a builtin: apply @job to a module-level function that calls the builtin"
        )
    qualname = getattr(function, "__qualname__", "")
    container, _, last = qualname.rpartition(".")
    is_inside_class = container and not container.endswith("<locals>")
    if (
        isinstance(function, (staticmethod, classmethod))
        or inspect.ismethod(function)
        or (inspect.isfunction(function) and is_inside_class)
    ):
        raise JobNameError(f"{_path(function)} is a method: {MODULE_LEVEL}")
    if name is not None:
        return
    if not qualname or is_inside_class:
        raise JobNameError(
            f"{function!r} has no import path, so workers cannot find the function: pass name= to @job"
        )
    if last == "<lambda>":
        raise JobNameError(
            f"{_path(function)} is a lambda, so workers cannot find the function by its path: {MODULE_LEVEL}"
        )
    if container:
        raise JobNameError(
            f"{_path(function)} is defined inside a function, so workers cannot import it: "
            f"{MODULE_LEVEL}. If every worker runs the enclosing code at startup, pass name= to @job"
        )


def _path(function: Any) -> str:
    inner = getattr(function, "__func__", function)
    return f"{inner.__module__}.{getattr(inner, '__qualname__', inner)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """The rule by which a worker calls the function with the jobs that it has collected."""

    size: int
    """Maximum number of jobs per call."""
    min_size: int
    """The worker calls the function as soon as it has this many jobs ..."""
    wait: int
    """... or as soon as the first job has waited for this many milliseconds."""


def parse_batch(value: Any) -> BatchRule:
    """Parse a size, or a mapping of `size`, `min_size` and `wait`. Raises OptionError."""
    fields: Mapping[str, Any] = value if isinstance(value, Mapping) else {"size": value}
    unknown = set(fields) - {"size", "min_size", "wait"}
    if unknown:
        raise OptionError(f"batch: unknown key {min(unknown, key=str)!r}; expected size, min_size or wait")
    if "size" not in fields:
        raise OptionError("batch: size is required")
    size = _batch_count("batch.size", fields["size"], MAX_BATCH)
    wait = milliseconds("batch.wait", fields.get("wait", 0))
    min_size = _batch_count("batch.min_size", fields.get("min_size", size if wait else 1), size)
    if min_size > 1 and not wait:
        raise OptionError("batch.min_size: requires wait, the time after which a smaller batch is accepted")
    return BatchRule(size=size, min_size=min_size, wait=wait)


def _batch_count(name: str, value: Any, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise OptionError(f"{name}: must be a whole number from 1 to {maximum}; got {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One schedule of a job."""

    name: str
    job_name: str
    schedule: Schedule
    args: list[Any]
    kwargs: dict[str, Any]


class Declarations:
    """The schedules that imported modules declare, by name. They become rows where jobs are run."""

    def __init__(self) -> None:
        self._entries: dict[str, Declared] = {}

    def check(
        self,
        name: str,
        job_name: str,
        when: Mapping[str, Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Declared:
        """Check a schedule. Raises OptionError if it is wrong, or if another job's schedule has its name."""
        if len(check_text("name", name)) > MAX_SCHEDULE_NAME:
            raise OptionError(
                f"name: a schedule's name must have at most {MAX_SCHEDULE_NAME} characters; got {len(name)}"
            )
        earlier = self._entries.get(name)
        if earlier is not None and earlier.job_name != job_name:
            raise OptionError(
                f"name: job {earlier.job_name!r} already has a schedule named {name!r}; use another name"
            )
        if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
            raise OptionError(f"args: expected a list, got {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise OptionError(f"kwargs: expected a dict, got {kwargs!r}")
        return Declared(
            name=name,
            job_name=job_name,
            schedule=parse_schedule(when),
            args=_plain("args", list(args)),
            kwargs=_plain("kwargs", dict(kwargs or {})),
        )

    def add(self, entry: Declared) -> None:
        """Declare a schedule; it replaces one of the same name."""
        self._entries[entry.name] = entry

    def of(self, job_names: Iterable[str]) -> dict[str, Declared]:
        """Return the schedules of some jobs, by name."""
        names = set(job_names)
        return {name: entry for name, entry in self._entries.items() if entry.job_name in names}


declared = Declarations()
"""The schedules of this process."""


def split_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a schedule from the options of `@job`, and return them. Raises OptionError."""
    when = {name: options.pop(name) for name in SCHEDULE_PARSERS if name in options}
    if when.get("cron") is None and when.get("every") is None:
        for name in sorted(when.keys() - {"cron", "every"}):
            raise OptionError(f"{name}: requires cron or every")
        return {}
    return when


def _plain(name: str, value: Any) -> Any:
    """Return a value as the row will return it."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name}: the values of a schedule must be JSON-serializable: {error}") from None
