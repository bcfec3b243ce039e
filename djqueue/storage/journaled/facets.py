"""The facets of the database storage: each operation is answered as the table in `operations` says."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from djqueue.core.diagnostics import DiagnosticLine, Diagnostics, Finding
from djqueue.core.explain import Explanation
from djqueue.core.graph import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.job import (
    CancelResult,
    DeadLetterPage,
    DeadLetterRecord,
    ItemMark,
    ItemPage,
    JobRecord,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.metrics import Bucket, RunStats
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.sharing import LimiterState
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage
from djqueue.storage.facets import EventHandler, Events, Jobs, Limiters, Queues, Unsubscribe, Workers
from djqueue.storage.reads import Reads

if TYPE_CHECKING:
    from .storage import JournaledStorage


class DatabaseJobs(Jobs):
    """Changes of single jobs."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._ask = storage.ask

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        return self._ask(Jobs.cancel, queue, list(ids), reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        return self._ask(Jobs.promote, queue, list(ids))

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        return self._ask(Jobs.reschedule, queue, list(ids), run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        return self._ask(Jobs.update, queue, list(ids), priority, payload)

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        return self._ask(Jobs.replace_payload, queue, id, payload, old, retry=retry)

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        if queue == to:
            raise ValueError(f"the jobs are already in queue {to!r}; pass a different queue")
        return self._ask(Jobs.move, queue, list(ids), to)

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        return self._ask(Jobs.retry, queue, list(ids), dry_run=dry_run)

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        return self._ask(Jobs.remove, queue, list(ids), ended_before=ended_before)


class DatabaseQueues(Queues):
    """Controls of queues."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._ask = storage.ask

    def names(self) -> list[str]:
        return self._ask(Queues.names)

    def pause(self, queue: str) -> None:
        self._ask(Queues.pause, queue)

    def resume(self, queue: str) -> None:
        self._ask(Queues.resume, queue)

    def is_paused(self, queue: str) -> bool:
        return self._ask(Queues.is_paused, queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._ask(Queues.set_limits, queue, **_given(rate, concurrency))

    def set_group_limit(self, queue: str, group: str | None, **overrides: Unpack[GroupWords]) -> None:
        self._ask(Queues.set_group_limit, queue, group, **overrides)

    def pause_group(self, queue: str, group: str) -> None:
        self._ask(Queues.pause_group, queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        self._ask(Queues.resume_group, queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        return self._ask(Queues.group_limits, queue)

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        return self._ask(Queues.clean, queue, states, before, limit)

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        return self._ask(Queues.obliterate, queue, force=force)


class DatabaseLimiters(Limiters):
    """Shared limiters."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._ask = storage.ask

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._ask(Limiters.set, name, **_given(rate, concurrency))

    def state(self, name: str) -> LimiterState:
        return self._ask(Limiters.state, name)


class DatabaseWorkers(Workers):
    """Live workers."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._storage = storage
        self._ask = storage.ask

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        return self._ask(Workers.register, info)

    def unregister(self, worker_id: str) -> None:
        self._storage.unregister_worker(worker_id)

    def all(self) -> list[WorkerInfo]:
        return self._ask(Workers.all)

    def control(self, worker_id: str, command: str) -> str:
        return self._ask(Workers.control, worker_id, command)

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        return self._storage.on_command(worker_id, wake)

    def save_dump(self, worker_id: str, text: str) -> bool:
        return self._ask(Workers.save_dump, worker_id, text)

    def dump(self, worker_id: str) -> WorkerDump | None:
        return self._ask(Workers.dump, worker_id)

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        self._ask(Workers.record_runs, list(stats))


class DatabaseReads(Reads):
    """Reads of jobs and queues."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._storage = storage
        self._ask = storage.ask

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._ask(Reads.jobs, queue, list(ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._storage.acall(self.jobs, queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._ask(Reads.items, queue, list(marks))

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return await self._storage.acall(self.items, queue, marks)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        return self._ask(Reads.states, queue, list(ids))

    def counts(self, queue: str) -> dict[State, int]:
        return self._ask(Reads.counts, queue)

    def waiting_names(self, queue: str) -> dict[str, int]:
        return self._ask(Reads.waiting_names, queue)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._ask(Reads.page, queue, state, limit, after)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        return self._ask(Reads.cursor_page, queue, state, limit, cursor, newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        return self._ask(Reads.find, id, _listed(queues))

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._ask(Reads.jobs_about, subject, limit, cursor, _listed(queues))

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._ask(Reads.dead_letters, queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        return self._ask(Reads.dead_letter_page, queue, limit, after)

    def explain(self, queue: str, id: str) -> Explanation | None:
        return self._ask(Reads.explain, queue, id)

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return self._ask(Reads.flow, queue, id, limit)

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._ask(Reads.overview, _listed(queues))

    def change_version(self) -> str | None:
        return self._storage.change_version()

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        return self._ask(Reads.groups, queue, limit, list(names))

    def group_modes(self, queues: Sequence[str]) -> dict[str, str]:
        return self._ask(Reads.group_modes, list(queues))

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        return self._ask(Reads.series, _listed(queues), start, end, step, by_name)

    def stale_leases(self, grace: int) -> dict[str, int]:
        return self._ask(Reads.stale_leases, grace)

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        return self._ask(Reads.cumulative, _listed(queues))

    def diagnostics(self) -> Diagnostics:
        answer = self._ask(Reads.diagnostics)
        location = DiagnosticLine("storage.where", "Storage", "Location", self._storage.describe())
        return answer._replace(lines=[location, *answer.lines])

    def findings(self) -> Sequence[Finding]:
        return ()


class DatabaseEvents(Events):
    """Events of jobs."""

    def __init__(self, storage: "JournaledStorage") -> None:
        self._storage = storage

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._storage.active.events.subscribe(queue, handler, job_id)


def _listed(names: Sequence[str] | None) -> list[str] | None:
    return None if names is None else list(names)


def _given(rate: SetRate, concurrency: SetConcurrency) -> dict[str, Any]:
    # UNSET has no value on the wire.
    return {
        name: value for name, value in (("rate", rate), ("concurrency", concurrency)) if value is not UNSET
    }
