"""`DatabaseStorage`: what the settings name. The scheduler in one process, a client of it in all others."""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections

from djqueue.core.breaker import Outage
from djqueue.core.clock import Clock
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics
from djqueue.core.durations import milliseconds
from djqueue.core.errors import (
    ConfigurationError,
    OptionError,
    SchedulerRunningError,
    StorageError,
    StorageUnavailableError,
)
from djqueue.core.forks import after_fork
from djqueue.core.hiding import shown_name
from djqueue.core.job import Batch
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.shown import in_one_line
from djqueue.storage import commits, sparktables
from djqueue.storage.base import P, Storage, T
from djqueue.storage.export import Export
from djqueue.storage.staging import Staging

from .address import default_address, parse_address
from .bulkwrites import DatabaseBulkWriteReports
from .client import ClientStorage
from .clock import DatabaseClock
from .dberrors import drop_if_broken, named, raise_named
from .dialects import dialect_for
from .journal import LeaseLost
from .lease import TTL, SchedulerLease
from .patience import TIMEOUT
from .remedies import LOCKED
from .scheduler import SchedulerStorage
from .server import SchedulerServer

logger = logging.getLogger("djqueue.scheduler")

MAX_TIMEOUT = 60
"""Seconds that TIMEOUT may be."""
SHORTEST_LEASE = 1_000
"""Milliseconds that SCHEDULER_LEASE must have."""
STANDBY_POLL = 0.5
"""Seconds between a standby's looks at the scheduler's lease."""


