"""Load jobs from the tables into the engine: all at the start of a scheduler, single ones later."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import NamedTuple

from django.db.models import CharField, Count, Value

from djqueue import models
from djqueue.core.changes import incident_of
from djqueue.core.collector import gc_paused
from djqueue.core.engine import Engine
from djqueue.core.enginejob import EngineJob, ItemStream, PayloadSource
from djqueue.core.interrupted import interrupt, supersede, superseded
from djqueue.core.job import DeadLetterRecord, Incident, Lease
from djqueue.core.options import JobKey
from djqueue.core.states import LIVE, REUSABLE, State
from djqueue.core.unique import PREDECESSOR
from djqueue.storage.tables import rows
from djqueue.storage.tables.groups import group_limits, recorded_modes

from . import pinned
from .journal import DatabaseJournal
from .livejobs import FRESH, NUMBERED, PAGE, FreshJobs, LiveJobs, read_histories
from .processes import SCHEDULER, has_died

logger = logging.getLogger("djqueue.scheduler")

ENDED = (State.COMPLETED, State.CANCELLED)
"""States of jobs that are only in the tables."""
INBOX = NUMBERED.index("inbox")


class JobRow(NamedTuple):
    """A job's row."""

    number: int
    job: EngineJob
    inbox: bool
    """Whether the row is still in the inbox."""

    @property
    def key(self) -> JobKey:
        """The job's queue and id."""
        return self.job.queue, self.job.id

    @classmethod
    def read(cls, values: rows.Row) -> "JobRow":
        """Return the job of a row of the columns in `NUMBERED`."""
        return cls(values[0], rows.job_from_row(values[1:]), bool(values[INBOX]))


Knowing = Callable[[Iterable[JobKey]], AbstractContextManager[None]]
"""Context manager: the engine knows these jobs, including ended ones, while it is open."""


def recover(
    alias: str,
    engine: Engine,
    journal: DatabaseJournal,
    take_in: Callable[[], None],
    knowing: Knowing,
    left_at: int = 0,
    *,
    was_released: bool = True,
    payloads: PayloadSource,
) -> dict[str, int]:
    """Load queues, pending, running and interrupted jobs, and dead letters; return the counts.

    take_in: reads the inbox: rows of producers that no scheduler has seen.
    payloads: reads the payloads of the jobs that have not started, when they are claimed.
    left_at: last sign of the previous scheduler, in UTC milliseconds.
    was_released: whether it released its lease; otherwise its process may still be running its jobs.
    """
    queues(alias, engine)
    live = LiveJobs(alias, payloads)
    with gc_paused(live.total):
        jobs = live.read()
        running, interrupted = take_over(engine, journal, jobs, left_at=left_at, was_released=was_released)
    dead = sum(_dead(alias, engine, page) for page in _pages(alias, [State.FAILED]))
    take_in()
    # Last, and in one step: their dependencies, which may be blocked jobs too, are loaded now.
    bind(engine, knowing, [job for job in jobs if job.unmet])
    needing = [job for job in jobs if job.options.depends_on and not job.unmet and job.state in LIVE]
    there = pinned.ended(alias, {key: None for job in needing for key in job.options.depends_on})
    for job in needing:
        engine.persistence.hold(job, there)
    for key in pinned.all_put_off(alias):
        journal.was_put_off(key)
        if not engine.persistence.put_off(key[0], [key[1]]):
            journal.let_go(key)
    pending = len(jobs) - running
    return {"pending": pending, "interrupted": interrupted, "running": running, "dead": dead}


def borrow(
    alias: str,
    engine: Engine,
    journal: DatabaseJournal,
    take: Callable[[Mapping[int, EngineJob]], None],
    knowing: Knowing,
    queue: str,
    ids: Sequence[str] | None,
    to: str | None = None,
    left_at: int = 0,
    *,
    was_released: bool = True,
) -> None:
    """Load some or all (None) jobs of one queue, their blocked dependents, the dependencies of these, and
    the live jobs with their unique keys.

    take: reads jobs from the inbox by the numbers of their rows; they replace their rivals, as at the
    start of a scheduler.
    to: another queue to which they move; its jobs with the same ids or unique keys are loaded, too.
    left_at, was_released: see `recover`.
    """
    queues(alias, engine)
    if ids is None:
        ids = list(models.Job.objects.using(alias).filter(queue=queue).values_list("job_id", flat=True))
    jobs, inbox = _concerned(alias, queue, ids, to)
    failed = [job for job in jobs if job.state is State.FAILED]
    alive = [job for job in jobs if job.state is not State.FAILED]
    take_over(engine, journal, alive, left_at=left_at, was_released=was_released)
    _dead(alias, engine, failed)
    take(inbox)
    bind(engine, knowing, [job for job in jobs if job.state is State.BLOCKED and job.unmet])


