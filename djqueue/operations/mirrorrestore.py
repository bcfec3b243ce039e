"""Restore from the mirror: enqueue unfinished jobs in Redis that it has lost."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, cast

from djqueue.core.enginejob import EngineJob
from djqueue.core.errors import OptionError
from djqueue.core.job import Batch
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.policies import NO_LIMIT, KeyLimit, KeyLimitChanges, Rate, standing
from djqueue.core.states import REUSABLE, State
from djqueue.storage.tables.rows import unpack_holds

from .mirror import Mirror

if TYPE_CHECKING:
    from djqueue.storage.redis import RedisStorage

PAGE = 1_000
"""Jobs enqueued at a time."""
STARTED = (State.WAITING, State.DELAYED, State.ACTIVE)
"""States of unfinished jobs that do not wait for others."""


@dataclass(slots=True)
class RestoreCounts:
    """The outcomes of the unfinished jobs of one queue."""

    restored: Counter[State] = field(default_factory=Counter)
    """Restored jobs by their former state."""
    unchanged: int = 0
    """Jobs that Redis knows, and that were not changed."""
    refused: Counter[str] = field(default_factory=Counter)
    """Jobs that were not restored, by reason."""


class LostJob(NamedTuple):
    """A job to enqueue again, with options that still apply."""

    job: EngineJob
    options: JobOptions


class Restoration:
    """One restore. Jobs keep their ids, names, payloads, options and due times; their attempts start from
    zero.

    dry_run: enqueue nothing, but count what would happen to each job.
    """

    def __init__(self, mirror: Mirror, *, dry_run: bool = False) -> None:
        self._mirror = mirror
        self._tables = mirror.tables
        self._storage = cast("RedisStorage", mirror.storage)  # nothing else is mirrored
        self._dry_run = dry_run
        self._now = 0
        self._reports: dict[str, RestoreCounts] = {}
        self._would_be: set[JobKey] = set()
        """Jobs that a dry run would have enqueued so far."""

    def run(self, queue: str | None = None) -> dict[str, RestoreCounts]:
        """Enqueue the lost jobs of one queue or of all. Raises StorageError and the database's errors."""
        # Jobs that Redis knows must be the same in the tables.
        self._mirror.catch_up()
        self._now = self._mirror.clock.now()
        queues = self._tables.queues() if queue is None else [queue]
        self._reports = {name: RestoreCounts() for name in queues}
        for name in queues:
            self._restore_controls(name)
        for name in queues:
            for page in self._tables.unfinished(name, STARTED, PAGE):
                self._restore(name, page)
        self._restore_blocked(queues)
        if not self._dry_run:
            self._mirror.catch_up()
        return {name: report for name, report in self._reports.items() if report != RestoreCounts()}

    def _restore_controls(self, queue: str) -> None:
        """Restore the controls first, because paused queues and held jobs must not start."""
        if self._dry_run or not self._mirror.has_lost(queue):
            return
        row = self._tables.controls().get(queue)
        if row is not None:
            _, paused, capacity, per, concurrency, holds = row
            if paused:
                self._storage.queues.pause(queue)
            for hold in standing(unpack_holds(holds), self._now):
                self._storage.queues.hold(queue, hold.name, hold.until, hold.reason)
            if capacity or concurrency:
                self._storage.queues.set_limits(queue, Rate(capacity, per) if capacity else None, concurrency)
        known = self._storage.queues.key_limits(queue)
        for group, limit in self._tables.key_limits(queue).items():
            if group not in known:
                self._restore_group(queue, group, limit)

    def _restore_group(self, queue: str, group: str | None, limit: KeyLimit) -> None:
        if limit._replace(paused=False) != NO_LIMIT:
            words = KeyLimitChanges(concurrency=limit.concurrency, rate=limit.rate, weight=limit.weight)
            self._storage.queues.set_key_limit(queue, group, **words)
        if limit.paused and group is not None:
            self._storage.queues.pause_key(queue, group)

    def _restore(self, queue: str, jobs: Sequence[EngineJob]) -> None:
        report = self._reports[queue]
        lost = []
        for job in self._unknown(queue, jobs):
            options = self._options(job)
            if options is None:
                report.refused["its TTL has expired"] += 1
            else:
                lost.append(LostJob(job, options))
        self._enqueue(queue, lost)

    def _unknown(self, queue: str, jobs: Sequence[EngineJob]) -> list[EngineJob]:
        states = self._storage.reads.states(queue, [job.id for job in jobs])
        unknown = [job for job, state in zip(jobs, states, strict=True) if state is None]
        self._reports[queue].unchanged += len(jobs) - len(unknown)
        return unknown

    def _options(self, job: EngineJob) -> JobOptions | None:
        """Return the options for enqueueing a job; None if it has expired."""
        options = job.options
        age = self._now - job.created_at
        if options.ttl is not None:
            if not job.started_at and age >= options.ttl:
                return None
            options = replace(options, ttl=None if job.started_at else options.ttl - age)
        if options.unique_ttl is not None:
            left = options.unique_ttl - age
            options = replace(
                options,
                unique_key=options.unique_key if left > 0 else None,
                unique_ttl=left if left > 0 else None,
            )
        return options

    def _enqueue(self, queue: str, lost: Sequence[LostJob]) -> None:
        report = self._reports[queue]
        if self._dry_run:
            report.restored.update(entry.job.state for entry in lost)
            self._would_be.update((queue, entry.job.id) for entry in lost)
            return
        if not lost:
            return
        answers = self._storage.enqueue_directly(list(self._batches(lost)))
        for entry, result in zip(lost, answers, strict=True):
            if result.status == "queued":
                report.restored[entry.job.state] += 1
            elif result.id == entry.job.id:
                report.unchanged += 1
            else:
                report.refused["its unique key is in use by another job"] += 1

    def _batches(self, lost: Iterable[LostJob]) -> Iterator[Batch]:
        for (name, options, run_at), entries in groupby(lost, self._alike):
            jobs = [entry.job for entry in entries]
            payloads, ids = [job.payload for job in jobs], [job.id for job in jobs]
            yield Batch(jobs[0].queue, name, options, payloads, ids, run_at=run_at)

    def _alike(self, entry: LostJob) -> tuple[str, JobOptions, int | None]:
        job = entry.job
        return job.name, entry.options, job.run_at if job.run_at > self._now else None

    # Jobs that wait for others.

    def _restore_blocked(self, queues: Iterable[str]) -> None:
        blocked: dict[JobKey, EngineJob] = {}
        for queue in queues:
            for page in self._tables.unfinished(queue, (State.BLOCKED,), PAGE):
                blocked.update({(queue, job.id): job for job in self._unknown(queue, page)})
        order = TopologicalSorter(
            {
                key: [other for other in job.options.depends_on if other in blocked]
                for key, job in blocked.items()
            }
        )
        try:
            order.prepare()
        except CycleError:
            for queue, _ in blocked:
                self._reports[queue].refused["is part of a dependency cycle"] += 1
            return
        while layer := order.get_ready():
            self._restore_layer([blocked[key] for key in layer])
            order.done(*layer)

    def _restore_layer(self, jobs: Sequence[EngineJob]) -> None:
        """Restore the blocked jobs whose blocked dependencies have been restored."""
        states = self._states({key for job in jobs for key in job.options.depends_on})
        for job in jobs:
            options = self._options(job)
            if options is None:
                self._reports[job.queue].refused["its TTL has expired"] += 1
                continue
            try:
                left = tuple(key for key in options.depends_on if _is_open(states[key], options))
                self._enqueue(job.queue, [LostJob(job, replace(options, depends_on=left))])
            except OptionError as error:
                self._reports[job.queue].refused[str(error)] += 1

    def _states(self, keys: Iterable[JobKey]) -> Mapping[JobKey, "RestoredDependency"]:
        by_queue: dict[str, list[str]] = {}
        for queue, job_id in keys:
            by_queue.setdefault(queue, []).append(job_id)
        dependencies: dict[JobKey, RestoredDependency] = {}
        for queue, ids in by_queue.items():
            rows = self._tables.states(queue, ids)
            for job_id, state in zip(ids, self._storage.reads.states(queue, ids), strict=True):
                is_known = state is not None or (queue, job_id) in self._would_be
                dependencies[queue, job_id] = RestoredDependency(is_known, rows.get(job_id))
        return dependencies


class RestoredDependency(NamedTuple):
    """A dependency of a restored job."""

    is_known: bool
    """Whether Redis knows the job."""
    state: State | None
    """State of the job in the tables."""


def _is_open(dependency: RestoredDependency, options: JobOptions) -> bool:
    """Return whether the job must still wait for it. Raises OptionError if that is unknown, or if it can
    never be met.
    """
    if dependency.is_known:
        return True
    state = dependency.state
    if state is State.COMPLETED:
        return False
    if (state is None or state in REUSABLE) and options.on_dependency_failure == "ignore":
        return False
    if state is None:
        raise OptionError("depends on a job that is neither in Redis nor in the tables")
    if state in REUSABLE:
        raise OptionError(f"depends on a job that is {state.value}")
    raise OptionError("depends on a job that was not restored")
