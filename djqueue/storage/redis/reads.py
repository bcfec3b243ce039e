"""Reads of jobs, queues, concurrency keys, workflows and metrics, each a script or a few commands.

Each script reads one queue at one moment.
"""

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Explanation, Facts, decide
from djqueue.core.flow import MAX_FLOW_JOBS, FlowGraph, FlowNode, JobLink, explore_all, link
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from djqueue.core.metrics import Bucket
from djqueue.core.options import JobKey
from djqueue.core.overview import (
    Diagnostics,
    Finding,
    KeyOverview,
    KeysOverview,
    Overview,
    QueueOverview,
    Totals,
    storage_lines,
    workers_line,
)
from djqueue.core.pages import (
    PAGE_BYTES,
    PAGE_ITEMS,
    JobPage,
    JobSummary,
    JobSummaryPage,
    Marked,
    first_of,
    mark_at,
    mark_before,
    mark_in,
    page_of,
    position_of,
    summary_of,
)
from djqueue.core.policies import GLOBAL, NO_LIMIT, QueuePolicy, Rate, hold_on, standing
from djqueue.core.states import PENDING, State
from djqueue.core.workers import version_of
from djqueue.storage.facets import Reads

from . import health, records
from .connections import Connections
from .keys import READ_KEYS
from .keyspace import Keyspace, chunks, scan
from .limits import SharedLimits
from .metrics import Metrics
from .records import NUMBER, STATES, key_limit, pack_text, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .workers import RedisWorkers

MAX_GROUPS = 250
"""Groups of a queue that are read in order; if there are more, as many samples at even distances."""
MAX_SHARING = 100
"""Queues of a limiter whose active jobs are read."""
STRUCTURES = {
    State.WAITING: ("w", "z", "unhandled", "group_waiting"),
    State.DELAYED: ("due",),
    State.BLOCKED: ("unmet",),
    State.ACTIVE: ("lease",),
    State.COMPLETED: ("finished",),
    State.FAILED: ("dead",),
    State.CANCELLED: ("finished",),
}
"""Structures with the jobs of each state, in page order."""
OUTCOME_CODES = {State.COMPLETED: b"c", State.CANCELLED: b"x"}
AT_ONCE = 500
"""Entries of one read."""


