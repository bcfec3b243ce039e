"""How long an enqueue may take."""

from collections.abc import Sequence

from djqueue.core.job import Batch

from .dialects import Dialect

TIMEOUT = 2.0
"""Seconds, unless the option TIMEOUT says otherwise."""


def patience(timeout: float, batches: Sequence[Batch], dialect: Dialect) -> float:
    """Return the seconds that these jobs may take."""
    return timeout + sum(len(batch.payloads) for batch in batches) / dialect.jobs_per_second
