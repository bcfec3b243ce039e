"""Compute the time limit of an enqueue."""

from collections.abc import Sequence

from djqueue.core.job import Batch
from djqueue.storage.tables.dialects import Dialect

TIMEOUT = 2.0
"""Default of the option TIMEOUT, in seconds."""


def patience(timeout: float, batches: Sequence[Batch], dialect: Dialect) -> float:
    """Return the time limit in seconds for enqueueing these jobs."""
    return timeout + sum(len(batch.payloads) for batch in batches) / dialect.jobs_per_second
