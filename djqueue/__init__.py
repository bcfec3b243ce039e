"""djqueue: a job queue for Django, on the project's own database to begin with."""

from ._version import __version__
from .client import JobType, Queue, job
from .core.backoff import Backoff
from .core.errors import (
    ConfigurationError,
    Discard,
    DjqueueError,
    JobCancelledError,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    MaxRetriesError,
    OptionError,
    PayloadTooLargeError,
    QueueFullError,
    Retry,
    SchedulerRunningError,
    SerializationError,
    Snooze,
    StorageError,
    StorageUnavailableError,
    UnknownJobError,
    UnknownQueueError,
    UnrecoverableError,
)
from .core.job import CancelResult, EnqueueResult, Event
from .core.states import State
from .runtime import Worker, current_job

__all__ = [
    "Backoff",
    "CancelResult",
    "ConfigurationError",
    "Discard",
    "DjqueueError",
    "EnqueueResult",
    "Event",
    "JobCancelledError",
    "JobFailedError",
    "JobNotFoundError",
    "JobTimeoutError",
    "JobType",
    "MaxRetriesError",
    "OptionError",
    "PayloadTooLargeError",
    "Queue",
    "QueueFullError",
    "Retry",
    "SchedulerRunningError",
    "SerializationError",
    "Snooze",
    "State",
    "StorageError",
    "StorageUnavailableError",
    "UnknownJobError",
    "UnknownQueueError",
    "UnrecoverableError",
    "Worker",
    "__version__",
    "current_job",
    "job",
]
