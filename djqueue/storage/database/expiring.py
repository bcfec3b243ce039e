"""Removal of what has outlived its time: records, results, details and dead letters.

Each function is one step of a sweep, which takes a limited number of rows from the start of an index.
"""

from collections.abc import Sequence
from typing import NamedTuple

from djqueue.core.states import TERMINAL, State

from . import dependencies, retention, stored, transitions
from .dialects import Row
from .stored import ids_by_queue
from .transaction import Tx

DETAILS = {"attempts": "djqueue_job_attempt", "logs": "djqueue_job_log", "items": "djqueue_job_item"}


class ExpiryStep(NamedTuple):
    """The work of one transaction of a sweep."""

    handled: int
    """Rows that a later step does not meet again."""
    removed: int = 0
    """Removed records of jobs."""


def everything(tx: Tx, limit: int) -> ExpiryStep:
    """Remove some of everything that has outlived its time."""
    steps = [letters(tx, limit)]
    steps += [records(tx, state, limit) for state in (State.COMPLETED, State.CANCELLED)]
    steps += [results(tx, limit), details(tx, limit)]
    return ExpiryStep(max(step.handled for step in steps), sum(step.removed for step in steps))


def records(tx: Tx, state: State, limit: int) -> ExpiryStep:
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


def results(tx: Tx, limit: int) -> ExpiryStep:
    """Remove results past their time with their items; those that live jobs may read lose only the items."""
    found = tx.rows(
        "SELECT id, queue, job_id, expires_at, kept_size FROM djqueue_job_result WHERE expires_at <= ? "
        f"ORDER BY expires_at, id LIMIT ?{tx.dialect.skip_locked}",
        *(tx.now, limit),
    )
    held = _held(tx, [row[1:3] for row in found])
    remove_results(tx, [row for row in found if row[1:3] not in held])
    pinned = [row for row in found if row[1:3] in held]
    _remove_items(tx, pinned)
    return ExpiryStep(len(found) - len(pinned) + sum(_pin_result(tx, row) for row in pinned))


def remove_results(tx: Tx, found: Sequence[Row]) -> None:
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
        for id in dependencies.are_held(tx, queue, ids)
    }


def details(tx: Tx, limit: int) -> ExpiryStep:
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


def letters(tx: Tx, limit: int) -> ExpiryStep:
    """Remove expired dead letters with their jobs."""
    found = tx.rows(
        "SELECT queue, job_id FROM djqueue_dead_letter WHERE expires_at <= ? ORDER BY expires_at, id LIMIT ?",
        *(tx.now, limit),
    )
    return remove_letters(tx, [(queue, id) for queue, id in found])


def remove_letters(tx: Tx, keys: Sequence[tuple[str, str]]) -> ExpiryStep:
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
