"""Reads: records and pages of jobs, overviews of queues and keys, metrics, explanations and diagnostics."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from django.db import connections

from djqueue.core.explain import MAX_BEFORE, SHOWN, BlockingJob, Dependency, Explanation, Facts, decide
from djqueue.core.flow import MAX_FLOW_JOBS, FlowGraph
from djqueue.core.job import DeadLetterPage, DeadLetterRecord, ItemMark, ItemPage, JobRecord
from djqueue.core.messages import gettext_noop as _
from djqueue.core.messages import size
from djqueue.core.metrics import Bucket, assemble, since_beginning, span_of
from djqueue.core.options import JobKey
from djqueue.core.overview import (
    BAD,
    MORE,
    OK,
    ROWS,
    ROWS_OF_SIZE,
    ROWS_WITH_DEAD,
    WARN,
    DiagnosticLine,
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
    PAGE_ITEMS,
    JobPage,
    JobSummaryPage,
    PagePosition,
    are_readable,
    cut,
    mark_of,
    page_of,
    position_of,
)
from djqueue.core.policies import GLOBAL, NO_LIMIT, Hold, hold_on, standing
from djqueue.core.states import PENDING, State
from djqueue.core.workers import version_of
from djqueue.storage.facets import Reads
from djqueue.storage.tables.inspector import DatabaseInspector
from djqueue.storage.tables.rows import pair_of_limits, unpack_holds, unpack_options

from . import claim, deadletters, dependencies, limiters, metrics, queues, stored, upgrade, workers
from .connections import CallThread
from .dialects import Row
from .queues import queue_names
from .stored import LockedGroup, StoredJob, is_grouped
from .transaction import STATES, TALLY, WIDTH, Database, Tx

MAX_VERSION_ROWS = 50_000
"""Rows of tallies that are counted for a version."""


class SqlReads(Reads):
    """Reads of the tables."""

    def __init__(self, database: Database, calls: CallThread, describe: Callable[[], str]) -> None:
        self._read = database.read
        self._calls = calls
        self._describe = describe
        self._tables = DatabaseInspector(database.alias)
        self._waiting = WaitingCounts()

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return self._read(lambda _: self._tables.jobs(queue, ids))

    async def ajobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        return await self._calls.call(self.jobs, queue, ids)

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return self._read(lambda tx: items(tx, queue, marks))

    async def aitems(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        return await self._calls.call(self.items, queue, marks)

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
        return self._read(lambda tx: cursor_page(tx, queue, state, limit, cursor, newest_first=newest_first))

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        def work(tx: Tx) -> list[tuple[str, State]]:
            return self._tables.find(id, queue_names(tx) if queues is None else queues)

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
        return self._read(lambda tx: explain(tx, queue, id))

    def flow(self, queue: str, id: str, limit: int = MAX_FLOW_JOBS) -> FlowGraph | None:
        return self.flows([(queue, id)], limit)[0]

    def flows(self, keys: Sequence[JobKey], limit: int = MAX_FLOW_JOBS) -> list[FlowGraph | None]:
        return self._read(lambda tx: dependencies.flows(tx, keys, limit))

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        return self._read(lambda tx: overview(tx, self._waiting, queues))

    def change_version(self) -> str | None:
        return self._read(self._version)

    def _version(self, tx: Tx) -> str:
        # The last rows are counted, because a transaction may commit after others with later rows.
        last = (
            "SELECT MAX(id), COUNT(*) FROM djqueue_tally WHERE id > (SELECT MAX(id) FROM djqueue_tally) - ?"
        )
        return version_of(tx.rows(last, MAX_VERSION_ROWS), workers.alive(tx))

    def concurrency_keys(self, queue: str, limit: int, names: Sequence[str] = ()) -> KeysOverview:
        return self._read(lambda tx: concurrency_keys(tx, queue, limit, names))

    def key_modes(self, queues: Sequence[str]) -> dict[str, str]:
        return self._read(lambda tx: modes(tx, queues))

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
        return self._read(lambda tx: diagnose(tx, self._describe()))

    def findings(self) -> Sequence[Finding]:
        return self._read(upgrade.findings)


# Pages of jobs by state, and of streamed items.


ORDERS = {
    State.DELAYED: ("djqueue_delayed", "run_at"),
    State.ACTIVE: ("djqueue_claim", "started_at"),
}
"""The tables of jobs in a state, and the times by which they are paged; other states are paged by row."""
AT_ONCE = 100
"""Maximum number of items of one statement."""


def cursor_page(
    tx: Tx, queue: str, state: State, limit: int, cursor: str | None, *, newest_first: bool
) -> JobPage:
    """Return up to `limit` jobs of one state."""
    position = position_of(cursor, newest_first=newest_first)
    found = _positions(tx, queue, state, limit + 1, position)
    jobs = {job.pk: job for job in stored.by_keys(tx, [pk for _, pk in found], lock=False)}
    return page_of([(f"{at}:{pk}", jobs[pk].record()) for at, pk in found if pk in jobs], limit, position)


def _positions(tx: Tx, queue: str, state: State, limit: int, position: PagePosition) -> list[Row]:
    """Return the times, or 0, and primary keys of the jobs of a page."""
    order = "DESC" if position.is_descending else "ASC"
    sign = "<" if position.is_descending else ">"
    at, pk = (0, 0) if position.mark is None else _mark(position.mark)
    has_mark = position.mark is not None
    if state in ORDERS:
        table, time = ORDERS[state]
        behind = f" AND ({time}, id) {sign} (?, ?)" if has_mark else ""
        some = f"SELECT {time}, id FROM {table} WHERE queue = ?{behind}"
        ordered = f"{some} ORDER BY {time} {order}, id {order} LIMIT ?"
        return tx.rows(ordered, queue, *((at, pk) if has_mark else ()), limit)
    behind = f" AND id {sign} ?" if has_mark else ""
    statement = (
        f"SELECT 0, id FROM djqueue_job WHERE queue = ? AND state = ?{behind} ORDER BY id {order} LIMIT ?"
    )
    return tx.rows(statement, queue, state.value, *((pk,) if has_mark else ()), limit)


def _mark(mark: str) -> tuple[int, int]:
    at, pk = mark_of(mark)
    return at, mark_of(f"{pk}:")[0]


def items(tx: Tx, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
    """Return the streamed items behind each mark with the state of the job; None for an unknown job."""
    condition, values = tx.among("job_id", list(dict.fromkeys(mark.id for mark in marks)))
    found = (
        "SELECT job_id, state, options, finished_at, items, token FROM djqueue_job WHERE queue = ? AND "
        + condition
    )
    jobs = {row[0]: row for row in (tx.rows(found, queue, values) if marks else ())}
    runs = _runs(tx, queue, [id for id, row in jobs.items() if row[4]])
    return [None if mark.id not in jobs else _page(tx, queue, mark, jobs[mark.id], runs) for mark in marks]


def _runs(tx: Tx, queue: str, ids: Sequence[str]) -> dict[str, int]:
    """Return the attempts that have sent the items of jobs."""
    if not ids:
        return {}
    condition, values = tx.among("job_id", ids)
    first = f"SELECT job_id, run FROM djqueue_job_item WHERE queue = ? AND {condition} AND number = 0"
    return dict(tx.rows(first, queue, values))


def _page(tx: Tx, queue: str, mark: ItemMark, row: Row, runs: dict[str, int]) -> ItemPage:
    _, state, packed, finished_at, count, token = row
    state, options = State(state), unpack_options(bytes(packed))
    run = runs.get(mark.id) or (token if state is State.ACTIVE else 0)
    start = mark.start if mark.run == run else 0
    found: tuple[bytes, ...] = ()
    if start < count and are_readable(state, options, finished_at or 0, tx.now):
        found = _items(tx, queue, mark.id, start)
    return ItemPage(state, options.content_type, run, start, found, max(count, start + len(found)))


def _items(tx: Tx, queue: str, id: str, start: int) -> tuple[bytes, ...]:
    """Return the items from a number on, as many as one page holds."""
    found: list[bytes] = []
    ahead = "SELECT item FROM djqueue_job_item WHERE queue = ? AND job_id = ? AND number >= ?"
    statement = f"{ahead} ORDER BY number LIMIT ?"
    while True:
        # Not a whole page of large items: most of them would be too many.
        some = [bytes(item) for (item,) in tx.rows(statement, queue, id, start + len(found), AT_ONCE)]
        found += some
        page = cut(found)
        if len(some) < AT_ONCE or len(page) < len(found) or len(page) == PAGE_ITEMS:
            return page


# Overviews of queues and groups, in a few statements however many there are.


MAX_COUNTED_BY_NAME = 10_000
"""Waiting jobs of a queue above which they are not counted by name for every overview."""
RECOUNT = 30_000
"""Milliseconds after which such a queue is counted again."""
MAX_GROUPS = 10_000
"""Groups of a queue among which the busiest are searched."""
SUMS = ", ".join(f"SUM({name})" for name in (*TALLY, *(f"in_{state.value}" for state in STATES)))
CONTROLS = (
    "SELECT q.name, s.paused, s.limits_set, s.rate_capacity, s.rate_per, s.concurrency, b.capacity, b.per, "
    f"b.full_at, g.mode, s.holds, ({stored.NEXT_DUE.format('q.name')}), "
    "(SELECT SUM(weight) FROM djqueue_claim WHERE queue = q.name) FROM {listed} q "
    "LEFT JOIN djqueue_queue_state s ON s.name = q.name "
    "LEFT JOIN djqueue_rate_bucket b ON b.queue = q.name AND b.name = '' "
    "LEFT JOIN djqueue_group_state g ON g.queue = q.name AND g.concurrency_key = ''"
)
HOLDS = 10
"""Position of the holds among its columns."""
OLDEST = (
    "WITH RECURSIVE ranks(queue, rank) AS ("
    "SELECT q.name, (SELECT MIN(rank) FROM djqueue_ready WHERE queue = q.name) FROM {listed} q UNION ALL "
    "SELECT k.queue, (SELECT MIN(r.rank) FROM djqueue_ready r WHERE r.queue = k.queue AND r.rank > k.rank) "
    "FROM ranks k WHERE k.rank IS NOT NULL) "
    "SELECT first.queue, MIN(CASE WHEN j.run_at > j.created_at THEN j.run_at ELSE j.created_at END) FROM ("
    "SELECT k.queue, (SELECT r.id FROM djqueue_ready r "
    "WHERE r.queue = k.queue AND r.rank = k.rank AND r.seq >= 0{free} "
    "ORDER BY r.seq LIMIT 1) AS id FROM ranks k WHERE k.rank IS NOT NULL UNION ALL "
    "SELECT k.queue, (SELECT r.id FROM djqueue_ready r "
    "WHERE r.queue = k.queue AND r.rank = k.rank AND r.seq < 0{free} "
    "ORDER BY r.seq DESC LIMIT 1) FROM ranks k WHERE k.rank IS NOT NULL"
    ") first JOIN djqueue_job j ON j.id = first.id GROUP BY first.queue"
)
"""When the oldest job could be claimed, of the oldest at the end and at the front of each priority."""
SEPARATOR = "\n"
"""Between the names of a queue and of its jobs in one text."""
FREE = f" AND r.queue || '{SEPARATOR}' || r.name NOT IN (SELECT h.name FROM {{held}} h)"
"""Leaves out held jobs, which the statement passes one by one, as a claim does."""


class WaitingCount(NamedTuple):
    """The waiting jobs of a queue by job name, and by whether their groups hold them back."""

    waiting: int
    """Their number."""
    names: dict[str, int]
    """Claimable jobs by job name."""
    held: int
    """Jobs that their groups hold back."""
    tick: int = 0
    """When they were counted."""

    def scaled(self, waiting: int) -> "WaitingCount":
        """Return the same proportions of another number of jobs."""
        names = {name: round(count * waiting / self.waiting) for name, count in self.names.items()}
        return WaitingCount(waiting, names, max(0, waiting - sum(names.values())))


class WaitingCounts:
    """Counts waiting jobs by name.

    A queue with very many is counted once in a while. In between, the proportions are taken to be the same,
    of a number of waiting jobs that is exact.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._large: dict[str, WaitingCount] = {}

    def of(self, tx: Tx, waiting: Mapping[str, int]) -> dict[str, WaitingCount]:
        """Return the waiting jobs of queues, given the number in each."""
        found = {queue: WaitingCount(0, {}, 0) for queue in waiting}
        wanted = []
        for queue, number in waiting.items():
            before = self._large.get(queue)
            if number > MAX_COUNTED_BY_NAME and before is not None and 0 <= tx.tick - before.tick < RECOUNT:
                found[queue] = before.scaled(number)
            elif number > 0:
                wanted.append(queue)
        counted = _count(tx, wanted) if wanted else {}
        with self._lock:
            for queue, one in counted.items():
                found[queue] = one
                self._large.pop(queue, None)
                if one.waiting > MAX_COUNTED_BY_NAME:
                    self._large[queue] = one
        return found


