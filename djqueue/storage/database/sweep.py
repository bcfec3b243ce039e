"""Periodic work: due jobs, expired leases and ttls, dead letters, old records, metrics."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from djqueue.core.maintenance import Swept
from djqueue.core.states import PENDING

from . import claim, dependencies, events, finish, limiters, retention, stored, transitions
from .transaction import Tx

if TYPE_CHECKING:
    from .storage import DatabaseStorage

LIMIT = 500
"""Jobs that one transaction of a sweep changes."""
ROUNDS = 100
"""Transactions of one kind in one sweep."""
SEARCHES = 10
"""Transactions of one sweep that search a queue for records that are not counted."""


def sweep(storage: "DatabaseStorage") -> Swept:
    """Do once what time requires. Any number of processes may sweep; a second sweep changes nothing."""
    write = storage.transactions.write
    write(storage.workers.forget_silent)
    write(events.forget_old)
    write(limiters.pass_turns_on)
    stalled = _rounds(lambda: write(_stall))
    promoted = retried = 0
    delayed, resting, failed = storage.transactions.read(_due)
    for queue in delayed:
        promoted += _rounds(partial(write, partial(claim.promote_due, queue=queue, limit=LIMIT)))
    for queue in resting:
        write(partial(claim.end_rests, queue=queue))
    expired = _rounds(lambda: write(_expire))
    write(dependencies.forget_expired_keys)
    removed = _sweep_retention(storage)
    for queue in failed:
        retried += write(partial(_retry, queue=queue))
    storage.sweep_metrics()
    storage.sweep_staging()
    return Swept(promoted, stalled, expired, retried, removed)


def _due(tx: Tx) -> tuple[list[str], list[str], list[str]]:
    """Return the queues with due delayed jobs, with groups whose rest is over, and with due retries."""
    due = " AND (SELECT MIN(run_at) FROM djqueue_delayed WHERE queue = found.name) <= ?"
    delayed = tx.rows(stored.queues_in("djqueue_delayed") + due, tx.now)
    resting = "SELECT DISTINCT queue FROM djqueue_rate_bucket WHERE rest_at IS NOT NULL AND rest_at <= ?"
    failed = "SELECT DISTINCT queue FROM djqueue_dead_letter WHERE next_retry_at <= ?"
    found = (delayed, tx.rows(resting, tx.tick), tx.rows(failed, tx.now))
    first, second, third = (sorted(name for (name,) in some) for some in found)
    return first, second, third


def _rounds(step: Callable[[], int]) -> int:
    total = 0
    for _ in range(ROUNDS):
        count = step()
        total += count
        if count < LIMIT:
            break
    return total


def _sweep_retention(storage: "DatabaseStorage") -> int:
    """Remove what has expired or is above the bounds of its queue; return the number of removed records."""
    write = storage.transactions.write
    removed = _steps(partial(write, partial(retention.expire, limit=LIMIT)))
    for queue in write(retention.unsearched):
        _steps(partial(write, partial(retention.search, queue=queue, limit=LIMIT)), SEARCHES)
    for queue in write(retention.exceeded):
        removed += _steps(partial(write, partial(retention.enforce, queue=queue, limit=LIMIT)))
    return removed


def _steps(step: Callable[[], retention.ExpiryStep], rounds: int = ROUNDS) -> int:
    removed = 0
    for _ in range(rounds):
        done = step()
        removed += done.removed
        if done.handled < LIMIT:
            break
    return removed


def _stall(tx: Tx) -> int:
    # The job that was claimed last is claimed first again: a job that kills its worker soon after its start
    # is among the last ones. Jobs of one claim keep their order.
    overdue = tx.rows(
        "SELECT id, token FROM djqueue_claim WHERE lease_until <= ? ORDER BY started_at, id DESC LIMIT ?"
        + tx.dialect.skip_locked,
        *(tx.tick, LIMIT),
    )
    for pk, token in overdue:
        finish.stall(tx, pk, token)
    return len(overdue)


def _expire(tx: Tx) -> int:
    """Fail pending jobs past their ttl; one that has started, or was retried, never expires."""
    due = []
    for state in sorted(PENDING):
        due += tx.rows(
            "SELECT expires_at, id, queue FROM djqueue_job WHERE state = ? AND expires_at <= ? "
            "ORDER BY expires_at, id LIMIT ?",
            *(state.value, tx.now, LIMIT),
        )
    # One queue after the other: the end of a job may fail one of another queue.
    order = sorted(sorted(due)[:LIMIT], key=itemgetter(2))
    stored.lock_jobs(tx, [pk for _, pk, _ in order])
    expired = 0
    for _, some in groupby(order, itemgetter(2)):
        for _, pk, _ in some:
            # Another process may have failed or started it meanwhile, or the end of an earlier one has.
            for job in stored.by_keys(tx, [pk], lock=False):
                if job.state in PENDING and job.expires_at is not None and job.expires_at <= tx.now:
                    transitions.fail_pending(tx, job, "ttl_expired", transitions.EXPIRED)
                    expired += 1
        tx.settle()
    return expired


def _retry(tx: Tx, queue: str) -> int:
    """Retry dead letters by themselves; those whose unique keys are taken do not hold up the others."""
    due = tx.rows(
        "SELECT d.job_id FROM djqueue_dead_letter d JOIN djqueue_job j ON j.queue = d.queue AND "
        "j.job_id = d.job_id "
        "LEFT JOIN djqueue_unique_key u ON u.queue = j.queue AND u.key = j.unique_key AND u.owner IS "
        "NOT NULL "
        "AND (u.expires_at IS NULL OR u.expires_at > ?) "
        "WHERE d.queue = ? AND d.next_retry_at <= ? AND u.id IS NULL ORDER BY d.id LIMIT ?",
        *(tx.now, queue, tx.now, LIMIT),
    )
    if not due:
        return 0
    answers = transitions.retry(tx, queue, [id for (id,) in due], by_itself=True)
    return answers.count("retried") + answers.count("blocked_again")