def _concerned(
    alias: str, queue: str, ids: Sequence[str], to: str | None
) -> tuple[list[EngineJob], dict[int, EngineJob]]:
    """Return the jobs that `borrow` loads, and those in the inbox by arrival."""
    found = {row.key: row for row in _load(alias, queue, ids)}
    if to is not None:
        found.update({row.key: row for row in _load(alias, to, ids)})
    needed: dict[JobKey, JobRow] = {}
    """Dependencies of blocked jobs; of these, only blocked ones are followed."""
    blocked = [
        JobRow.read(row)
        for row in rows.raw_values(
            models.Job.objects.using(alias).filter(state=State.BLOCKED.value), NUMBERED
        )
    ]
    seen = -1
    while len(found) > seen:
        seen = len(found)
        found.update(_rivals(alias, found, queue, to))
        found.update(_dependents(blocked, found))
        needed.update(_dependencies(alias, found, needed))
        found.update({key: row for key, row in needed.items() if row.inbox or row.job.state is State.BLOCKED})
    everything = list((needed | found).values())
    inbox = sorted((row for row in everything if row.inbox), key=lambda row: row.number)
    return [row.job for row in everything if not row.inbox], {row.number: row.job for row in inbox}


def _rivals(
    alias: str, found: Mapping[JobKey, JobRow], moved_from: str, to: str | None
) -> dict[JobKey, JobRow]:
    """Return the live jobs with the unique keys of these jobs, also in the queue to which these move."""
    keys: dict[str, dict[str, None]] = {}
    for row in found.values():
        key = row.job.options.unique_key
        if key is not None and row.job.state not in ENDED:
            keys.setdefault(row.job.queue, {})[key] = None
            if to is not None and row.job.queue == moved_from:
                keys.setdefault(to, {})[key] = None
    rivals: dict[JobKey, JobRow] = {}
    for queue, mine in keys.items():
        owners = [job_id for job_id in _owners(alias, queue, mine) if (queue, job_id) not in found]
        rivals.update({row.key: row for row in _load(alias, queue, owners)})
    return rivals


def _owners(alias: str, queue: str, keys: Iterable[str]) -> Iterable[str]:
    """Return the ids of a queue's live jobs that have these unique keys."""
    live = [state.value for state in LIVE]
    for chunk in rows.chunked(list(keys)):
        found = models.Job.objects.using(alias).filter(queue=queue, state__in=live, unique_key__in=chunk)
        yield from found.values_list("job_id", flat=True)


def _dependents(blocked: Sequence[JobRow], found: Mapping[JobKey, JobRow]) -> dict[JobKey, JobRow]:
    """Return the blocked jobs that depend on these, directly or not."""
    rest = list(blocked)
    dependents: dict[JobKey, JobRow] = {}
    waited_for = set(found)
    while waiting := [row for row in rest if not waited_for.isdisjoint(row.job.options.depends_on)]:
        waited_for = {row.key for row in waiting}
        dependents.update({row.key: row for row in waiting})
        rest = [row for row in rest if row.key not in waited_for]
    return {key: row for key, row in dependents.items() if key not in found}


def _dependencies(
    alias: str, found: Mapping[JobKey, JobRow], needed: Mapping[JobKey, JobRow]
) -> dict[JobKey, JobRow]:
    """Return the missing dependencies of the blocked jobs among these."""
    wanted: dict[str, dict[str, None]] = {}
    for row in found.values():
        # A dead letter may be blocked by its dependencies again.
        if row.job.state is State.BLOCKED or row.job.reason == "dependency_failed":
            for key in row.job.options.depends_on:
                if key not in found and key not in needed:
                    wanted.setdefault(key[0], {})[key[1]] = None
    return {row.key: row for queue, ids in wanted.items() for row in _load(alias, queue, list(ids))}


def bind(engine: Engine, knowing: Knowing, blocked: Sequence[EngineJob]) -> None:
    """Link blocked jobs to their dependencies, and apply ends in the past."""
    with knowing(key for job in blocked for key in job.unmet or ()):
        for job in blocked:
            engine.settlement.bind(job, tuple((job.unmet or set()) - {PREDECESSOR}), missing=State.COMPLETED)