def _count(tx: Tx, names: Sequence[str]) -> dict[str, WaitingCount]:
    condition, values = tx.among("queue", names)
    ready: dict[str, dict[str, int]] = {queue: {} for queue in names}
    counted = f"SELECT queue, name, COUNT(*) FROM djqueue_ready WHERE {condition} GROUP BY queue, name"
    for queue, name, count in tx.rows(counted, values):
        ready[queue][name] = count
    held: dict[str, int] = dict(
        tx.rows(f"SELECT queue, COUNT(*) FROM djqueue_held WHERE {condition} GROUP BY queue", values)
    )
    return {
        queue: WaitingCount(sum(by_name.values()) + held.get(queue, 0), by_name, held.get(queue, 0), tx.tick)
        for queue, by_name in ready.items()
    }


def overview(tx: Tx, counts: WaitingCounts, names: Sequence[str] | None) -> Overview:
    """Return the counts and controls of queues (None: of all)."""
    wanted = queue_names(tx) if names is None else list(names)
    if not wanted:
        return Overview(tx.now, [])
    listed, values = tx.listed(list(dict.fromkeys(wanted)))
    controls = {row[0]: row for row in tx.rows(CONTROLS.format(listed=listed), values)}
    holds = {queue: standing(unpack_holds(row[HOLDS]), tx.now) for queue, row in controls.items()}
    tallies = _tallies(tx, wanted)
    waiting = {queue: tallies[queue][1][State.WAITING] for queue in controls}
    counted = counts.of(tx, waiting)
    oldest = _oldest(tx, {queue: one.names for queue, one in counted.items()}, holds)
    found = {
        queue: _overview_of(tx, row, tallies[queue], oldest.get(queue), counted[queue], holds[queue])
        for queue, row in controls.items()
    }
    return Overview(tx.now, [found[name] for name in wanted])


