"""Queues as a whole: pauses, limits, groups, and removal of many jobs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from djqueue.core.errors import StorageError
from djqueue.core.policies import NO_LIMIT, UNSET, Hold, KeyLimit, Rate, SetConcurrency, SetRate, standing
from djqueue.core.states import PENDING, TERMINAL, State
from djqueue.storage.tables.rows import group_limit_of, pack_holds, pair_of_limits, unpack_holds

from . import limiters, metrics, stored, transitions
from .expiry import ExpiryStep
from .stored import KEY_LIMIT, LockedGroup, used_queues
from .transaction import Tx, limits_lock

T = TypeVar("T")
LIMIT = 500
"""Jobs that one transaction removes."""
HAS_ACTIVE = "queue {!r} has active jobs: wait until they finish, or pass force=True"
REMOVED = (State.BLOCKED, *sorted(PENDING - {State.BLOCKED}), *sorted(TERMINAL))
"""Order in which jobs are removed: dependents would end with their dependencies otherwise, and stay."""


class StepRunner(Protocol):
    """Runs one step of a long operation in a transaction."""

    def __call__(self, step: Callable[[Tx], T], /) -> T:
        """Return the answer of the step."""


class QueueControls(NamedTuple):
    """The pause, limits and holds of a queue."""

    paused: bool = False
    rate: Rate | None = None
    concurrency: int | None = None
    holds: tuple[Hold, ...] = ()


def controls(tx: Tx, queue: str) -> QueueControls:
    """Return what applies to a queue: set at run time or, for limits, else those of its policy."""
    policy = tx.database.policy(queue)
    row = tx.row(
        "SELECT paused, holds, limits_set, rate_capacity, rate_per, concurrency FROM djqueue_queue_state "
        "WHERE name = ?",
        queue,
    )
    if row is None:
        return QueueControls(False, policy.rate, policy.concurrency)
    limits = pair_of_limits(*row[3:]) if row[2] else (policy.rate, policy.concurrency)
    return QueueControls(bool(row[0]), *limits, standing(unpack_holds(row[1]), tx.now))


def check_modes(tx: Tx) -> None:
    """Raise ConfigurationError if a queue is configured with another key mode than it is used in."""
    for queue, mode in recorded_modes(tx, None).items():
        tx.database.policy(queue).check_mode(queue, mode)


def recorded_modes(tx: Tx, names: Sequence[str] | None) -> dict[str, str]:
    """Return the key modes that are recorded, of these queues (None: of all)."""
    statement = "SELECT queue, mode FROM djqueue_group_state WHERE concurrency_key = '' AND mode <> ''"
    if names is None:
        return dict(tx.rows(statement))
    condition, values = tx.among("queue", names)
    return dict(tx.rows(f"{statement} AND {condition}", values))


def pause(tx: Tx, queue: str, *, paused: bool) -> None:
    """Stop claims from a queue, or resume them."""
    tx.touch()
    if paused:
        stored.use(tx, queue)
        _stop(tx, queue)
        return
    tx.run("UPDATE djqueue_queue_state SET paused = FALSE WHERE name = ?", queue)
    tx.woken.add(queue)


def _stop(tx: Tx, queue: str) -> None:
    # Here and below: another process may have removed the row since this one recorded the use of the queue.
    tx.run(
        "INSERT INTO djqueue_queue_state (name, paused, limits_set) VALUES (?, TRUE, FALSE) "
        "ON CONFLICT (name) DO UPDATE SET paused = TRUE",
        queue,
    )


def hold(tx: Tx, queue: str, name: str, until: int | None, reason: str) -> None:
    """Stop claims of the jobs of one name."""
    stored.use(tx, queue)
    others, _ = _other_holds(tx, queue, name)
    _set_holds(tx, queue, [*others, Hold(name, tx.now, until, reason)])


def release(tx: Tx, queue: str, name: str) -> bool:
    """End a hold; return whether there was one."""
    others, was_held = _other_holds(tx, queue, name)
    if was_held:
        _set_holds(tx, queue, others)
        tx.woken.add(queue)
    return was_held


def _other_holds(tx: Tx, queue: str, name: str) -> tuple[list[Hold], bool]:
    """Lock the holds of a queue; return those on other names, and whether there is one on this name."""
    tx.touch()
    tx.lock(limits_lock(queue))
    holds = controls(tx, queue).holds
    others = [one for one in holds if one.name != name]
    return others, len(others) < len(holds)


def _set_holds(tx: Tx, queue: str, holds: Sequence[Hold]) -> None:
    tx.run(
        "INSERT INTO djqueue_queue_state (name, paused, limits_set, holds) VALUES (?, FALSE, FALSE, ?) "
        "ON CONFLICT (name) DO UPDATE SET holds = excluded.holds",
        *(queue, pack_holds(holds)),
    )


def set_limits(tx: Tx, queue: str, rate: SetRate, concurrency: SetConcurrency) -> None:
    """Change the limits of a queue; a limit that is not given stays as it is."""
    tx.touch()
    stored.use(tx, queue)
    tx.lock(limits_lock(queue))
    now = controls(tx, queue)
    new_rate = now.rate if rate is UNSET else rate
    new_concurrency = now.concurrency if concurrency is UNSET else concurrency
    if new_rate is None:
        # Another rate, even an equal one, starts with a full bucket.
        tx.run("DELETE FROM djqueue_rate_bucket WHERE queue = ? AND name = ''", queue)
    tx.run(
        "INSERT INTO djqueue_queue_state (name, paused, limits_set, rate_capacity, rate_per, concurrency) "
        "VALUES (?, FALSE, TRUE, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET limits_set = TRUE, "
        "rate_capacity = excluded.rate_capacity, rate_per = excluded.rate_per, "
        "concurrency = excluded.concurrency",
        *(queue, *limiters.rate_columns(new_rate), new_concurrency),
    )
    tx.woken.add(queue)


def change_group(tx: Tx, queue: str, group: str | None, changes: Mapping[str, Any]) -> None:
    """Change the overrides of a group, or those of all groups of the queue if `group` is None."""
    tx.touch()
    stored.use(tx, queue)
    name = group or ""
    row = tx.row(
        f"SELECT {KEY_LIMIT} FROM djqueue_group_state WHERE queue = ? AND concurrency_key = ?", queue, name
    )
    before = NO_LIMIT if row is None else group_limit_of(row)
    after = before._replace(**changes)
    tx.run(
        "INSERT INTO djqueue_group_state (queue, concurrency_key, mode, concurrency, paused, rate_capacity, "
        "rate_per, weight) "
        "VALUES (?, ?, '', ?, ?, ?, ?, ?) ON CONFLICT (queue, concurrency_key) DO UPDATE SET "
        "concurrency = excluded.concurrency, paused = excluded.paused, rate_capacity = "
        "excluded.rate_capacity, "
        "rate_per = excluded.rate_per, weight = excluded.weight",
        *(queue, name, after.concurrency, after.paused, *limiters.rate_columns(after.rate), after.weight),
    )
    for one in _groups(tx, queue) if group is None else [group]:
        changed = LockedGroup(tx, queue, one)
        changed.hold_back()
        changed.advance()
    tx.woken.add(queue)


def _groups(tx: Tx, queue: str) -> list[str]:
    """Return the groups of a queue that have pending jobs."""
    names = tx.rows(
        "SELECT concurrency_key FROM djqueue_held WHERE queue = ? UNION SELECT concurrency_key "
        "FROM djqueue_ready WHERE queue = ? AND concurrency_key IS NOT NULL ORDER BY 1",
        *(queue, queue),
    )
    return [name for (name,) in names]


def key_limits(tx: Tx, queue: str) -> dict[str | None, KeyLimit]:
    """Return the overrides of a queue's groups; under None, those of all groups."""
    found: dict[str | None, KeyLimit] = {}
    of_queue = f"SELECT {KEY_LIMIT} FROM djqueue_group_state WHERE queue = ? ORDER BY concurrency_key"
    for row in tx.rows(of_queue, queue):
        limit = group_limit_of(row)
        if limit != NO_LIMIT:
            found[row[1] or None] = limit
    return found


