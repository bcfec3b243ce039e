"""The database storage: the scheduler in one process, and its client in all others."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Concatenate

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections

from djqueue.core.breaker import Outage
from djqueue.core.clock import Clock
from djqueue.core.durations import milliseconds
from djqueue.core.errors import (
    ConfigurationError,
    OptionError,
    SchedulerRunningError,
    StorageError,
    StorageUnavailableError,
)
from djqueue.core.forks import after_fork
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
)
from djqueue.core.maintenance import Swept
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.shown import in_one_line, shown_name
from djqueue.core.states import State
from djqueue.storage import sparktables
from djqueue.storage.base import P, Storage, T
from djqueue.storage.capabilities import Capabilities
from djqueue.storage.commits import JoinedTransactions
from djqueue.storage.facets import Unsubscribe
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.dberrors import LOCKED, drop_if_broken, named
from djqueue.storage.tables.dialects import dialect_for

from .address import default_address, parse_address
from .bulkwrites import DatabaseBulkWriteReports
from .client import ClientStorage
from .facets import (
    DatabaseEvents,
    DatabaseJobs,
    DatabaseLimiters,
    DatabaseQueues,
    DatabaseReads,
    DatabaseWorkers,
)
from .lease import RUNS_NOTHING, TAKES_OVER, TTL, LeaseLost, SchedulerLease
from .operations import TIMEOUT, operation_of
from .role import DatabaseSchedulerRole
from .scheduler import SchedulerStorage
from .server import SchedulerServer
from .snapshots import DatabaseSnapshots

logger = logging.getLogger("djqueue.scheduler")

MAX_TIMEOUT = 60
"""Maximum of TIMEOUT, in seconds."""
SHORTEST_LEASE = 1_000
"""Minimum of SCHEDULER_LEASE, in milliseconds."""
STANDBY_POLL = 0.5
"""Seconds between a standby's checks of the scheduler's lease."""


class JournaledStorage(Storage):
    """Jobs in a database of the project.

    At most one process is the scheduler. `connect` takes that role, unless the role's `standby` is `work`;
    all other processes are clients.

    Args:
        database: Alias in `DATABASES`.
        address: Address of the scheduler's socket, `unix:///path` or `tcp://host:port`. The default is a
            Unix domain socket that only this user can open.
        token: Token that clients of a TCP address must send.
        timeout: Time limit of an enqueue in seconds, plus a second for every 10,000 jobs, or every 1,000
            with the ORM alone.
        metrics: How long metrics are kept.
        scheduler_lease: How long the scheduler's lease lasts unless it is renewed: seconds, or a timedelta.
        sql: `auto` uses fast statements on SQLite and PostgreSQL; `orm` uses the ORM alone.
    """

    def __init__(
        self,
        *,
        database: str = "default",
        address: str | None = None,
        token: str | None = None,
        scheduler_lease: float | timedelta = TTL / 1_000,
        sql: str = "auto",
        policies: Mapping[str, QueuePolicy] | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock | None = None,
        cores: int | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        timeout: float = TIMEOUT,
    ) -> None:
        if database not in connections:
            raise ConfigurationError(f"DATABASE: {shown_name(database)} is not in DATABASES")
        for name, value in (("ADDRESS", address), ("TOKEN", token)):
            if value is not None and not isinstance(value, str):
                kind = value if name == "ADDRESS" else f"an object of type {type(value).__name__}"
                raise ConfigurationError(f"{name}: expected a string, got {kind}")
        if cores is not None and (type(cores) is not int or cores < 1):
            raise ConfigurationError(f"CORES: expected a positive whole number, got {cores!r}")
        if sql not in ("auto", "orm"):
            raise ConfigurationError(f"SQL: must be 'auto' or 'orm'; got {shown_name(sql)}")
        if connections[database].settings_dict["ENGINE"] == "django.db.backends.dummy":
            raise ImproperlyConfigured(
                f"djqueue stores its jobs in DATABASES[{database!r}], which is not configured: set its ENGINE"
            )
        try:
            self._ttl = milliseconds("SCHEDULER_LEASE", scheduler_lease)
        except OptionError as error:
            raise ConfigurationError(str(error)) from error
        if self._ttl < SHORTEST_LEASE:
            raise ConfigurationError(
                f"SCHEDULER_LEASE must be {SHORTEST_LEASE / 1_000:g} s or longer; got {scheduler_lease!r}"
            )
        self._alias = database
        self._address = parse_address(address) if address else default_address(database)
        self._token = token
        self._policies = policies
        self._limiters = limiters
        self._cores = cores
        self._metrics = metrics
        self._clock: Clock = clock or DatabaseClock(database)
        self._dialect = dialect_for(database, orm=sql == "orm")
        self._timeout = _seconds(timeout)
        self._client = ClientStorage(
            self._dialect, self._clock, token, policies, limiters, self.notify_incidents, self._timeout
        )
        self._scheduler: SchedulerStorage | None = None
        """The scheduler, if this process is the scheduler."""
        self._deposed: SchedulerStorage | None = None
        """The scheduler that this process was before another process took over."""
        self.lease: SchedulerLease | None = None
        """The scheduler's lease, if this process holds it."""
        self._server: SchedulerServer | None = None
        self._closing = threading.Event()
        self.role = DatabaseSchedulerRole(self, self._ttl)
        self._transactions = JoinedTransactions(database)
        self._bulk_writes = DatabaseBulkWriteReports(database, self._clock)
        self.jobs = DatabaseJobs(self)
        self.queues = DatabaseQueues(self)
        self.limiters = DatabaseLimiters(self)
        self.workers = DatabaseWorkers(self)
        self.reads = DatabaseReads(self)
        self.events = DatabaseEvents(self)
        self.snapshots = DatabaseSnapshots(self, self._dialect, self._client.policy)
        after_fork(self.become_client)

    # Life.

    def connect(self) -> None:
        """Become the scheduler of the database: take its lease, load its jobs, open its socket.

        While another process is the scheduler, wait, or raise SchedulerRunningError: see
        `DatabaseSchedulerRole.standby`.

        Raises StorageUnavailableError if the database is unavailable.
        """
        if self.is_scheduler:
            return
        with named(self._alias):
            if self.role.standby == "work":
                self._wait_for_scheduler()
            else:
                self._connect()

    def close(self) -> None:
        """Write the remaining changes, release the scheduler's lease, and close all connections."""
        self._closing.set()
        scheduler, self._scheduler = self._scheduler, None
        server, self._server = self._server, None
        lease, self.lease = self.lease, None
        try:
            if server is not None:
                server.close()
            if scheduler is not None:
                scheduler.close()
            if self._deposed is not None:
                with contextlib.suppress(LeaseLost):  # That was logged when it happened.
                    self._deposed.close()
            if lease is not None:
                self._release(lease)
        except (Error, OSError) as error:
            drop_if_broken(self._alias)
            raise StorageUnavailableError(
                f"database {self._alias!r} is unavailable, and the last changes could not be written: "
                f"{in_one_line(error)}"
            ) from error
        finally:
            self._client.close()

    def describe(self) -> str:
        settings = connections[self._alias].settings_dict
        vendor = connections[self._alias].display_name
        where = f" at {settings['HOST']}" if settings.get("HOST") else ""
        return f"database {self._alias!r} ({vendor}{where}: {settings['NAME']})"

    @property
    def alias(self) -> str:
        """Alias of the database."""
        return self._alias

    @property
    def clock(self) -> Clock:
        """The clock that decides when jobs are due."""
        return self._clock

    @property
    def has_spark_tables(self) -> bool:
        """Whether the tables of `djqueue.contrib.spark` can be used."""
        return sparktables.are_installed()

    @property
    def active(self) -> SchedulerStorage | ClientStorage:
        """The scheduler if this process is the scheduler, otherwise its client."""
        return self._scheduler or self._client

    @property
    def capabilities(self) -> Capabilities:
        active = self.active
        return Capabilities(
            database=self._alias,
            mirrored_states=frozenset(State),
            transactions=self._transactions,
            scheduler=self.role,
            staging=active.staging if self.has_spark_tables else None,
            bulk_writes=self._bulk_writes if self.has_spark_tables else None,
            export=active.export,
        )

    @property
    def outage(self) -> Outage | None:
        return self.active.outage

    @property
    def is_scheduler(self) -> bool:
        """Whether this process is the scheduler."""
        return self._scheduler is not None

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method on the async ORM's thread, which has the caller's transaction."""
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # The hot path.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with named(self._alias):
            return self.active.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with named(self._alias):
            return await self.active.aenqueue(batches)

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        with named(self._alias):
            return self.active.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        with named(self._alias):
            return await self.active.afinish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        with named(self._alias):
            return self.active.renew(leases)

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        with named(self._alias):
            return self.active.report(reports)

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        with named(self._alias):
            return self.active.emit(emissions)

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        return self.active.listen(queues, wake)

    def sweep(self) -> Swept:
        with named(self._alias):
            return self.active.sweep()

    # Every other operation.

    def ask(self, method: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation of the contract, such as `Jobs.cancel`, where the table in `operations` says."""
        operation, scheduler = operation_of(method), self._scheduler
        with named(self._alias):
            if scheduler is not None:
                answer: T = operation.of(scheduler)(*args, **kwargs)
            else:
                answer = self._client.ask(operation, args, kwargs)
        return answer

    def flush(self) -> None:
        """Write what the scheduler has not written to the tables yet, if one is running."""
        scheduler = self._scheduler
        with named(self._alias):
            if scheduler is not None:
                scheduler.gate.flush()
            else:
                self._client.flush()

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when commands may wait for a worker: see `Workers.on_command`."""
        scheduler = self._scheduler
        if scheduler is not None:
            return scheduler.workers.on_command(worker_id, wake)
        return self._client.on_command(worker_id, wake)

    def unregister_worker(self, worker_id: str) -> None:
        """Remove a worker. If no scheduler can be reached, do nothing: the next one removes the worker."""
        scheduler = self._scheduler
        with named(self._alias):
            if scheduler is not None:
                scheduler.workers.unregister(worker_id)
            else:
                self._client.unregister_worker(worker_id)

    def change_version(self) -> str | None:
        """Return the version of all jobs: see `Reads.change_version`."""
        scheduler = self._scheduler
        with named(self._alias):
            if scheduler is not None:
                return scheduler.reads.change_version()
            return self._client.change_version()

    # Becoming the scheduler, and losing the role.

    def _connect(self) -> None:
        self._tune()
        lease = self._wait_for_lease()
        storage = SchedulerStorage(
            self._dialect,
            lease,
            self._clock,
            self._policies,
            self._limiters,
            self._cores,
            lost=self._lost,
            incidents=self.notify_incidents,
            tiers=self._metrics,
            timeout=self._timeout,
        )
        server = None
        try:
            counts = storage.open()
            server = SchedulerServer(
                storage,
                self._address,
                self._token,
                storage.inbox.arrived.set,
                self._alias,
                holds=lambda: not lease.has_run_out(),
            )
            server.start()
            lease.move(str(server.address))
            storage.welcome()
        except BaseException:
            if server is not None:
                server.close()
            storage.close()
            # The next scheduler must know how the previous one ended.
            lease.release_unserved()
            raise
        self.lease, self._server, self._scheduler = lease, server, storage
        logger.info(
            "This process is the scheduler: %s pending jobs, %s of them interrupted; "
            "%s jobs running in other processes; %s dead letters.",
            *counts.values(),
        )

    def _wait_for_lease(self) -> SchedulerLease:
        lease = SchedulerLease(self._alias, self._clock, str(self._address), self._ttl)
        if lease.acquire():
            return lease
        there = lease.present()
        who = there.describe() if there is not None else "another process"
        if self.role.standby == "never":
            raise SchedulerRunningError(
                f"{who} is the scheduler of database {self._alias!r}: stop that process first, remove "
                "--standby=never to wait until it stops, or use --standby=work to run its jobs"
            )
        logger.info(
            "Standing by: %s is the scheduler of database %r. %s",
            who,
            self._alias,
            RUNS_NOTHING if self.role.on_standby is None else TAKES_OVER,
        )
        if self.role.on_standby is not None:
            self.role.on_standby()
        self._stand_by(lease.acquire)
        return lease

    def _release(self, lease: SchedulerLease) -> None:
        """Release the scheduler's lease, on a new connection if this thread's connection no longer works.

        The server may have closed this thread's connection, which has not been used since the start.
        """
        try:
            lease.release()
        except Error as error:
            connection = connections[self._alias]
            if connection.in_atomic_block or LOCKED.search(str(error)):
                raise
            connection.close()
            lease.release()

    def _wait_for_scheduler(self) -> None:
        if not self._client.reaches_scheduler():
            logger.info(
                "Waiting for a scheduler of database %r: start one with `manage.py runworkers`. With "
                "--standby work, this process runs the jobs that a scheduler assigns, and never becomes "
                "the scheduler.",
                self._alias,
            )
            self._stand_by(self._client.reaches_scheduler)

    def _stand_by(self, is_over: Callable[[], bool]) -> None:
        """Wait for a condition, also through outages of the database."""
        away = False
        while not self._closing.wait(STANDBY_POLL):
            try:
                if is_over():
                    return
                away = False
            except Error as error:
                drop_if_broken(self._alias)
                if not away:
                    logger.warning("Could not read the scheduler's row, retrying: %s", in_one_line(error))
                away = True
        raise StorageError("the storage was closed while standing by")

    def _tune(self) -> None:
        """Apply the recommended settings of SQLite that are stored in its file."""
        connection = connections[self._alias]
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA journal_mode=WAL")

    def become_client(self) -> None:
        """Become a client in a forked child: the parent is the scheduler and has its threads and socket."""
        self._scheduler = self._server = self.lease = None

    def _lost(self) -> None:
        logger.error(
            "Another process has taken over as the scheduler. Running jobs continue, and their "
            "results are reported to the new scheduler."
        )
        if self._scheduler is not None:
            # The rows contain the claims of this process, and the new scheduler keeps these for a whole
            # lease.
            self._deposed, self._scheduler = self._scheduler, None
        if self._server is not None:
            self._server.stop()
        if self.role.on_lost is not None:
            self.role.on_lost()


def _seconds(timeout: Any) -> float:
    try:
        found = milliseconds("TIMEOUT", timeout) / 1_000
    except OptionError as error:
        raise ConfigurationError(str(error)) from error
    if not 0 < found <= MAX_TIMEOUT:
        raise ConfigurationError(
            f"TIMEOUT: must be a number of seconds greater than 0 and at most {MAX_TIMEOUT}; got {timeout!r}"
        )
    return found
