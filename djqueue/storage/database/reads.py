"""Reads of jobs, queues, groups and metrics."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from djqueue.core.diagnostics import Diagnostics, Finding
from djqueue.core.explain import Explanation
from djqueue.core.graph import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from djqueue.core.metrics import Bucket, assemble, since_beginning, span_of
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.states import State
from djqueue.core.summaries import JobSummaryPage
from djqueue.core.versions import version_of
from djqueue.storage.reads import Reads
from djqueue.storage.tables.inspector import DatabaseInspector

from . import deadletters, diagnosis, explain, flows, metrics, overview, pages, upgrade
from .transaction import Tx

if TYPE_CHECKING:
    from .storage import DatabaseStorage

LATEST = 50_000
"""Rows of tallies that are counted for a version."""


class SqlReads(Reads):
    """Reads of the tables."""

    def __init__(self, storage: "DatabaseStorage") -> None:
        self._storage = storage
        self._read = storage.read
        self._tables = DatabaseInspector(storage.alias)
        self._waiting = overview.WaitingCounts()

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._read(lambda _: self._tables.jobs(queue, ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._storage.acall(self.jobs, queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._read(lambda tx: pages.items(tx, queue, marks))

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return await self._storage.acall(self.items, queue, marks)

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        return self._read(lambda _: self._tables.states(queue, ids))

    def counts(self, queue: str) -> dict[State, int]:
        return self._read(lambda tx: tx.counts(queue), is_single=True)

    def waiting_names(self, queue: str) -> dict[str, int]:
        def work(tx: Tx) -> dict[str, int]:
            return self._waiting.of(tx, {queue: tx.counts(queue)[State.WAITING]})[queue].names

        return self._read(work)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._read(lambda _: self._tables.page(queue, state, limit, after))

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        return self._read(
            lambda tx: pages.cursor_page(tx, queue, state, limit, cursor, newest_first=newest_first)
        )

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        def work(tx: Tx) -> list[tuple[str, State]]:
            return self._tables.find(id, self._storage.queue_names(tx) if queues is None else queues)

        return self._read(work)

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._read(lambda _: self._tables.about(subject, limit, cursor, queues))

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._read(lambda tx: deadletters.all_of(tx, queue))

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        return self._read(lambda tx: deadletters.page(tx, queue, limit, after))

    def explain(self, queue: str, id: str) -> Explanation | None:
        return self._read(lambda tx: explain.explain(tx, queue, id))

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return self._read(lambda tx: flows.flow(tx, (queue, id), limit))

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._read(lambda tx: overview.overview(tx, self._waiting, queues))

    def change_version(self) -> str | None:
        return self._read(self._version)

    def _version(self, tx: Tx) -> str:
        # The last rows are counted, because a transaction may commit after others with later rows.
        last = (
            "SELECT MAX(id), COUNT(*) FROM djqueue_tally WHERE id > (SELECT MAX(id) FROM djqueue_tally) - ?"
        )
        return version_of(tx.rows(last, LATEST), self._storage.workers.alive(tx))

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        return self._read(lambda tx: overview.groups(tx, queue, limit, names))

    def group_modes(self, queues: Sequence[str]) -> dict[str, str]:
        return self._read(lambda tx: overview.modes(tx, queues))

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        span = span_of(start, end, step)
        found = self._read(lambda tx: metrics.series(tx, queues, span, by_name=by_name))
        return assemble(found, queues, span, by_name=by_name)

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        return since_beginning(self._read(lambda tx: metrics.everything(tx, queues)))

    def stale_leases(self, grace: int) -> dict[str, int]:
        expired = "SELECT queue, COUNT(*) FROM djqueue_claim WHERE lease_until < ? GROUP BY queue"
        return self._read(lambda tx: dict(tx.rows(expired, tx.tick - grace)))

    def diagnostics(self) -> Diagnostics:
        return self._read(diagnosis.diagnose)

    def findings(self) -> Sequence[Finding]:
        return self._read(upgrade.findings)