def _oldest(
    tx: Tx, names: Mapping[str, Iterable[str]], holds: Mapping[str, Sequence[Hold]]
) -> dict[str, int]:
    """Return since when the oldest ready job that is not held can be claimed, for queues that have one."""
    held = {(queue, hold.name) for queue, some in holds.items() for hold in some}
    queues = [queue for queue, some in names.items() if any((queue, name) not in held for name in some)]
    if not queues:
        return {}
    listed, values = tx.listed(queues)
    if not held:
        return dict(tx.rows(OLDEST.format(listed=listed, free=""), values))
    pairs, kept_back = tx.listed([SEPARATOR.join(pair) for pair in sorted(held)])
    statement = OLDEST.format(listed=listed, free=FREE.format(held=pairs))
    return dict(tx.rows(statement, values, kept_back, kept_back))


def _tallies(tx: Tx, names: Iterable[str]) -> dict[str, tuple[Totals, dict[State, int]]]:
    """Return the totals of queues, and their numbers of jobs by state."""
    condition, values = tx.among("queue", list(names))
    rows = tx.rows(f"SELECT queue, {SUMS} FROM djqueue_tally WHERE {condition} GROUP BY queue", values)
    found = {row[0]: [int(number) for number in row[1:]] for row in rows}
    result = {}
    for name in names:
        numbers = found.get(name, [0] * WIDTH)
        states = dict(zip(STATES, numbers[len(TALLY) :], strict=True))
        result[name] = Totals(*numbers[: len(TALLY)]), states
    return result


