"""Snapshots of the tables: read at one moment on a connection of their own, written in one transaction.

A restore empties the tables and fills them with a snapshot.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

from django.db import Error, connections

from djqueue.codecs import MSGPACK, encode
from djqueue.core.enginejob import EngineJob, ItemStream, end_without_record
from djqueue.core.job import AttemptRecord, DeadLetterRecord, JobFailure
from djqueue.core.options import DEFAULT_OPTIONS, JobKey
from djqueue.core.policies import GLOBAL, NO_LIMIT, NO_LIMITS, KeyLimit
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.storage import snapshots
from djqueue.storage.export import PAGE_BYTES
from djqueue.storage.facets import Workers
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
from djqueue.storage.snapshotspool import SnapshotSpool, SpooledJob
from djqueue.storage.tables import dialects as tables
from djqueue.storage.tables import rows, schedules
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.rows import (
    TEXT_LIMIT,
    clean,
    group_limit_of,
    pack_holds,
    pair_of_limits,
    unpack_holds,
)

from . import queues, stored, transitions
from .dependencies import DEPENDENCY
from .dialects import Row
from .limiters import rate_columns
from .stored import COLUMNS, DELAYED, HELD, HOT, KEY_LIMIT, READY, StoredJob, job_of
from .transaction import REPEATS, STATES, Database, Tx

HELD_BACK = 1 << 61
"""First position of the jobs that their groups hold back: behind those that are ready."""


class SqlSnapshots(Snapshots):
    """Snapshots of the tables of one database."""

    def __init__(self, database: Database, workers: Workers) -> None:
        self._database = database
        self._workers = workers
        self._alias = database.alias

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        database = self._database
        with named(self._alias), closing(connections.create_connection(self._alias)) as connection:
            set_right(database.clock)
            connection.ensure_connection()
            with connection.wrap_database_errors:
                cursor = database.dialect.cursor(connection)
                cursor.execute(database.dialect.snapshot)
                try:
                    jobs = Reader(Tx(database, cursor)).parts(page)
                    pages = schedules.pages(connection, self._alias, page)
                    yield itertools.chain(jobs, (Part(snapshots.SCHEDULE, "", found) for found in pages))
                finally:
                    cursor.execute("ROLLBACK")

    def is_empty(self) -> bool:
        return self._database.read(self._is_empty)

    def _is_empty(self, tx: Tx) -> bool:
        reader = Reader(tx)
        return (
            tx.row("SELECT 1 FROM djqueue_job LIMIT 1") is None
            and all(settings.is_empty for settings in reader.settings().values())
            and next(reader.limiters(), None) is None
            and schedules.is_empty(self._alias)
        )

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        database = self._database
        check_target(self, self._workers.all(), replace=replace)
        now = database.clock.now()
        with closing(SnapshotSpool(database.policy, now, database.random)) as spool:
            spool.fill(parts)
            with named(self._alias):
                self._commit(spool, now, replace=replace)
            return spool.counts()

    def _commit(self, spool: SnapshotSpool, now: int, *, replace: bool) -> None:
        """Replace everything by what is spooled; repeat that after a conflict with another transaction."""
        database, dialect = self._database, tables.dialect_for(self._alias)
        limit = 0 if connections[self._alias].in_atomic_block else REPEATS
        for number in itertools.count():
            try:
                # Django's own transaction: the schedules are written by its models.
                with dialect.transaction(durable=True):
                    database.transactions.write(lambda tx: self._replace(tx, spool, now, replace=replace))
            except Error as error:
                if number >= limit or not database.dialect.may_repeat(error.__cause__ or error):
                    raise
            else:
                return

    def _replace(self, tx: Tx, spool: SnapshotSpool, now: int, *, replace: bool) -> None:
        restore = TableRestore(tx, spool, now)
        restore.lock()
        # Again, because other processes may have written until now.
        check_target(self, self._workers.all(), replace=replace)
        restore.run()
        schedules.replace(self._alias, spool.schedules)
        self._database.used_until.clear()


LENGTHS = """
    SELECT j.id, LENGTH(j.payload), COALESCE(LENGTH(r.result), 0)
    FROM djqueue_job j LEFT JOIN djqueue_job_result r ON r.queue = j.queue AND r.job_id = j.job_id
    WHERE j.id > ? ORDER BY j.id LIMIT ?
