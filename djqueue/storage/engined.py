"""The contract over an engine in this process: what the memory and the database storage share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Unpack

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
from .base import EventHandler, P, Storage, T, Unsubscribe

WORKER_TTL = 60_000
"""Milliseconds after which a silent worker counts as gone."""


class EngineStorage(Storage):
    """Every verb is the engine's, at once: no operation blocks, so the async twins do not need a thread."""

    engine: Engine
    metrics: MetricKeeper

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Storage.acall`."""
        return method(*args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`."""
        if self.engine.may_block:
            return backpressure.enqueue(self, self.engine.policy, batches, self.engine.enqueue)
        return self.engine.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if self.engine.may_block:
            return await backpressure.aenqueue(self, self.engine.policy, batches, self._enqueue_soon)
        return self.enqueue(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self.engine.enqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        return self.engine.finish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """See `Storage.renew`."""
        return self.engine.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """See `Storage.report`."""
        return self.engine.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """See `Storage.emit`."""
        return self.engine.emit(emissions)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `Storage.items`."""
        return self.engine.items(queue, marks)

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """See `Storage.cancel`."""
        return self.engine.cancel(queue, ids, reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.promote`."""
        return self.engine.promote(queue, ids)

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """See `Storage.reschedule`."""
        return self.engine.reschedule(queue, ids, run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """See `Storage.update`."""
        return self.engine.update(queue, ids, priority, payload)

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """See `Storage.replace_payload`."""
        return self.engine.replace_payload(queue, id, payload, old, retry=retry)

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`."""
        return self.engine.move(queue, ids, to)

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        return self.engine.retry(queue, ids, dry_run=dry_run)

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """See `Storage.remove`."""
        return self.engine.remove(queue, ids, ended_before)

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return self.engine.queues()

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self.engine.pause(queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self.engine.resume(queue)

    def is_paused(self, queue: str) -> bool:
        """See `Storage.is_paused`."""
        return self.engine.is_paused(queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limits`."""
        self.engine.set_limits(queue, rate, concurrency)

    def set_group_limit(self, queue: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """See `Storage.set_group_limit`."""
        self.engine.set_group_limit(queue, group, **said)

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self.engine.pause_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        self.engine.resume_group(queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """See `Storage.group_limits`."""
        return self.engine.group_limits(queue)

    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limiter`."""
        self.engine.set_limiter(name, rate, concurrency)

    def limiter_state(self, name: str) -> LimiterState:
        """See `Storage.limiter_state`."""
        return self.engine.limiter_state(name)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        return self.engine.clean(queue, states, before, limit)

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        removed = self.engine.obliterate(queue, force=force)
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait until they end, or pass force=True")
        self.metrics.forget(queue)
        return removed

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        return self.engine.jobs(queue, ids)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        return self.engine.states(queue, ids)

    def counts(self, queue: str) -> dict[State, int]:
        """See `Storage.counts`."""
        return self.engine.counts(queue)

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """See `Storage.overview`."""
        return self.engine.overview(queues)

    def change_version(self) -> str | None:
        """See `Storage.change_version`."""
        engine = self.engine
        # A claim also promotes what is due and buries what has expired.
        sizes = [
            (queue.name, queue.ready.size, queue.delayed.size, len(queue.dead), len(queue.jobs))
            for shard in engine.shards
            for queue in list(shard.queues.values())
        ]
        return version_of([engine.started, engine.changes.value, *sizes], engine.workers())

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        """See `Storage.groups`."""
        return self.engine.groups(queue, limit, names)

    def explain(self, queue: str, id: str) -> Explanation | None:
        """See `Storage.explain`."""
        facts = self.engine.facts(queue, id)
        return None if facts is None else decide(facts, self.workers())

    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        """See `Storage.flow`."""
        return walked(explore((queue, id), limit), lambda keys: self.links(keys, limit))

    def links(self, keys: Sequence[JobKey], most: int) -> Mapping[JobKey, JobLink]:
        """What `explore` asks for."""
        return self.engine.links(keys, most)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """See `Storage.cursor_page`."""
        return self.engine.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """See `Storage.find`."""
        return self.engine.find(id, queues)

    def about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """See `Storage.about`."""
        return self.engine.about(subject, limit, cursor, queues)

    def waiting_names(self, queue: str) -> dict[str, int]:
        """See `Storage.waiting_names`."""
        return self.engine.waiting_names(queue)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        return self.engine.page(queue, state, limit, after)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """See `Storage.dead_letters`."""
        return self.engine.dead_letters(queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """See `Storage.dead_letter_page`."""
        return self.engine.dead_letter_page(queue, limit, after)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.listen`."""
        return self.engine.listen(queues, wake)

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """See `Storage.subscribe`."""
        return self.engine.subscribe(queue, handler, job_id)

    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """See `Storage.register_worker`."""
        return self.engine.register_worker(info)

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`."""
        self.engine.unregister_worker(worker_id)

    def workers(self) -> list[WorkerInfo]:
        """See `Storage.workers`."""
        return self.engine.workers()

    def control_worker(self, worker_id: str, command: str) -> str:
        """See `Storage.control_worker`."""
        return self.engine.control_worker(worker_id, command)

    def on_worker_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.on_worker_command`."""
        return self.engine.on_worker_command(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        """See `Storage.save_dump`."""
        return self.engine.save_dump(worker_id, text)

    def worker_dump(self, worker_id: str) -> WorkerDump | None:
        """See `Storage.worker_dump`."""
        return self.engine.worker_dump(worker_id)

    def maintain(self) -> Swept:
        """See `Storage.maintain`."""
        swept = self._sweep()
        if any(swept):
            self.engine.changes.bump()
        self.note_totals()
        return swept

    def _sweep(self) -> Swept:
        return sweep(self.engine, WORKER_TTL)

    # Metrics.

    def note_totals(self) -> None:
        """Have in the buckets what the totals have risen by."""
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

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """See `Storage.record_runs`."""
        known = [one for one in stats if self.engine.existing(one.queue) is not None]
        self.metrics.record(known, self.engine.clock.now())
        self.engine.changes.bump()

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """See `Storage.series`."""
        span = span_of(start, end, step)
        rows = self.metrics.rows(queues, span, by_name=by_name)
        return assemble(rows, queues, span, by_name=by_name)
