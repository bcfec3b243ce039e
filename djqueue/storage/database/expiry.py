"""Sweeps of what has outlived its time, or exceeds the bounds of its queue.

Each step takes a limited number of rows from the start of an index.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from djqueue.core.options import DAY
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import TERMINAL, State

from . import deadletters, retention, stored, transitions
from .dialects import Row
from .stored import ids_by_queue
from .transaction import KEPT, Tx

DETAILS = {"attempts": "djqueue_job_attempt", "logs": "djqueue_job_log", "items": "djqueue_job_item"}


class ExpiryStep(NamedTuple):
    """The work of one transaction of a sweep."""

    handled: int
    """Rows that a later step does not meet again."""
    removed: int = 0
    """Removed records of jobs."""


def expire(tx: Tx, limit: int) -> ExpiryStep:
    """Remove some of everything that has outlived its time."""
    steps = [_expire_letters(tx, limit)]
    steps += [_expire_records(tx, state, limit) for state in (State.COMPLETED, State.CANCELLED)]
    steps += [_expire_results(tx, limit), _expire_details(tx, limit)]
    return ExpiryStep(max(step.handled for step in steps), sum(step.removed for step in steps))


def _expire_records(tx: Tx, state: State, limit: int) -> ExpiryStep:
    """Remove records of ended jobs past their time; those that live jobs may read are pinned."""
    found = tx.rows(
        "SELECT id, queue, job_id, expires_at FROM djqueue_job WHERE state = ? AND expires_at <= ? "
        f"ORDER BY expires_at, id LIMIT ?{tx.dialect.skip_locked}",
        *(state.value, tx.now, limit),
    )
    held = _held(tx, [row[1:3] for row in found])
    removed = [row[0] for row in found if row[1:3] not in held]
    if removed:
        transitions.remove(tx, stored.ended(tx, removed))
    pinned = sum(
        retention.pin(tx, pk, (queue, id), "expires_at", expires_at)
        for pk, queue, id, expires_at in found
        if (queue, id) in held
    )
    return ExpiryStep(len(removed) + pinned, len(removed))


def _expire_results(tx: Tx, limit: int) -> ExpiryStep:
    """Remove results past their time with their items; those that live jobs may read lose only the items."""
    found = tx.rows(
        "SELECT id, queue, job_id, expires_at, kept_size FROM djqueue_job_result WHERE expires_at <= ? "
        f"ORDER BY expires_at, id LIMIT ?{tx.dialect.skip_locked}",
        *(tx.now, limit),
    )
    held = _held(tx, [row[1:3] for row in found])
    _remove_results(tx, [row for row in found if row[1:3] not in held])
    pinned = [row for row in found if row[1:3] in held]
    _remove_items(tx, pinned)
    return ExpiryStep(len(found) - len(pinned) + sum(_pin_result(tx, row) for row in pinned))


def _remove_results(tx: Tx, found: Sequence[Row]) -> None:
    """Remove results (id, queue, job's id, expiry, counted bytes) with the items of their jobs."""
    if not found:
        return
    condition, ids = tx.among("id", [row[0] for row in found])
    tx.run(f"DELETE FROM djqueue_job_result WHERE {condition}", ids)
    for row in found:
        tx.keep(row[1], "result_bytes", -(row[4] or 0))
    _remove_items(tx, found)


def _pin_result(tx: Tx, row: Row) -> bool:
    _, queue, id, expires_at, _ = row
    pk = tx.value("SELECT id FROM djqueue_job WHERE queue = ? AND job_id = ?", queue, id)
    return pk is not None and retention.pin(tx, pk, (queue, id), "result_expires_at", expires_at)


def _remove_items(tx: Tx, found: Sequence[Row]) -> None:
    for queue, ids in ids_by_queue(row[1:3] for row in found).items():
        condition, values = tx.among("job_id", ids)
        tx.run(f"DELETE FROM djqueue_job_item WHERE queue = ? AND {condition}", queue, values)


def _held(tx: Tx, keys: Sequence[Row]) -> set[Row]:
    return {
        (queue, id)
        for queue, ids in ids_by_queue((queue, id) for queue, id in keys).items()
        for id in retention.are_held(tx, queue, ids)
    }


def _expire_details(tx: Tx, limit: int) -> ExpiryStep:
    """Remove attempts, log lines and items that expire before the records of their jobs."""
    found = tx.rows(
        f"SELECT id, job, queue, ended_at, kind FROM djqueue_expiring WHERE at <= ? ORDER BY at, id LIMIT ?"
        f"{tx.dialect.skip_locked}",
        *(tx.now, limit),
    )
    if not found:
        return ExpiryStep(0)
    condition, pks = tx.among("id", [row[1] for row in found])
    jobs = {
        row[0]: row
        for row in tx.rows(
            "SELECT id, queue, job_id, state, finished_at FROM djqueue_job "
            f"WHERE {condition} ORDER BY id{tx.dialect.for_update}",
            pks,
        )
    }
    for _, pk, queue, ended_at, kind in found:
        job = jobs.get(pk)
        # It may be live again, have ended once more, or be in another queue.
        if job is not None and job[1] == queue and job[3] in TERMINAL and job[4] == ended_at:
            tx.run(f"DELETE FROM {DETAILS[kind]} WHERE queue = ? AND job_id = ?", queue, job[2])
    condition, ids = tx.among("id", [row[0] for row in found])
    tx.run(f"DELETE FROM djqueue_expiring WHERE {condition}", ids)
    return ExpiryStep(len(found))


def _expire_letters(tx: Tx, limit: int) -> ExpiryStep:
    """Remove expired dead letters with their jobs."""
    found = tx.rows(
        "SELECT queue, job_id FROM djqueue_dead_letter WHERE expires_at <= ? ORDER BY expires_at, id LIMIT ?",
        *(tx.now, limit),
    )
    return _remove_letters(tx, [(queue, id) for queue, id in found])


def _remove_letters(tx: Tx, keys: Sequence[tuple[str, str]]) -> ExpiryStep:
    """Remove failed jobs with their dead letters, in this order."""
    pks = {}
    for queue, ids in ids_by_queue(keys).items():
        condition, values = tx.among("job_id", ids)
        found = f"SELECT job_id, id FROM djqueue_job WHERE queue = ? AND {condition}"
        pks.update({(queue, id): pk for id, pk in tx.rows(found, queue, values)})
    there = {job.pk: job for job in stored.ended(tx, list(pks.values()))} if pks else {}
    jobs = [there[pk] for key in keys if (pk := pks.get(key)) in there]
    failed = [job for job in jobs if job.state is State.FAILED]
    transitions.remove(tx, failed)
    return ExpiryStep(len(failed), len(failed))


# The bounds of queues: number and bytes of records, results and dead letters.


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
    failed = tx.rows("SELECT queue, SUM(in_failed) FROM djqueue_tally GROUP BY queue ORDER BY queue")
    found = [queue for queue, count in failed if count > tx.database.policy(queue).dead_letters.max_entries]
    sums = ", ".join(f"SUM({what})" for what in KEPT)
    for queue, added, *numbers in tx.rows(
        f"SELECT queue, COUNT(*), {sums} FROM djqueue_retention_tally GROUP BY queue ORDER BY queue"
    ):
        if added > 1:
            _add_up(tx, queue)
        kept = dict(zip(KEPT, map(int, numbers), strict=True))
        policy = tx.database.policy(queue)
        letters = policy.dead_letters.max_bytes
        is_exceeded = (
            any(max(_surplus(policy, kept, state)) > 0 for state in (State.COMPLETED, State.CANCELLED))
            or _excess_of_results(policy, kept) > 0
            or (letters is not None and kept["letter_bytes"] > letters)
        )
        if is_exceeded:
            found.append(queue)
    return list(dict.fromkeys(found))


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
    policy = tx.database.policy(queue)
    steps = [_enforce_letters(tx, queue, policy, limit), _enforce_results(tx, queue, policy, limit)]
    steps += [
        _enforce_records(tx, queue, policy, state, limit) for state in (State.COMPLETED, State.CANCELLED)
    ]
    return ExpiryStep(max(step.handled for step in steps), sum(step.removed for step in steps))


def _enforce_letters(tx: Tx, queue: str, policy: QueuePolicy, limit: int) -> ExpiryStep:
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
    return _remove_letters(tx, [(queue, id) for id in ids])


def _enforce_results(tx: Tx, queue: str, policy: QueuePolicy, limit: int) -> ExpiryStep:
    excess = _excess_of_results(policy, tx.kept(queue)) if policy.retention.results.bytes is not None else 0
    if excess <= 0:
        return ExpiryStep(0)
    rows = tx.rows(
        "SELECT id, queue, job_id, expires_at, kept_size FROM djqueue_job_result "
        f"WHERE queue = ? AND kept_order IS NOT NULL ORDER BY kept_order LIMIT ?{tx.dialect.for_update}",
        *(queue, limit),
    )
    chosen = _first(rows, 0, excess)
    _remove_results(tx, chosen)
    return ExpiryStep(len(chosen))


def _enforce_records(tx: Tx, queue: str, policy: QueuePolicy, state: State, limit: int) -> ExpiryStep:
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
    names = [name for name, policy in tx.database.policies().items() if needs_search(policy)]
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
    policy = tx.database.policy(queue)
    ids = [id for _, id in found]
    if state is State.FAILED:
        if policy.dead_letters.max_bytes is not None:
            retention.count_letters(tx, queue, ids)
    elif policy.retention.counts:
        held = retention.are_held(tx, queue, ids)
        free = [id for id in ids if id not in held]
        if free:
            retention.count_again(tx, queue, free)
    if is_first and (policy.retention.attempts.age is not None or policy.retention.logs.age is not None):
        for job in stored.by_keys(tx, [pk for pk, _ in found], lock=False):
            retention.note_details(tx, job)
