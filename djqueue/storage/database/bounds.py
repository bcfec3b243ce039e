"""The bounds of queues: number and bytes of records, results and dead letters."""

from collections.abc import Iterable

from djqueue.core.options import DAY
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State

from . import deadletters, dependencies, expiring, retention, stored, transitions
from .dialects import Row
from .expiring import ExpiryStep
from .transaction import KEPT, Tx

SEARCHED = (State.COMPLETED, State.CANCELLED, State.FAILED)
STATE = 60
"""Bits of a position in the search for a primary key; the others are the state."""


def needs_search(policy: QueuePolicy) -> bool:
    """Return whether something of a queue is counted, or expires, that was not when its jobs ended."""
    kept = policy.retention
    ages = (kept.attempts.age, kept.logs.age)
    return kept.counts or policy.dead_letters.max_bytes is not None or any(age is not None for age in ages)


def exceeded(tx: Tx) -> list[str]:
    """Return the queues that keep more than they may; also add up what was counted."""
    found = _crowded(tx)
    sums = ", ".join(f"SUM({what})" for what in KEPT)
    for queue, rows, *numbers in tx.rows(
        f"SELECT queue, COUNT(*), {sums} FROM djqueue_retention_tally GROUP BY queue ORDER BY queue"
    ):
        if rows > 1:
            _add_up(tx, queue)
        kept = dict(zip(KEPT, map(int, numbers), strict=True))
        policy = tx.storage.policy(queue)
        letters = policy.dead_letters.max_bytes
        is_exceeded = (
            any(max(_surplus(policy, kept, state)) > 0 for state in (State.COMPLETED, State.CANCELLED))
            or _excess_of_results(policy, kept) > 0
            or (letters is not None and kept["letter_bytes"] > letters)
        )
        if is_exceeded:
            found.append(queue)
    return list(dict.fromkeys(found))


def _crowded(tx: Tx) -> list[str]:
    """Return the queues that have more dead letters than they may."""
    failed = tx.rows("SELECT queue, SUM(in_failed) FROM djqueue_tally GROUP BY queue ORDER BY queue")
    return [queue for queue, count in failed if count > tx.storage.policy(queue).dead_letters.max_entries]


def _add_up(tx: Tx, queue: str) -> None:
    sums = ", ".join(KEPT)
    rows = tx.rows(
        "DELETE FROM djqueue_retention_tally WHERE id IN (SELECT id FROM djqueue_retention_tally "
        f"WHERE queue = ? ORDER BY id LIMIT 10000{tx.dialect.skip_locked}) RETURNING {sums}",
        queue,
    )
    if rows:
        total = [sum(row[at] for row in rows) for at in range(len(KEPT))]
        tx.insert("djqueue_retention_tally", ("queue", *KEPT), [(queue, *total)])


def enforce(tx: Tx, queue: str, limit: int) -> ExpiryStep:
    """Remove some of what a queue keeps above its bounds."""
    # Two sweeps that read the same sums would remove twice as much.
    tx.lock(f"retention:{queue}")
    policy = tx.storage.policy(queue)
    steps = [_letters(tx, queue, policy, limit), _results(tx, queue, policy, limit)]
    steps += [_records(tx, queue, policy, state, limit) for state in (State.COMPLETED, State.CANCELLED)]
    return ExpiryStep(max(step.handled for step in steps), sum(step.removed for step in steps))


def _letters(tx: Tx, queue: str, policy: QueuePolicy, limit: int) -> ExpiryStep:
    rules = policy.dead_letters
    count = min(tx.counts(queue)[State.FAILED] - rules.max_entries, limit)
    ids = deadletters.oldest(tx, queue, count)
    excess = 0
    if rules.max_bytes is not None:
        excess = tx.kept(queue)["letter_bytes"] - rules.max_bytes
    if excess > 0:
        heavy = tx.rows(
            "SELECT job_id, size FROM djqueue_dead_letter WHERE queue = ? ORDER BY id LIMIT ?", queue, limit
        )
        heavy_ids = [id for (id, _) in _first(heavy, 0, excess)]
        ids = max(ids, heavy_ids, key=len)
    return expiring.remove_letters(tx, [(queue, id) for id in ids])


def _results(tx: Tx, queue: str, policy: QueuePolicy, limit: int) -> ExpiryStep:
    excess = _excess_of_results(policy, tx.kept(queue)) if policy.retention.results.bytes is not None else 0
    if excess <= 0:
        return ExpiryStep(0)
    rows = tx.rows(
        "SELECT id, queue, job_id, expires_at, kept_size FROM djqueue_job_result "
        f"WHERE queue = ? AND kept_order IS NOT NULL ORDER BY kept_order LIMIT ?{tx.dialect.for_update}",
        *(queue, limit),
    )
    chosen = _first(rows, 0, excess)
    expiring.remove_results(tx, chosen)
    return ExpiryStep(len(chosen))


