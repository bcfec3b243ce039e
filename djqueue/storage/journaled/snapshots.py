"""Snapshots of the tables: read in one read-only transaction, written in one transaction.

Both happen in the calling process. A scheduler may run during a read, but not during a write, which holds the
scheduler's lease.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet

from djqueue import models
from djqueue.codecs import MSGPACK, encode
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.errors import SnapshotTargetError
from djqueue.core.groups import NO_LIMIT
from djqueue.core.job import AttemptRecord, DeadLetterRecord, JobFailure
from djqueue.core.options import DEFAULT_OPTIONS
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.storage import snapshots
from djqueue.storage.snapshots import (
    FIRST,
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
from djqueue.storage.snapshotspool import SnapshotSpool, SpooledJob
from djqueue.storage.tables import rows, schedules
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.groups import GROUP_STATE, QUEUE_STATE, limit_of, row_of
from djqueue.storage.tables.inspector import DatabaseInspector

from .buffer import LIMITER_STATE
from .lease import SchedulerLease

if TYPE_CHECKING:
    from .storage import JournaledStorage

HELD = (
    models.Job,
    *rows.OWNED,
    models.QueueState,
    models.GroupState,
    models.LimiterState,
    models.RetainedJob,
    models.RetainedTotal,
)
"""Models whose rows a snapshot replaces, besides the schedules."""
READ_ONLY = {"postgresql": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"}
"""Statements that begin a transaction with one view of the tables; on SQLite each transaction has one."""
NUMBERED = ("id", *rows.JOB_FIELDS)
STARTED_FIRST = ("stalled", "released")
"""Outcomes after which a job waits before those that have not started."""


class DatabaseSnapshots(Snapshots):
    """Snapshots of the tables of one database.

    Args:
        storage: The storage.
        dialect: Writes rows.
        policy: Returns the policy of a queue.
    """

    def __init__(
        self, storage: "JournaledStorage", dialect: Dialect, policy: Callable[[str], QueuePolicy]
    ) -> None:
        self._storage = storage
        self._dialect = dialect
        self._alias = storage.alias
        self._policy = policy
        self._inspector = DatabaseInspector(storage.alias)

    # Read.

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        self._storage.flush()
        with named(self._alias), closing(connections.create_connection(self._alias)) as connection:
            connection.ensure_connection()
            connection.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
            with connection.cursor() as cursor:
                if statement := READ_ONLY.get(connection.vendor):
                    cursor.execute(statement)
            try:
                yield self._parts(connection, page)
            finally:
                connection.rollback()

    def _parts(self, connection: BaseDatabaseWrapper, page: int) -> Iterator[Part]:
        table = TableReader(connection, self._alias)
        # The first query begins the view of the tables.
        settings = table.settings()
        last = 0
        names: set[str] = set(settings)
        while found := list(table.page(models.Job, NUMBERED, last, page)):
            last = found[-1][0]
            by_queue: dict[str, list[rows.Row]] = {}
            for row in found:
                by_queue.setdefault(row[1], []).append(row)
            for queue, mine in by_queue.items():
                names.add(queue)
                yield from table.jobs(queue, mine)
        for name in sorted(names):
            yield Part(snapshots.QUEUE, name, [settings.get(name, QueueSettings()).record()])
        for records in snapshots.chunks((limiter.record() for limiter in table.limiters()), page):
            yield Part(snapshots.LIMITER, "", records)
        for records in schedules.pages(connection, self._alias, page):
            yield Part(snapshots.SCHEDULE, "", records)

    def is_empty(self) -> bool:
        self._storage.flush()
        with named(self._alias):
            if models.Job.objects.using(self._alias).exists() or not schedules.is_empty(self._alias):
                return False
            table = TableReader(connections[self._alias], self._alias)
            are_set = any(not settings.is_empty for settings in table.settings().values())
            return not are_set and next(table.limiters(), None) is None

    # Write.

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        if self._storage.is_scheduler:
            raise SnapshotTargetError(
                "this process is the scheduler of the database: close its storage first, or restore in "
                "another process"
            )
        check_target(self, self._storage.workers.all(), replace=replace)
        clock = self._storage.clock
        with closing(SnapshotSpool(self._policy, clock.now())) as spool:
            spool.fill(parts)
            with named(self._alias), self._dialect.transaction(durable=True):
                lease = SchedulerLease(self._alias, clock, "")
                if not lease.acquire():
                    holder = lease.present()
                    who = "another process" if holder is None else holder.describe()
                    raise SnapshotTargetError(
                        f"{who} is the scheduler of database {self._alias!r}: stop that process first"
                    )
                # Again, because other processes may have written until now.
                check_target(self, self._inspector.workers(clock.now()), replace=replace)
                self._replace(spool)
                lease.release()
            return spool.counts()

    def _replace(self, spool: SnapshotSpool) -> None:
        for model in HELD:
            model._default_manager.using(self._alias).all()._raw_delete(self._alias)
        dialect = self._dialect
        for page in spool.jobs(1_000):
            self._insert(page)
        for letters in spool.letters(1_000):
            dialect.insert(models.DeadLetter, rows.LETTER, [_letter_row(letter) for letter in letters])
        queues, groups = [], []
        for name, found in spool.queues.items():
            if found.paused or found.limits is not None:
                rate, concurrency = found.limits or (None, None)
                capacity, per = (None, None) if rate is None else (rate.capacity, rate.per)
                queues.append((name, found.paused, capacity, per, concurrency))
            for group in {"": NO_LIMIT, **found.groups}:
                mode = "" if group else found.group_mode
                row = row_of(name, group or None, found.groups.get(group, NO_LIMIT), mode)
                if row is not None:
                    groups.append(row)
        dialect.insert(models.QueueState, QUEUE_STATE, queues)
        dialect.insert(models.GroupState, GROUP_STATE, groups)
        limiters = [
            (name, *((None, None) if rate is None else (rate.capacity, rate.per)), concurrency)
            for name, rate, concurrency in spool.limiters
        ]
        dialect.insert(models.LimiterState, LIMITER_STATE, limiters)
        schedules.replace(self._alias, spool.schedules)

    def _insert(self, page: Sequence[SpooledJob]) -> None:
        dialect = self._dialect
        jobs = [job for job, _ in page]
        dialect.insert(models.Job, rows.JOB_FIELDS, [self._job_row(job) for job in jobs])
        ended = [job for job in jobs if job.state is State.COMPLETED and job.result is not None]
        results = [rows.result_row(job, self._policy(job.queue).retention.results) for job in ended]
        dialect.insert(models.JobResult, rows.RESULT, results)
        attempts = [rows.attempt_row(job, attempt) for job in jobs for attempt in job.history or ()]
        dialect.insert(models.JobAttempt, rows.ATTEMPT, attempts)
        lines = [line for job in jobs for line in rows.log_rows(job, job.logs or ())]
        dialect.insert(models.JobLog, rows.LOG, lines)
        items = [row for job in jobs if job.stream is not None for row in _item_rows(job, job.stream)]
        dialect.insert(models.JobItem, rows.ITEM, items)

    def _job_row(self, job: EngineJob) -> rows.Row:
        options = job.options
        values = rows.changed_row(job, self._policy(job.queue).retention.of(job.state))
        changed = dict(zip(rows.CHANGED_JOB, values, strict=True))
        changed |= {
            "name": job.name,
            "priority": options.priority,
            "payload": job.payload,
            "content_type": options.content_type,
            "options": rows.pack_options(job.options),
            "unique_key": options.unique_key,
            "group": options.group,
            "subject": options.subject,
            "progress": None if job.progress is None else encode(job.progress, MSGPACK),
            "items": 0 if job.stream is None else job.stream.count,
        }
        return tuple(changed[name] for name in rows.JOB_FIELDS)


def _letter_row(letter: DeadLetterRecord) -> rows.Row:
    job = EngineJob(letter.id, letter.queue, letter.name, b"", DEFAULT_OPTIONS, State.FAILED, 0, 0)
    job.error = JobFailure(letter.error_type, letter.error_message)
    return rows.letter_row(job, letter)


def _item_rows(job: EngineJob, stream: ItemStream) -> Iterator[rows.Row]:
    # The items that are kept are the last of those that were sent.
    items = stream.items or []
    for number, item in enumerate(items, stream.count - len(items)):
        yield (job.queue, job.id, number, stream.run, item)


class TableReader:
    """Reads of the tables on one connection.

    Args:
        connection: The connection.
        alias: The alias of its database.
    """

    def __init__(self, connection: BaseDatabaseWrapper, alias: str) -> None:
        self._connection = connection
        self._alias = alias

    def page(self, model: type[Model], fields: Sequence[str], after: int, limit: int) -> Iterator[rows.Row]:
        """Return rows of a table in the order of their numbers."""
        found = model._default_manager.using(self._alias).filter(id__gt=after).order_by("id")[:limit]
        return self._values(found, fields)

    def jobs(self, queue: str, found: Sequence[rows.Row]) -> Iterator[Part]:
        """Return jobs of a queue, given their rows of `NUMBERED`, and their dead letters."""
        jobs = {row[2]: rows.job_from_row(row[1:]) for row in found}
        numbers = {row[2]: row[0] for row in found}
        self._add_belongings(queue, jobs)
        records = [job_record(job, _position(job, numbers[job.id])) for job in jobs.values()]
        yield Part(snapshots.JOB, queue, records)
        failed = [job.id for job in jobs.values() if job.state is State.FAILED]
        letters = [
            letter_record(rows.letter_from_row(row[:-1]), row[-1])
            for row in self._of_jobs(models.DeadLetter, queue, failed, (*rows.LETTER, "id"))
        ]
        if letters:
            yield Part(snapshots.DEAD, queue, letters)

    def settings(self) -> dict[str, QueueSettings]:
        """Return what was set on queues and groups."""
        groups: dict[str, dict[str, Any]] = {}
        modes: dict[str, str] = {}
        found: dict[str, QueueSettings] = {}
        for row in self._values(models.GroupState.objects.using(self._alias).all(), GROUP_STATE):
            queue, group, mode = row[0], row[1], row[-1]
            limit = limit_of(row)
            if limit != NO_LIMIT:
                groups.setdefault(queue, {})[group] = limit
            if mode and not group:
                modes[queue] = mode
        limits = {}
        for row in self._values(models.QueueState.objects.using(self._alias).all(), QUEUE_STATE):
            limits[row[0]] = (bool(row[1]), rows.pair_of_limits(*row[2:]))
        for name in {*groups, *modes, *limits}:
            paused, pair = limits.get(name, (False, (None, None)))
            given = None if pair == (None, None) else pair
            found[name] = QueueSettings(paused, modes.get(name, ""), given, groups.get(name, {}))
        return found

    def limiters(self) -> Iterator[LimiterSettings]:
        """Return what was set on limiters."""
        for row in self._values(models.LimiterState.objects.using(self._alias).all(), LIMITER_STATE):
            yield LimiterSettings(row[0], *rows.pair_of_limits(*row[1:]))

    def _add_belongings(self, queue: str, jobs: dict[str, EngineJob]) -> None:
        ended = [job.id for job in jobs.values() if job.state is State.COMPLETED]
        for row in self._of_jobs(models.JobResult, queue, ended, rows.RESULT):
            jobs[row[1]].result = bytes(row[3])
        begun = [job.id for job in jobs.values() if job.started_at or job.attempts]
        for row in self._of_jobs(models.JobAttempt, queue, begun, (*rows.ATTEMPT, "id")):
            job = jobs[row[1]]
            error = JobFailure(*row[7:10]) if row[7] else None
            attempt = AttemptRecord(row[2], row[3], row[4], row[5], row[6], error)
            job.history = [*(job.history or ()), attempt]
        for row in self._of_jobs(models.JobLog, queue, begun, (*rows.LOG, "id")):
            job = jobs[row[1]]
            job.logs = [*(job.logs or ()), (row[2], row[3])]
        streaming = [job.id for job in jobs.values() if job.stream is not None]
        for row in self._of_jobs(models.JobItem, queue, streaming, (*rows.ITEM, "id"), order="number"):
            stream = jobs[row[1]].stream
            assert stream is not None
            stream.run = row[3]
            stream.items = [*(stream.items or ()), bytes(row[4])]

    def _of_jobs(
        self, model: type[Model], queue: str, ids: Sequence[str], fields: Sequence[str], order: str = "id"
    ) -> Iterator[rows.Row]:
        for chunk in rows.chunked(ids):
            found = model._default_manager.using(self._alias).filter(queue=queue, job_id__in=chunk)
            yield from self._values(found.order_by(order), fields)

    def _values(self, found: QuerySet[Any], fields: Sequence[str]) -> Iterator[rows.Row]:
        """Return values as they are stored: times remain integer milliseconds."""
        compiler = found.values_list(*fields).query.get_compiler(connection=self._connection)
        for chunk in compiler.execute_sql(result_type="multi") or ():
            for row in chunk:
                yield tuple(row)


def _position(job: EngineJob, number: int) -> Position:
    """Return the position that a scheduler gives a job at its start: see `LiveJobs`."""
    last = job.history[-1].outcome if job.history else ""
    if job.started_at and (job.state is State.ACTIVE or last in STARTED_FIRST):
        return (FIRST + (job.created_at if last == "released" else -job.started_at), number)
    return (-job.run_at, -number) if job.options.lifo else (job.run_at, number)