def _overview_of(
    tx: Tx,
    row: Row,
    tally: tuple[Totals, dict[State, int]],
    oldest_at: int | None,
    waiting: WaitingCount,
    holds: tuple[Hold, ...],
) -> QueueOverview:
    (
        name,
        paused,
        limits_set,
        set_capacity,
        set_per,
        set_concurrency,
        capacity,
        per,
        full_at,
        mode,
        _,
        due,
        weight,
    ) = row
    policy, (totals, counts) = tx.database.policy(name), tally
    rate, concurrency = policy.rate, policy.concurrency
    if limits_set:
        rate, concurrency = pair_of_limits(set_capacity, set_per, set_concurrency)
    return QueueOverview(
        name,
        counts,
        bool(paused),
        oldest_at,
        due,
        rate,
        None if rate is None else limiters.tokens_left(rate, (capacity, per, full_at), tx.tick),
        concurrency,
        int(weight or 0),
        mode or policy.key_mode,
        waiting.held,
        waiting.names,
        totals,
        holds,
    )


# Groups.


def modes(tx: Tx, names: Sequence[str]) -> dict[str, str]:
    """Return the key modes of queues."""
    recorded = queues.recorded_modes(tx, names) if names else {}
    return {name: recorded.get(name, tx.database.policy(name).key_mode) for name in names}