def _records(tx: Tx, queue: str, policy: QueuePolicy, state: State, limit: int) -> ExpiryStep:
    keep = policy.retention.of(state)
    if keep.count is None and keep.bytes is None:
        return ExpiryStep(0)
    count, excess = _surplus(policy, tx.kept(queue), state)
    if count <= 0 and excess <= 0:
        return ExpiryStep(0)
    rows = tx.rows(
        "SELECT id, job_id, kept_size FROM djqueue_job WHERE queue = ? AND state = ? "
        f"AND kept_order IS NOT NULL ORDER BY kept_order LIMIT ?{tx.dialect.for_update}",
        *(queue, state.value, limit if excess > 0 else min(count, limit)),
    )
    if excess > 0 and state is State.COMPLETED and rows:
        condition, ids = tx.among("job_id", [row[1] for row in rows])
        sizes: dict[str, int | None] = dict(
            tx.rows(
                f"SELECT job_id, kept_size FROM djqueue_job_result WHERE queue = ? AND {condition}",
                queue,
                ids,
            )
        )
        rows = [(pk, id, size + (sizes.get(id) or 0)) for pk, id, size in rows]
    chosen = _first(rows, count, excess)
    if chosen:
        transitions.remove(tx, stored.ended(tx, [row[0] for row in chosen]))
    return ExpiryStep(len(chosen), len(chosen))


def _surplus(policy: QueuePolicy, kept: dict[str, int], state: State) -> tuple[int, int]:
    """Return by how much a queue exceeds the number, and the bytes, of records with an outcome."""
    keep = policy.retention.of(state)
    size = kept[f"{state}_bytes"] + (kept["result_bytes"] if state is State.COMPLETED else 0)
    return (
        0 if keep.count is None else kept[state] - keep.count,
        0 if keep.bytes is None else size - keep.bytes,
    )


def _excess_of_results(policy: QueuePolicy, kept: dict[str, int]) -> int:
    limit = policy.retention.results.bytes
    return 0 if limit is None else kept["result_bytes"] - limit


def _first(rows: Iterable[Row], count: int, excess: int) -> list[Row]:
    """Return the first rows, at least this number, and this many bytes, which are their last column."""
    chosen: list[Row] = []
    for row in rows:
        if len(chosen) >= count and excess <= 0:
            break
        chosen.append(row)
        excess -= row[-1] or 0
    return chosen


# Jobs that ended before their queue had bounds, or in a process without them.


def unsearched(tx: Tx) -> list[str]:
    """Return the queues in which jobs may have ended that are not counted; each is searched once a day."""
    names = [name for name, policy in tx.storage.policies().items() if needs_search(policy)]
    if not names:
        return []
    condition, values = tx.among("name", names)
    due = f"SELECT name FROM djqueue_queue_state WHERE {condition} AND (counted_to > 0 OR counted_at <= ?)"
    return [name for (name,) in tx.rows(f"{due} ORDER BY name", values, tx.now - DAY)]


def search(tx: Tx, queue: str, limit: int) -> ExpiryStep:
    """Count some of the ended jobs of a queue that are not counted."""
    tx.lock(f"retention:{queue}")
    row = tx.row("SELECT counted_to, counted_at FROM djqueue_queue_state WHERE name = ?", queue)
    if row is None or (not row[0] and row[1] > tx.now - DAY):
        return ExpiryStep(0)  # Another sweep has done it.
    index, last = row[0] >> STATE, row[0] & ((1 << STATE) - 1)
    found = tx.rows(
        "SELECT id, job_id FROM djqueue_job WHERE queue = ? AND state = ? AND id > ? "
        f"ORDER BY id LIMIT ?{tx.dialect.for_update}",
        *(queue, SEARCHED[index].value, last, limit),
    )
    if found:
        _count(tx, queue, SEARCHED[index], found, is_first=not row[1])
    if len(found) == limit:
        position, done_at = (index << STATE) + found[-1][0], row[1]
    elif index + 1 < len(SEARCHED):
        position, done_at = (index + 1) << STATE, row[1]
    else:
        position, done_at = 0, tx.now
    tx.run(
        "UPDATE djqueue_queue_state SET counted_to = ?, counted_at = ? WHERE name = ?",
        position,
        done_at,
        queue,
    )
    return ExpiryStep(limit if position else 0)


def _count(tx: Tx, queue: str, state: State, found: list[Row], *, is_first: bool) -> None:
    policy = tx.storage.policy(queue)
    ids = [id for _, id in found]
    if state is State.FAILED:
        if policy.dead_letters.max_bytes is not None:
            retention.count_letters(tx, queue, ids)
    elif policy.retention.counts:
        held = dependencies.are_held(tx, queue, ids)
        free = [id for id in ids if id not in held]
        if free:
            retention.count_again(tx, queue, free)
    if is_first and (policy.retention.attempts.age is not None or policy.retention.logs.age is not None):
        for job in stored.by_keys(tx, [pk for pk, _ in found], lock=False):
            retention.note_details(tx, job)
