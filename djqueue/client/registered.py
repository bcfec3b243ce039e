"""The registry: job types by name."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.apps import apps

from djqueue.core.errors import JobNameError, UnknownJobError
from djqueue.core.suggest import nearest

if TYPE_CHECKING:
    from .jobs import JobType


class Registry:
    """Job types by name. A worker runs nothing else."""

    def __init__(self) -> None:
        self._types: dict[str, JobType[..., Any]] = {}
        # Django does not import this package if no app defines jobs.
        is_late = apps.models_ready and apps.is_installed("djqueue")
        self.discovered: frozenset[str] | None = frozenset() if is_late else None
        """Names registered when all modules that workers import had been imported; None before that."""
        self.served: set[str] = set()
        """Names for which a worker of this process has handlers."""

    def add(self, job_type: "JobType[..., Any]") -> None:
        """Register a job type. Raises JobNameError if another function has its name."""
        there = self._types.get(job_type.name)
        if there is not None and not _same(there.function, job_type.function):
            raise JobNameError(
                f"two functions are registered as {job_type.name!r}: {_where(there.function)} and "
                f"{_where(job_type.function)}; pass a different name= to @job for one of them"
            )
        self._types[job_type.name] = job_type

    def get(self, name: str) -> "JobType[..., Any]":
        """Return the job type of a name. Raises UnknownJobError."""
        try:
            return self._types[name]
        except KeyError:
            near = nearest(name, self._types)
            hint = f"{near} If not," if near else ":"
            raise UnknownJobError(
                f"no job is registered as {name!r}{hint} import the module that defines the job"
            ) from None

    def find(self, name: str) -> "JobType[..., Any] | None":
        """Return the job type of a name; None if it is not registered."""
        return self._types.get(name)

    def names(self) -> list[str]:
        """Return all names, sorted."""
        return sorted(self._types)

    def all(self) -> "dict[str, JobType[..., Any]]":
        """Return all job types by name."""
        return dict(self._types)


registry = Registry()


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    if one is other:
        return True
    # A module that is reloaded, or run as __main__ and imported, defines its functions again.
    return one.__qualname__ == other.__qualname__ and one.__code__.co_filename == other.__code__.co_filename


def _where(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