def concurrency_keys(tx: Tx, queue: str, limit: int, names: Sequence[str]) -> KeysOverview:
    """Return up to `limit` groups, those with most waiting jobs first, and the named ones."""
    policy = tx.database.policy(queue)
    mode = modes(tx, [queue])[queue]
    own = queues.key_limits(tx, queue)
    default = own.pop(None, NO_LIMIT)
    is_grouped = mode != GLOBAL
    waiting = _waiting_by_group(tx, queue) if is_grouped else {}
    busiest = sorted(waiting, key=lambda group: (-waiting[group], group))[:limit]
    whole = len(waiting) <= MAX_GROUPS
    active: dict[str, int] = {}
    if is_grouped:
        wanted = list(dict.fromkeys((*busiest, *names)))
        active = _by_group(tx, "djqueue_claim", queue, wanted)
        if not whole:
            # Of a group among the last ones, a part may not have been counted.
            waiting = _sums(
                _by_group(tx, table, queue, wanted) for table in ("djqueue_held", "djqueue_ready")
            )

    def overview_of(group: str) -> KeyOverview:
        mine = own.get(group, NO_LIMIT)
        return KeyOverview(
            group,
            waiting.get(group, 0),
            active.get(group, 0),
            (mine.concurrency or default.concurrency or policy.key_concurrency) if is_grouped else 0,
            mine.rate or default.rate or policy.key_rate,
            mine.weight or default.weight or policy.key_weights.get(group, 1),
            mine.paused,
            mine,
        )

    return KeysOverview(
        mode,
        (default.concurrency or policy.key_concurrency) if is_grouped else 0,
        default.rate or policy.key_rate,
        default,
        [overview_of(group) for group in busiest],
        [overview_of(group) for group in names],
        whole,
    )


