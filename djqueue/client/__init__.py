"""The API of producers: `@job`, `Queue`, and waiting for results."""

from . import results  # noqa: F401 - installs the methods of `EnqueueResult`
from .flows import Flow, FlowResult, Node, chain, chord, flow, group
from .jobs import JobType, job, registry
from .keywords import JobKeywords, QueueKeywords, UsingKeywords
from .limiters import Limiter
from .queue import Queue
from .storages import get_storage

__all__ = [
    "Flow",
    "FlowResult",
    "JobKeywords",
    "JobType",
    "Limiter",
    "Node",
    "Queue",
    "QueueKeywords",
    "UsingKeywords",
    "chain",
    "chord",
    "flow",
    "get_storage",
    "group",
    "job",
    "registry",
]
