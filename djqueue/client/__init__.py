"""What producers use: `@job`, `Queue`, and waiting for results."""

from .jobs import JobType, job, registry
from .queue import Queue
from .storages import get_storage

__all__ = ["JobType", "Queue", "get_storage", "job", "registry"]