"""


class Reader:
    """Reads everything that the tables hold, in one transaction."""

    def __init__(self, tx: Tx) -> None:
        self._tx = tx

    def parts(self, page: int) -> Iterator[Part]:
        """Return all parts except the schedules; jobs in pages, in the order of their primary keys."""
        tx = self._tx
        settings = self.settings()
        names = {*settings, *queues.queue_names(tx)}
        first = 0
        which = "WHERE j.id > ? AND j.id <= ? ORDER BY j.id"
        statement = f"SELECT {COLUMNS}, j.retries FROM djqueue_job j {which}"
        for last in self._ends(page):
            by_queue: dict[str, list[Row]] = {}
            for row in tx.rows(statement, first, last):
                by_queue.setdefault(row[1], []).append(row)
            for queue, mine in by_queue.items():
                yield from self._jobs(queue, mine)
            first = last
        for name in sorted(names):
            yield Part(snapshots.QUEUE, name, [settings.get(name, QueueSettings()).record()])
        for records in snapshots.chunks((limiter.record() for limiter in self.limiters()), page):
            yield Part(snapshots.LIMITER, "", records)

    def _ends(self, page: int) -> Iterator[int]:
        """Yield the last primary key of each page, which has about `PAGE_BYTES` of payloads and results."""
        last = 0
        while found := self._tx.rows(LENGTHS, last, page):
            size = 0
            for pk, payload, result in found:
                if size and size + payload + result > PAGE_BYTES:
                    yield last
                    size = 0
                last = pk
                size += payload + result
            yield last

    def settings(self) -> dict[str, QueueSettings]:
        """Return what was set on queues and groups at run time, by queue."""
        tx = self._tx
        groups: dict[str, dict[str, KeyLimit]] = {}
        modes: dict[str, str] = {}
        for row in tx.rows(f"SELECT {KEY_LIMIT}, mode FROM djqueue_group_state"):
            queue, group, *_, mode = row
            limit = group_limit_of(row)
            if limit != NO_LIMIT:
                groups.setdefault(queue, {})[group] = limit
            if mode and not group:
                modes[queue] = mode
        found = {}
        for name, paused, holds, are_set, capacity, per, concurrency in tx.rows(
            "SELECT name, paused, holds, limits_set, rate_capacity, rate_per, concurrency "
            "FROM djqueue_queue_state"
        ):
            policy, limits = tx.database.policy(name), pair_of_limits(capacity, per, concurrency)
            given = limits if are_set and limits != (policy.rate, policy.concurrency) else None
            own = modes.get(name, ""), given, groups.get(name, {})
            found[name] = QueueSettings(bool(paused), *own, unpack_holds(holds))
        for name in {*groups, *modes} - found.keys():
            found[name] = QueueSettings(False, modes.get(name, ""), None, groups.get(name, {}))
        return found

    def limiters(self) -> Iterator[LimiterSettings]:
        """Return what was set on limiters at run time."""
        tx = self._tx
        for name, *row in tx.rows(
            "SELECT name, rate_capacity, rate_per, concurrency FROM djqueue_limiter_state ORDER BY name"
        ):
            policy = tx.database.limiter_policies.get(name, NO_LIMITS)
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


JOBS = 1_000
"""Jobs that are written at a time."""
SETTINGS = ("djqueue_queue_state", "djqueue_group_state", "djqueue_limiter_state")
CLEARED = (
    *("djqueue_ready", "djqueue_delayed", "djqueue_held", "djqueue_claim"),
    *("djqueue_dependency", "djqueue_unique_key", "djqueue_rate_bucket"),
    *("djqueue_job", "djqueue_job_result", "djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item"),
    *("djqueue_dead_letter", "djqueue_group_state", "djqueue_limiter_state"),
    *("djqueue_retained_job", "djqueue_retained_total"),
    *("djqueue_retention_tally", "djqueue_pinned", "djqueue_expiring"),
)
"""Tables that a restore empties, besides those of queues and schedules."""
JOB = (
    *("id", "queue", "job_id", "name", "state", "priority", "payload", "content_type", "options"),
    *(
        "unique_key",
        "concurrency_key",
        "subject",
        "created_at",
        "run_at",
        "started_at",
        "finished_at",
        "expires_at",
    ),
    *("attempts", "failures", "stalls", "worker", "reason", "error_type", "error_message", "traceback"),
    *("progress", "items", "retries"),
)
UNIQUE_KEY = ("queue", "key", "owner", "expires_at")
QUEUE = ("name", "paused", "holds", "limits_set", "rate_capacity", "rate_per", "concurrency")
LIMITER = ("name", "rate_capacity", "rate_per", "concurrency")
GROUP = ("queue", "concurrency_key", "mode", "concurrency", "paused", "rate_capacity", "rate_per", "weight")
RESTORED = {
    "djqueue_job": JOB,
    "djqueue_ready": READY,
    "djqueue_delayed": DELAYED,
    "djqueue_held": HELD,
    "djqueue_dependency": DEPENDENCY,
    "djqueue_unique_key": UNIQUE_KEY,
    "djqueue_job_result": rows.RESULT,
    "djqueue_job_attempt": rows.ATTEMPT,
    "djqueue_job_log": rows.LOG,
    "djqueue_job_item": rows.ITEM,
}
"""Columns of the rows of jobs, by table."""


class TableRestore:
    """Replaces everything that the tables hold, except schedules, by a snapshot.

    Args:
        tx: The transaction.
        spool: The snapshot.
        now: The time of the restore, in UTC milliseconds.
    """

    def __init__(self, tx: Tx, spool: SnapshotSpool, now: int) -> None:
        self._tx = tx
        self._spool = spool
        self._now = now
        self._rows: dict[str, list[Row]] = defaultdict(list)
        """Rows to insert, by table."""
        self._states: dict[JobKey, State] = {}
        """States of the dependencies of the current jobs."""
        self._queue = ""
        self._room: dict[str, int] = {}
        """Number of further jobs of each group of the current queue may be ready."""
        self._ended: list[tuple[int, JobKey, State]] = []
        """Jobs that wait for a dependency that has ended, so that they end with it."""

    def lock(self) -> None:
        """Keep other transactions from changing jobs and settings until this one ends."""
        if self._tx.dialect.for_update:  # SQLite has one writer.
            self._tx.run(f"LOCK TABLE {', '.join((*HOT, 'djqueue_job', *SETTINGS))} IN EXCLUSIVE MODE")

    def run(self) -> None:
        """Replace everything."""
        self._clear()
        self._write_settings()
        for page in self._spool.by_position(JOBS):
            self._write_jobs(page)
        for letters in self._spool.letters(JOBS):
            self._tx.insert("djqueue_dead_letter", rows.LETTER, [_letter_row(letter) for letter in letters])
        for pk, key, state in self._ended:
            for job in stored.by_keys(self._tx, [pk]):
                transitions.resolve(self._tx, job, key, state)

    def _clear(self) -> None:
        tx = self._tx
        sums = ", ".join(f"SUM(in_{state.value})" for state in STATES)
        for queue, *numbers in tx.rows(f"SELECT queue, {sums} FROM djqueue_tally GROUP BY queue"):
            # The totals stay: they belong to the metrics, which a restore does not change.
            for state, number in zip(STATES, numbers, strict=True):
                tx.shift(queue, state, None, int(number))
        for table in CLEARED:
            tx.run(f"DELETE FROM {table}")

    def _write_settings(self) -> None:
        tx, spool = self._tx, self._spool
        tx.run("DELETE FROM djqueue_queue_state")
        queues, groups = [], []
        for name in spool.names():
            settings = spool.queues.get(name, QueueSettings())
            rate, concurrency = settings.limits or (None, None)
            are_set = settings.limits is not None
            holds = pack_holds(settings.holds)
            queues.append((name, settings.paused, holds, are_set, *rate_columns(rate), concurrency))
            for group, limit in {"": NO_LIMIT, **settings.key_limits}.items():
                mode = "" if group else settings.key_mode
                if limit != NO_LIMIT or mode:
                    limits = limit.concurrency, limit.paused, *rate_columns(limit.rate), limit.weight
                    groups.append((name, group, mode, *limits))
        tx.insert("djqueue_queue_state", QUEUE, queues)
        tx.insert("djqueue_group_state", GROUP, groups)
        # As for jobs, the first of two records of one limiter counts.
        limiters = {
            name: (name, *rate_columns(rate), limit) for name, rate, limit in reversed(spool.limiters)
        }
        tx.insert("djqueue_limiter_state", LIMITER, list(limiters.values()))

    def _write_jobs(self, page: Sequence[SpooledJob]) -> None:
        """Write jobs, which follow those that are already written."""
        tx = self._tx
        live = [job for job, _ in page if job.state in LIVE]
        self._states = self._spool.states({key for job in live for key in job.options.depends_on})
        for pk, (job, retries) in zip(tx.numbers(len(page)), page, strict=True):
            if job.state in LIVE:
                self._place(pk, job)
            tx.shift(job.queue, None, job.state)
            tx.woken.add(job.queue)
            self._rows["djqueue_job"].append(self._job_row(pk, job, retries))
            self._add_belongings(job)
        for table, columns in RESTORED.items():
            tx.insert(table, columns, self._rows.pop(table, []))

    def _place(self, pk: int, job: EngineJob) -> None:
        """Add a job that has not ended to where it waits, with its unique key."""
        key, ttl = job.options.unique_key, job.options.unique_ttl
        free_at = None if ttl is None else job.created_at + ttl
        if key is not None and (free_at is None or free_at > self._now):
            self._rows["djqueue_unique_key"].append((job.queue, key, pk, free_at))
        if self._waits(pk, job):
            return
        if job.state is State.BLOCKED:
            job.state = State.DELAYED if job.run_at > self._now else State.WAITING
        if job.state is State.DELAYED:
            self._rows["djqueue_delayed"].append((pk, job.queue, job.run_at))
            return
        job.run_at = min(job.run_at, self._now)  # The other storage's clock may have been ahead.
        options = job.options
        if self._may_be_ready(job):
            expires_at = self._expiry(job)
            order = -options.priority, pk
            row = (
                pk,
                job.queue,
                *order,
                job.name,
                options.concurrency_key,
                options.weight,
                job.stalls,
                expires_at,
            )
            self._rows["djqueue_ready"].append(row)
        else:
            self._rows["djqueue_held"].append(
                (pk, job.queue, options.concurrency_key, pk, job.name, options.weight)
            )

    def _waits(self, pk: int, job: EngineJob) -> bool:
        """Add the dependencies of a job; return whether it waits for one of them."""
        policy = job.options.on_dependency_failure
        is_patient = policy == "wait" or job.error is not None
        waits = False
        keys = dict.fromkeys(job.options.depends_on)
        missing = end_without_record(job, [self._states[key] for key in keys if key in self._states])
        for key in keys:
            if key not in self._states and (job.state is not State.BLOCKED or missing is State.COMPLETED):
                continue
            state = self._states.get(key, missing)
            is_over = state in TERMINAL and not (state is State.FAILED and is_patient)
            is_met = job.state is not State.BLOCKED or (
                is_over and (state is State.COMPLETED or policy == "ignore")
            )
            if not (is_met and state is State.FAILED):  # A failed job leaves no record to read.
                self._rows["djqueue_dependency"].append((pk, *key, is_met))
            if not is_met:
                waits = True
                if is_over:
                    self._ended.append((pk, key, state))
        return waits

    def _may_be_ready(self, job: EngineJob) -> bool:
        """Return whether a waiting job may be claimed by the rules of its group: see `LockedGroup`."""
        group, policy = job.options.concurrency_key, self._tx.database.policy(job.queue)
        if group is None or policy.key_mode == GLOBAL:
            return True
        if job.queue != self._queue:
            self._queue, self._room = job.queue, {}
        if group not in self._room:
            groups = self._spool.queues.get(job.queue, QueueSettings()).key_limits
            default, own = groups.get("", KeyLimit()), groups.get(group, KeyLimit())
            limit: int = own.concurrency or default.concurrency or policy.key_concurrency
            weight: int = own.weight or default.weight or policy.key_weights.get(group, 1)
            rate = own.rate or default.rate or policy.key_rate
            # No job is active, and the rate has all its tokens.
            room = min(limit, weight) if rate is None else min(limit, weight, rate.capacity)
            self._room[group] = 0 if own.paused else room
        self._room[group] -= 1
        return self._room[group] >= 0

    def _expiry(self, job: EngineJob) -> int | None:
        """Return when the ttl of a pending job expires; one that has started, or was retried, has none."""
        ttl = job.options.ttl
        if ttl is None or job.started_at or job.error is not None:
            return None
        return job.created_at + ttl

    def _job_row(self, pk: int, job: EngineJob, retries: int) -> Row:
        options, error = job.options, job.error or rows.NO_ERROR
        if job.state in LIVE:
            expires_at = self._expiry(job)
        else:
            expires_at = rows.expiry(job, self._tx.database.policy(job.queue).retention.of(job.state))
        return (
            *(pk, job.queue, job.id, job.name, job.state.value, options.priority, job.payload),
            *(options.content_type, rows.pack_options(options), options.unique_key, options.concurrency_key),
            *(options.subject, job.created_at, job.run_at, job.started_at or None, job.finished_at or None),
            *(expires_at, job.attempts, job.failures, job.stalls, clean(job.worker, TEXT_LIMIT)),
            *(clean(job.reason, TEXT_LIMIT), clean(error.type, TEXT_LIMIT), clean(error.message)),
            *(clean(error.traceback), None if job.progress is None else encode(job.progress, MSGPACK)),
            *(0 if job.stream is None else job.stream.count, retries),
        )

    def _add_belongings(self, job: EngineJob) -> None:
        if job.state is State.COMPLETED and job.result is not None:
            keep = self._tx.database.policy(job.queue).retention.results
            self._rows["djqueue_job_result"].append(rows.result_row(job, keep))
        if job.history:
            self._rows["djqueue_job_attempt"] += [rows.attempt_row(job, attempt) for attempt in job.history]
        if job.logs:
            self._rows["djqueue_job_log"] += rows.log_rows(job, job.logs)
        if job.stream is not None:
            self._rows["djqueue_job_item"] += _item_rows(job, job.stream)


def _letter_row(letter: DeadLetterRecord) -> Row:
    job = EngineJob(letter.id, letter.queue, letter.name, b"", DEFAULT_OPTIONS, State.FAILED, 0, 0)
    job.error = JobFailure(letter.error_type, letter.error_message)
    return rows.letter_row(job, letter)


def _item_rows(job: EngineJob, stream: ItemStream) -> Iterator[Row]:
    # The items that are kept are the last of those that were sent.
    items = stream.items or []
    for number, item in enumerate(items, stream.count - len(items)):
        yield (job.queue, job.id, number, stream.run, item)
