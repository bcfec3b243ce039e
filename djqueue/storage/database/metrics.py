"""Metrics: what transactions have counted, and what workers report.

Every transaction adds a row to the tallies, so that no two of them wait for one another. A sweep replaces the
rows of each queue by their sum, and adds the totals of the new ones to the buckets of the metrics.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from djqueue.core.metrics import (
    ALL_TIME,
    COUNTS,
    MAX_NAMES,
    OTHERS,
    TIERS,
    RunStats,
    Span,
    Values,
    add_up,
    new_values,
    start_of,
    times_of,
    values_of,
)
from djqueue.core.metrics import Row as Found
from djqueue.core.overview import Totals
from djqueue.storage.tables.rows import BUCKET, bucket_row, bucket_values, pack_histogram

from .transaction import STATES, TALLY, TALLY_COLUMNS, Database, Tx

READ = f"SELECT {', '.join(BUCKET)} FROM djqueue_metric_bucket"
ADD_UP = (
    f"INSERT INTO djqueue_metric_bucket ({', '.join(BUCKET)}) VALUES ({', '.join('?' * len(BUCKET))}) "
    "ON CONFLICT (queue, name, tier, start) DO UPDATE SET "
    + ", ".join(f"{name} = djqueue_metric_bucket.{name} + excluded.{name}" for name in Totals._fields)
)
REPLACE_TIMES = ADD_UP + ", wait = excluded.wait, run = excluded.run"
ROWS = 5_000
"""Rows of tallies that one transaction of a sweep adds up."""
ROUNDS = 200
"""Transactions of a queue in one sweep."""
EXPIRED = 500
"""Expired buckets that one transaction of a sweep deletes."""


# Sweeps.


def sweep(database: Database) -> None:
    """Add the tallies of each queue up to one row, and what they count to the metrics; drop old buckets.

    Any number of processes may sweep: a row is deleted by the transaction that adds its numbers elsewhere.
    """
    write, read = database.transactions.write, database.transactions.read
    for queue in read(_changed):
        _rounds(partial(write, partial(_add_up, queue=queue)), ROWS)
    for tier, kept in database.metrics.kept().items():
        if read(partial(_has_expired, tier=tier, kept=kept)):
            _rounds(partial(write, partial(_delete_expired, tier=tier, kept=kept)), EXPIRED)


def _rounds(step: Callable[[], int], whole: int) -> None:
    for _ in range(ROUNDS):
        if step() < whole:
            break


def _changed(tx: Tx) -> list[str]:
    """Return the queues whose tallies have new rows, in one scan, as there may be very many."""
    found = tx.rows("SELECT queue FROM djqueue_tally GROUP BY queue HAVING MAX(at) > 0 ORDER BY queue")
    return [name for (name,) in found]


def _add_up(tx: Tx, queue: str) -> int:
    """Replace the oldest tallies of a queue by their sum; return the number of the replaced rows."""
    tx.lock(f"metrics:{queue}")
    if not tx.value("SELECT MAX(at) FROM djqueue_tally WHERE queue = ?", queue):
        return 0  # Another process has done so since.
    rows = tx.rows(
        "DELETE FROM djqueue_tally WHERE id "
        + tx.dialect.once("SELECT id FROM djqueue_tally WHERE queue = ? ORDER BY at LIMIT ?")
        + f" RETURNING {', '.join(TALLY_COLUMNS)}",
        *(queue, ROWS),
    )
    sums = map(sum, zip(*(row[2:] for row in rows), strict=True))
    tx.insert("djqueue_tally", TALLY_COLUMNS, [(queue, 0, *sums)])
    buckets: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        if row[1] and any(row[2 : 2 + COUNTS]):
            for tier in TIERS:
                add_up(buckets.setdefault((tier, start_of(tier, row[1])), [0] * COUNTS), row[2 : 2 + COUNTS])
    nothing = pack_histogram(0, ())
    tx.many(ADD_UP, [(queue, "", *key, *counts, nothing, nothing) for key, counts in sorted(buckets.items())])
    return len(rows)


def reset(tx: Tx, queue: str) -> None:
    """Forget the totals and metrics of a queue that is obliterated.

    Its numbers of jobs are 0 then, unless another transaction has enqueued jobs meanwhile.
    """
    tx.lock(f"metrics:{queue}")
    left = tx.forget(queue)
    columns = ", ".join(f"in_{state.value}" for state in STATES)
    for row in tx.rows(f"DELETE FROM djqueue_tally WHERE queue = ? RETURNING {columns}", queue):
        for state, number in zip(STATES, row, strict=True):
            left[state] += number
    if any(left.values()):
        numbers = (*[0] * len(TALLY), *(left[state] for state in STATES))
        tx.insert("djqueue_tally", TALLY_COLUMNS, [(queue, 0, *numbers)])
    tx.run("DELETE FROM djqueue_metric_bucket WHERE queue = ?", queue)


def _has_expired(tx: Tx, tier: int, kept: int) -> bool:
    expired = "SELECT 1 FROM djqueue_metric_bucket WHERE tier = ? AND start < ? LIMIT 1"
    return tx.row(expired, tier, tx.now - kept) is not None


def _delete_expired(tx: Tx, tier: int, kept: int) -> int:
    return tx.run(
        "DELETE FROM djqueue_metric_bucket WHERE id "
        + tx.dialect.once(
            "SELECT id FROM djqueue_metric_bucket WHERE tier = ? AND start < ? ORDER BY start LIMIT ?"
            + tx.dialect.skip_locked
        ),
        *(tier, tx.now - kept, EXPIRED),
    )


# What workers report.


def record(tx: Tx, stats: Sequence[RunStats]) -> None:
    """Add statistics of ended attempts to the current buckets, except those of unknown queues."""
    by_queue: dict[str, list[RunStats]] = {}
    for one in stats:
        by_queue.setdefault(one.queue, []).append(one)
    if not by_queue:
        return
    tx.lock(*(f"metrics:{queue}" for queue in by_queue))
    condition, names = tx.among("name", list(by_queue))
    for (queue,) in sorted(tx.rows(f"SELECT name FROM djqueue_queue_state WHERE {condition}", names)):
        _record(tx, queue, by_queue[queue])
        tx.touch()


def _record(tx: Tx, queue: str, stats: Sequence[RunStats]) -> None:
    there = _current(tx, queue, ["", OTHERS, *dict.fromkeys(one.name for one in stats)])
    own = _names(tx, queue, there, stats)
    new: dict[str, Values] = {}
    for one in stats:
        add_up(new.setdefault("", new_values()), times_of(one))
        add_up(new.setdefault(one.name if one.name in own else OTHERS, new_values()), values_of(one))
    rows = []
    for name, values in sorted(new.items()):
        for tier in TIERS:
            key = (name, tier, start_of(tier, tx.now))
            times = [0] * COUNTS + there.get(key, new_values())[COUNTS:]
            add_up(times, values)
            rows.append(bucket_row((queue, *key), times))
    tx.many(REPLACE_TIMES, rows)


def _current(tx: Tx, queue: str, names: Sequence[str]) -> dict[tuple[str, int, int], Values]:
    """Return the current buckets of these names, by name, length and start."""
    condition, values = tx.among("name", names)
    some = f"{READ} WHERE queue = ? AND {condition} AND tier = ? AND start = ?"
    given = [item for tier in TIERS for item in (queue, values, tier, start_of(tier, tx.now))]
    return {row[1:4]: bucket_values(row) for row in tx.rows(" UNION ALL ".join([some] * len(TIERS)), *given)}


def _names(
    tx: Tx, queue: str, there: Mapping[tuple[str, int, int], Values], stats: Sequence[RunStats]
) -> set[str]:
    """Return the names that have buckets of their own, of those that are reported."""
    wanted = list(dict.fromkeys(one.name for one in stats))
    own = {name for name in wanted if (name, ALL_TIME, 0) in there}
    new = [name for name in wanted if name not in own]
    if not new:
        return own
    counted = (
        "SELECT COUNT(*) FROM djqueue_metric_bucket WHERE queue = ? AND tier = ? AND name NOT IN ('', ?)"
    )
    left = MAX_NAMES - tx.value(counted, queue, ALL_TIME, OTHERS)
    return own | set(new[: max(0, left)])


# Reads.


def series(tx: Tx, queues: Sequence[str] | None, span: Span, *, by_name: bool) -> Iterable[Found]:
    """Return the buckets in a span of time, by queue (None: of all) or by job name."""
    named = "name <> ''" if by_name else "name = ''"
    which = f"tier = ? AND start >= ? AND start < ? AND {named}"
    return _found(tx, queues, which, span.tier, span.start, span.end)


def everything(tx: Tx, queues: Sequence[str] | None) -> Iterable[Found]:
    """Return the buckets with everything since the queues began (None: all), by queue and by job name."""
    return _found(tx, queues, "tier = ?", ALL_TIME)


def _found(tx: Tx, queues: Sequence[str] | None, which: str, *parameters: object) -> Iterable[Found]:
    if queues is None:
        rows = tx.rows(f"{READ} WHERE {which}", *parameters)
    else:
        condition, values = tx.among("queue", list(dict.fromkeys(queues)))
        rows = tx.rows(f"{READ} WHERE {condition} AND {which}", values, *parameters)
    return [(row[0], row[1], row[3], bucket_values(row)) for row in rows]
