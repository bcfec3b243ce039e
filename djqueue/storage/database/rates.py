"""Token buckets of queues, groups and limiters.

Only the time at which a bucket will be full is kept, from which everything else follows. Times are
milliseconds by the clock of leases, divided into as many parts as the rate's capacity, so that a token is a
whole number of parts. A bucket with another rate than the one asked for is full.
"""

from collections.abc import Sequence

from djqueue.core.limiter import Rate

from .transaction import Tx


def available(tx: Tx, queue: str, name: str, rate: Rate) -> int:
    """Return the number of whole tokens."""
    return (rate.capacity * rate.per - _missing(tx, queue, name, rate)) // rate.per


def available_at(tx: Tx, queue: str, name: str, rate: Rate, tokens: int) -> int:
    """Return when this many tokens will be available, up to the rate's capacity."""
    late = _missing(tx, queue, name, rate) - (rate.capacity - tokens) * rate.per
    return tx.tick + max(0, -(-late // rate.capacity))


def wait(tx: Tx, queue: str, name: str, rate: Rate) -> int:
    """Return the milliseconds until a whole token is available; 0: now."""
    return available_at(tx, queue, name, rate, 1) - tx.tick


def consume(tx: Tx, queue: str, name: str, rate: Rate, count: int) -> None:
    """Take tokens that `available` has returned; a negative number gives them back."""
    if not count:
        return
    full_at = tx.tick * rate.capacity + _missing(tx, queue, name, rate) + count * rate.per
    tx.run(
        "INSERT INTO djqueue_rate_bucket (queue, name, capacity, per, full_at, turns) VALUES (?, ?, "
        "?, ?, ?, '') "
        "ON CONFLICT (queue, name) DO UPDATE SET capacity = excluded.capacity, per = excluded.per, "
        "full_at = excluded.full_at",
        *(queue, name, rate.capacity, rate.per, full_at),
    )


def set_rest(tx: Tx, queue: str, name: str, rate: Rate, at: int | None) -> None:
    """Record when the next job of a group may be ready; None if time alone does not make it ready. A time
    that has passed remains until the group continues.
    """
    if at is None:
        rested = (
            "UPDATE djqueue_rate_bucket SET rest_at = NULL WHERE queue = ? AND name = ? AND rest_at "
            "IS NOT NULL"
        )
        tx.run(rested, queue, name)
        return
    tx.run(
        "INSERT INTO djqueue_rate_bucket (queue, name, capacity, per, full_at, turns, rest_at) "
        "VALUES (?, ?, ?, ?, 0, '', ?) ON CONFLICT (queue, name) DO UPDATE SET rest_at = CASE "
        "WHEN djqueue_rate_bucket.rest_at < excluded.rest_at AND excluded.rest_at <= ? "
        "THEN djqueue_rate_bucket.rest_at ELSE excluded.rest_at END",
        *(queue, name, rate.capacity, rate.per, at, tx.tick),
    )


def left(rate: Rate, kept: Sequence[int | None], tick: int) -> int:
    """Return the number of whole tokens of a bucket whose capacity, period and time were read."""
    return (rate.capacity * rate.per - _short(rate, kept, tick)) // rate.per


def _missing(tx: Tx, queue: str, name: str, rate: Rate) -> int:
    """Return the parts that are missing to a full bucket."""
    found = tx.row(
        "SELECT capacity, per, full_at FROM djqueue_rate_bucket WHERE queue = ? AND name = ?", queue, name
    )
    return 0 if found is None else _short(rate, found, tx.tick)


def _short(rate: Rate, kept: Sequence[int | None], tick: int) -> int:
    capacity, per, full_at = kept
    if (capacity, per) != (rate.capacity, rate.per) or full_at is None:
        return 0
    return max(0, full_at - tick * rate.capacity)
