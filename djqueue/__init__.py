"""djqueue: a job queue for Django that stores its jobs in the project's database or in Redis.

Public names are imported on first use, so that importing one part of the package, such as the engine or the
pytest plugin, loads neither Django nor the rest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .client import JobType, Limiter, Queue, chain, chord, flow, group, job
    from .codecs import content_id
    from .core.backoff import Backoff
    from .core.job import EnqueueResult, Event
    from .core.permissions import Permissions
    from .core.states import State
    from .errors import (
        Discard,
        DjqueueError,
        JobFailedError,
        ResultTimeoutError,
        Retry,
        Snooze,
        StorageUnavailableError,
        UnrecoverableError,
    )
    from .runtime import Worker, current_job

__all__ = [
    "Backoff",
    "Discard",
    "DjqueueError",
    "EnqueueResult",
    "Event",
    "JobFailedError",
    "JobType",
    "Limiter",
    "Permissions",
    "Queue",
    "ResultTimeoutError",
    "Retry",
    "Snooze",
    "State",
    "StorageUnavailableError",
    "UnrecoverableError",
    "Worker",
    "__version__",
    "chain",
    "chord",
    "content_id",
    "current_job",
    "flow",
    "group",
    "job",
]

HOMES = {
    "Backoff": "core.backoff",
    "EnqueueResult": "core.job",
    "Event": "core.job",
    "JobType": "client",
    "Limiter": "client",
    "Permissions": "core.permissions",
    "Queue": "client",
    "State": "core.states",
    "Worker": "runtime",
    "chain": "client",
    "chord": "client",
    "content_id": "codecs",
    "current_job": "runtime",
    "flow": "client",
    "group": "client",
    "job": "client",
}
"""Modules of the public names; those that are not listed are in `errors`."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module(f"{__name__}.errors")
    if name not in __all__:
        # Not for dunder names, which Python itself asks for.
        here = None if name.startswith("_") else _here(name)
        hint = f". Use djqueue.{here}" if here else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = import_module(f"{__name__}.{HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def _here(name: str) -> str | None:
    """Return what to use instead of a name that is not here."""
    if name in import_module(f"{__name__}.errors").__all__:
        return f"errors.{name}"
    other: str | None = import_module(f"{__name__}.core.suggest").FOREIGN_EXPORTS.get(name)
    return other


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