class DatabaseStorage(Storage):
    """Jobs in a database of the project.

    database: its alias in `DATABASES`.
    address: of the scheduler's socket: `unix:///path` or `tcp://host:port`; else a Unix domain socket
        that only this user can open.
    token: what clients of a TCP address have to show.
    timeout: seconds that an enqueue may take; longer for many at once, by a second for every 10,000 jobs, or
        1,000 through the ORM alone.
    metrics: for how long they are kept.
    scheduler_lease: seconds, or a timedelta: how long the scheduler keeps its place unless it renews it.
    sql: `auto` uses the fast statements of SQLite and PostgreSQL; `orm` the ORM alone.

    `connect` makes this process the scheduler; without it, it is a client.
    """

    standby = "wait"
    """What `connect` does while another process is the scheduler: `wait` for its end, or `never` to raise;
    `work` claims from that process over its socket and never takes its place."""

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
            self._dialect, self._clock, token, policies, limiters, self.told, self._timeout
        )
        self._active: Storage = self._client
        self._deposed: SchedulerStorage | None = None
        """What this process was until another one took its place."""
        self._lease: SchedulerLease | None = None
        self._server: SchedulerServer | None = None
        self._closing = threading.Event()
        self.on_lost: Callable[[], None] | None = None
        """Called when another process has taken the scheduler's place: nothing more can be written."""
        after_fork(self.become_client)

    # Life.

    def connect(self) -> None:
        """Become the scheduler of the database: take its lease, load its jobs, open its socket.

        Waits while another process is the scheduler, or raises SchedulerRunningError: see `standby`.
        Raises StorageUnavailableError if the database is away.
        """
        if self.is_scheduler:
            return
        with named(self._alias):
            if self.standby == "work":
                self._wait_for_scheduler()
            else:
                self._connect()

    def close(self) -> None:
        """Write what is left, give the scheduler's place back, hang up."""
        self._closing.set()
        scheduler, self._active = self._active, self._client
        server, self._server = self._server, None
        lease, self._lease = self._lease, None
        try:
            if server is not None:
                server.close()
            if scheduler is not self._client:
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
        """See `Storage.describe`."""
        settings = connections[self._alias].settings_dict
        vendor = connections[self._alias].display_name
        where = f" at {settings['HOST']}" if settings.get("HOST") else ""
        return f"database {self._alias!r} ({vendor}{where}: {settings['NAME']})"

    def diagnostics(self) -> Diagnostics:
        """See `Storage.diagnostics`."""
        with named(self._alias):
            found = self._active.diagnostics()
        return found._replace(
            lines=[DiagnosticLine("storage.where", "Storage", "Location", self.describe()), *found.lines]
        )

    @property
    def alias(self) -> str:
        """Of the database, in `DATABASES`."""
        return self._alias

    @property
    def clock(self) -> Clock:
        """By which jobs are due."""
        return self._clock

    @property
    def staging(self) -> Staging | None:
        """Staged writes, if `djqueue.contrib.spark` is installed."""
        return self._active.staging if self.has_spark_tables else None

    @property
    def has_spark_tables(self) -> bool:
        """Whether the tables of `djqueue.contrib.spark` can be used."""
        return sparktables.are_installed()

    @property
    def export(self) -> Export | None:
        """See `Storage.export`."""
        return self._active.export

    def scheduler_claim(self) -> tuple[bytes, int] | None:
        """See `Storage.scheduler_claim`."""
        return None if self._lease is None else (self._lease.claim, self._lease.ttl)

    def renew_scheduler_claim(self, claim: bytes) -> None:
        """See `Storage.renew_scheduler_claim`."""
        SchedulerLease(self._alias, self._clock, "", self._ttl).renew_claim(claim)

    @property
    def outage(self) -> Outage | None:
        """See `Storage.outage`."""
        return self._active.outage

    @property
    def is_scheduler(self) -> bool:
        """Whether this process is the scheduler."""
        return self._active is not self._client

    @property
    def imports(self) -> DatabaseBulkWriteReports | None:
        """Reports of bulk writes, if `djqueue.contrib.spark` is installed."""
        return DatabaseBulkWriteReports(self._alias, self._clock) if self.has_spark_tables else None

    def transaction_of(self, batch: Batch) -> str | None:
        """See `Storage.transaction_of`."""
        apart = batch.options.durable is False
        return self._alias if connections[self._alias].in_atomic_block and not apart else None

    async def atransaction_of(self, batch: Batch) -> str | None:
        """See `Storage.transaction_of`."""
        return await sync_to_async(self.transaction_of)(batch)

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        """See `Storage.uncommitted_in`."""
        return self._alias if commits.has_uncommitted(self._alias, queue, id) else None

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        """Async version of `uncommitted_in`."""
        return await sync_to_async(self.uncommitted_in)(queue, id)

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Storage.acall`."""
        return await self._active.acall(method, *args, **kwargs)

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
            incidents=self.told,
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
                storage.arrived,
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
            # The next one has to know how the scheduler before this one ended.
            lease.release_unserved()
            raise
        self._lease, self._server, self._active = lease, server, storage
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
        if self.standby == "never":
            raise SchedulerRunningError(
                f"{who} is the scheduler of database {self._alias!r}: stop that process first, remove "
                "--standby=never to wait until it stops, or use --standby=work to run its jobs"
            )
        logger.info(
            "Standing by: %s is the scheduler of database %r. This process runs no jobs until that "
            "scheduler stops; to run jobs now, start this process with --standby work.",
            who,
            self._alias,
        )
        self._stand_by(lease.acquire)
        return lease

    def _release(self, lease: SchedulerLease) -> None:
        """Give the scheduler's place back, on a new connection if this thread's no longer works.

        This thread may not have used its connection since the start, and the server may have closed it.
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
        """Wait for something, whatever becomes of the database meanwhile."""
        away = False
        while not self._closing.wait(STANDBY_POLL):
            try:
                if is_over():
                    return
                away = False
            except Error as error:
                drop_if_broken(self._alias)
                if not away:
                    logger.warning("Reading the scheduler's row failed, retrying: %s", in_one_line(error))
                away = True
        raise StorageError("closed while standing by")

    def _tune(self) -> None:
        """What the documents name for SQLite, as far as it is kept in the file."""
        connection = connections[self._alias]
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA journal_mode=WAL")

    def become_client(self) -> None:
        """In a forked child: the scheduler is the parent, which has the threads and the socket."""
        self._active = self._client
        self._server = self._lease = None

    def _lost(self) -> None:
        logger.error(
            "Another process has become the scheduler, so this one stops being it. Running jobs "
            "continue, and their results are reported to the new scheduler."
        )
        if isinstance(self._active, SchedulerStorage):
            # Its rows say which claims this process holds: the new scheduler keeps them for a whole lease.
            self._deposed, self._active = self._active, self._client
        if self._server is not None:
            self._server.stop()
        if self.on_lost is not None:
            self.on_lost()


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


def _delegate(name: str) -> Any:
    def method(self: DatabaseStorage, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(self._active, name)(*args, **kwargs)
        except Error as error:
            raise_named(self._alias, error)

    return _like(name, method)


def _async_delegate(name: str) -> Any:
    async def method(self: DatabaseStorage, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(self._active, name)(*args, **kwargs)
        except Error as error:
            raise_named(self._alias, error)

    return _like(name, method)


def _like(name: str, method: Any) -> Any:
    method.__name__ = name
    method.__qualname__ = f"DatabaseStorage.{name}"
    method.__doc__ = getattr(Storage, name).__doc__
    return method


# Every other verb is that of what this process is at the moment.
for _name in sorted(Storage.__abstractmethods__ - {"describe", "diagnostics"} | {"claim", "change_version"}):
    setattr(DatabaseStorage, _name, _delegate(_name))
for _name in ("aenqueue", "afinish", "ajobs", "aitems"):
    setattr(DatabaseStorage, _name, _async_delegate(_name))
DatabaseStorage.__abstractmethods__ = frozenset()