def _waiting_by_group(tx: Tx, queue: str) -> dict[str, int]:
    """Return the waiting jobs of the first groups of a queue; if there are too many groups, of one more."""
    counted = (
        "SELECT concurrency_key, COUNT(*) FROM {} WHERE queue = ? AND concurrency_key IS NOT NULL "
        "GROUP BY concurrency_key ORDER BY concurrency_key LIMIT ?"
    )
    return _sums(
        dict(tx.rows(counted.format(table), queue, MAX_GROUPS + 1))
        for table in ("djqueue_held", "djqueue_ready")
    )


def _by_group(tx: Tx, table: str, queue: str, names: Sequence[str]) -> dict[str, int]:
    """Return the number of rows of each of these groups."""
    condition, values = tx.among("concurrency_key", names)
    counted = (
        f"SELECT concurrency_key, COUNT(*) FROM {table} WHERE queue = ? AND {condition} "
        "GROUP BY concurrency_key"
    )
    return dict(tx.rows(counted, queue, values)) if names else {}


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            sums[name] = sums.get(name, 0) + count
    return sums


# The facts that explain why a job is not running: see `core.explain`.


HOLDERS = (
    "SELECT j.job_id, c.worker, c.queue FROM ("
    "SELECT id, worker, queue, started_at FROM djqueue_claim WHERE {which} "
    "ORDER BY started_at, id LIMIT ?) c JOIN djqueue_job j ON j.id = c.id ORDER BY c.started_at, c.id"
)


def explain(tx: Tx, queue: str, id: str) -> Explanation | None:
    """Explain why a job is not running; None for an unknown job."""
    job = stored.by_id(tx, queue, id, lock=False)
    return None if job is None else decide(_facts(tx, job), workers.alive(tx))


def _facts(tx: Tx, job: StoredJob) -> Facts:
    facts = Facts(tx.now, job.queue, job.id, job.name, job.state, job.run_at, worker=job.worker)
    if job.state is State.ACTIVE:
        until = tx.value("SELECT lease_until FROM djqueue_claim WHERE id = ?", job.pk) or tx.tick
        return facts._replace(lease_until=tx.now + max(0, until - tx.tick))
    if job.state not in PENDING:
        return facts
    facts = _limits(tx, job, facts)
    if job.state is State.BLOCKED:
        facts = facts._replace(unmet=(*_predecessor(tx, job), *_dependencies(tx, job)))
    return _grouped(tx, job, _shared(tx, job, facts))