class RedisReads(Reads):
    """Reads of a storage."""

    def __init__(
        self,
        keyspace: Keyspace,
        connections: Connections,
        limits: SharedLimits,
        metrics: Metrics,
        workers: RedisWorkers,
    ) -> None:
        self._keyspace = keyspace
        self._connections = connections
        self._limits = limits
        self._metrics = metrics
        self._workers = workers

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._keyspace.run(self._jobs(queue, ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._keyspace.arun(self._jobs(queue, ids))

    def _jobs(self, queue: str, ids: Sequence[str]) -> Steps[list[JobRecord | None]]:
        keys = self._keyspace.keys(queue)
        jobs: list[JobRecord | None] = []
        for chunk in chunks(ids, 200):
            arguments = [*map(pack_text, chunk)]
            [[now, replies]] = yield [
                ScriptCall(script("read"), keys, arguments, keys.of_jobs(chunk, READ_KEYS), sequence=False)
            ]
            for job_id, reply in zip(chunk, replies, strict=True):
                jobs.append(None if reply is None else records.record(queue, job_id, reply, int(now)))
        return jobs

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
        counters, delayed, active, failed = self._keyspace.ask(
            ScriptCall(script("counts"), self._keyspace.keys(queue), [], sequence=False)
        )
        return _counts(_counters(counters), delayed, active, failed)

    def waiting_names(self, queue: str) -> dict[str, int]:
        found = self._keyspace.ask(RedisCommand((b"HGETALL", self._keyspace.keys(queue).key("meta"))))
        return {name[2:]: number for name, number in _counters(found).items() if name.startswith("n:")}

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        return self._keyspace.run(self._page(queue, state, limit, after))

    def _page(self, queue: str, state: State | None, limit: int, after: str | None) -> Steps[list[JobRecord]]:
        wanted = frozenset(State) if state is None else frozenset({state})
        jobs = sorted((yield from scan(self._keyspace.keys(queue), wanted)))
        start = 0
        if after is not None:
            start = next((at for at, (_, job_id) in enumerate(jobs, 1) if job_id == after), len(jobs))
        ids = [job_id for _, job_id in islice(jobs, start, start + limit)]
        page = yield from self._jobs(queue, ids)
        return [record for record in page if record is not None and record.state in wanted]

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        return self._keyspace.run(self._cursor_page(queue, state, limit, cursor, newest_first))

    def _cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None, newest_first: bool
    ) -> Steps[JobPage]:
        keys, position = self._keyspace.keys(queue), position_of(cursor, newest_first=newest_first)
        structures = STRUCTURES[state][:: -1 if position.is_descending else 1]
        name, score, mark = _unpack(position.mark) if position.mark is not None else (structures[0], "", b"")
        if name not in structures:
            raise OptionError(f"cursor: {cursor!r} belongs to a page of another state")
        jobs: list[Marked] = []
        last_score: bytes | str = score
        direction, outcome = int(position.is_descending), OUTCOME_CODES.get(state, b"")
        for structure in structures[structures.index(name) :]:
            while len(jobs) <= limit:
                size = AT_ONCE if structure == "finished" else min(AT_ONCE, limit + 1 - len(jobs))
                arguments = [structure, size, direction, mark, last_score, outcome]
                [reply] = yield [ScriptCall(script("page"), keys, arguments, sequence=False)]
                entries = [tuple(reply[at : at + 3]) for at in range(0, len(reply), 3)]
                if not entries:
                    break
                shown = [(text(job_id), *rest) for job_id, *rest in entries if job_id]
                found = yield from self._jobs(queue, [job_id for job_id, *_ in shown])
                for (_, its_mark, its_score), record in zip(shown, found, strict=True):
                    if record is not None and record.state is state:
                        jobs.append((_pack(structure, its_score, its_mark), record))
                _, mark, last_score = entries[-1]
            mark, last_score = b"", ""
        return page_of(jobs, limit, position)

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
        states = [(name, STATES.get(codes[0])) for name, codes in zip(names, answers, strict=True)]
        return [(name, state) for name, state in states if state is not None]

    def jobs_about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        return self._keyspace.run(self._jobs_about(subject, limit, cursor, queues))

    def _jobs_about(
        self, subject: str, limit: int, cursor: str | None, queues: Sequence[str] | None
    ) -> Steps[JobSummaryPage]:
        """Return jobs about a subject, ordered by enqueue time, queue and number."""
        mark = mark_in(cursor)
        before = None if mark is None else mark_before(mark)
        names = list(queues) if queues is not None else (yield from self._keyspace.names())
        calls = [
            ScriptCall(
                script("jobs_about"),
                self._keyspace.keys(name),
                [pack_text(subject), _behind(name, before), limit + 1],
                sequence=False,
            )
            for name in names
        ]
        answers = (yield [*calls]) if calls else []
        summaries: list[tuple[tuple[int, str, str], JobSummary]] = []
        for name, (now, jobs) in zip(names, answers, strict=True):
            for at in range(0, len(jobs), 3):
                job_id, blob, st = jobs[at : at + 3]
                record = _record(name, text(job_id), blob, st, int(now))
                if record is not None:
                    summaries.append(
                        ((record.created_at, name, blob[: NUMBER.size].hex()), summary_of(record))
                    )
        summaries.sort(key=itemgetter(0), reverse=True)
        return first_of([(mark_at(*key), summary) for key, summary in summaries], limit)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        return self._keyspace.run(self._dead_letters(queue))

    def _dead_letters(self, queue: str) -> Steps[list[DeadLetterRecord]]:
        keys = self._keyspace.keys(queue)
        [ids] = yield [RedisCommand((b"ZRANGE", keys.key("dead"), 0, -1))]
        dead_letters = []
        for chunk in chunks(ids):
            [letters] = yield [RedisCommand((b"HMGET", keys.key("dead_letters"), *chunk))]
            dead_letters += [
                records.dead_letter(queue, text(job_id), data)
                for job_id, data in zip(chunk, letters, strict=True)
                if data is not None
            ]
        return dead_letters

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        begin = b"-inf" if after is None else b"(%d" % int(after)
        call = ScriptCall(
            script("dead_letters"), self._keyspace.keys(queue), [begin, limit + 1], sequence=False
        )
        now, letters = self._keyspace.ask(call)
        dead_letters = [
            records.dead_letter(queue, text(letters[at + 1]), letters[at + 2])
            for at in range(0, min(len(letters), 3 * limit), 3)
        ]
        is_last = len(letters) <= 3 * limit
        following = None if is_last else str(int(float(letters[3 * limit - 3])))
        return DeadLetterPage(dead_letters, following, int(now))

    def explain(self, queue: str, id: str) -> Explanation | None:
        facts = self._keyspace.run(self._facts(queue, id))
        return None if facts is None else decide(facts, self._workers.all())

    def _facts(self, queue: str, job_id: str) -> Steps[Facts | None]:
        """Return the facts about a job at one moment; states of jobs in other queues are read later."""
        policy = self._keyspace.policy(queue)
        arguments = [pack_text(job_id), policy.key_limit, MAX_BEFORE, SHOWN]
        [reply] = yield [ScriptCall(script("explain"), self._keyspace.keys(queue), arguments, sequence=False)]
        facts = None if len(reply) == 1 else _facts_of(queue, job_id, policy, reply)
        if facts is None or facts.state not in PENDING:
            return facts
        if policy.limiter is not None:
            facts = yield from self._limiter_facts(policy.limiter, facts)
        if not facts.unmet:
            return facts
        wanted: dict[str, list[str]] = {}
        for one in facts.unmet:
            wanted.setdefault(one.queue, []).append(one.id)
        known: dict[JobKey, State | None] = {}
        for name, ids in wanted.items():
            states = yield from self._keyspace.states(name, ids)
            known.update({(name, other): state for other, state in zip(ids, states, strict=True)})
        unmet = tuple(one._replace(state=known[one.queue, one.id]) for one in facts.unmet)
        return facts._replace(unmet=unmet)

    def _limiter_facts(self, limiter: str, facts: Facts) -> Steps[Facts]:
        """Add the state of the limiter and the holders of its permits, each read a moment later."""
        state, wait = yield from self._limits.standing(limiter)
        facts = facts._replace(
            limiter=limiter,
            limiter_next_at=facts.at + wait if wait else None,
            limiter_limit=state.concurrency,
            limiter_used=state.used,
        )
        if state.free is None:
            return facts
        # A claim's permits get their names with the next request, so the queues are read instead.
        names = yield from self._keyspace.names()
        queues = [name for name in names if self._keyspace.policy(name).limiter == limiter][:MAX_SHARING]
        keys = [self._keyspace.keys(name) for name in queues]
        leases = yield [
            RedisCommand((b"ZRANGE", queue_keys.key("lease"), 0, SHOWN - 1)) for queue_keys in keys
        ]
        wanted = [
            (name, queue_keys, ids) for name, queue_keys, ids in zip(queues, keys, leases, strict=True) if ids
        ]
        if not wanted:
            return facts
        answers = yield [
            RedisCommand((b"HMGET", queue_keys.key("st"), *ids)) for _, queue_keys, ids in wanted
        ]
        holders = [
            (st[1:9], BlockingJob(text(job_id), unpack(st[9:])[3], "" if name == facts.queue else name))
            for (name, _, ids), states in zip(wanted, answers, strict=True)
            for job_id, st in zip(ids, states, strict=True)
            if st is not None and st[:1] in b"aA"
        ]
        # Tokens ascend with time in all queues.
        holders.sort(key=itemgetter(0))
        return facts._replace(limiter_holders=tuple(holder for _, holder in holders[:SHOWN]))

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return self.flows([(queue, id)], limit)[0]

    def flows(self, keys: Sequence[JobKey], limit: int = MAX_FLOW_JOBS) -> list[FlowGraph | None]:
        return self._keyspace.run(self._flows(keys, limit))

    def _flows(self, roots: Sequence[JobKey], limit: int) -> Steps[list[FlowGraph | None]]:
        """Return the graphs of flows. Each step is one round trip, with a call for each queue."""
        steps = explore_all(roots, limit)
        try:
            wanted = next(steps)
            while True:
                by_queue: dict[str, list[str]] = {}
                for queue, job_id in wanted:
                    by_queue.setdefault(queue, []).append(job_id)
                answers = yield [
                    ScriptCall(
                        script("links"),
                        self._keyspace.keys(queue),
                        [limit, *map(pack_text, ids)],
                        sequence=False,
                    )
                    for queue, ids in by_queue.items()
                ]
                links: dict[JobKey, JobLink] = {}
                for (queue, ids), (now, replies) in zip(by_queue.items(), answers, strict=True):
                    links.update(_links(queue, ids, replies, int(now)))
                wanted = steps.send(links)
        except StopIteration as end:
            graphs: list[FlowGraph | None] = end.value
            return graphs

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._keyspace.run(self._overviews(queues))

    def _overviews(self, queues: Sequence[str] | None) -> Steps[Overview]:
        """Return the state of queues."""
        names = list(queues) if queues is not None else (yield from self._keyspace.names())
        # Without queues, only the time is read.
        keys = map(self._keyspace.keys, names or [""])
        answers = yield [
            ScriptCall(script("overview"), queue_keys, (), sequence=False) for queue_keys in keys
        ]
        overviews = [
            _overview(name, self._keyspace.policy(name), reply)
            for name, reply in zip(names, answers, strict=bool(names))
        ]
        return Overview(int(answers[-1][0]), overviews)

    def change_version(self) -> str | None:
        """Return a version of all queues, jobs and workers, with two reads of each queue in one request."""
        return version_of([self._keyspace.run(self._versions())], self._workers.all())

    def _versions(self) -> Steps[list[tuple[str, bytes]]]:
        names = yield from self._keyspace.names()
        if not names:
            return []
        keys = [self._keyspace.keys(name) for name in names]
        # Plain enqueues and claims change the last numbers instead of the version.
        replies = yield [
            *(RedisCommand((b"GET", queue.key("version"))) for queue in keys),
            *(RedisCommand((b"HMGET", queue.key("meta"), b"rear", b"token")) for queue in keys),
        ]
        versions, numbers = replies[: len(names)], replies[len(names) :]
        return [
            (name, b":".join(value or b"" for value in (version, *last)))
            for name, version, last in zip(names, versions, numbers, strict=True)
        ]

    def concurrency_keys(self, queue: str, limit: int, names: Sequence[str] = ()) -> KeysOverview:
        return self._keyspace.run(self._concurrency_keys(queue, limit, names))

    def _concurrency_keys(self, queue: str, limit: int, names: Sequence[str]) -> Steps[KeysOverview]:
        """Return the busiest keys of a queue, and some by name."""
        policy = self._keyspace.policy(queue)
        arguments = [limit, MAX_GROUPS, *map(pack_text, names)]
        [reply] = yield [ScriptCall(script("groups"), self._keyspace.keys(queue), arguments, sequence=False)]
        mode, every, whole, busiest, named = reply
        common = key_limit(every) if every else NO_LIMIT
        shown = _mode(mode, policy)
        maximum = 0 if shown == GLOBAL else common.concurrency or policy.key_concurrency

        def row(fields: Sequence[Any]) -> KeyOverview:
            name, waiting, active, own = fields
            group, own_limit = text(name), key_limit(own) if own else NO_LIMIT
            return KeyOverview(
                group,
                waiting,
                active,
                maximum and (own_limit.concurrency or maximum),
                own_limit.rate or common.rate or policy.key_rate,
                own_limit.weight or policy.key_weights.get(group, 1),
                own_limit.paused,
                own_limit,
            )

        rate = common.rate or policy.key_rate
        return KeysOverview(
            shown, maximum, rate, common, [*map(row, busiest)], [*map(row, named)], whole == 1
        )

    def key_modes(self, queues: Sequence[str]) -> dict[str, str]:
        return self._keyspace.run(self._key_modes(queues))

    def _key_modes(self, queues: Sequence[str]) -> Steps[dict[str, str]]:
        """Return the key modes of queues."""
        answers = yield [
            ScriptCall(script("groups"), self._keyspace.keys(queue), [0, 0], sequence=False)
            for queue in queues
        ]
        return {
            queue: _mode(mode, self._keyspace.policy(queue))
            for queue, (mode, *_) in zip(queues, answers, strict=True)
        }

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
        until = (yield from self._overviews([])).at - grace
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
            *storage_lines(self._connections.describe(), len(names)),
            *health.server_lines(self._connections),
            *self._keyspace.run(health.key_lines([self._keyspace.keys(name) for name in names])),
            workers_line(len(self._workers.all())),
        ]
        return Diagnostics("redis", self.overview([]).at, lines)

    def findings(self) -> Sequence[Finding]:
        """Check the servers, and return what is or may be wrong."""
        return health.findings(self._connections)


