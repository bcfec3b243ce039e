"""The API of producers: `@job`, `Queue`, and waiting for results."""

from . import results  # noqa: F401 - installs the methods of `EnqueueResult`
from .flows import Flow, FlowResult, Node, chain, chord, flow, group
from .jobs import JobType, job, registry
from .limiters import Limiter
from .queue import Queue
from .storages import get_storage

__all__ = [
    "Flow",
    "FlowResult",
    "JobType",
    "Limiter",
    "Node",
    "Queue",
    "chain",
    "chord",
    "flow",
    "get_storage",
    "group",
    "job",
    "registry",
]