def _limits(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    controls = queues.controls(tx, job.queue)
    wait = 0 if controls.rate is None else limiters.rate_tokens(tx, job.queue, "", controls.rate).wait
    return facts._replace(
        paused=controls.paused,
        hold=hold_on(job.name, controls.holds, tx.now),
        next_token_at=tx.now + wait if wait else None,
        weight=job.options.weight,
        concurrency=controls.concurrency,
        used=claim.taken(tx, job.queue),
        holders=_holders(tx, "queue = ?", job.queue),
        before=_ready_before(tx, job),
    )


def _ready_before(tx: Tx, job: StoredJob) -> int | None:
    """Return the number of jobs that are claimed before a ready one; None if it is not ready."""
    position = tx.row("SELECT rank, seq FROM djqueue_ready WHERE id = ?", job.pk)
    if position is None:
        return None
    ahead = "SELECT 1 FROM djqueue_ready WHERE queue = ? AND (rank, seq) < (?, ?) LIMIT ?"
    return int(tx.value(f"SELECT COUNT(*) FROM ({ahead}) ahead", job.queue, *position, MAX_BEFORE))


def _shared(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    name = tx.database.policy(job.queue).limiter
    if name is None:
        return facts
    limiter = limiters.LockedLimiter(tx, name, lock=False)
    state, wait = limiter.state(), limiter.next_token()
    facts = facts._replace(
        limiter=name,
        limiter_next_at=tx.now + wait if wait else None,
        limiter_limit=state.concurrency,
        limiter_used=state.used,
    )
    if state.free is None:
        return facts
    return facts._replace(limiter_holders=_holders(tx, "limiter = ?", name, here=job.queue))


def _grouped(tx: Tx, job: StoredJob, facts: Facts) -> Facts:
    name = job.options.concurrency_key
    if name is None or not is_grouped(tx, job):
        return facts
    group = LockedGroup(tx, job.queue, name, lock=False)
    facts = facts._replace(
        concurrency_key=name,
        key_paused=group.paused,
        key_limit=group.limit,
        key_active=group.active(),
        key_holders=_holders(tx, "queue = ? AND concurrency_key = ?", job.queue, name),
    )
    seq = tx.value("SELECT seq FROM djqueue_held WHERE id = ?", job.pk)
    if seq is None:
        return facts
    rest_at = tx.value(
        "SELECT rest_at FROM djqueue_rate_bucket WHERE queue = ? AND name = ?", job.queue, name
    )
    if rest_at is not None:
        facts = facts._replace(key_next_at=tx.now + max(0, rest_at - tx.tick))
    ahead = "SELECT 1 FROM djqueue_held WHERE queue = ? AND concurrency_key = ? AND seq < ? LIMIT ?"
    held = tx.value(f"SELECT COUNT(*) FROM ({ahead}) ahead", job.queue, name, seq, MAX_BEFORE)
    return facts._replace(is_group_waiting=True, before=min(MAX_BEFORE, group.ready() + held))


def _holders(tx: Tx, which: str, *parameters: str, here: str | None = None) -> tuple[BlockingJob, ...]:
    """Return the active jobs that were claimed first; their queues only if they are not `here`."""
    found = tx.rows(HOLDERS.format(which=which), *parameters, SHOWN)
    return tuple(
        BlockingJob(id, worker, "" if here in (None, queue) else queue) for id, worker, queue in found
    )


def _predecessor(tx: Tx, job: StoredJob) -> tuple[Dependency, ...]:
    """Return the active job whose end lets a job have its unique key."""
    key = job.options.unique_key
    if key is None:
        return ()
    behind = tx.value(
        f"SELECT behind FROM djqueue_unique_key{dependencies.WHERE_KEY} AND successor = ?",
        job.queue,
        key,
        job.pk,
    )
    owners = [] if behind is None else stored.by_keys(tx, [behind], lock=False)
    return tuple(Dependency(owner.queue, owner.id, owner.state) for owner in owners)


def _dependencies(tx: Tx, job: StoredJob) -> tuple[Dependency, ...]:
    unmet = sorted(dependencies.unmet_of(tx, job))
    states = dependencies.states_of(tx, unmet, lock=False)
    return tuple(Dependency(*key, states.get(key)) for key in unmet)


# Diagnostics of the database and its tables.


OLD_TRANSACTION = 60_000
"""Age in milliseconds of an open transaction from which it slows claims down."""
BACKLOG = 100_000
"""New rows of tallies above which sweeps seem to be missing."""
HORIZON = (
    "SELECT CAST(extract(epoch FROM clock_timestamp() - MIN(xact_start)) * 1000 AS bigint) "
    "FROM pg_stat_activity WHERE datname = current_database() AND backend_xmin IS NOT NULL "
    "AND pid <> pg_backend_pid()"
)
"""Age of the oldest visible transaction whose snapshot keeps VACUUM from removing dead rows."""
ESTIMATES = (
    "SELECT c.relname, COALESCE(s.n_live_tup, 0), pg_total_relation_size(c.oid), s.n_dead_tup "
    "FROM pg_class c LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid "
    "WHERE c.relkind = 'r' AND c.relname LIKE 'djqueue\\_%' AND pg_table_is_visible(c.oid) ORDER BY c.relname"
)


def diagnose(tx: Tx, location: str) -> Diagnostics:
    """Describe the database, which is at this location, its tables and workers."""
    lines = [
        *storage_lines(location, len(queue_names(tx))),
        *_server(tx),
        _sweeps(tx),
        *_tables(tx),
        workers_line(len(workers.alive(tx))),
    ]
    return Diagnostics("database", tx.now, lines)


def _server(tx: Tx) -> Iterator[DiagnosticLine]:
    connection: Any = connections[tx.database.alias]
    version = ".".join(map(str, connection.get_database_version()))
    yield DiagnosticLine("server.version", _("Server"), _("Version"), f"{connection.display_name} {version}")
    if tx.dialect.has_clock:
        length = tx.value("SELECT pg_database_size(current_database())")
        yield DiagnosticLine("server.size", _("Server"), _("Database size"), size(length))
        yield _horizon(tx.value(HORIZON) or 0)
        return
    pages, length = tx.value("PRAGMA page_count"), tx.value("PRAGMA page_size")
    yield DiagnosticLine("server.size", _("Server"), _("File size"), size(pages * length))
    mode = str(tx.value("PRAGMA journal_mode"))
    yield journal_mode(mode, has_workers=bool(workers.alive(tx)))


def journal_mode(mode: str, *, has_workers: bool) -> DiagnosticLine:
    """Return the line with the journal mode of SQLite, a warning unless the first worker will change it."""
    level, note = OK, ""
    if mode == "delete" and not has_workers:
        note = _("The first worker changes it to WAL.")
    elif mode not in ("wal", "memory"):
        level, note = WARN, _("Reads and writes block each other; use WAL mode.")
    return DiagnosticLine("server.journal_mode", _("Server"), _("Journal mode"), mode, level, note)


def _horizon(age: int) -> DiagnosticLine:
    note = (
        "" if age < OLD_TRANSACTION else _("While it is open, VACUUM cannot remove the rows of ended jobs.")
    )
    shown = f"{age / 1_000:.0f} s"
    return DiagnosticLine(
        "server.oldest_snapshot", _("Server"), _("Oldest snapshot"), shown, WARN if note else OK, note
    )


def _sweeps(tx: Tx) -> DiagnosticLine:
    """Return how many changes the next sweep has to add up."""
    counted = "SELECT COUNT(*) FROM (SELECT 1 FROM djqueue_tally LIMIT ?) new"
    rows = tx.value(counted, BACKLOG + 1)
    note = "" if rows <= BACKLOG else _("Nothing sweeps: start a worker with `manage.py runworkers`.")
    value = f"{rows:,}" if rows <= BACKLOG else MORE % f"{BACKLOG:,}"
    return DiagnosticLine(
        "sweep.backlog", _("Sweep"), _("Changes to add up"), value, BAD if note else OK, note
    )


def _tables(tx: Tx) -> Iterator[DiagnosticLine]:
    if tx.dialect.has_clock:
        for table, rows, length, dead in tx.rows(ESTIMATES):
            value = ROWS_OF_SIZE % (f"{rows:,}", size(length))
            if dead:
                value = ROWS_WITH_DEAD % (f"{rows:,}", size(length), f"{dead:,}")
            yield DiagnosticLine(f"tables.{table}", _("Tables"), table, value)
        return
    if tx.row("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'") is None:
        return
    estimates = (
        "SELECT tbl, stat FROM sqlite_stat1 WHERE tbl LIKE 'djqueue%' AND stat IS NOT NULL ORDER BY tbl"
    )
    found = {table: int(stat.split()[0]) for table, stat in tx.rows(estimates)}
    for table, rows in found.items():
        yield DiagnosticLine(f"tables.{table}", _("Tables"), table, ROWS % f"{rows:,}")