def _record(queue: str, job_id: str, blob: bytes, st: bytes | None, now: int) -> JobRecord | None:
    """Decode a job without its result and details."""
    return records.record(queue, job_id, (blob, st or None, None, None, None, ()), now)


def _pack(structure: str, score: bytes, mark: bytes) -> str:
    return f"{structure}:{text(score)}:{urlsafe_b64encode(mark).decode()}"


def _unpack(mark: str) -> tuple[str, str, bytes]:
    try:
        structure, score, packed = mark.split(":")
        return structure, score, urlsafe_b64decode(packed)
    except (ValueError, Error):
        raise OptionError(f"cursor: {mark!r} is invalid; pass the cursor of an earlier page") from None


def _behind(queue: str, before: tuple[int, str, str] | None) -> bytes:
    """Return the bound for entries of a queue that come after a mark in the order of all queues."""
    if before is None:
        return b""
    created_at, name, number = before
    try:
        its_number = bytes.fromhex(number)
        if queue == name:
            return NUMBER.pack(created_at) + its_number
        return NUMBER.pack(created_at + (queue < name))
    except (ValueError, struct.error):
        raise OptionError("cursor: invalid; pass the cursor of an earlier page") from None


def _facts_of(queue: str, job_id: str, policy: QueuePolicy, reply: Sequence[Any]) -> Facts | None:
    now, blob, st, overrides, used, lease, holders, group, mates, before, unmet, followed = reply
    at = int(now)
    record = _record(queue, job_id, blob, st, at)
    if record is None:
        return None
    facts = Facts(at, queue, job_id, record.name, record.state, record.run_at, worker=record.worker)
    if record.state not in PENDING:
        return facts._replace(lease_until=int(float(lease)) if lease else None)
    paused, *limited, holds = overrides
    rate, concurrency, _ = _limits(policy, limited, at)
    missing = 0 if rate is None else rate.per - _bucket_parts(rate, limited[4:], at)
    dependencies = [Dependency(text(unmet[at]), text(unmet[at + 1]), None) for at in range(0, len(unmet), 2)]
    if followed:
        dependencies.insert(0, Dependency(queue, text(followed), None))
    facts = facts._replace(
        paused=paused is not None,
        hold=hold_on(record.name, records.unpack_holds(holds), at),
        unmet=tuple(dependencies),
        next_token_at=at - -missing // rate.capacity if rate is not None and missing > 0 else None,
        weight=record.options.weight,
        concurrency=concurrency,
        used=used,
        holders=_holders(holders),
        before=before if before >= 0 else None,
    )
    if record.options.concurrency_key is None or not policy.key_limit:
        return facts
    own, every, active, rests = group
    overrides = key_limit(own) if own else NO_LIMIT
    common = key_limit(every) if every else NO_LIMIT
    return facts._replace(
        concurrency_key=record.options.concurrency_key,
        key_paused=overrides.paused,
        key_limit=overrides.concurrency or common.concurrency or policy.key_limit,
        key_active=active,
        key_next_at=int(float(rests)) if rests and st[:1] == b"g" else None,
        key_holders=_holders(mates),
        is_group_waiting=st[:1] == b"g",
    )


