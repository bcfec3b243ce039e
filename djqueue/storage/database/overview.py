"""Overviews of queues and groups, in a few statements however many there are."""

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple

from djqueue.core.groups import NO_LIMIT, GroupOverview
from djqueue.core.overview import GroupsOverview, Overview, QueueOverview, Totals
from djqueue.core.queue import GLOBAL
from djqueue.core.states import State
from djqueue.storage.tables.rows import pair_of_limits

from . import queues, rates
from .dialects import Row
from .transaction import STATES, TALLY, WIDTH, Tx

MANY = 10_000
"""Waiting jobs of a queue above which they are not counted by name for every overview."""
RECOUNT = 30_000
"""Milliseconds after which such a queue is counted again."""
MAX_GROUPS = 10_000
"""Groups of a queue among which the busiest are searched."""
SUMS = ", ".join(f"SUM({name})" for name in (*TALLY, *(f"in_{state.value}" for state in STATES)))
CONTROLS = (
    "SELECT q.name, s.paused, s.limits_set, s.rate_capacity, s.rate_per, s.concurrency, b.capacity, b.per, "
    "b.full_at, g.mode, (SELECT MIN(run_at) FROM djqueue_delayed WHERE queue = q.name), "
    "(SELECT SUM(weight) FROM djqueue_claim WHERE queue = q.name) FROM {listed} q "
    "LEFT JOIN djqueue_queue_state s ON s.name = q.name "
    "LEFT JOIN djqueue_rate_bucket b ON b.queue = q.name AND b.name = '' "
    "LEFT JOIN djqueue_group_state g ON g.queue = q.name AND g.\"group\" = ''"
)
OLDEST = (
    "WITH RECURSIVE ranks(queue, rank) AS ("
    "SELECT q.name, (SELECT MIN(rank) FROM djqueue_ready WHERE queue = q.name) FROM {listed} q UNION ALL "
    "SELECT k.queue, (SELECT MIN(r.rank) FROM djqueue_ready r WHERE r.queue = k.queue AND r.rank > k.rank) "
    "FROM ranks k WHERE k.rank IS NOT NULL) "
    "SELECT first.queue, MIN(CASE WHEN j.run_at > j.created_at THEN j.run_at ELSE j.created_at END) FROM ("
    "SELECT k.queue, (SELECT r.id FROM djqueue_ready r "
    "WHERE r.queue = k.queue AND r.rank = k.rank AND r.seq >= 0 "
    "ORDER BY r.seq LIMIT 1) AS id FROM ranks k WHERE k.rank IS NOT NULL UNION ALL "
    "SELECT k.queue, (SELECT r.id FROM djqueue_ready r "
    "WHERE r.queue = k.queue AND r.rank = k.rank AND r.seq < 0 "
    "ORDER BY r.seq DESC LIMIT 1) FROM ranks k WHERE k.rank IS NOT NULL"
    ") first JOIN djqueue_job j ON j.id = first.id GROUP BY first.queue"
)
"""When the oldest job could be claimed, of the oldest at the end and at the front of each priority."""


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
            if number > MANY and before is not None and 0 <= tx.tick - before.tick < RECOUNT:
                found[queue] = before.scaled(number)
            elif number > 0:
                wanted.append(queue)
        counted = _count(tx, wanted) if wanted else {}
        with self._lock:
            for queue, one in counted.items():
                found[queue] = one
                self._large.pop(queue, None)
                if one.waiting > MANY:
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
    wanted = queues.names(tx) if names is None else list(names)
    if not wanted:
        return Overview(tx.now, [])
    listed, values = tx.listed(list(dict.fromkeys(wanted)))
    controls = {row[0]: row for row in tx.rows(CONTROLS.format(listed=listed), values)}
    oldest: dict[str, int] = dict(tx.rows(OLDEST.format(listed=listed), values))
    tallies = _tallies(tx, wanted)
    waiting = {queue: tallies[queue][1][State.WAITING] for queue in controls}
    counted = counts.of(tx, waiting)
    found = {
        queue: _overview_of(tx, row, tallies[queue], oldest.get(queue), counted[queue])
        for queue, row in controls.items()
    }
    return Overview(tx.now, [found[name] for name in wanted])


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
        due,
        weight,
    ) = row
    policy, (totals, counts) = tx.storage.policy(name), tally
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
        None if rate is None else rates.left(rate, (capacity, per, full_at), tx.tick),
        concurrency,
        int(weight or 0),
        mode or policy.group_mode,
        waiting.held,
        waiting.names,
        totals,
    )


# Groups.


def modes(tx: Tx, names: Sequence[str]) -> dict[str, str]:
    """Return the group modes of queues."""
    recorded = queues.recorded_modes(tx, names) if names else {}
    return {name: recorded.get(name, tx.storage.policy(name).group_mode) for name in names}


def groups(tx: Tx, queue: str, limit: int, names: Sequence[str]) -> GroupsOverview:
    """Return up to `limit` groups, those with most waiting jobs first, and the named ones."""
    policy = tx.storage.policy(queue)
    mode = modes(tx, [queue])[queue]
    own = queues.group_limits(tx, queue)
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

    def overview_of(group: str) -> GroupOverview:
        mine = own.get(group, NO_LIMIT)
        return GroupOverview(
            group,
            waiting.get(group, 0),
            active.get(group, 0),
            (mine.concurrency or default.concurrency or policy.group_concurrency) if is_grouped else 0,
            mine.rate or default.rate or policy.group_rate,
            mine.weight or default.weight or policy.group_weights.get(group, 1),
            mine.paused,
            mine,
        )

    return GroupsOverview(
        mode,
        (default.concurrency or policy.group_concurrency) if is_grouped else 0,
        default.rate or policy.group_rate,
        default,
        [overview_of(group) for group in busiest],
        [overview_of(group) for group in names],
        whole,
    )


def _waiting_by_group(tx: Tx, queue: str) -> dict[str, int]:
    """Return the waiting jobs of the first groups of a queue; if there are too many groups, of one more."""
    counted = (
        'SELECT "group", COUNT(*) FROM {} WHERE queue = ? AND "group" IS NOT NULL GROUP BY "group" '
        'ORDER BY "group" LIMIT ?'
    )
    return _sums(
        dict(tx.rows(counted.format(table), queue, MAX_GROUPS + 1))
        for table in ("djqueue_held", "djqueue_ready")
    )


def _by_group(tx: Tx, table: str, queue: str, names: Sequence[str]) -> dict[str, int]:
    """Return the number of rows of each of these groups."""
    condition, values = tx.among('"group"', names)
    counted = f'SELECT "group", COUNT(*) FROM {table} WHERE queue = ? AND {condition} GROUP BY "group"'
    return dict(tx.rows(counted, queue, values)) if names else {}


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for one in counts:
        for name, count in one.items():
            sums[name] = sums.get(name, 0) + count
    return sums
