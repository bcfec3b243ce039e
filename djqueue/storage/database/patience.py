"""How long an enqueue may take."""

from collections.abc import Sequence

from djqueue.core.job import Batch

TIMEOUT = 2.0
"""Seconds, unless the option TIMEOUT says otherwise."""
JOBS_PER_SECOND = 10_000
"""Jobs of one enqueue for which it gets another second."""


def patience(timeout: float, batches: Sequence[Batch]) -> float:
    """Return the seconds that these jobs may take."""
    return timeout + sum(len(batch.payloads) for batch in batches) / JOBS_PER_SECOND
