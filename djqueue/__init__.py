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
    from .core.errors import (
        ArgumentsError,
        ConfigurationError,
        Discard,
        DjqueueError,
        ItemError,
        JobCancelledError,
        JobFailedError,
        JobInterrupted,
        JobLimitError,
        JobMemoryLimitError,
        JobNotFoundError,
        JobTimeoutError,
        MaxRetriesError,
        OptionError,
        PayloadTooLargeError,
        QueueFullError,
        RestoreInProgressError,
        ResultTimeoutError,
        Retry,
        SchedulerRunningError,
        SerializationError,
        SnapshotTargetError,
        Snooze,
        StorageError,
        StorageUnavailableError,
        StreamRestartedError,
        UnknownJobError,
        UnknownQueueError,
        UnrecoverableError,
        WaitInTransactionError,
        WorkerCrashedError,
    )
    from .core.job import CancelResult, EnqueueResult, Event
    from .core.overview import LimiterState
    from .core.permissions import Permissions
    from .core.states import State
    from .runtime import Worker, current_job

__all__ = [
    "ArgumentsError",
    "Backoff",
    "CancelResult",
    "ConfigurationError",
    "Discard",
    "DjqueueError",
    "EnqueueResult",
    "Event",
    "ItemError",
    "JobCancelledError",
    "JobFailedError",
    "JobInterrupted",
    "JobLimitError",
    "JobMemoryLimitError",
    "JobNotFoundError",
    "JobTimeoutError",
    "JobType",
    "Limiter",
    "LimiterState",
    "MaxRetriesError",
    "OptionError",
    "PayloadTooLargeError",
    "Permissions",
    "Queue",
    "QueueFullError",
    "RestoreInProgressError",
    "ResultTimeoutError",
    "Retry",
    "SchedulerRunningError",
    "SerializationError",
    "SnapshotTargetError",
    "Snooze",
    "State",
    "StorageError",
    "StorageUnavailableError",
    "StreamRestartedError",
    "UnknownJobError",
    "UnknownQueueError",
    "UnrecoverableError",
    "WaitInTransactionError",
    "Worker",
    "WorkerCrashedError",
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
    "CancelResult": "core.job",
    "EnqueueResult": "core.job",
    "Event": "core.job",
    "JobType": "client",
    "Limiter": "client",
    "LimiterState": "core.overview",
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
"""Modules of the public names; those that are not listed are in `core.errors`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        # Not for dunder names, which Python itself asks for.
        here = None if name.startswith("_") else _suggest().PACKAGE_HERE.get(name)
        hint = f". Use djqueue.{here}" if here else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = import_module(f"{__name__}.{HOMES.get(name, 'core.errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def _suggest() -> Any:
    return import_module(f"{__name__}.core.suggest")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
