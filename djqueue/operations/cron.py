"""The jobs of a schedule's row."""

from dataclasses import replace

from djqueue.client import envelope, registry
from djqueue.core.errors import UnknownJobError
from djqueue.core.job import Batch
from djqueue.core.options import EnqueueOptions, JobOptions
from djqueue.models import CronJob

KEPT = 60 * 60_000
"""Milliseconds for which the records of such jobs are kept at least."""


def job_id(row: CronJob, slot: int) -> str:
    """Return the id of the job of a slot."""
    return f"cron:{row.name}:{slot}"


def batch_of(row: CronJob, ids: list[str] | None) -> Batch:
    """Jobs of a row, one for each id (None: one job, with an id of its own).

    With the options of `@job` if that is known here, else the settings'. Raises DjqueueError.
    """
    options = options_of(row)
    values = [{"args": row.args, "kwargs": row.kwargs}] * (1 if ids is None else len(ids))
    return envelope.batch(options, row.job_name, values, ids)


def options_of(row: CronJob) -> EnqueueOptions:
    """Return the options of a row's jobs."""
    try:
        options = registry.get(row.job_name).options
    except UnknownJobError:
        options = envelope.resolve({})
    if row.queue:
        options = replace(options, queue=envelope.resolve({"queue": row.queue}).queue)
    return replace(options, job=_kept(options.job), run_at=None)


def _kept(options: JobOptions) -> JobOptions:
    """Write the job before the row moves on, and keep its record long enough to find it again."""
    is_kept = options.kept is None or options.kept >= KEPT
    return replace(options, durable=True, retention=options.retention if is_kept else KEPT)