def clean(run: StepRunner, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
    """Remove up to `limit` jobs in these states that ended, or were enqueued, before a time.

    Args:
        run: Runs each step in a transaction.
        queue: The queue.
        states: Active jobs are never removed.
        before: UTC milliseconds.
        limit: None removes all of them.

    Returns the number of removed jobs.
    """
    removed = 0
    for state in REMOVED:
        while state in states and (some := LIMIT if limit is None else min(LIMIT, limit - removed)) > 0:
            step = run(partial(_clean_some, queue=queue, state=state, before=before, limit=some))
            removed += step.removed
            if step.handled < some:
                break  # Jobs that come while this one cleans may stay.
    return removed


def _clean_some(tx: Tx, queue: str, state: State, before: int, limit: int) -> ExpiryStep:
    """Remove the first jobs of one state, in the order of an index."""
    time = "finished_at" if state in TERMINAL else "created_at"
    order = {State.BLOCKED: "id DESC", State.WAITING: "id", State.DELAYED: "id"}.get(state, time)
    pks = tx.rows(
        f"SELECT id FROM djqueue_job WHERE queue = ? AND state = ? AND {time} < ? ORDER BY {order} LIMIT ?",
        *(queue, state.value, before, limit),
    )
    jobs = [job for job in stored.by_keys(tx, [pk for (pk,) in pks]) if job.state is state]
    transitions.remove(tx, jobs)
    return ExpiryStep(len(pks), len(jobs))


def obliterate(run: StepRunner, queue: str, *, force: bool) -> int:
    """Remove a queue with all its jobs; return the number of removed jobs.

    No waiting job starts meanwhile, and jobs that arrive meanwhile stay, in a queue without limits. If the
    process dies, the queue stays paused, and another call removes the rest.

    Args:
        run: Runs each step in a transaction.
        queue: The queue.
        force: Also remove active jobs. Otherwise, StorageError is raised if there are any.
    """
    was_paused, newest = run(partial(_close, queue=queue, force=force))
    removed = 0
    try:
        while (step := run(partial(_remove_newest, queue=queue, newest=newest, force=force))).handled:
            removed += step.removed
    except StorageError:
        if not was_paused:
            run(partial(pause, queue=queue, paused=False))
        raise
    run(partial(_forget, queue=queue))
    return removed


def _close(tx: Tx, queue: str, *, force: bool) -> tuple[bool, int]:
    """Pause a queue; return whether it was paused already, and the newest primary key of a job."""
    if not force and tx.rows("SELECT id FROM djqueue_claim WHERE queue = ? LIMIT 1", queue):
        raise StorageError(HAS_ACTIVE.format(queue))
    was_paused = controls(tx, queue).paused
    # Not by `pause`: a process that is configured for another key mode may obliterate the queue.
    _stop(tx, queue)
    return was_paused, tx.value("SELECT MAX(id) FROM djqueue_job") or 0


def _remove_newest(tx: Tx, queue: str, newest: int, *, force: bool) -> ExpiryStep:
    """Remove the newest jobs of one state of a closed queue.

    So a job that waits for another one of the queue goes before it, or with it.
    """
    which = "SELECT id FROM djqueue_job WHERE queue = ? AND state = ? AND id <= ? ORDER BY id DESC LIMIT ?"
    # Active jobs once more: a job may have started between the looks at active and at waiting ones. Without
    # `force` they are looked at before anything is removed.
    first = REMOVED[:1] if force else ()
    for state in (*first, State.ACTIVE, *REMOVED, State.ACTIVE):
        if pks := [pk for (pk,) in tx.rows(which, queue, state.value, newest, LIMIT)]:
            jobs = stored.by_keys(tx, pks)
            if started := [job.pk for job in jobs if job.state is State.ACTIVE]:
                # Their claims had begun before the queue was paused.
                _end_active(tx, queue, started, force=force)
                jobs = stored.by_keys(tx, pks, lock=False)
            transitions.remove(tx, jobs)
            return ExpiryStep(len(pks), len(jobs))
    return ExpiryStep(0)


def _forget(tx: Tx, queue: str) -> None:
    """Remove what is left of a queue without its jobs."""
    limiter = tx.database.policy(queue).limiter
    if limiter is not None:
        limiters.LockedLimiter(tx, limiter).forget(queue)
    metrics.reset(tx, queue)
    tx.touch()
    for table in ("djqueue_group_state", "djqueue_rate_bucket", "djqueue_retention_tally"):
        tx.run(f"DELETE FROM {table} WHERE queue = ?", queue)
    # Subscriptions are to the name of the queue, and outlive it.
    tx.run("DELETE FROM djqueue_queue_state WHERE name = ?", queue)
    tx.woken.add(queue)  # Jobs that have arrived meanwhile may start.


def _end_active(tx: Tx, queue: str, pks: Sequence[int], *, force: bool) -> None:
    """Cancel active jobs that are about to be removed. Raises StorageError without `force`."""
    if not force:
        raise StorageError(HAS_ACTIVE.format(queue))
    condition, values = tx.among("id", pks)
    tx.run(f"DELETE FROM djqueue_claim WHERE {condition}", values)
    for job in stored.by_keys(tx, pks):
        if job.state is State.ACTIVE:
            transitions.cancel_active(tx, job, "obliterated")


def queue_names(tx: Tx) -> list[str]:
    """Return the names of the queues that have been used, sorted."""
    used: Sequence[tuple[str]] = tx.rows("SELECT name FROM djqueue_queue_state")
    return sorted({name for (name,) in used} | set(used_queues(tx, "djqueue_job")))