def _holders(entries: Sequence[bytes]) -> tuple[BlockingJob, ...]:
    pairs = [(entries[at], entries[at + 1]) for at in range(0, len(entries), 2)]
    return tuple(BlockingJob(text(job_id), unpack(st[9:])[3] if st else "") for job_id, st in pairs)


def _links(
    queue: str, ids: Sequence[str], replies: Sequence[Any], now: int
) -> Iterator[tuple[JobKey, JobLink]]:
    for job_id, reply in zip(ids, replies, strict=True):
        if reply is None:
            continue
        blob, st, dependents = reply
        record = _record(queue, job_id, blob, st, now)
        if record is None:
            continue
        node = FlowNode(
            queue,
            job_id,
            record.name,
            record.state,
            record.reason,
            created_at=record.created_at,
            finished_at=record.finished_at,
            started_at=record.started_at,
        )
        waiting = [(text(dependents[at]), text(dependents[at + 1])) for at in range(0, len(dependents), 2)]
        yield (queue, job_id), link(node, record.options, waiting)


def _overview(name: str, policy: QueuePolicy, reply: Sequence[Any]) -> QueueOverview:
    now, counters, delayed, active, failed, existing, due, oldest, overrides, kept = reply
    paused, mode, *limited, holds = overrides
    numbers = _counters(counters)
    rate, concurrency, tokens = _limits(policy, limited, int(now))
    names = {word[2:]: number for word, number in numbers.items() if word.startswith("n:")}
    counts = _counts(numbers, delayed, active, failed)
    return QueueOverview(
        name,
        counts,
        paused is not None,
        int(oldest) if oldest else None,
        int(float(due)) if due else None,
        rate,
        tokens,
        concurrency,
        active + numbers.get("e", 0),
        _mode(mode, policy),
        numbers.get("p", 0),
        names,
        _totals(kept, existing, active, counts),
        standing(records.unpack_holds(holds), int(now)),
    )


