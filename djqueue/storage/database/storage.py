"""`DatabaseStorage`: jobs in a database of the project; every process runs the same statements."""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from random import Random
from time import monotonic
from typing import Any, TypeVar, Unpack

from django.apps import apps
from django.db import Error, connections

from djqueue.core.clock import Clock
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    Claims,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.core.logs import Log
from djqueue.core.messages import shown_name
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.overview import Finding, LimiterState
from djqueue.core.policies import (
    UNSET,
    KeyLimit,
    KeyLimitChanges,
    LimiterPolicy,
    QueuePolicy,
    SetConcurrency,
    SetRate,
)
from djqueue.core.states import State
from djqueue.storage import backpressure, sparktables
from djqueue.storage.base import P, Storage
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.commits import JoinedTransactions
from djqueue.storage.facets import EventHandler, Jobs, Limiters, Queues, Unsubscribe
from djqueue.storage.tables.dberrors import (
    LOCKED,
    LOCKS,
    WHOLE_TABLE,
    locked_file,
    locked_tables,
    named,
    write_lock_holder,
)
from djqueue.storage.tables.rows import chunked

from . import claim, enqueue, finish, limiters, queues, stored, sweep, transitions, workers
from .bulkwrites import SqlBulkWriteReports
from .connections import CallThread
from .events import SqlEvents
from .export import SqlExport
from .reads import SqlReads
from .snapshots import SqlSnapshots
from .staging import SqlStaging, StagingSweep
from .transaction import Database, Hooks, Tx
from .wake import Background, Follower, Looks, Wake
from .workers import Leadership, SqlWorkers
from .writebuffer import WriteBuffer

logger = Log("djqueue.storage")
T = TypeVar("T")
NO_CLAIMS = Claims([])
ONE_BY_ONE_TIMEOUT = 1.0
"""Seconds for which a report tries its outcomes one by one when something of one of them is locked."""
OVERDUE_RENEWAL_TIMEOUT = 3.0
"""Seconds for which the renewal of an overdue lease waits for another transaction that has locked it, if
other leases are long enough.
"""
HELD_UP_AFTER = 5.0
"""Seconds after which a worker logs whose lock holds it up."""
MAX_TIMEOUT = 3_600
"""Maximum of the seconds for which a call waits for locks."""
JOBS_PER_MOVE = 100
"""Jobs that one transaction moves to another queue."""


