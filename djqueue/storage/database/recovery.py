"""From the tables to the engine: at the scheduler's start, and for single jobs on the way."""

import logging
from collections.abc import Iterable, Sequence

from djqueue import models
from djqueue.core.engine import Engine
from djqueue.core.job import DeadLetter, Job, JobError
from djqueue.core.limiter import Rate
from djqueue.core.options import JobKey
from djqueue.core.shard import note_attempt
from djqueue.core.states import LIVE, State

from . import rows
from .journal import DatabaseJournal

logger = logging.getLogger("djqueue.scheduler")

PAGE = 5_000
"""Rows read at a time."""
TELL_EVERY = 100_000
"""Jobs between two lines about a long recovery."""


def recover(alias: str, engine: Engine, journal: DatabaseJournal) -> dict[str, int]:
    """Everything that is alive: queues, pending jobs, interrupted ones, dead letters. Returns counts."""
    counts = {"pending": 0, "interrupted": 0, "dead": 0}
    queues(alias, engine)
    for jobs in _pages(alias, [state.value for state in LIVE - {State.BLOCKED}]):
        counts["interrupted"] += take_over(engine, journal, jobs)
        before, counts["pending"] = counts["pending"], counts["pending"] + len(jobs)
        if counts["pending"] // TELL_EVERY > before // TELL_EVERY:
            logger.info("Recovering: %s jobs so far.", f"{counts['pending']:,}")
    for jobs in _pages(alias, [State.FAILED.value]):
        counts["dead"] += _dead(alias, engine, jobs)
    # Last, and in one step: what they depend on is there by now, themselves included.
    blocked = [job for jobs in _pages(alias, [State.BLOCKED.value]) for job in jobs]
    engine.restore(blocked)
    counts["pending"] += len(blocked)
    return counts


def take_over(
    engine: Engine, journal: DatabaseJournal, jobs: Sequence[Job], letters: Iterable[DeadLetter] = ()
) -> int:
    """Give the engine jobs of a scheduler that is no more; returns how many it was running."""
    dead = list(letters)
    interrupted = [job for job in jobs if job.state is State.ACTIVE]
    for job in interrupted:
        letter = _interrupted(engine, job)
        if letter is None:
            journal.changed(job)
        else:
            dead.append(letter)
            journal.died(job, letter)
    engine.restore(jobs, dead, bind=False)
    return len(interrupted)


def _dead(alias: str, engine: Engine, jobs: Sequence[Job]) -> int:
    keys: dict[str, list[str]] = {}
    for job in jobs:
        keys.setdefault(job.queue, []).append(job.id)
    letters: list[DeadLetter] = []
    for queue, ids in keys.items():
        for chunk in rows.chunked(ids):
            found = models.DeadLetter.objects.using(alias).filter(queue=queue, job_id__in=chunk)
            letters += [rows.letter_from_row(row) for row in rows.raw_values(found, rows.LETTER)]
    engine.restore(jobs, sorted(letters, key=lambda letter: letter.entered_at))
    return len(letters)


def fetch(alias: str, engine: Engine, keys: Iterable[JobKey]) -> list[Job]:
    """Bring jobs that have ended, and are in the tables alone, back into the engine; returns them."""
    wanted: dict[str, list[str]] = {}
    for queue, job_id in keys:
        wanted.setdefault(queue, []).append(job_id)
    fetched: list[Job] = []
    for queue, ids in wanted.items():
        states = engine.states(queue, ids)
        missing = [job_id for job_id, state in zip(ids, states, strict=True) if state is None]
        jobs = load(alias, queue, missing, (State.COMPLETED, State.CANCELLED))
        engine.restore(jobs)
        fetched += jobs
    return fetched


def load(alias: str, queue: str, ids: Sequence[str], states: Iterable[State]) -> list[Job]:
    """Jobs of a queue in these states, with what belongs to them."""
    found: dict[str, Job] = {}
    values = [state.value for state in states]
    for chunk in rows.chunked(ids):
        mine = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk, state__in=values)
        found.update({job.id: job for job in map(rows.job_from_row, rows.job_rows(mine))})
    rows.read_belongings(alias, queue, found)
    return list(found.values())


def _interrupted(engine: Engine, job: Job) -> DeadLetter | None:
    """A job that was active when its scheduler ended: a stall is counted, and it waits again."""
    now = engine.clock.now()
    note_attempt(job, "stalled", now, None)
    job.stalls += 1
    lost_with = job.worker
    job.worker = ""
    if job.stalls <= job.options.max_stalls:
        job.state = State.WAITING
        job.run_at = now
        return None
    job.state = State.FAILED
    job.reason = "worker_lost"
    job.finished_at = now
    text = f"lost {job.stalls} times with its worker, last with {lost_with}"
    job.error = JobError("djqueue.core.errors.StorageError", text)
    policy = engine.policy(job.queue).dead_letters
    return DeadLetter(job.queue, job.id, job.reason, now, now + policy.ttl)


def _pages(alias: str, states: Sequence[str]) -> Iterable[list[Job]]:
    """Jobs in these states by order of arrival, with what belongs to those that have run before."""
    last = 0
    while True:
        page = models.Job.objects.using(alias).filter(state__in=states, id__gt=last).order_by("id")[:PAGE]
        jobs: list[Job] = []
        for row in rows.raw_values(page, ("id", *rows.JOB_FIELDS)):
            last = row[0]
            jobs.append(rows.job_from_row(row[1:]))
        if not jobs:
            return
        begun: dict[str, dict[str, Job]] = {}
        for job in jobs:
            if job.started_at:
                begun.setdefault(job.queue, {})[job.id] = job
        for queue, mine in begun.items():
            rows.read_belongings(alias, queue, mine)
        yield jobs


def queues(alias: str, engine: Engine) -> None:
    """What was said to queues while they ran."""
    for queue in models.QueueState.objects.using(alias):
        if queue.paused:
            engine.pause(queue.name)
        if queue.rate_capacity or queue.concurrency:
            rate = Rate(queue.rate_capacity, queue.rate_per or 1_000) if queue.rate_capacity else None
            engine.set_limits(queue.name, rate, queue.concurrency)