def take_over(
    engine: Engine,
    journal: DatabaseJournal,
    jobs: Sequence[EngineJob],
    *,
    left_at: int = 0,
    was_released: bool = True,
) -> tuple[int, int]:
    """Give the engine an earlier scheduler's jobs; return how many are running, and were interrupted."""
    dead: list[DeadLetterRecord] = []
    active = [job for job in jobs if job.state is State.ACTIVE]
    is_gone = has_died()
    for job in active:
        if job.process.startswith(SCHEDULER) and not was_released:
            _adopt(job, engine, journal)
    interrupted = [job for job in active if _is_lost(job, left_at) or is_gone(job.process)]
    for job in interrupted:
        job.token = 0
    running = [job for job in active if job.token]
    incidents: list[Incident] = []
    for job in interrupted:
        policy = engine.context.policy(job.queue)
        letter = interrupt(job, policy, engine.clock.now(), engine.context.random)
        if job.state is State.WAITING and job.stream is not None:
            job.stream = None
            journal.restarted(job)
        if letter is None:
            journal.changed(job)
        else:
            dead.append(letter)
            journal.died(job, letter)
        if job.state is not State.CANCELLED:
            incidents.append(incident_of(job, "stalled"))
        if job.state is not State.WAITING:
            incidents.append(incident_of(job, str(job.state)))
    for job in superseded(jobs, engine.clock.now()):
        supersede(job, engine.clock.now())
        journal.changed(job)
        incidents.append(incident_of(job, "cancelled"))
    # First the jobs that count against the limits of the others.
    others = (job for job in jobs if job.state is not State.ACTIVE) if running else jobs
    _read_items(journal.alias, running)
    engine.persistence.restore(chain(running, others), dead, bind=False)
    engine.settlement.announce(incidents)
    return len(running), len(interrupted)


def _adopt(job: EngineJob, engine: Engine, journal: DatabaseJournal) -> None:
    """Treat a job of the last scheduler as another process's, because that may only be suspended."""
    job.process = job.process.removeprefix(SCHEDULER)
    job.lease_until = engine.clock.monotonic() + engine.context.policy(job.queue).lease
    journal.changed(job)
    # Like the other attributes, which come from the tables.
    job.lease_until += journal.lag


def _is_lost(job: EngineJob, left_at: int) -> bool:
    """Return whether an active job's attempt is over: its scheduler stopped, or its lease expired while
    one was running.
    """
    if not job.token or not job.process or job.process.startswith(SCHEDULER):
        return True
    return job.lease_until <= left_at


def _read_items(alias: str, running: Iterable[EngineJob]) -> None:
    """Give jobs the items that they have sent; further items follow these."""
    for job in running:
        if job.stream is not None:
            mine = models.JobItem.objects.using(alias).filter(queue=job.queue, job_id=job.id)
            items = [bytes(item) for (item,) in rows.raw_values(mine.order_by("number"), ("item",))]
            job.stream = ItemStream(job.token, items, len(items))


def _dead(alias: str, engine: Engine, jobs: Sequence[EngineJob]) -> int:
    keys: dict[str, list[str]] = {}
    for job in jobs:
        keys.setdefault(job.queue, []).append(job.id)
    letters: dict[int, DeadLetterRecord] = {}
    for queue, ids in keys.items():
        for chunk in rows.chunked(ids):
            found = models.DeadLetter.objects.using(alias).filter(queue=queue, job_id__in=chunk)
            for row in rows.raw_values(found, (*rows.LETTER, "id")):
                letters[row[-1]] = rows.letter_from_row(row[:-1])
    # In order of arrival: a moved job keeps the time of its failure.
    engine.persistence.restore(jobs, [letters[number] for number in sorted(letters)])
    return len(letters)


class UnloadedJobs(NamedTuple):
    """Jobs that are in the tables, but not in the engine."""

    ended: list[EngineJob]
    """Completed and cancelled."""
    arrived: dict[int, EngineJob]
    """In the inbox, by the number of the row."""


def find(alias: str, engine: Engine, journal: DatabaseJournal, keys: Iterable[JobKey]) -> UnloadedJobs:
    """Return the jobs that are not in the engine and not about to be deleted, also those in the inbox."""
    wanted: dict[str, list[str]] = {}
    for queue, job_id in keys:
        wanted.setdefault(queue, []).append(job_id)
    found = UnloadedJobs([], {})
    for queue, ids in wanted.items():
        states = dict(zip(ids, engine.reads.states(queue, ids), strict=True))
        missing = [job_id for job_id, state in states.items() if state is None or state in REUSABLE]
        for number, job, inbox in _load(alias, queue, missing):
            if inbox:
                found.arrived[number] = job
            elif states[job.id] is None and job.state in ENDED and not journal.is_gone(rows.job_key(job)):
                found.ended.append(job)
    return found


def arrived(alias: str, limit: int) -> dict[int, EngineJob]:
    """Return the first jobs of the inbox, by the numbers of their rows, in order."""
    page = models.Job.objects.using(alias).filter(inbox=True).order_by("id")[:limit]
    return {row[0]: rows.job_from_row(row[1:]) for row in rows.raw_values(page, NUMBERED)}


