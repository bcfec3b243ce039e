"""Follow, in the tables, a step of the wall clock that happened while no scheduler was running."""

from djqueue import models
from djqueue.core.clocksteps import keep_lengths, log_step
from djqueue.core.enginejob import EngineJob
from djqueue.core.states import LIVE, State
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import Dialect

PAGE = 5_000
"""Rows changed at a time."""
FIELDS = ("id", *rows.JOB_KEY, "state", "run_at", "attempts", "stalls", "options")


def follow_missed_step(dialect: Dialect, step: int) -> None:
    """Shift the times of live jobs and dead letters that were given as durations.

    The caller has a transaction, in which the lease notes that this was done. Rows in the inbox are left
    alone: their producers may have written them before the step or behind it.
    """
    log_step(step)
    last = 0
    live = models.Job.objects.using(dialect.alias).filter(
        state__in=[state.value for state in LIVE], inbox=False
    )
    while page := list(rows.raw_values(live.filter(id__gt=last).order_by("id")[:PAGE], FIELDS)):
        last = page[-1][0]
        jobs = [job for row in page if keep_lengths(job := _job(row), step)]
        changed = [(*rows.job_key(job), job.run_at, rows.pack_job_options(job)) for job in jobs]
        if changed:
            dialect.update(models.Job, rows.JOB_KEY, ("run_at", "options"), changed)
    letters = models.DeadLetter.objects.using(dialect.alias).filter(next_retry_at__isnull=False)
    times = list(rows.raw_values(letters, (*rows.KEY, "next_retry_at")))
    if times:
        moved = [(queue, job_id, at + step) for queue, job_id, at in times]
        dialect.update(models.DeadLetter, rows.KEY, ("next_retry_at",), moved)


def _job(row: rows.Row) -> EngineJob:
    _, queue, job_id, created_at, state, run_at, attempts, stalls, packed = row
    options, stepped = rows.unpack_job_options(bytes(packed))
    job = EngineJob(job_id, queue, "", b"", options, State(state), created_at, run_at)
    job.attempts, job.stalls, job.stepped = attempts, stalls, stepped
    return job
