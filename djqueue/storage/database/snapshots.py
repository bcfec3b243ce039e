"""Snapshots of the tables: read at one moment on a connection of their own, written in one transaction."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from django.db import Error, connections

from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.groups import NO_LIMIT, GroupLimit
from djqueue.core.job import AttemptRecord, JobFailure
from djqueue.core.sharing import NO_LIMITS
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.storage import snapshots
from djqueue.storage.snapshots import (
    LimiterSettings,
    Part,
    Position,
    QueueSettings,
    SnapshotCounts,
    Snapshots,
    check_target,
    job_record,
    letter_record,
)
from djqueue.storage.snapshotspool import SnapshotSpool
from djqueue.storage.tables import dialects as tables
from djqueue.storage.tables import rows, schedules
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.groups import limit_of
from djqueue.storage.tables.rows import pair_of_limits

from . import queues
from .dialects import Row
from .ready import GROUP_LIMIT
from .restore import TableRestore
from .stored import COLUMNS, StoredJob, job_of
from .transaction import REPEATS, Tx

if TYPE_CHECKING:
    from .storage import DatabaseStorage

HELD_BACK = 1 << 61
"""First position of the jobs that their groups hold back: behind those that are ready."""


class SqlSnapshots(Snapshots):
    """Snapshots of the tables of one database."""

    def __init__(self, storage: "DatabaseStorage") -> None:
        self._storage = storage
        self._alias = storage.alias

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        storage = self._storage
        with named(self._alias), closing(connections.create_connection(self._alias)) as connection:
            set_right(storage.clock)
            connection.ensure_connection()
            with connection.wrap_database_errors:
                cursor = storage.dialect.cursor(connection)
                cursor.execute(storage.dialect.snapshot)
                try:
                    jobs = Reader(Tx(storage, storage.dialect, cursor)).parts(page)
                    pages = schedules.pages(connection, self._alias, page)
                    yield itertools.chain(jobs, (Part(snapshots.SCHEDULE, "", found) for found in pages))
                finally:
                    cursor.execute("ROLLBACK")

    def is_empty(self) -> bool:
        return self._storage.read(self._is_empty)

    def _is_empty(self, tx: Tx) -> bool:
        reader = Reader(tx)
        return (
            tx.row("SELECT 1 FROM djqueue_job LIMIT 1") is None
            and all(settings.is_empty for settings in reader.settings().values())
            and next(reader.limiters(), None) is None
            and schedules.is_empty(self._alias)
        )

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        storage = self._storage
        check_target(self, storage.workers.all(), replace=replace)
        now = storage.clock.now()
        with closing(SnapshotSpool(storage.policy, now, storage.random)) as spool:
            spool.fill(parts)
            with named(self._alias):
                self._commit(spool, now, replace=replace)
            return spool.counts()

    def _commit(self, spool: SnapshotSpool, now: int, *, replace: bool) -> None:
        """Replace everything by what is spooled; repeat that after a conflict with another transaction."""
        storage, dialect = self._storage, tables.dialect_for(self._alias)
        limit = 0 if connections[self._alias].in_atomic_block else REPEATS
        for number in itertools.count():
            try:
                # Django's own transaction: the schedules are written by its models.
                with dialect.transaction(durable=True):
                    storage.transactions.write(lambda tx: self._replace(tx, spool, now, replace=replace))
            except Error as error:
                if number >= limit or not storage.dialect.may_repeat(error.__cause__ or error):
                    raise
            else:
                return

    def _replace(self, tx: Tx, spool: SnapshotSpool, now: int, *, replace: bool) -> None:
        restore = TableRestore(tx, spool, now)
        restore.lock()
        # Again, because other processes may have written until now.
        check_target(self, self._storage.workers.all(), replace=replace)
        restore.run()
        schedules.replace(self._alias, spool.schedules)
        self._storage.forget_used()


class Reader:
    """Reads everything that the tables hold, in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def parts(self, page: int) -> Iterator[Part]:
        """Return all parts except the schedules; jobs in pages, in the order of their primary keys."""
        tx = self._tx
        settings = self.settings()
        names = {*settings, *queues.names(tx)}
        last = 0
        statement = f"SELECT {COLUMNS}, j.retries FROM djqueue_job j WHERE j.id > ? ORDER BY j.id LIMIT ?"
        while found := tx.rows(statement, last, page):
            last = found[-1][0]
            by_queue: dict[str, list[Row]] = {}
            for row in found:
                by_queue.setdefault(row[1], []).append(row)
            for queue, mine in by_queue.items():
                yield from self._jobs(queue, mine)
        for name in sorted(names):
            yield Part(snapshots.QUEUE, name, [settings.get(name, QueueSettings()).record()])
        for records in snapshots.chunks((limiter.record() for limiter in self.limiters()), page):
            yield Part(snapshots.LIMITER, "", records)

    def settings(self) -> dict[str, QueueSettings]:
        """Return what was set on queues and groups at run time, by queue."""
        tx = self._tx
        groups: dict[str, dict[str, GroupLimit]] = {}
        modes: dict[str, str] = {}
        for row in tx.rows(f"SELECT {GROUP_LIMIT}, mode FROM djqueue_group_state"):
            queue, group, *_, mode = row
            limit = limit_of(row)
            if limit != NO_LIMIT:
                groups.setdefault(queue, {})[group] = limit
            if mode and not group:
                modes[queue] = mode
        found = {}
        for name, paused, are_set, capacity, per, concurrency in tx.rows(
            "SELECT name, paused, limits_set, rate_capacity, rate_per, concurrency FROM djqueue_queue_state"
        ):
            policy, limits = tx.storage.policy(name), pair_of_limits(capacity, per, concurrency)
            given = limits if are_set and limits != (policy.rate, policy.concurrency) else None
            found[name] = QueueSettings(bool(paused), modes.get(name, ""), given, groups.get(name, {}))
        for name in {*groups, *modes} - found.keys():
            found[name] = QueueSettings(False, modes.get(name, ""), None, groups.get(name, {}))
        return found

    def limiters(self) -> Iterator[LimiterSettings]:
        """Return what was set on limiters at run time."""
        tx = self._tx
        for name, *row in tx.rows(
            "SELECT name, rate_capacity, rate_per, concurrency FROM djqueue_limiter_state ORDER BY name"
        ):
            policy = tx.storage.limiter_policies.get(name, NO_LIMITS)
            rate, concurrency = pair_of_limits(*row)
            if (rate, concurrency) != (policy.rate, policy.concurrency):
                yield LimiterSettings(name, rate, concurrency)

    def _jobs(self, queue: str, found: Sequence[Row]) -> Iterator[Part]:
        """Return jobs of a queue, and their dead letters."""
        jobs = [self._job(row) for row in found]
        self._add_belongings(queue, {job.id: job for job in jobs})
        positions = self._positions(jobs)
        yield Part(
            snapshots.JOB,
            queue,
            [
                job_record(job, positions[job.pk], row[-1] if job.state in LIVE else 0)
                for job, row in zip(jobs, found, strict=True)
            ],
        )
        failed = [job.id for job in jobs if job.state is State.FAILED]
        letters = [
            letter_record(rows.letter_from_row(row[:-1]), row[-1])
            for row in self._of_jobs("djqueue_dead_letter", queue, failed, (*rows.LETTER, "id"))
        ]
        if letters:
            yield Part(snapshots.DEAD, queue, letters)

    def _job(self, row: Row) -> StoredJob:
        return job_of(row)

    def _positions(self, jobs: Sequence[StoredJob]) -> dict[int, Position]:
        """Return the positions of jobs by primary key, and note the requests to cancel active ones."""
        tx = self._tx
        positions: dict[int, Position] = {
            job.pk: (job.finished_at if job.state in TERMINAL else job.pk, 0) for job in jobs
        }
        waiting = [job.pk for job in jobs if job.state is State.WAITING]
        for table, first in (("djqueue_ready", 0), ("djqueue_held", HELD_BACK)):
            condition, pks = tx.among("id", waiting)
            for pk, seq in tx.rows(f"SELECT id, seq FROM {table} WHERE {condition}", pks) if waiting else ():
                positions[pk] = (first + seq, 0)
        if active := {job.pk: job for job in jobs if job.state is State.ACTIVE}:
            condition, pks = tx.among("id", list(active))
            for (pk,) in tx.rows(f"SELECT id FROM djqueue_claim WHERE {condition} AND cancel", pks):
                active[pk].cancel_requested = True
        return positions

    def _add_belongings(self, queue: str, jobs: dict[str, StoredJob]) -> None:
        """Load results, ended attempts, log lines and streamed items."""
        ended = [id for id, job in jobs.items() if job.state is State.COMPLETED]
        for row in self._of_jobs("djqueue_job_result", queue, ended, rows.RESULT):
            jobs[row[1]].result = bytes(row[3])
        started = [id for id, job in jobs.items() if job.started_at or job.attempts]
        for row in self._of_jobs("djqueue_job_attempt", queue, started, rows.ATTEMPT):
            job = jobs[row[1]]
            error = JobFailure(*row[7:10]) if row[7] else None
            job.history = [*(job.history or ()), AttemptRecord(row[2], row[3], row[4], row[5], row[6], error)]
        for _, id, at, line in self._of_jobs("djqueue_job_log", queue, started, rows.LOG):
            jobs[id].logs = [*(jobs[id].logs or ()), (at, line)]
        streamed = [id for id, job in jobs.items() if job.stream is not None]
        for _, id, _, run, item in self._of_jobs("djqueue_job_item", queue, streamed, rows.ITEM, "number"):
            stream = _stream_of(jobs[id])
            stream.run = run
            assert stream.items is not None
            stream.items.append(bytes(item))

    def _of_jobs(
        self, table: str, queue: str, ids: Sequence[str], columns: Sequence[str], order: str = "id"
    ) -> list[Row]:
        """Return rows that belong to jobs."""
        if not ids:
            return []
        condition, values = self._tx.among("job_id", ids)
        which = f"FROM {table} WHERE queue = ? AND {condition} ORDER BY {order}"
        return self._tx.rows(f"SELECT {', '.join(columns)} {which}", queue, values)


def _stream_of(job: EngineJob) -> ItemStream:
    assert job.stream is not None
    if job.stream.items is None:
        job.stream.items = []
    return job.stream
