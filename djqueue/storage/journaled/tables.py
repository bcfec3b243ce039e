"""Answer operations from the tables: clients fall back to them while no scheduler responds.

The tables are a moment behind the scheduler's engine.
"""

from collections.abc import Callable, Mapping, Sequence

from djqueue.core.clock import Clock
from djqueue.core.diagnostics import Diagnostics, Finding
from djqueue.core.explain import Explanation, decide
from djqueue.core.graph import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.groups import GroupLimit
from djqueue.core.job import (
    DeadLetterPage,
    DeadLetterRecord,
    ItemMark,
    ItemPage,
    JobRecord,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.metrics import Bucket, assemble, since_beginning, span_of
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import NO_LIMITS, LimiterPolicy, LimiterState
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage
from djqueue.storage.tables.groups import recorded_modes
from djqueue.storage.tables.inspector import DatabaseInspector

from . import capped, diagnosis, metrics


class TableAnswers:
    """The operations that the tables can answer while no scheduler responds."""

    def __init__(
        self,
        alias: str,
        clock: Clock,
        policy: Callable[[str], QueuePolicy],
        limiters: Mapping[str, LimiterPolicy] | None,
    ) -> None:
        inspector = DatabaseInspector(alias)
        self.reads = TableReads(alias, inspector, clock, policy)
        self.queues = TableQueues(inspector)
        self.limiters = TableLimiters(inspector, limiters or {})
        self.workers = TableWorkers(inspector, clock)


class TableReads:
    """Reads of the tables."""

    def __init__(
        self, alias: str, inspector: DatabaseInspector, clock: Clock, policy: Callable[[str], QueuePolicy]
    ) -> None:
        self._alias = alias
        self._inspector = inspector
        self._clock = clock
        self._policy = policy

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._inspector.jobs(queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._inspector.items(queue, marks, self._clock.now())

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        return self._inspector.states(queue, ids)

    def counts(self, queue: str) -> dict[State, int]:
        return {**dict.fromkeys(State, 0), **self._inspector.counts(queue)}

    def waiting_names(self, queue: str) -> dict[str, int]:
        # Includes jobs that a group holds back: the tables do not tell them apart.
        return self._inspector.waiting_names(queue)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._inspector.page(queue, state, limit, after)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        return self._inspector.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        return self._inspector.find(id, self._inspector.queues() if queues is None else queues)

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._inspector.about(subject, limit, cursor, queues)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._inspector.dead_letters(queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        return self._inspector.dead_letter_page(queue, limit, after, self._clock.now())

    def explain(self, queue: str, id: str) -> Explanation | None:
        facts = capped.facts(self._alias, queue, id, self._clock.now(), self._policy(queue))
        # Without a scheduler no worker can claim.
        return None if facts is None else decide(facts, [])

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return capped.flow(self._alias, (queue, id), limit)

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        names = self._inspector.queues() if queues is None else queues
        return capped.overview(self._alias, names, self._clock.now(), self._policy)

    def change_version(self) -> str | None:
        return None

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        return capped.groups(self._alias, queue, limit, names, self._policy(queue))

    def group_modes(self, queues: Sequence[str]) -> dict[str, str]:
        recorded = recorded_modes(self._alias, queues)
        return {queue: recorded.get(queue, self._policy(queue).group_mode) for queue in queues}

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        span = span_of(start, end, step)
        rows = metrics.read(self._alias, queues, span, by_name=by_name)
        return assemble(rows, queues, span, by_name=by_name)

    def stale_leases(self, grace: int) -> dict[str, int]:
        return self._inspector.stale_leases(self._clock.now() - grace)

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        return since_beginning(metrics.read_everything(self._alias, queues))

    def diagnostics(self) -> Diagnostics:
        now = self._clock.now()
        return Diagnostics("database", now, diagnosis.of_database(self._alias, now))

    def findings(self) -> Sequence[Finding]:
        return ()


class TableQueues:
    """Queues, as the tables have them."""

    def __init__(self, inspector: DatabaseInspector) -> None:
        self._inspector = inspector

    def names(self) -> list[str]:
        return self._inspector.queues()

    def is_paused(self, queue: str) -> bool:
        return self._inspector.is_paused(queue)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        return self._inspector.group_limits(queue)


class TableLimiters:
    """Limiters while no scheduler runs, so that nothing of them is in use."""

    def __init__(self, inspector: DatabaseInspector, limiters: Mapping[str, LimiterPolicy]) -> None:
        self._inspector = inspector
        self._limiters = limiters

    def state(self, name: str) -> LimiterState:
        configured = self._limiters.get(name, NO_LIMITS)
        override = self._inspector.limiter(name)
        rate, concurrency = (configured.rate, configured.concurrency) if override is None else override
        return LimiterState(rate, concurrency, 0, None if rate is None else rate.capacity, ())


class TableWorkers:
    """Workers, as the tables have them."""

    def __init__(self, inspector: DatabaseInspector, clock: Clock) -> None:
        self._inspector = inspector
        self._clock = clock

    def all(self) -> list[WorkerInfo]:
        return self._inspector.workers(self._clock.now())

    def dump(self, _worker_id: str) -> WorkerDump | None:
        # Only the scheduler keeps dumps.
        return None
