"""The contract over an engine in this process: what the memory and the database storage share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Unpack

from djqueue.core.diagnostics import Finding
from djqueue.core.engine import Engine
from djqueue.core.errors import StorageError
from djqueue.core.explain import Explanation, decide
from djqueue.core.graph import MOST, FlowGraph, JobLink, explore, walked
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    DeadLetterPage,
    DeadLetterRecord,
    Emission,
    EnqueueResult,
    Finished,
    ItemMark,
    ItemPage,
    JobRecord,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.maintenance import Swept, sweep
from djqueue.core.metrics import Bucket, RunStats, assemble, span_of
from djqueue.core.metricstore import MetricKeeper
from djqueue.core.options import JobKey
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.sharing import LimiterState
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage
from djqueue.core.versions import version_of

from . import backpressure
from .base import P, Storage, T
from .facets import EventHandler, Events, Jobs, Limiters, Queues, Unsubscribe, Workers
from .reads import Reads

WORKER_TTL = 60_000
"""Milliseconds after its last heartbeat at which a worker counts as gone."""


class EngineStorage(Storage):
    """A storage whose engine answers at once: the async methods need no thread."""

    engine: Engine
    metrics: MetricKeeper

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method."""
        return method(*args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.engine.may_block:
            return backpressure.enqueue(self.events, self.engine.policy, batches, self.engine.enqueue)
        return self.engine.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.engine.may_block:
            return await backpressure.aenqueue(self, self.engine.policy, batches, self._enqueue_soon)
        return self.enqueue(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self.engine.enqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self.engine.finish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        return self.engine.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        return self.engine.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        return self.engine.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self.engine.listen(queues, wake)

    def sweep(self) -> Swept:
        swept = self._sweep()
        if any(swept):
            self.engine.changes.bump()
        self.note_totals()
        return swept

    def _sweep(self) -> Swept:
        return sweep(self.engine, WORKER_TTL)

    def note_totals(self) -> None:
        """Add what the totals have risen by to the metrics."""
        now = self.engine.clock.now()
        for queue in self.engine.queues():
            news = self.engine.news(queue)
            if news:
                try:
                    self.metrics.count(queue, news, now)
                    self.engine.changes.bump()
                except BaseException:
                    self.engine.take_back(queue, news)
                    raise


class EngineJobs(Jobs):
    """Changes of single jobs, made by the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        return self._engine.cancel(queue, ids, reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        return self._engine.promote(queue, ids)

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        return self._engine.reschedule(queue, ids, run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        return self._engine.update(queue, ids, priority, payload)

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        return self._engine.replace_payload(queue, id, payload, old, retry=retry)

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        return self._engine.move(queue, ids, to)

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        return self._engine.retry(queue, ids, dry_run=dry_run)

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        return self._engine.remove(queue, ids, ended_before)


class EngineQueues(Queues):
    """Controls of queues, made by the engine."""

    def __init__(self, engine: Engine, metrics: MetricKeeper) -> None:
        self._engine = engine
        self._metrics = metrics

    def names(self) -> list[str]:
        return self._engine.queues()

    def pause(self, queue: str) -> None:
        self._engine.pause(queue)

    def resume(self, queue: str) -> None:
        self._engine.resume(queue)

    def is_paused(self, queue: str) -> bool:
        return self._engine.is_paused(queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._engine.set_limits(queue, rate, concurrency)

    def set_group_limit(self, queue: str, group: str | None, **overrides: Unpack[GroupWords]) -> None:
        self._engine.set_group_limit(queue, group, **overrides)

    def pause_group(self, queue: str, group: str) -> None:
        self._engine.pause_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        self._engine.resume_group(queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        return self._engine.group_limits(queue)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        return self._engine.clean(queue, states, before, limit)

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        removed = self._engine.obliterate(queue, force=force)
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait until they end, or pass force=True")
        self._metrics.forget(queue)
        return removed


class EngineLimiters(Limiters):
    """Limiters, held by the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._engine.set_limiter(name, rate, concurrency)

    def state(self, name: str) -> LimiterState:
        return self._engine.limiter_state(name)


class EngineWorkers(Workers):
    """Workers, known to the engine."""

    def __init__(self, engine: Engine, metrics: MetricKeeper) -> None:
        self._engine = engine
        self._metrics = metrics

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        return self._engine.register_worker(info)

    def unregister(self, worker_id: str) -> None:
        self._engine.unregister_worker(worker_id)

    def all(self) -> list[WorkerInfo]:
        return self._engine.workers()

    def control(self, worker_id: str, command: str) -> str:
        return self._engine.control_worker(worker_id, command)

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        return self._engine.on_worker_command(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        return self._engine.save_dump(worker_id, text)

    def dump(self, worker_id: str) -> WorkerDump | None:
        return self._engine.worker_dump(worker_id)

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        known = [one for one in stats if self._engine.existing(one.queue) is not None]
        self._metrics.record(known, self._engine.clock.now())
        self._engine.changes.bump()


class EngineReads(Reads):
    """Reads of what the engine knows."""

    def __init__(self, engine: Engine, metrics: MetricKeeper) -> None:
        self._engine = engine
        self._metrics = metrics

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._engine.jobs(queue, ids)

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self.jobs(queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._engine.items(queue, marks)

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self.items(queue, marks)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        return self._engine.states(queue, ids)

    def counts(self, queue: str) -> dict[State, int]:
        return self._engine.counts(queue)

    def waiting_names(self, queue: str) -> dict[str, int]:
        return self._engine.waiting_names(queue)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._engine.page(queue, state, limit, after)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        return self._engine.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        return self._engine.find(id, queues)

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._engine.about(subject, limit, cursor, queues)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._engine.dead_letters(queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        return self._engine.dead_letter_page(queue, limit, after)

    def explain(self, queue: str, id: str) -> Explanation | None:
        facts = self._engine.facts(queue, id)
        return None if facts is None else decide(facts, self._engine.workers())

    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        return walked(explore((queue, id), limit), lambda keys: self.links(keys, limit))

    def links(self, keys: Sequence[JobKey], limit: int) -> Mapping[JobKey, JobLink]:
        """Return what `explore` asks for: these jobs, with their dependencies and up to `limit`
        dependents.
        """
        return self._engine.links(keys, limit)

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._engine.overview(queues)

    def change_version(self) -> str | None:
        engine = self._engine
        # A claim also promotes what is due and fails what has expired.
        sizes = [
            (queue.name, queue.ready.size, queue.delayed.size, len(queue.dead), len(queue.jobs))
            for shard in engine.shards
            for queue in list(shard.queues.values())
        ]
        return version_of([engine.started, engine.changes.value, *sizes], engine.workers())

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        return self._engine.groups(queue, limit, names)

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        span = span_of(start, end, step)
        rows = self._metrics.rows(queues, span, by_name=by_name)
        return assemble(rows, queues, span, by_name=by_name)

    def findings(self) -> Sequence[Finding]:
        return ()


class EngineEvents(Events):
    """Events of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._engine.subscribe(queue, handler, job_id)