def more_arrived(alias: str, limit: int, fresh: FreshJobs) -> dict[int, EngineJob]:
    """Like `arrived`, for a long inbox: the payloads stay in the table."""
    page = models.Job.objects.using(alias).filter(inbox=True).order_by("id")[:limit]
    found: dict[int, EngineJob] = {}
    for row in rows.raw_values(page, (*FRESH, "process")):
        found[row[0]] = job = fresh.job(row)
        job.process = row[-1]
    return found


def left_in_inbox(alias: str, numbers: Iterable[int]) -> set[int]:
    """Return the rows that are still in the inbox."""
    left: set[int] = set()
    for chunk in rows.chunked(list(numbers)):
        left.update(
            models.Job.objects.using(alias).filter(id__in=chunk, inbox=True).values_list("id", flat=True)
        )
    return left


def succeeding(alias: str, queue: str, ids: Sequence[str]) -> dict[int, EngineJob]:
    """Return the jobs in the inbox with one of these ids, by the numbers of their rows."""
    found: dict[int, EngineJob] = {}
    for chunk in rows.chunked(ids):
        mine = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk, inbox=True)
        found |= {row[0]: rows.job_from_row(row[1:]) for row in rows.raw_values(mine, NUMBERED)}
    return found


def ended_claims(alias: str, queue: str, ids: Sequence[str]) -> Iterable[Lease]:
    """Return the last claims of these jobs whose outcomes their workers have reported."""
    for chunk in rows.chunked(ids):
        mine = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk, token__gt=0)
        ended = mine.exclude(state=State.ACTIVE.value).values_list("queue", "job_id", "token")
        yield from (Lease(*claim) for claim in ended)


def _load(alias: str, queue: str, ids: Sequence[str]) -> list[JobRow]:
    """Return jobs of a queue with their results, attempts and log lines."""
    found: dict[str, JobRow] = {}
    for chunk in rows.chunked(ids):
        mine = models.Job.objects.using(alias).filter(queue=queue, job_id__in=chunk)
        for values in rows.raw_values(mine, NUMBERED):
            row = JobRow.read(values)
            found[row.job.id] = row
    rows.read_belongings(alias, queue, {job_id: row.job for job_id, row in found.items()})
    return list(found.values())


def _pages(alias: str, states: Iterable[State]) -> Iterable[list[EngineJob]]:
    """Yield the jobs in these states, without the inbox, in order of arrival, with their histories."""
    last = 0
    found = models.Job.objects.using(alias).filter(state__in=[state.value for state in states], inbox=False)
    while True:
        jobs: list[EngineJob] = []
        for row in rows.raw_values(found.filter(id__gt=last).order_by("id")[:PAGE], NUMBERED):
            last = row[0]
            jobs.append(rows.job_from_row(row[1:]))
        if not jobs:
            return
        read_histories(alias, jobs)
        yield jobs


def note_kept(alias: str, engine: Engine) -> None:
    """Count the completed and cancelled jobs in the tables, once at the start.

    Cancelled jobs that rows in the inbox replace are counted until these rows are read. One statement is
    used, so that producers that replace rows at the same time do not change the result.
    """
    jobs = models.Job.objects.using(alias)
    ended = jobs.filter(state__in=[state.value for state in ENDED], inbox=False)
    replaced = jobs.filter(inbox=True, process=rows.REPLACES_CANCELLED)
    cancelled = Value(State.CANCELLED.value, output_field=CharField())
    counts = ended.values_list("queue", "state").annotate(count=Count("id"))
    others = replaced.annotate(ended=cancelled).values_list("queue", "ended").annotate(count=Count("id"))
    for queue, state, count in counts.union(others, all=True):
        engine.persistence.add_stored(queue, State(state), count)


def agree(alias: str, engine: Engine) -> set[str]:
    """Return the queues with a recorded group mode. Raises ConfigurationError if the settings differ."""
    modes = recorded_modes(alias)
    for queue, mode in modes.items():
        engine.context.policy(queue).check_mode(queue, mode)
    return set(modes)


def queues(alias: str, engine: Engine) -> None:
    """Restore the pauses and limits of queues, groups and limiters."""
    for queue in models.QueueState.objects.using(alias):
        if queue.paused:
            engine.queues.pause(queue.name)
        if queue.rate_capacity or queue.concurrency:
            engine.queues.set_limits(queue.name, *rows.limits(queue))
    for (name, group), said in group_limits(alias).items():
        engine.queues.set_group_limit(
            name, group, concurrency=said.concurrency, rate=said.rate, weight=said.weight
        )
        if said.paused and group is not None:
            engine.queues.pause_group(name, group)
    for limiter in models.LimiterState.objects.using(alias):
        engine.limiters.set(limiter.name, *rows.limits(limiter))
