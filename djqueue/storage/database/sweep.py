"""Periodic work: due jobs, expired leases and ttls, dead letters, old records, metrics."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from time import monotonic
from typing import Any

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import Swept
from djqueue.core.logs import Log
from djqueue.core.states import PENDING
from djqueue.storage.tables.dberrors import is_unreachable, named

from . import (
    claim,
    dependencies,
    events,
    expiry,
    finish,
    limiters,
    metrics,
    stored,
    transitions,
    workers,
)
from .transaction import Database, Tx

logger = Log("djqueue.storage")
LIMIT = 500
"""Jobs that one transaction of a sweep changes."""
STALLED = 50
"""Leases that one transaction of a sweep ends: their workers may report meanwhile, and wait."""
EVENTS = 5_000
"""Old events that one transaction of a sweep deletes."""
ROUNDS = 100
"""Transactions of one kind in one sweep."""
ONE_BY_ONE_TIMEOUT = 1.0
"""Seconds for which a sweep tries expired jobs one by one when something of one of them is locked."""
SEARCHES = 10
"""Transactions of one sweep that search a queue for records that are not counted."""


class Sweep:
    """One round of what time requires. Any number of processes may sweep; a second round changes nothing.

    A step that fails does not stop the others. It is logged when it has not failed before, and the next round
    tries it again.

    Args:
        database: The database.
        sweep_staging: Sweeps what bulk writes have left.
        failing: Names of the steps that failed in the round before; changed to those of this one.
    """

    def __init__(self, database: Database, sweep_staging: Callable[[], None], failing: set[str]) -> None:
        self._database = database
        self._write = database.transactions.write
        self._sweep_staging = sweep_staging
        self._failing = failing
        self._errors: dict[str, Exception] = {}
        self._worked = False
        self._is_held_up = False

    def run(self) -> Swept:
        """Do the steps. Raises only if all fail, two wait for the database in vain, or it is away."""
        self._tidy()
        stalled, expired, promoted, retried = self._move()
        with self._step("add up what was counted"):
            metrics.sweep(self._database)
        removed = self._remove()
        with self._step("sweep bulk writes"):
            self._sweep_staging()
        self._report()
        return Swept(promoted, stalled, expired, retried, removed)

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        try:
            with named(self._database.alias):
                yield
            self._worked = True
        except StorageUnavailableError as error:
            # Each step that waits in vain takes seconds: one may be held up by a lock, two mean more.
            if self._is_held_up or is_unreachable(self._database.alias, error):
                raise
            self._is_held_up = True
            self._errors[name] = error
        except Exception as error:
            self._errors[name] = error

    def _report(self) -> None:
        if not self._worked:
            raise next(iter(self._errors.values()))
        for name, error in self._errors.items():
            if name not in self._failing:
                is_known = isinstance(error, StorageUnavailableError)
                logger.log(
                    logging.WARNING if is_known else logging.ERROR,
                    "The sweep could not %s; it goes on with its other steps, and will try again: %s",
                    *(name, error),
                    exc_info=None if is_known else error,
                )
        self._failing.clear()
        self._failing.update(self._errors)

    def _tidy(self) -> None:
        """Remove what is no longer needed."""
        with self._step("remove silent workers"):
            self._write(workers.forget_silent)
        with self._step("remove old events"):
            _rounds(partial(self._write, partial(events.forget_old, limit=EVENTS)), EVENTS)
        with self._step("pass on turns at limiters"):
            self._write(limiters.pass_turns_on)
        with self._step("release expired unique keys"):
            _rounds(partial(self._write, partial(dependencies.forget_expired_keys, limit=LIMIT)), LIMIT)

    def _move(self) -> tuple[int, int, int, int]:
        """Move jobs on; return the numbers of stalled, expired, promoted and retried ones."""
        stalled = expired = promoted = retried = 0
        due: tuple[list[str], list[str], list[str]] = ([], [], [])
        with self._step("take back jobs of lost workers"):
            stalled = _rounds(partial(self._write, _stall), STALLED)
        with self._step("find due jobs"):
            due = self._database.transactions.read(_due)
        delayed, resting, failed = due
        for queue in delayed:
            with self._step(f"promote delayed jobs of queue {queue!r}"):
                promote = partial(claim.promote_due, queue=queue, limit=LIMIT)
                promoted += _rounds(partial(self._write, promote), LIMIT)
        for queue in resting:
            with self._step(f"resume groups of queue {queue!r}"):
                self._write(partial(claim.end_rests, queue=queue))
        with self._step("fail expired jobs"):
            expired = _rounds(self._expire, LIMIT)
        for queue in failed:
            with self._step(f"retry dead letters of queue {queue!r}"):
                retried += self._write(partial(_retry, queue=queue))
        return stalled, expired, promoted, retried

    def _expire(self) -> int:
        """Fail expired jobs; one that is locked, or whose dependents are, does not hold up the others."""
        write = self._database.transactions.write_unless_locked
        together = write(lambda tx: _expire(tx, _expired(tx)))
        if together is not None:
            return together[0]
        expired, until = 0, monotonic() + ONE_BY_ONE_TIMEOUT
        for job in self._database.transactions.read(_expired):
            if monotonic() > until:
                break
            alone = write(partial(_expire, jobs=[job]))
            expired += 0 if alone is None else alone[0]
        return expired

    def _remove(self) -> int:
        """Remove what has expired or is above the bounds of its queue; return the number of records."""
        removed = 0
        unsearched, exceeded = [], []
        with self._step("remove expired records"):
            removed += _steps(partial(self._write, partial(expiry.expire, limit=LIMIT)))
        with self._step("find queues with records to count"):
            unsearched = self._write(expiry.unsearched)
        for queue in unsearched:
            with self._step(f"count records of queue {queue!r}"):
                _steps(partial(self._write, partial(expiry.search, queue=queue, limit=LIMIT)), SEARCHES)
        with self._step("find queues above their bounds"):
            exceeded = self._write(expiry.exceeded)
        for queue in exceeded:
            with self._step(f"remove records above the bounds of queue {queue!r}"):
                removed += _steps(partial(self._write, partial(expiry.enforce, queue=queue, limit=LIMIT)))
        return removed


def _due(tx: Tx) -> tuple[list[str], list[str], list[str]]:
    """Return the queues with due delayed jobs, with groups whose rest is over, and with due retries."""
    due = f" AND ({stored.NEXT_DUE.format('found.name')}) <= ?"
    delayed = tx.rows(stored.queues_in("djqueue_delayed") + due, tx.now)
    resting = "SELECT DISTINCT queue FROM djqueue_rate_bucket WHERE rest_at IS NOT NULL AND rest_at <= ?"
    failed = "SELECT DISTINCT queue FROM djqueue_dead_letter WHERE next_retry_at <= ?"
    found = (delayed, tx.rows(resting, tx.tick), tx.rows(failed, tx.now))
    first, second, third = (sorted(name for (name,) in some) for some in found)
    return first, second, third


def _rounds(step: Callable[[], int], limit: int) -> int:
    total = 0
    for _ in range(ROUNDS):
        count = step()
        total += count
        if count < limit:
            break
    return total


def _steps(step: Callable[[], expiry.ExpiryStep], rounds: int = ROUNDS) -> int:
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
        f"SELECT id, token FROM djqueue_claim WHERE lease_until <= ?{tx.dialect.free_group} "
        f"ORDER BY started_at, id DESC LIMIT ?{tx.dialect.skip_locked}",
        *(tx.tick, STALLED),
    )
    for pk, token in overdue:
        finish.stall(tx, pk, token)
    return len(overdue)


def _expired(tx: Tx) -> list[tuple[int, int, str]]:
    """Return pending jobs past their ttl: when it ended, primary key and queue.

    A job that has started, or was retried, never expires.
    """
    due: list[Any] = []
    for state in sorted(PENDING):
        due += tx.rows(
            "SELECT expires_at, id, queue FROM djqueue_job WHERE state = ? AND expires_at <= ? "
            "ORDER BY expires_at, id LIMIT ?",
            *(state.value, tx.now, LIMIT),
        )
    return sorted(due)[:LIMIT]


def _expire(tx: Tx, jobs: Sequence[tuple[int, int, str]]) -> int:
    # One queue after the other: the end of a job may fail one of another queue.
    order = sorted(jobs, key=itemgetter(2))
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
