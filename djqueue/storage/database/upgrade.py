"""Carries over the jobs of the former storage, whose scheduler process kept its journal in the same tables.

A live job of the former storage has no row besides that of `djqueue_job`. Jobs, dead letters and settings are
read like a snapshot, and written like a restore, in one transaction.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from djqueue import models
from djqueue.core.errors import SnapshotTargetError
from djqueue.core.job import REJECTED, JobFailure
from djqueue.core.overview import Finding
from djqueue.core.procfs import died_here, lives_here
from djqueue.core.states import LIVE, State
from djqueue.storage.facets import WORKER_TTL
from djqueue.storage.snapshots import FIRST, JOB, PAGE, Part, Position, SnapshotCounts
from djqueue.storage.snapshotspool import SnapshotSpool
from djqueue.storage.tables import rows, schema
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.leaderlease import ABANDONED, SCHEDULER, LeaseHolder

from .dialects import Row
from .snapshots import Reader, TableRestore
from .stored import HOT, StoredJob, job_of
from .transaction import Database, Tx

PLACES = " UNION ALL ".join(f"SELECT 1 FROM {table} WHERE {table}.id = djqueue_job.id" for table in HOT)
IS_FORMER = (
    "SELECT 1 FROM djqueue_leader_lease WHERE name = ? UNION ALL SELECT 1 FROM djqueue_job "
    f"WHERE state IN ('waiting', 'delayed', 'active') AND NOT EXISTS ({PLACES}) LIMIT 1"
)
COUNTS = "SELECT state, COUNT(*) FROM djqueue_job GROUP BY state"
ENDED = "state IN ('completed', 'cancelled')"
SET_LIMITS = "rate_capacity IS NOT NULL OR concurrency IS NOT NULL"
STARTED_FIRST = ("stalled", "released")
"""Outcomes after which a job waits before those that have not started."""


def is_former(database: Database) -> bool:
    """Return whether the tables hold what the former storage has written. They must be up to date."""
    return database.read(lambda tx: tx.row(IS_FORMER, SCHEDULER) is not None)


def findings(tx: Tx) -> list[Finding]:
    """Return a finding if the tables hold what the former storage has written, which no worker runs."""
    if tx.row("SELECT 1 FROM djqueue_leader_lease WHERE name = ?", SCHEDULER) is None:
        return []
    return [
        Finding(
            "storage.former",
            "error",
            "The tables hold jobs of an earlier development version, which workers do not run.",
            "Stop all workers, then run `manage.py djqueue upgrade`.",
        )
    ]


def counts(database: Database) -> dict[State, int]:
    """Return the number of jobs by state."""
    return database.read(lambda tx: {State(state): number for state, number in tx.rows(COUNTS)})


def check_stopped(tx: Tx) -> None:
    """Raise SnapshotTargetError while a scheduler or a worker of any version runs."""
    now, alias = tx.database.clock.now(), tx.database.alias
    leases = schema.table_name(alias, models.LeaderLeaseRow._meta.db_table)
    for host, pid, ends in tx.rows(f"SELECT host, pid, expires_at FROM {leases} WHERE name = ?", SCHEDULER):
        if ends > ABANDONED and not died_here(pid, host) and (ends > now or lives_here(pid, host)):
            holder = LeaseHolder("", host, pid, "")
            raise SnapshotTargetError(
                f"{holder.describe()} is the scheduler of an earlier version: stop all workers first"
            )
    workers = models.WorkerState.objects.using(alias).filter(seen_at__gt=now - WORKER_TTL)
    if ids := sorted(workers.values_list("worker_id", flat=True)):
        raise SnapshotTargetError(
            f"workers have sent heartbeats in the last {WORKER_TTL // 1_000} seconds ({', '.join(ids[:3])}"
            f"{', …' if len(ids) > 3 else ''}): stop all workers first, and wait if they were killed"
        )


def carry_over(
    database: Database,
    *,
    drop_finished: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> SnapshotCounts:
    """Bring all jobs, dead letters and settings into the form of this storage: all of them, or none.

    Args:
        database: The database, whose tables are up to date.
        drop_finished: Delete the completed and cancelled jobs that no other job depends on.
        progress: Called with the number of records read so far.
    """

    def work(tx: Tx) -> SnapshotCounts:
        with closing(SnapshotSpool(database.policy, tx.now, database.random)) as spool:
            restore = TableRestore(tx, spool, tx.now)
            restore.lock()
            check_stopped(tx)
            if drop_finished:
                _drop_finished(tx)
            _name_keys(tx)
            tx.run(f"UPDATE djqueue_queue_state SET limits_set = TRUE WHERE {SET_LIMITS}")
            spool.fill(_counted(FormerReader(tx).parts(PAGE), progress))
            restore.run()
            tx.run("DELETE FROM djqueue_leader_lease WHERE name = ?", SCHEDULER)
            return spool.counts()

    with named(database.alias):
        found = database.transactions.write(work, durable=True)
    database.used_until.clear()
    return found


class FormerReader(Reader):
    """Reads jobs of the former storage, beside those of this one."""

    def _job(self, row: Row) -> StoredJob:
        job = job_of(row)
        if job.state is State.ACTIVE and job.reason == rows.CANCEL_REQUESTED:
            job.cancel_requested, job.reason = True, ""
        elif job.options.rejected is not None and job.state in LIVE:
            # It was still in the inbox, from which the scheduler took it as a dead letter.
            job.state, job.reason, job.finished_at = State.FAILED, REJECTED, self._tx.now
            job.error = JobFailure(*job.options.rejected)
        return job

    def _positions(self, jobs: Sequence[StoredJob]) -> dict[int, Position]:
        positions = super()._positions(jobs)
        live = {job.pk: job for job in jobs if job.state in LIVE}
        condition, pks = self._tx.among("id", list(live))
        for table in HOT if live else ():
            for (pk,) in self._tx.rows(f"SELECT id FROM {table} WHERE {condition}", pks):
                del live[pk]
        return positions | {pk: _position(job) for pk, job in live.items()}


def _position(job: StoredJob) -> Position:
    """Return the turn that the former storage gave a job when its scheduler started."""
    last = job.history[-1].outcome if job.history else ""
    if job.started_at and (job.state is State.ACTIVE or last in STARTED_FIRST):
        return FIRST + (job.created_at if last == "released" else -job.started_at), job.pk
    return (-job.run_at, -job.pk) if job.options.lifo else (job.run_at, job.pk)


def _drop_finished(tx: Tx) -> None:
    needed = {
        key
        for (options,) in tx.rows(f"SELECT options FROM djqueue_job WHERE NOT {ENDED}")
        for key in rows.unpack_options(bytes(options)).depends_on
    }
    found = tx.rows(f"SELECT id, queue, job_id FROM djqueue_job WHERE {ENDED}")
    surplus = [pk for pk, *key in found if tuple(key) not in needed]
    for pks in rows.chunked(surplus, 10_000):
        condition, values = tx.among("id", pks)
        tx.run(f"DELETE FROM djqueue_job WHERE {condition}", values)


def _name_keys(tx: Tx) -> None:
    """Add concurrency keys to the packed options, which have them as `group` in earlier versions."""
    for pk, packed, key in tx.rows(
        "SELECT id, options, concurrency_key FROM djqueue_job WHERE concurrency_key IS NOT NULL"
    ):
        options = replace(rows.unpack_options(bytes(packed)), concurrency_key=key)
        tx.run("UPDATE djqueue_job SET options = ? WHERE id = ?", rows.pack_options(options), pk)


def _counted(parts: Iterable[Part], progress: Callable[[int], None]) -> Iterator[Part]:
    number = 0
    for part in parts:
        yield part
        number += len(part.records) if part.kind == JOB else 0
        progress(number)
