"""Load everything from the tables when a scheduler starts."""

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from djqueue import models
from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob, ItemStream, incident_of, interrupt, supersede, superseded
from djqueue.core.errors import ConfigurationError
from djqueue.core.job import DeadLetterRecord, Incident
from djqueue.core.options import JobKey
from djqueue.core.policies import KeyLimit
from djqueue.core.states import LIVE, PENDING, TERMINAL, State
from djqueue.core.threads import gc_paused
from djqueue.storage.enginesnapshots import apply_settings, hold_records
from djqueue.storage.snapshots import QueueSettings
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import key_limits, recorded_modes

from .journal import TableJournal

LOADED = (*rows.JOB_FIELDS, "retries")
HOT = (models.ReadyJob, models.DelayedJob, models.HeldJob, models.ClaimedJob)
"""Tables of the database storage, which has jobs in states of its own."""


class RecoveredJobs(NamedTuple):
    """Numbers of loaded jobs."""

    pending: int
    running: int
    """Active jobs whose worker is alive."""
    interrupted: int
    dead: int
    ended: int


def recover(alias: str, engine: Engine, journal: TableJournal, lives: Callable[[str], bool]) -> RecoveredJobs:
    """Load waiting and delayed jobs, then active ones, then dead letters, and last the records of ended jobs.

    Args:
        alias: The database.
        engine: An empty engine.
        journal: The engine's journal, which has not been started.
        lives: Returns whether the process with a name lives: its active jobs stay active.
    """
    refuse_others(alias)
    _settings(alias, engine)
    with gc_paused(models.Job.objects.using(alias).count()):
        jobs, retries = _jobs(alias)
        by_key = {(job.queue, job.id): job for job in jobs}
        _belongings(alias, by_key)
        for job in jobs:
            if job.logs:
                # An active job's older lines stay in the table until its attempt ends.
                del job.logs[: -engine.context.policy(job.queue).retention.logs.count]
        letters = _letters(alias, by_key)
        active = [job for job in jobs if job.state is State.ACTIVE]
        running = [job for job in active if lives(job.process)]
        lost = [job for job in active if not lives(job.process)]
        # Those of one time stay in the order of their rows.
        pending = sorted((job for job in jobs if job.state in PENDING), key=attrgetter("claimable_at"))
        incidents = _interrupt(engine, journal, lost, letters)
        for job in superseded([*pending, *running, *lost], engine.clock.now()):
            supersede(job, engine.clock.now())
            journal.changed(job)
            incidents.append(incident_of(job, "cancelled"))
        ended = sorted((job for job in jobs if job.state in TERMINAL), key=lambda job: job.finished_at)
        live = [job for job in (*lost, *pending) if job.state in LIVE]
        # First the jobs that count against the limits of the others; interrupted ones before those that wait.
        engine.persistence.restore(chain(running, live, ended), letters)
    for job, count in retries:
        engine.context.shard(job.queue).find(job.queue).dead.note_retries(job.id, count)
    for job in (*running, *live):
        hold_records(engine.context, job)
    tokens = max((max(job.token, job.last_token) for job in jobs), default=0)
    engine.context.start_tokens_above(tokens)
    engine.settlement.announce(incidents)
    return RecoveredJobs(len(live), len(running), len(lost), len(letters), len(ended))


def refuse_others(alias: str) -> None:
    """Raise ConfigurationError if the tables have live jobs of the database storage."""
    for model in HOT:
        if model._default_manager.using(alias).exists():
            raise ConfigurationError(
                f"STORAGE: database {alias!r} has live jobs of djqueue.storage.database.DatabaseStorage: "
                "take a backup with that storage, empty its tables, and restore the backup with this one"
            )


def _settings(alias: str, engine: Engine) -> None:
    limits, modes = key_limits(alias), recorded_modes(alias)
    groups: dict[str, dict[str, KeyLimit]] = {}
    for (queue, group), limit in limits.items():
        groups.setdefault(queue, {})[group or ""] = limit
    context = engine.context
    for row in models.QueueState.objects.using(alias):
        policy = context.policy(row.name)
        policy.check_mode(row.name, modes.get(row.name, policy.key_mode))
        are_set = rows.limits(row) if row.limits_set else None
        holds = rows.unpack_holds(row.holds)
        settings = QueueSettings(row.paused, "", are_set, groups.get(row.name, {}), holds)
        apply_settings(context, row.name, settings)
    for limiter in models.LimiterState.objects.using(alias):
        context.limiter(limiter.name).change(*rows.limits(limiter), set())


def _jobs(alias: str) -> tuple[list[EngineJob], list[tuple[EngineJob, int]]]:
    """Return all jobs in the order in which they were first written, and the retries of some."""
    jobs: list[EngineJob] = []
    retries: list[tuple[EngineJob, int]] = []
    for row in rows.raw_values(models.Job.objects.using(alias).order_by("id"), LOADED):
        job = rows.job_from_row(row[:-1])
        jobs.append(job)
        if job.stream is not None:
            job.stream = ItemStream(job.token or job.last_token, [], job.stream.count)
        if row[-1] and job.state in LIVE:
            retries.append((job, row[-1]))
    return jobs, retries


def _belongings(alias: str, jobs: dict[JobKey, EngineJob]) -> None:
    for row in rows.raw_values(models.JobResult.objects.using(alias), rows.RESULT):
        if (job := jobs.get(row[:2])) is not None and job.state is State.COMPLETED:
            job.result = bytes(row[3])
    for row in rows.raw_values(models.JobAttempt.objects.using(alias).order_by("id"), rows.ATTEMPT):
        if (job := jobs.get(row[:2])) is not None:
            job.history = [*(job.history or ()), rows.attempt_from_row(row)]
            job.noted = len(job.history)
    for row in rows.raw_values(models.JobLog.objects.using(alias).order_by("id"), rows.LOG):
        if (job := jobs.get(row[:2])) is not None:
            job.logs = job.logs or []
            job.logs.append(row[2:4])
    for row in rows.raw_values(models.JobItem.objects.using(alias).order_by("number"), rows.ITEM):
        job = jobs.get(row[:2])
        if job is not None and job.stream is not None and job.stream.items is not None:
            job.stream.run = row[3]
            job.stream.items.append(bytes(row[4]))


def _letters(alias: str, jobs: dict[JobKey, EngineJob]) -> list[DeadLetterRecord]:
    found = rows.raw_values(models.DeadLetter.objects.using(alias).order_by("id"), rows.LETTER)
    letters = [rows.letter_from_row(row) for row in found]
    return [
        letter
        for letter in letters
        if (job := jobs.get((letter.queue, letter.id))) is not None and job.state is State.FAILED
    ]


def _interrupt(
    engine: Engine, journal: TableJournal, lost: Iterable[EngineJob], letters: list[DeadLetterRecord]
) -> list[Incident]:
    """End the attempts whose workers are gone, and add the dead letters of jobs that may not stall again."""
    incidents: list[Incident] = []
    for job in lost:
        job.token = 0
        policy = engine.context.policy(job.queue)
        letter = interrupt(job, policy, engine.clock.now(), engine.context.random)
        if job.state is State.WAITING and job.stream is not None:
            job.stream = None
            journal.restarted(job)
        journal.changed(job)
        if letter is not None:
            letters.append(letter)
        if job.state is not State.CANCELLED:
            incidents.append(incident_of(job, "stalled"))
        if job.state is not State.WAITING:
            incidents.append(incident_of(job, str(job.state)))
    return incidents