def _mode(recorded: bytes | None, policy: QueuePolicy) -> str:
    """Return the key mode of a queue: the recorded one, or that of the policy if none is."""
    return text(recorded) if recorded else policy.key_mode


def _counters(meta: Any) -> dict[str, int]:
    """Return the counters among the fields of a queue's `meta`: see `lua/numbers.lua`."""
    found = {text(name): value for name, value in records.pairs(meta) if name[:2] == b"n:" or len(name) < 3}
    return {name: int(value) for name, value in found.items()}


def _counts(counters: dict[str, int], delayed: int, active: int, failed: int) -> dict[State, int]:
    """Return the number of jobs in each state."""
    ready = sum(number for name, number in counters.items() if name.startswith("n:"))
    return {
        State.WAITING: ready + counters.get("p", 0),
        State.DELAYED: delayed - counters.get("r", 0),
        State.BLOCKED: counters.get("b", 0),
        State.ACTIVE: active,
        State.COMPLETED: counters.get("c", 0),
        State.FAILED: failed,
        State.CANCELLED: counters.get("x", 0),
    }


def _totals(kept: Sequence[Any], existing: int, active: int, counts: dict[State, int]) -> Totals:
    """Return the totals: existing jobs, and counters of those that were removed.

    Enqueues, claims and completions therefore need no counters of their own.

    kept: counters of removed jobs (others, completed, cancelled), of attempts that were retried, that stalled
    or that ended otherwise without completing the job, and of dead letters.
    existing: number of existing jobs.
    """
    gone, completed, cancelled, retried, stalled, otherwise, buried = (int(number or 0) for number in kept)
    done = counts[State.COMPLETED] + completed
    return Totals(
        existing + gone + completed + cancelled,
        done + retried + stalled + otherwise + active,
        done,
        retried,
        buried,
        counts[State.CANCELLED] + cancelled,
        stalled,
    )


def _limits(
    policy: QueuePolicy, limited: Sequence[Any], now: int
) -> tuple[Rate | None, int | None, int | None]:
    """Return rate, concurrency and available tokens, with the overrides of the queue applied."""
    is_overridden, capacity, per, concurrency, *bucket = limited
    if is_overridden is None:
        rate, slots = policy.rate, policy.concurrency
    else:
        rate, slots = records.unpack_limits(capacity, per, concurrency)
    return rate, slots, None if rate is None else _bucket_parts(rate, bucket, now) // rate.per


def _bucket_parts(rate: Rate, bucket: Sequence[Any], now: int) -> int:
    """Return the parts in a bucket, as `rates.lua` counts them."""
    limit = rate.capacity * rate.per
    kept_for, parts, filled = bucket
    if kept_for is None or text(kept_for) != f"{rate.capacity}/{rate.per}":
        return limit
    return min(limit, int(float(parts)) + max(0, now - int(filled)) * rate.capacity)
