"""Reads of jobs, queues and metrics."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from djqueue.core.explain import Explanation, decide
from djqueue.core.flow import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from djqueue.core.metrics import Bucket
from djqueue.core.overview import DiagnosticLine, Diagnostics, Finding, GroupsOverview, Overview, workers_line
from djqueue.core.pages import PAGE_BYTES, PAGE_ITEMS, JobPage, JobSummaryPage
from djqueue.core.states import State
from djqueue.core.workers import version_of
from djqueue.storage.reads import Reads

from . import diagnosis, health, pages, records
from .connections import Connections
from .inspector import RedisInspector, counts_of
from .keyspace import Keyspace, answer, chunks
from .metrics import Metrics
from .records import STATES, mapping, pack_text, text
from .removing import Scanning, of_jobs
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .workers import RedisWorkers


class RedisReads(Reads):
    """Reads, each a script or a few commands."""

    def __init__(
        self,
        keyspace: Keyspace,
        connections: Connections,
        inspector: RedisInspector,
        scanning: Scanning,
        metrics: Metrics,
        workers: RedisWorkers,
    ) -> None:
        self._keyspace = keyspace
        self._connections = connections
        self._inspector = inspector
        self._scanning = scanning
        self._metrics = metrics
        self._workers = workers

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._keyspace.run(self._jobs(queue, ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._keyspace.arun(self._jobs(queue, ids))

    def _jobs(self, queue: str, ids: Sequence[str]) -> Steps[list[JobRecord | None]]:
        keys = self._keyspace.keys(queue)
        found: list[JobRecord | None] = []
        for some in chunks(ids, 200):
            arguments = [*map(pack_text, some)]
            [[now, replies]] = yield [
                ScriptCall(script("read"), keys, arguments, of_jobs(keys, some), sequence=False)
            ]
            for job_id, reply in zip(some, replies, strict=True):
                found.append(None if reply is None else records.record(queue, job_id, reply, int(now)))
        return found

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._keyspace.run(self._items(queue, marks))

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return await self._keyspace.arun(self._items(queue, marks))

    def _items(self, queue: str, marks: Sequence[ItemMark]) -> Steps[list[ItemPage | None]]:
        keys = self._keyspace.keys(queue)
        arguments: list[Any] = [PAGE_BYTES, PAGE_ITEMS]
        for mark in marks:
            arguments += (pack_text(mark.id), records.pack_token(queue, mark.run), mark.start)
        theirs = [keys.items(mark.id) for mark in marks]
        [[now, replies]] = yield [ScriptCall(script("items"), keys, arguments, theirs, sequence=False)]
        return [None if reply is None else records.item_page(queue, reply, int(now)) for reply in replies]

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        return self._keyspace.run(self._keyspace.states(queue, ids))

    def counts(self, queue: str) -> dict[State, int]:
        counters, delayed, active, failed = self._keyspace.run(
            answer(ScriptCall(script("counts"), self._keyspace.keys(queue), [], sequence=False))
        )
        return counts_of(mapping(counters), delayed, active, failed)

    def waiting_names(self, queue: str) -> dict[str, int]:
        counters = self._keyspace.run(
            answer(RedisCommand((b"HGETALL", self._keyspace.keys(queue).key("count"))))
        )
        return {name[2:]: number for name, number in mapping(counters).items() if name.startswith("n:")}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._keyspace.run(self._page(queue, state, limit, after))

    def _page(self, queue: str, state: State | None, limit: int, after: str | None) -> Steps[list[JobRecord]]:
        wanted = frozenset(State) if state is None else frozenset({state})
        found = sorted((yield from self._scanning.jobs(self._keyspace.keys(queue), wanted)))
        start = 0
        if after is not None:
            start = next((at for at, (_, job_id) in enumerate(found, 1) if job_id == after), len(found))
        ids = [job_id for _, job_id in islice(found, start, start + limit)]
        page = yield from self._jobs(queue, ids)
        return [record for record in page if record is not None and record.state in wanted]

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        steps = pages.cursor_page(
            self._keyspace.keys(queue), state, limit, cursor, self._jobs, newest_first=newest_first
        )
        return self._keyspace.run(steps)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        return self._keyspace.run(self._find(id, queues))

    def _find(self, job_id: str, queues: Sequence[str] | None) -> Steps[list[tuple[str, State]]]:
        names = list(queues) if queues is not None else (yield from self._keyspace.names())
        if not names:
            return []
        calls = [
            ScriptCall(script("states"), self._keyspace.keys(name), [pack_text(job_id)], sequence=False)
            for name in names
        ]
        answers = yield [*calls]
        found = [(name, STATES.get(codes[0])) for name, codes in zip(names, answers, strict=True)]
        return [(name, state) for name, state in found if state is not None]

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._keyspace.run(self._inspector.about(subject, limit, cursor, queues))

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._keyspace.run(self._dead_letters(queue))

    def _dead_letters(self, queue: str) -> Steps[list[DeadLetterRecord]]:
        keys = self._keyspace.keys(queue)
        [ids] = yield [RedisCommand((b"ZRANGE", keys.key("dead"), 0, -1))]
        dead_letters = []
        for some in chunks(ids):
            [found] = yield [RedisCommand((b"HMGET", keys.key("dead_letters"), *some))]
            dead_letters += [
                records.dead_letter(queue, text(job_id), data)
                for job_id, data in zip(some, found, strict=True)
                if data is not None
            ]
        return dead_letters

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        begin = b"-inf" if after is None else b"(%d" % int(after)
        call = ScriptCall(
            script("dead_letters"), self._keyspace.keys(queue), [begin, limit + 1], sequence=False
        )
        now, found = self._keyspace.run(answer(call))
        dead_letters = [
            records.dead_letter(queue, text(found[at + 1]), found[at + 2])
            for at in range(0, min(len(found), 3 * limit), 3)
        ]
        is_last = len(found) <= 3 * limit
        following = None if is_last else str(int(float(found[3 * limit - 3])))
        return DeadLetterPage(dead_letters, following, int(now))

    def explain(self, queue: str, id: str) -> Explanation | None:
        facts = self._keyspace.run(self._inspector.facts(queue, id))
        return None if facts is None else decide(facts, self._workers.all())

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return self._keyspace.run(self._inspector.flow((queue, id), limit))

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._keyspace.run(self._inspector.overview(queues))

    def change_version(self) -> str | None:
        """Return a version of all queues, jobs and workers, with two reads of each queue in one request."""
        return version_of([self._keyspace.run(self._versions())], self._workers.all())

    def _versions(self) -> Steps[list[tuple[str, bytes]]]:
        names = yield from self._keyspace.names()
        if not names:
            return []
        keys = [self._keyspace.keys(name) for name in names]
        # Plain enqueues and claims change the last numbers instead of the version.
        found = yield [
            *(RedisCommand((b"GET", queue.key("version"))) for queue in keys),
            *(RedisCommand((b"HMGET", queue.key("meta"), b"rear", b"token")) for queue in keys),
        ]
        versions, numbers = found[: len(names)], found[len(names) :]
        return [
            (name, b":".join(value or b"" for value in (version, *last)))
            for name, version, last in zip(names, versions, numbers, strict=True)
        ]

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        return self._keyspace.run(self._inspector.groups(queue, limit, names))

    def group_modes(self, queues: Sequence[str]) -> dict[str, str]:
        return self._keyspace.run(self._inspector.group_modes(queues))

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        return self._keyspace.run(self._metrics.series(queues, start, end, step, by_name))

    def stale_leases(self, grace: int) -> dict[str, int]:
        return self._keyspace.run(self._stale_leases(grace))

    def _stale_leases(self, grace: int) -> Steps[dict[str, int]]:
        names = yield from self._keyspace.names()
        if not names:
            return {}
        until = (yield from self._inspector.overview([])).at - grace
        counts = yield [
            RedisCommand((b"ZCOUNT", self._keyspace.keys(name).key("lease"), b"-inf", b"(%d" % until))
            for name in names
        ]
        return {name: count for name, count in zip(names, counts, strict=True) if count}

    def cumulative(self, queues: Sequence[str] | None = None) -> list[Bucket]:
        return self._keyspace.run(self._metrics.cumulative(queues))

    def diagnostics(self) -> Diagnostics:
        names = self._keyspace.run(self._keyspace.names())
        lines = [
            DiagnosticLine("storage.where", "Storage", "Location", self._connections.describe()),
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(names):,}"),
            *diagnosis.of_servers(self._connections),
            *self._keyspace.run(diagnosis.of_keys([self._keyspace.keys(name) for name in names])),
            workers_line(len(self._workers.all())),
        ]
        return Diagnostics("redis", self.overview([]).at, lines)

    def findings(self) -> Sequence[Finding]:
        """Check the servers, and return what is or may be wrong."""
        return health.findings(self._connections)