class DatabaseStorage(Storage):
    """Jobs in a database of the project: SQLite, or PostgreSQL.

    Args:
        database: Alias in `DATABASES`.
        policies: The policies of single queues.
        limiters: Limiters that queues may share.
        clock: The source of time; by default that of the database server, or of this machine for SQLite.
        metrics: How long metrics are kept.
        notify: PostgreSQL notifies workers and subscribers of what has happened elsewhere. False lets them
            poll: behind a pooler that gives each transaction another connection, notifications are lost.
        timeout: Seconds for which a call waits for the locks of other transactions. By default 5, or as the
            settings of the database say.
    """

    has_settings = True
    """Whether the policies are those of the project; otherwise the key modes of queues are looked up."""
    workers: SqlWorkers
    reads: SqlReads
    events: SqlEvents

    def __init__(
        self,
        *,
        database: str = "default",
        policies: Mapping[str, QueuePolicy] | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        notify: bool = True,
        timeout: float | None = None,
        random: Random | None = None,
    ) -> None:
        if database not in connections:
            raise ConfigurationError(f"DATABASE: {shown_name(database)} is not in DATABASES")
        if not isinstance(notify, bool):
            raise ConfigurationError(f"NOTIFY: expected True or False, got {notify!r}")
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and 0 < timeout <= MAX_TIMEOUT):
            raise ConfigurationError(
                f"TIMEOUT: expected a number of seconds above 0, {MAX_TIMEOUT} at most, got {timeout!r}"
            )
        self.alias = database
        self.database = Database(
            database,
            policies=policies or {},
            limiters=limiters or {},
            clock=clock,
            metrics=metrics,
            notify=notify,
            timeout=timeout,
            has_settings=self.has_settings,
            random=random or Random(),
        )
        self.clock = self.database.clock
        self._connections = self.database.connections
        self._calls = CallThread(database)
        self.follower = Follower(self.database)
        self.background = Background(database)
        self.buffer = WriteBuffer(self.database, self.background)
        self.wake = Wake(self.database, self.follower, self.background)
        self.events = SqlEvents(self.database, self.follower)
        self.workers = SqlWorkers(self.database, self.follower)
        self.follower.looks = Looks(self.wake, self.events, self.workers)
        self.database.hooks = Hooks(
            self.events, self.wake, transitions.settle, self.notify_incidents, self._flush_buffer
        )
        self.jobs = SqlJobs(self.database)
        self.queues = SqlQueues(self.database)
        self.limiters = SqlLimiters(self.database)
        self.reads = SqlReads(self.database, self._calls, lambda: self.describe())
        self.snapshots = SqlSnapshots(self.database, self.workers)
        self._export = SqlExport(database)
        self._staging = SqlStaging(self.database)
        self._bulk_writes = SqlBulkWriteReports(database, self.clock)
        self._staging_sweep = StagingSweep(self.database, self.reads)
        self._leadership = Leadership(self.database)
        self._failing_steps: set[str] = set()
        self._held_up = HeldUpLog(self.database)
        self._joined = JoinedTransactions(database, can_leave=self.database.dialect.has_clock)

    # Connections.

    def connect(self) -> None:
        # A database in memory exists in the connection of its thread only.
        if self.follower.is_possible and not self._connections.is_open:
            with named(self.alias):
                self._connections.open()
            self._calls.open()
        self.database.read(queues.check_modes)
        if self.database.follows_restarts and self.database.read(workers.is_first_use, is_single=True):
            self.database.write(workers.follow_restart)

    def close(self) -> None:
        try:
            self.buffer.flush()
        finally:
            self.events.close()
            self.wake.close()
            self.background.close()
            self.follower.close()
            self._calls.close()
            self._connections.close()
            self.database.dialect.close()

    def describe(self) -> str:
        settings = connections[self.alias].settings_dict
        vendor = connections[self.alias].display_name
        where = f" at {settings['HOST']}" if settings.get("HOST") else ""
        return f"database {self.alias!r} ({vendor}{where}: {settings['NAME']})"

    def held_up_by(self) -> str:
        # A server that does not answer can't be asked; it refuses what waits for a lock for too long.
        is_file = connections[self.alias].vendor == "sqlite"
        return write_lock_holder(self.alias) if is_file else ""

    @property
    def has_spark_tables(self) -> bool:
        """Whether the project has the tables of `djqueue.contrib.spark`."""
        return sparktables.are_installed()

    @property
    def capabilities(self) -> Capabilities:
        has_spark = self.has_spark_tables
        return Capabilities(
            database=self.alias,
            mirrored_states=frozenset(State),
            transactions=self._joined,
            staging=self._staging if has_spark else None,
            bulk_writes=self._bulk_writes if has_spark else None,
            export=self._export,
        )

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._calls.call(method, *args, **kwargs)

    def _flush_buffer(self) -> None:
        """Let a call see the jobs that this process has enqueued before."""
        if self.buffer and not self.buffer.would_wait_for_caller():
            self.buffer.flush()

    # The hot path.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.database.is_in_transaction():
            return self._enqueue(batches)  # It would keep its locks while it waits for room.
        return backpressure.enqueue(self.events, self.database.policy, batches, self._enqueue)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        async def once(some: Sequence[Batch]) -> list[EnqueueResult]:
            return await self.acall(self._enqueue, some)

        if backpressure.may_wait(self.database.policy, batches) and await self.acall(
            self.database.is_in_transaction
        ):
            return await once(batches)
        return await backpressure.aenqueue(self, self.database.policy, batches, once)

    def _enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        durable = any(batch.options.durable for batch in batches)
        is_apart = bool(batches) and all(batch.options.durable is False for batch in batches)
        if not is_apart or not self.follower.is_possible:
            numbers = enqueue.numbers(self.database, batches)
            return self.database.write(
                lambda tx: enqueue.enqueue(tx, batches), durable=durable, numbers=numbers
            )
        if self.buffer.takes(batches):
            return self.buffer.add(batches)
        self._flush_buffer()
        with named(self.alias):
            return self.database.transactions.write_apart(lambda tx: enqueue.enqueue(tx, batches))

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        return self.database.write(partial(_finish_and_claim, outcomes=outcomes, then=then))

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        # On SQLite, writing on this thread takes less time than waking another and waiting for it.
        if self._connections.serve_loop and self._calls.is_used() and not self.buffer:
            with named(self.alias):
                done = self.database.transactions.write_at_once(
                    partial(_finish_and_claim, outcomes=outcomes, then=then)
                )
            if done is not None:
                return done[0]
        return await self.acall(self._finish_unlocked, outcomes, then)

    def _finish_unlocked(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Finished:
        """Like `finish`, but leave out the jobs that other transactions have locked."""
        finished = self._finish_what_is_free(outcomes, then)
        with named(self.alias):
            self._held_up.note(None in finished.accepted or finished.claims.wait == stored.LOCKED_AGAIN)
        return finished

    def _finish_what_is_free(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Finished:
        self._flush_buffer()
        write = self.database.transactions.write_unless_locked
        with named(self.alias):
            done = write(partial(_finish_and_claim, outcomes=outcomes, then=then, waits=False))
            if done is not None:
                return done[0]
            # One of them needs something else that is locked, such as a group: the others do not wait for it.
            accepted: list[bool | None] = []
            claimed = None
            try:
                until = monotonic() + ONE_BY_ONE_TIMEOUT
                for outcome in outcomes:
                    if monotonic() > until:
                        break
                    alone = write(partial(_finish_and_claim, outcomes=[outcome], then=None, waits=False))
                    accepted += [None] if alone is None else alone[0].accepted
                claimed = (
                    None
                    if then is None
                    else write(partial(claim.claim, request=then, waits=False, expires=False))
                )
            except (Error, StorageUnavailableError):
                if not accepted:
                    raise
                # The worker reports the others again, and meets the error then.
            accepted += [None] * (len(outcomes) - len(accepted))
            wait = None if then is None else stored.LOCKED_AGAIN
            return Finished(accepted, Claims([], wait) if claimed is None else claimed[0])

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        if not leases:
            return []
        answers = self.database.write(lambda tx: finish.renew(tx, leases))
        if None in answers:
            # By itself: the others are renewed whatever holds these up.
            overdue = [lease for lease, answer in zip(leases, answers, strict=True) if answer is None]
            # A sweep takes them back within this time. What holds them longer does not, so they still hold.
            shortest = min(self.database.policy(lease.queue).lease for lease in leases) / 1_000
            waited, until = None, monotonic() + min(OVERDUE_RENEWAL_TIMEOUT, shortest / 4)
            while waited is None and monotonic() < until:
                waited = self.database.transactions.write_unless_locked(
                    lambda tx: finish.renew(tx, overdue, waits=True)
                )
            late = iter([Renewal(True)] * len(overdue) if waited is None else waited[0])
            answers = [next(late) if answer is None else answer for answer in answers]
        return [answer or Renewal(True) for answer in answers]

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        return self.database.write(lambda tx: finish.report(tx, reports)) if reports else []

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        return self.database.write(lambda tx: finish.emit(tx, emissions)) if emissions else []

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self.wake.listen(queues, wake)

    def subscribe_new(self, queue: str, handler: EventHandler, job_id: str) -> Unsubscribe:
        return self.events.subscribe_new(queue, handler, job_id)

    def sweep(self) -> Swept:
        with named(self.alias):
            return sweep.Sweep(self.database, self._sweep_staging, self._failing_steps).run()

    def probe(self) -> Sequence[Finding]:
        return _probe(self.database)

    def maintain(self) -> None:
        if self.database.read(workers.killed, is_single=True):
            self.database.write(workers.forget_killed)
        if self._leadership.acquire():
            try:
                self.sweep()
            except Exception:
                self._leadership.release()  # Another process may succeed.
                raise

    def resign(self) -> None:
        self._leadership.release()

    def _sweep_staging(self) -> None:
        """Publish the rest of bulk writes whose publishers are silent, and remove expired ones."""
        if sparktables.are_installed():
            self._staging_sweep.run()


class HeldUpLog:
    """Logs once that other sessions' locks have held up a worker for long, and whose they are."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._since: float | None = None
        self._look_at = 0.0

    def note(self, is_held_up: bool) -> None:
        """Record whether locks have kept a call from something."""
        now = monotonic()
        if not is_held_up:
            self._since = None
            return
        if self._since is None:
            self._since, self._look_at = now, now + HELD_UP_AFTER
        if now < self._look_at:
            return
        self._look_at = now + HELD_UP_AFTER
        with self._database.connections.borrow() as wrapper, wrapper.wrap_database_errors:
            holder = self._database.dialect.holder(wrapper, HELD_UP_AFTER)
        if holder:
            self._look_at = math.inf
            logger.warning(
                "Claims or outcomes of jobs have waited for a lock for %.0f s, and are tried again: %s",
                *(now - self._since, holder),
            )


class SqlJobs(Jobs):
    """Changes of single jobs."""

    def __init__(self, database: Database) -> None:
        self._write = database.write

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        return self._write(lambda tx: transitions.cancel(tx, queue, ids, reason)) if ids else []

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        states = frozenset({State.DELAYED})
        return self._write(lambda tx: transitions.move_in_time(tx, queue, ids, tx.now, "promoted", states))

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        states = frozenset({State.DELAYED, State.WAITING})
        return self._write(lambda tx: transitions.move_in_time(tx, queue, ids, run_at, "rescheduled", states))

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        return self._write(lambda tx: transitions.update(tx, queue, ids, priority, payload))

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        return self._write(lambda tx: transitions.replace_payload(tx, queue, id, payload, old, retry=retry))

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        if queue == to:
            raise ValueError(f"the jobs are already in queue {to!r}; pass a different queue")
        answers: list[str] = []
        for some in chunked(ids, JOBS_PER_MOVE):
            answers += self._write(partial(transitions.move, queue=queue, ids=some, to=to))
        return answers

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        return self._write(lambda tx: transitions.retry(tx, queue, ids, dry_run=dry_run))

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        return self._write(lambda tx: transitions.remove_by_ids(tx, queue, ids, ended_before=ended_before))


class SqlQueues(Queues):
    """Controls of queues."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write, self._read = database.write, database.read

    def names(self) -> list[str]:
        return self._read(queues.queue_names)

    def pause(self, queue: str) -> None:
        self._write(lambda tx: queues.pause(tx, queue, paused=True))

    def resume(self, queue: str) -> None:
        self._write(lambda tx: queues.pause(tx, queue, paused=False))

    def is_paused(self, queue: str) -> bool:
        return self._read(lambda tx: queues.controls(tx, queue).paused, is_single=True)

    def hold(self, queue: str, name: str, until: int | None, reason: str) -> None:
        self._write(lambda tx: queues.hold(tx, queue, name, until, reason))

    def release(self, queue: str, name: str) -> bool:
        return self._write(lambda tx: queues.release(tx, queue, name))

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._write(lambda tx: queues.set_limits(tx, queue, rate, concurrency))

    def set_key_limit(self, queue: str, key: str | None, **overrides: Unpack[KeyLimitChanges]) -> None:
        changes: dict[str, Any] = {**overrides}
        self._write(lambda tx: queues.change_group(tx, queue, key, changes))

    def pause_key(self, queue: str, key: str) -> None:
        self._write(lambda tx: queues.change_group(tx, queue, key, {"paused": True}))

    def resume_key(self, queue: str, key: str) -> None:
        self._write(lambda tx: queues.change_group(tx, queue, key, {"paused": False}))

    def key_limits(self, queue: str) -> dict[str | None, KeyLimit]:
        return self._read(lambda tx: queues.key_limits(tx, queue))

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        return queues.clean(self._write, queue, states, before, limit)

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        if self._database.is_in_transaction():
            # All or nothing: the caller may handle the error, and commit.
            count = self._write(lambda tx: queues.obliterate(lambda step: step(tx), queue, force=force))
        else:
            count = queues.obliterate(self._write, queue, force=force)
        self._database.used_until.pop(queue, None)
        return count


class SqlLimiters(Limiters):
    """Limiters that queues share."""

    def __init__(self, database: Database) -> None:
        self._write, self._read = database.write, database.read

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._write(lambda tx: limiters.set_limits(tx, name, rate, concurrency))

    def state(self, name: str) -> LimiterState:
        return self._read(lambda tx: limiters.LockedLimiter(tx, name, lock=False).state())


def _finish_and_claim(
    tx: Tx, outcomes: Sequence[Outcome], then: ClaimRequest | None, *, waits: bool = True
) -> Finished:
    """End attempts, and claim the next jobs, in one transaction."""
    accepted = finish.finish(tx, outcomes, waits=waits) if outcomes else []
    tx.settle()
    return Finished(accepted, NO_CLAIMS if then is None else claim.claim(tx, then))


PROBE = (
    "INSERT INTO djqueue_observed (name, until) VALUES ('', 0) "
    "ON CONFLICT (name) DO UPDATE SET until = excluded.until"
)
"""Writes a row that has no effect, and that a sweep removes."""
TRIAL_BYTES = 1_000
"""Size of the payload of the job that a probe inserts and takes back."""


MODELS = ("djqueue.models.hot", "djqueue.models.jobs", "djqueue.models.queues")
"""The modules whose tables are probed."""
MAY_NOT_WRITE = (
    "SELECT name FROM unnest(ARRAY[{}]) AS name WHERE NOT (has_table_privilege(name, 'SELECT') "
    "AND has_table_privilege(name, 'INSERT') AND has_table_privilege(name, 'UPDATE') "
    "AND has_table_privilege(name, 'DELETE'))"
)
"""Returns some of these tables, and fails if there is no such table. It waits for no lock of a table."""


@cache
def _tables() -> list[str]:
    return [model._meta.db_table for model in apps.get_models() if model.__module__ in MODELS]


def _probe(database: Database) -> list[Finding]:
    """Write to the tables. Return the locks that are held for long; raise what an enqueue would raise."""
    if database.dialect.has_clock:
        locks = database.read(lambda tx: tx.rows(LOCKS, WHOLE_TABLE), is_single=True)
        found = list(locked_tables(lambda *_: locks))
        if not found:
            database.write(_note if locks else _write)
            if refused := database.read(_refused_tables, is_single=True):
                raise StorageUnavailableError(
                    f"the database {database.alias!r} cannot be used: its user may not read and write "
                    f"{', '.join(refused)}: grant SELECT, INSERT, UPDATE and DELETE to it"
                )
        return found
    try:
        database.write(_write)
    except StorageUnavailableError as error:
        if not LOCKED.search(str(error.__cause__)):
            raise
        return list(locked_file(database.alias))
    return []


def _note(tx: Tx) -> None:
    tx.run(PROBE)


def _write(tx: Tx) -> None:
    """Write what stays, and a job that does not: the disk may be full, or the project may refuse jobs."""
    _note(tx)
    tx.run("SAVEPOINT djqueue_probe")
    number = -random.getrandbits(62)
    values: dict[str, Any] = {
        **dict.fromkeys(("queue", "name", "content_type"), ""),
        "id": number,
        "job_id": str(number),
        "state": State.WAITING.value,
        "priority": 0,
        "payload": random.randbytes(TRIAL_BYTES),
        "options": b"",
        "created_at": tx.now,
        "run_at": tx.now,
    }
    tx.insert(
        "djqueue_job", stored.NEW_JOB, [tuple(values.get(name) for name in stored.NEW_JOB)], stored.UNTOUCHED
    )
    tx.run("ROLLBACK TO SAVEPOINT djqueue_probe")
    if not tx.dialect.has_clock:
        # It fails if a table is missing.
        tx.rows(f"SELECT 1 FROM {', '.join(_tables())} LIMIT 0")


def _refused_tables(tx: Tx) -> list[str]:
    names = ", ".join(f"'{name}'" for name in _tables())
    return [name for (name,) in tx.rows(MAY_NOT_WRITE.format(names))]
