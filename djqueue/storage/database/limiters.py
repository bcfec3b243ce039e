"""Limiters that queues share: see `core.sharing` for the rules, which decide here, too."""

import json

from djqueue.core.limiter import UNSET, Rate, SetConcurrency, SetRate
from djqueue.core.sharing import NO_LIMITS, LimiterPolicy, LimiterState, SharedLimiter
from djqueue.storage.tables.rows import pair_of_limits

from .transaction import Tx, limiter_lock


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
        capacity, per, full_at, turns = kept or (0, 0, 0, "")
        rate = self.policy.rate
        missing = 0
        if rate is not None and (capacity, per) == (rate.capacity, rate.per):
            missing = max(0, full_at - tx.tick * capacity)
        self._shared.restore(int(weight), missing, json.loads(turns) if turns else [])

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
        full_at = self._tx.tick * rate.capacity + missing
        self._tx.run(
            "INSERT INTO djqueue_rate_bucket (queue, name, capacity, per, full_at, turns) VALUES "
            "('', ?, ?, ?, ?, ?) "
            "ON CONFLICT (queue, name) DO UPDATE SET capacity = excluded.capacity, per = excluded.per, "
            "full_at = excluded.full_at, turns = excluded.turns",
            *(self._name, rate.capacity, rate.per, full_at, json.dumps(turns) if turns else ""),
        )


def policy_of(tx: Tx, name: str) -> LimiterPolicy:
    """Return the limits that apply: those set at run time, or else those of the settings."""
    row = tx.row(
        "SELECT rate_capacity, rate_per, concurrency FROM djqueue_limiter_state WHERE name = ?", name
    )
    if row is None:
        return tx.storage.limiter_policies.get(name, NO_LIMITS)
    rate, concurrency = pair_of_limits(*row)
    return LimiterPolicy(rate=rate, concurrency=concurrency)


def set_limits(tx: Tx, name: str, rate: SetRate, concurrency: SetConcurrency) -> None:
    """Change the limits of a limiter while its queues run."""
    tx.touch()
    tx.lock(limiter_lock(name))
    before = policy_of(tx, name)
    new_rate = before.rate if rate is UNSET else rate
    new_concurrency = before.concurrency if concurrency is UNSET else concurrency
    capacity, per = (None, None) if new_rate is None else (new_rate.capacity, new_rate.per)
    tx.run(
        "INSERT INTO djqueue_limiter_state (name, rate_capacity, rate_per, concurrency) VALUES (?, ?, ?, ?) "
        "ON CONFLICT (name) DO UPDATE SET rate_capacity = excluded.rate_capacity, rate_per = "
        "excluded.rate_per, "
        "concurrency = excluded.concurrency",
        *(name, capacity, per, new_concurrency),
    )
    LockedLimiter(tx, name).change()


def pass_turns_on(tx: Tx) -> None:
    """Give turns that a queue did not use to the next queue in line."""
    for (name,) in tx.rows(
        "SELECT name FROM djqueue_rate_bucket WHERE queue = '' AND turns <> '' ORDER BY name"
    ):
        LockedLimiter(tx, name).released()
