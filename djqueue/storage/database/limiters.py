"""Limiters that queues share, and the token buckets of queues, groups and limiters.

`core.sharing` has the rules of limiters. Of a bucket, only the time at which it will be full is kept, from
which everything else follows. Times are milliseconds by the clock of leases, divided into as many parts as
the rate's capacity, so that a token is a whole number of parts. A bucket with another rate than the one asked
for is full.
"""

import json
from collections.abc import Sequence
from typing import Any

from djqueue.core.limiter import UNSET, Rate, SetConcurrency, SetRate
from djqueue.core.sharing import NO_LIMITS, LimiterPolicy, LimiterState, SharedLimiter
from djqueue.storage.tables.rows import pair_of_limits

from .transaction import Tx, limiter_lock


class RateTokens:
    """The tokens of a rate, read once."""

    def __init__(self, tx: Tx, queue: str, name: str, rate: Rate, kept: Sequence[Any] | None) -> None:
        """Initialize; `kept` are the columns of `BUCKET`, None if there is no row."""
        self._tx = tx
        self._key = queue, name
        self._rate = rate
        self._missing = 0 if kept is None else _missing_parts(rate, kept, tx.tick)

    @property
    def available(self) -> int:
        """Number of whole tokens."""
        return (self._rate.capacity * self._rate.per - self._missing) // self._rate.per

    def time_of(self, tokens: int) -> int:
        """Return when this many tokens will be available, up to the rate's capacity."""
        late = self._missing - (self._rate.capacity - tokens) * self._rate.per
        return self._tx.tick + max(0, -(-late // self._rate.capacity))

    @property
    def wait(self) -> int:
        """Milliseconds until a whole token is available; 0: now."""
        return self.time_of(1) - self._tx.tick

    def take(self, count: int) -> None:
        """Take available tokens; a negative number gives them back."""
        if not count:
            return
        rate = self._rate
        self._missing += count * rate.per
        full_at = self._tx.tick * rate.capacity + self._missing
        self._tx.run(
            "INSERT INTO djqueue_rate_bucket (queue, name, capacity, per, full_at, turns) VALUES (?, ?, "
            "?, ?, ?, '') "
            "ON CONFLICT (queue, name) DO UPDATE SET capacity = excluded.capacity, per = excluded.per, "
            "full_at = excluded.full_at",
            *(*self._key, rate.capacity, rate.per, str(full_at)),
        )


BUCKET = ("capacity", "per", "full_at")
"""Columns of a bucket."""


def rate_tokens(tx: Tx, queue: str, name: str, rate: Rate) -> RateTokens:
    """Read the tokens of a queue (without a name), or of one of its groups."""
    read = f"SELECT {', '.join(BUCKET)} FROM djqueue_rate_bucket WHERE queue = ? AND name = ?"
    return RateTokens(tx, queue, name, rate, tx.row(read, queue, name))


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
        "VALUES (?, ?, ?, ?, '0', '', ?) ON CONFLICT (queue, name) DO UPDATE SET rest_at = CASE "
        "WHEN djqueue_rate_bucket.rest_at < excluded.rest_at AND excluded.rest_at <= ? "
        "THEN djqueue_rate_bucket.rest_at ELSE excluded.rest_at END",
        *(queue, name, rate.capacity, rate.per, at, tx.tick),
    )


def tokens_left(rate: Rate, kept: Sequence[Any], tick: int) -> int:
    """Return the number of whole tokens of a bucket whose capacity, period and time were read."""
    return (rate.capacity * rate.per - _missing_parts(rate, kept, tick)) // rate.per


def _missing_parts(rate: Rate, kept: Sequence[Any], tick: int) -> int:
    """Return the parts that are missing to a full bucket."""
    capacity, per, full_at = kept
    if (capacity, per) != (rate.capacity, rate.per) or full_at is None:
        return 0
    return max(0, int(full_at) - tick * rate.capacity)


class _Tick:
    """The clock of a transaction, whose time does not pass."""

    def __init__(self, tick: int) -> None:
        self._tick = tick

    def now(self) -> int:
        return self._tick

    def monotonic(self) -> int:
        return self._tick

    def elapsed(self) -> int:
        return self._tick


class LockedLimiter:
    """One limiter, locked for the rest of the transaction."""

    def __init__(self, tx: Tx, name: str, *, lock: bool = True) -> None:
        self._tx = tx
        self._name = name
        if lock:
            tx.lock(limiter_lock(name))
        self.policy = policy_of(tx, name)
        self._shared = SharedLimiter(self.policy, _Tick(tx.tick))
        weight = tx.value("SELECT COALESCE(SUM(weight), 0) FROM djqueue_claim WHERE limiter = ?", name)
        kept = tx.row(
            "SELECT capacity, per, full_at, turns FROM djqueue_rate_bucket WHERE queue = '' AND name = ?",
            name,
        )
        *bucket, turns = kept or (0, 0, 0, "")
        rate = self.policy.rate
        missing = 0 if rate is None else _missing_parts(rate, bucket, tx.tick)
        self._shared.restore(int(weight), missing, json.loads(turns) if turns else [])
        self._kept = (*bucket[:2], self._shared.saved()) if kept else None

    def reserve(self, queue: str, weight: int, *, is_served: bool) -> bool:
        """Reserve the permits of one job; False if there are not enough, or it is another queue's turn."""
        tx = self._tx
        granted = self._shared.reserve(queue, 1, weight, tx.tick, tx.woken, is_served=is_served)
        return granted > 0

    def released(self) -> None:
        """Give permits of jobs that ended, and turns that passed, to the next queue in line."""
        self._shared.release(0, self._tx.woken)
        self.save()

    def waits(self, queue: str) -> list[int]:
        """Return the milliseconds after each of which time alone may make permits available to a queue."""
        return self._shared.waits(queue, self._tx.tick)

    def next_token(self) -> int:
        """Return the milliseconds until the rate lets a job start; 0: now."""
        return self._shared.next_token()

    def state(self) -> LimiterState:
        """Return the limiter as it is now."""
        return self._shared.state()

    def change(self) -> None:
        """Wake the queues in line after the limits have changed."""
        self._shared.change(UNSET, UNSET, self._tx.woken)
        self.save()

    def forget(self, queue: str) -> None:
        """Remove a queue from the line."""
        self._shared.forget(queue, self._tx.woken)
        self.save()

    def save(self) -> None:
        """Write the tokens and the queues in line."""
        missing, turns = self._shared.saved()
        rate = self.policy.rate or Rate(0, 1)
        if self._kept == (rate.capacity, rate.per, (missing, turns)):
            return  # On SQLite, each write wakes the workers of all processes, which would claim again.
        self._kept = (rate.capacity, rate.per, (missing, turns))
        full_at = self._tx.tick * rate.capacity + missing
        self._tx.run(
            "INSERT INTO djqueue_rate_bucket (queue, name, capacity, per, full_at, turns) VALUES "
            "('', ?, ?, ?, ?, ?) "
            "ON CONFLICT (queue, name) DO UPDATE SET capacity = excluded.capacity, per = excluded.per, "
            "full_at = excluded.full_at, turns = excluded.turns",
            *(self._name, rate.capacity, rate.per, str(full_at), json.dumps(turns) if turns else ""),
        )


def policy_of(tx: Tx, name: str) -> LimiterPolicy:
    """Return the limits that apply: those set at run time, or else those of the settings."""
    row = tx.row(
        "SELECT rate_capacity, rate_per, concurrency FROM djqueue_limiter_state WHERE name = ?", name
    )
    if row is None:
        return tx.database.limiter_policies.get(name, NO_LIMITS)
    rate, concurrency = pair_of_limits(*row)
    return LimiterPolicy(rate=rate, concurrency=concurrency)


def rate_columns(rate: Rate | None) -> tuple[int | None, int | None]:
    """Return a rate as the columns of its capacity and period."""
    return (None, None) if rate is None else (rate.capacity, rate.per)


def set_limits(tx: Tx, name: str, rate: SetRate, concurrency: SetConcurrency) -> None:
    """Change the limits of a limiter while its queues run."""
    tx.touch()
    tx.lock(limiter_lock(name))
    before = policy_of(tx, name)
    new_rate = before.rate if rate is UNSET else rate
    new_concurrency = before.concurrency if concurrency is UNSET else concurrency
    tx.run(
        "INSERT INTO djqueue_limiter_state (name, rate_capacity, rate_per, concurrency) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET rate_capacity = excluded.rate_capacity, rate_per = "
        "excluded.rate_per, "
        "concurrency = excluded.concurrency",
        *(name, *rate_columns(new_rate), new_concurrency),
    )
    LockedLimiter(tx, name).change()


def pass_turns_on(tx: Tx) -> None:
    """Give turns that a queue did not use to the next queue in line."""
    for (name,) in tx.rows(
        "SELECT name FROM djqueue_rate_bucket WHERE queue = '' AND turns <> '' ORDER BY name"
    ):
        LockedLimiter(tx, name).released()
