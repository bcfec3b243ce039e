"""Snapshots of an engine, which holds all jobs in memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter

from djqueue.core.engine import Engine
from djqueue.core.engine.context import EngineContext
from djqueue.core.engine.groups import GROUP_WAITING
from djqueue.core.engine.persistence import EngineReplacement, all_jobs
from djqueue.core.engine.queue import JobQueue
from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import SnapshotTargetError
from djqueue.core.job import DeadLetterRecord
from djqueue.core.policies import NO_LIMIT
from djqueue.core.states import LIVE, PENDING, State
from djqueue.core.threads import gc_paused

from . import snapshots
from .snapshotchecks import check_part
from .snapshots import (
    LimiterSettings,
    Part,
    Position,
    QueueSettings,
    ScheduleRows,
    SnapshotCounts,
    Snapshots,
    check_target,
    dead_letter,
    end_attempt,
    engine_job,
    job_record,
    letter_record,
    lost_letter,
    resolve_rivals,
    schedules_replaced,
    turn,
)

HELD_BACK = 1 << 61
"""First position of the jobs that their groups hold back: behind those that are ready."""
FIRST_LATE_POSITION = 1 << 40
"""First position of the dead letters that were added during a read."""


class EngineSnapshots(Snapshots):
    """Snapshots of an engine that holds all jobs."""

    def __init__(self, engine: Engine) -> None:
        self.schedules: ScheduleRows | None = None
        self._engine = engine
        self._context = engine.context

    # Read.

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        yield self._parts(page)

    def _parts(self, page: int) -> Iterator[Part]:
        jobs = all_jobs(self._context)
        for name in self._context.queue_names():
            yield Part(snapshots.QUEUE, name, [self._settings(name).record()])
        limiters = [found.record() for found in changed_limiters(self._context)]
        for records in snapshots.chunks(limiters, page):
            yield Part(snapshots.LIMITER, "", records)
        positions = self._positions()
        for first in range(0, len(jobs), page):
            yield from self._page(jobs[first : first + page], positions)
        if self.schedules is not None:
            for records in self.schedules.pages(page):
                yield Part(snapshots.SCHEDULE, "", records)

    def _positions(self) -> dict[EngineJob, int]:
        """Return the positions of jobs held back by their groups, and of dead letters."""
        positions: dict[EngineJob, int] = {}
        for name in self._context.queue_names():
            shard = self._context.shard(name)
            with shard.lock:
                queue = shard.find(name)
                held = [*queue.groups.held_back()]
                dead = [queue.jobs[letter.id] for letter in queue.dead.letters()]
            positions.update((job, HELD_BACK + number) for number, job in enumerate(held))
            positions.update((job, number) for number, job in enumerate(dead))
        return positions

    def _page(self, jobs: Sequence[EngineJob], positions: dict[EngineJob, int]) -> Iterator[Part]:
        left = list(jobs)
        while left:
            by_queue: dict[str, list[EngineJob]] = defaultdict(list)
            for job in left:
                by_queue[job.queue].append(job)
            left = []
            for name, mine in by_queue.items():
                records, letters = [], []
                shard = self._context.shard(name)
                with shard.lock:
                    queue = shard.find(name)
                    for job in mine:
                        if job.queue != name:
                            left.append(job)  # It was moved meanwhile.
                            continue
                        if not queue.is_there(job):
                            continue
                        with self._context.processing_shard(job.id).lock:
                            records.append(self._record(queue, job, positions))
                        if (letter := queue.dead.get(job.id)) is not None:
                            position = positions.get(job, FIRST_LATE_POSITION + letter.entered_at)
                            letters.append(letter_record(letter, position))
                if records:
                    yield Part(snapshots.JOB, name, records)
                if letters:
                    yield Part(snapshots.DEAD, name, letters)

    @staticmethod
    def _record(queue: JobQueue, job: EngineJob, positions: dict[EngineJob, int]) -> dict[str, object]:
        position = job.generation
        if job.generation == GROUP_WAITING:
            position = positions.get(job, HELD_BACK + job.run_at)
        elif job.state not in PENDING:
            position = job.finished_at
        return job_record(job, (position, 0), queue.dead.retries_of(job.id))

    def _settings(self, name: str) -> QueueSettings:
        shard = self._context.shard(name)
        with shard.lock:
            return settings_of(shard.find(name))

    def is_empty(self) -> bool:
        if any(queue.jobs for shard in self._context.shards for queue in list(shard.queues.values())):
            return False
        if not all(self._settings(name).is_empty for name in self._context.queue_names()):
            return False
        if next(changed_limiters(self._context), None) is not None:
            return False
        return self.schedules is None or self.schedules.is_empty()

    # Write.

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        check_target(self, self._engine.workers.all(), replace=replace)
        found = _Collected()
        with gc_paused(1 << 20):
            for part in parts:
                found.add(part)
            replacement = EngineReplacement(self._context)
            dead = self._fill(replacement, found)

        def is_allowed() -> bool:
            shards = self._context.shards
            if not replace and any(queue.jobs for shard in shards for queue in shard.queues.values()):
                return False
            self._is_being_replaced()
            return True

        with schedules_replaced(self.schedules, found.schedules):
            if not replacement.replace(self._engine.settlement, is_allowed):
                raise SnapshotTargetError(
                    "jobs were enqueued while the snapshot was read: nothing was written"
                )
            self._was_replaced()
        return found.counts(dead)

    def _is_being_replaced(self) -> None:
        """Prepare for new contents; called while nothing else can change."""

    def _was_replaced(self) -> None:
        """Do what a storage does after the contents were replaced."""

    def _fill(self, replacement: EngineReplacement, found: "_Collected") -> int:
        """Fill the replacement; return the number of dead letters."""
        context = replacement.context
        now = context.clock.now()
        for name, settings in found.queues.items():
            context.policy(name).check_mode(name, settings.key_mode or context.policy(name).key_mode)
            apply_settings(context, name, settings)
        woken: set[str] = set()
        for limiter in found.limiters:
            context.limiter(limiter.name).change(limiter.rate, limiter.concurrency, woken)
        found.end_attempts(context)
        jobs = found.in_order()
        resolve_rivals(jobs, now)
        letters = found.letters_of_failed(context)
        replacement.persistence.restore(jobs, letters)
        for job in jobs:
            queue = context.shard(job.queue).queues[job.queue]
            if retries := found.retries.get((job.queue, job.id)):
                queue.dead.note_retries(job.id, retries)
            hold_records(context, job)
        return len(letters)


def settings_of(queue: JobQueue) -> QueueSettings:
    """Return the settings of a queue made at run time. The caller holds the lock of its shard."""
    policy, bucket = queue.policy, queue.limiter.bucket
    limits = None if bucket is None else bucket.rate, queue.limiter.concurrency
    groups = queue.groups.overrides()
    if queue.key_limit != NO_LIMIT:
        groups[""] = queue.key_limit
    are_set = limits != (policy.rate, policy.concurrency)
    holds = tuple(sorted(queue.holds.values()))
    return QueueSettings(queue.paused, policy.key_mode, limits if are_set else None, groups, holds)


def changed_limiters(context: EngineContext) -> Iterator[LimiterSettings]:
    """Yield the limiters whose limits were changed at run time."""
    for name, limiter in sorted(context.limiters.copy().items()):
        state = limiter.state()
        if (state.rate, state.concurrency) != (limiter.policy.rate, limiter.policy.concurrency):
            yield LimiterSettings(name, state.rate, state.concurrency)


def hold_records(context: EngineContext, job: EngineJob) -> None:
    """Hold the records that a job may read, those of its dependencies, if it is live and waits for none."""
    if job.state not in LIVE or job.unmet:
        return
    for name, job_id in job.options.depends_on:
        shard = context.shard(name)
        queue = shard.find(name)
        ended = queue.jobs.get(job_id)
        if ended is not None and ended.state in (State.COMPLETED, State.CANCELLED):
            queue.hold(ended, job)


def apply_settings(context: EngineContext, name: str, settings: QueueSettings) -> None:
    """Restore the settings of a queue in an engine that nothing else uses yet."""
    queue = context.shard(name).queue(name)
    queue.paused = settings.paused
    queue.holds = {hold.name: hold for hold in settings.holds}
    if settings.limits is not None:
        queue.limiter.set(*settings.limits, context.clock.monotonic())
    for group, limit in settings.key_limits.items():
        if group:
            queue.groups.set_own(group, limit)
        else:
            queue.limit_groups(limit)


@dataclass(slots=True)
class _Collected:
    """The records of a snapshot, in memory."""

    queues: dict[str, QueueSettings] = field(default_factory=dict)
    limiters: list[LimiterSettings] = field(default_factory=list)
    jobs: dict[tuple[str, str], tuple[Position, EngineJob]] = field(default_factory=dict)
    letters: dict[tuple[str, str], tuple[int, DeadLetterRecord]] = field(default_factory=dict)
    retries: dict[tuple[str, str], int] = field(default_factory=dict)
    schedules: list[snapshots.Record] = field(default_factory=list)

    def add(self, part: Part) -> None:
        """Add the records of a part."""
        check_part(part)
        for record in part.records:
            if part.kind == snapshots.JOB:
                job = engine_job(part.queue, record)
                key = (part.queue, job.id)
                major, minor = record["position"]
                self.jobs.setdefault(key, ((major, minor), job))
                if record["retries"]:
                    self.retries[key] = record["retries"]
            elif part.kind == snapshots.DEAD:
                letter = dead_letter(part.queue, record)
                self.letters.setdefault((part.queue, letter.id), (record["position"], letter))
            elif part.kind == snapshots.QUEUE:
                self.queues[part.queue] = QueueSettings.of(part.queue, record)
            elif part.kind == snapshots.LIMITER:
                self.limiters.append(LimiterSettings.of(record))
            else:
                self.schedules.append(record)

    def end_attempts(self, context: EngineContext) -> None:
        """Treat active jobs like those whose workers were lost; they wait before all others."""
        for key, (_, job) in self.jobs.items():
            if job.state is State.ACTIVE:
                now = context.clock.now()
                position, letter = end_attempt(job, context.policy(job.queue), now, context.random)
                self.jobs[key] = (position, job)
                if letter is not None:
                    self.letters[key] = (snapshots.LAST + now, letter)

    def in_order(self) -> list[EngineJob]:
        """Return the jobs in the order in which they are put into their queues."""
        return [job for _, job in sorted(self.jobs.values(), key=lambda entry: turn(entry[1], entry[0]))]

    def letters_of_failed(self, context: EngineContext) -> list[DeadLetterRecord]:
        """Return the dead letters of all failed jobs, oldest first."""
        found = []
        for key, (_, job) in self.jobs.items():
            if job.state is State.FAILED:
                if key not in self.letters:
                    letter = lost_letter(job, context.policy(job.queue), context.random)
                    self.letters[key] = (snapshots.LAST + job.finished_at, letter)
                found.append(self.letters[key])
        return [letter for _, letter in sorted(found, key=itemgetter(0))]

    def counts(self, dead: int) -> SnapshotCounts:
        """Return the numbers of records."""
        numbers = len(self.queues), len(self.limiters), len(self.jobs), dead, len(self.schedules)
        return SnapshotCounts(*numbers)
