"""`SchedulerStorage`: the scheduler in the process that runs it, and a client everywhere else."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from django.db import connections

from djqueue.core.clock import Clock
from djqueue.core.deadlines import Outage, within
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
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
    Swept,
)
from djqueue.core.logs import Log
from djqueue.core.messages import shown_name
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.options import JobKey
from djqueue.core.overview import Finding
from djqueue.core.policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy
from djqueue.core.states import State
from djqueue.core.threads import after_fork, on_thread
from djqueue.storage import backpressure, snapshots
from djqueue.storage.base import Storage
from djqueue.storage.capabilities import Capabilities, SchedulerRole
from djqueue.storage.facets import EventHandler, Events, Jobs, Limiters, Queues, Reads, Unsubscribe, Workers
from djqueue.storage.outbox import REPLY_TIMEOUT, OutboxTable
from djqueue.storage.snapshots import Part, SnapshotCounts, Snapshots
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.wire import pack

from .client import SchedulerClient, result_of
from .folder import PrivateFolder, default_folder
from .protocol import OPERATIONS, frames_of, time_for
from .scheduler import JobScheduler
from .server import SocketServer

logger = Log("djqueue.scheduler")

PART_JOBS = 20_000
"""Maximum number of jobs in a frame."""
PART_BYTES = 16 * 1024 * 1024
"""Bytes of payloads after which a frame ends."""
CONFIRM_TIMEOUT = 2.0
"""Seconds for which a subscription waits until it has begun."""


class SchedulerStorage(Storage):
    """Jobs in the memory of one scheduler process for a machine and a database.

    Args:
        database: Alias in `DATABASES` of the tables that the scheduler keeps.
        folder: Folder of the scheduler's socket, which only this user can open.
        timeout: Seconds in which the scheduler answers.
        policies: The policies of single queues.
        limiters: Limiters that queues may share.
        clock: The scheduler's source of time.
        metrics: How long metrics are kept.
        cores: Decides the number of shards: see `Engine`.
    """

    def __init__(
        self,
        *,
        database: str = "default",
        folder: str | Path | None = None,
        timeout: float = 2.0,
        policies: Mapping[str, QueuePolicy] | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        clock: Clock | None = None,
        metrics: Tiers = DEFAULT_TIERS,
        cores: int | None = None,
        random: Random | None = None,
    ) -> None:
        if database not in connections:
            raise ConfigurationError(f"DATABASE: {shown_name(database)} is not in DATABASES")
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or timeout <= 0:
            raise ConfigurationError(f"TIMEOUT: expected a number of seconds above 0, got {timeout!r}")
        self.alias = database
        self.clock: Clock = clock or DatabaseClock(database)
        self._folder = PrivateFolder(default_folder(database) if folder is None else Path(folder))
        self._timeout = timeout
        self._policies = dict(policies or {})
        self._may_block = any(policy.when_full == "block" for policy in self._policies.values())
        self._make = partial(
            JobScheduler,
            database,
            self.clock,
            self._folder,
            policies=policies,
            limiters=limiters,
            metrics=metrics,
            cores=cores,
            random=random,
            incidents=self.notify_incidents,
            describe=self.describe,
            timeout=timeout,
        )
        self._scheduler: JobScheduler | None = None
        self._server: SocketServer | None = None
        self.client = SchedulerClient(self._folder, timeout)
        self.role = ProcessRoleOfScheduler(self)
        self.jobs = cast(Jobs, RemoteFacet("jobs", self))
        self.queues = cast(Queues, RemoteFacet("queues", self))
        self.limiters = cast(Limiters, RemoteFacet("limiters", self))
        self.workers = cast(Workers, RemoteWorkers("workers", self))
        self.reads = cast(Reads, RemoteReads("reads", self))
        self.events = SchedulerEvents(self)
        self.snapshots = RemoteSnapshots(self)
        self._outbox = OutboxTable(
            lambda _queue: True,
            self._send,
            self._asend,
            self._send_soon,
            self._asend_soon,
            server="the scheduler",
            detaches=True,
            on_commit=self._tell_relay,
            is_away=lambda: self.outage is not None,
            clock=clock,
        )

    @classmethod
    def options_in_tests(cls, options: Mapping[str, Any], prefix: str) -> dict[str, Any]:  # noqa: ARG003
        # The default folder follows from the name of the database, which is a test database's.
        return {name: option for name, option in options.items() if name != "folder"}

    @property
    def scheduler(self) -> JobScheduler | None:
        """The scheduler, if it is this process."""
        return self._scheduler

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            max_in_flight=1 if self._scheduler is not None else 2,
            database=self.alias,
            mirrored_states=frozenset(State),
            transactions=self._outbox,
            scheduler=self.role,
            enqueue_directly=self._enqueue_written,
            has_outbox=True,
            on_outbox=None if self._scheduler is None else self._scheduler.relays.append,
        )

    @property
    def outage(self) -> Outage | None:
        return None if self._scheduler is not None else self.client.outage

    # Life.

    def connect(self) -> None:
        """Become the scheduler, unless the role says that another process is.

        Raises SchedulerRunningError if another process is the scheduler already.
        """
        if not self.role.starts_here or self._scheduler is not None:
            return
        scheduler = self._make(lost=self.role.lost)
        scheduler.open()
        try:
            self._server = SocketServer(scheduler, self._folder, secrets.token_hex(8))
        except BaseException:
            scheduler.close()
            raise
        self._scheduler = scheduler
        after_fork(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """Become a client in a forked process, whose copy of the jobs would be neither run nor written."""
        if self._server is not None:
            self._server.leave_to_parent()
        self._scheduler = self._server = None
        self.role.starts_here = False

    def close(self) -> None:
        self.client.close()
        server, self._server = self._server, None
        scheduler, self._scheduler = self._scheduler, None
        if server is not None:
            server.close()
        if scheduler is not None:
            scheduler.close()

    def describe(self) -> str:
        settings = connections[self.alias].settings_dict
        vendor = connections[self.alias].display_name
        return f"scheduler of database {self.alias!r} ({vendor}: {settings['NAME']})"

    # Calls.

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Carry out an operation here, or in the scheduler's process."""
        if self._scheduler is not None:
            return self._scheduler.call(operation, args, kwargs)
        return self.client.call(operation, *args, **kwargs)

    async def async_call(self, operation: str, *args: Any) -> Any:
        """Async version of `call`."""
        if self._scheduler is not None:
            return await on_thread(self._scheduler.call, operation, args, {})
        return await self.client.acall(operation, *args)

    def policy(self, queue: str) -> QueuePolicy:
        """Return the configuration of a queue."""
        return self._policies.get(queue, DEFAULT_POLICY)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs. In a transaction, or while the scheduler is away, they wait in the outbox."""
        self._check(batches)
        if self._may_block:
            return backpressure.enqueue(self.events, self.policy, batches, self._outbox.enqueue)
        return self._outbox.enqueue(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        self._check(batches)
        if self._may_block:
            return await backpressure.aenqueue(self, self.policy, batches, self._outbox.aenqueue)
        return await self._outbox.aenqueue(batches)

    def _check(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)
            batch.check_ids()

    def _send(self, batches: Sequence[Batch], *, written: bool = False) -> list[EnqueueResult]:
        if self._scheduler is not None:
            return self._scheduler.enqueue(batches, written=written)
        return [
            answer for part in self._parts(batches) for answer in self.client.enqueue(part, written=written)
        ]

    async def _asend(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self._scheduler is not None:
            return await on_thread(self._scheduler.enqueue, batches)
        return [answer for part in self._parts(batches) for answer in await self.client.aenqueue(part)]

    def _parts(self, batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
        """Split a batch that is too large for a frame, unless its queue takes all of it or nothing."""
        batch = batches[0] if len(batches) == 1 else None
        if batch is None or batch.ids is None or self.policy(batch.queue).max_size is not None:
            yield batches
            return
        first = size = 0
        for place, payload in enumerate(batch.payloads, 1):
            size += len(payload)
            if size > PART_BYTES or place - first == PART_JOBS or place == len(batch.payloads):
                yield [batch._replace(payloads=batch.payloads[first:place], ids=batch.ids[first:place])]
                first, size = place, 0

    def _send_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with within(min(REPLY_TIMEOUT, self._timeout) + time_for(batches)):
            return self._send(batches)

    async def _asend_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with within(min(REPLY_TIMEOUT, self._timeout) + time_for(batches)):
            return await self._asend(batches)

    def _enqueue_written(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return self._send(batches, written=True)

    def _tell_relay(self) -> None:
        if self._scheduler is not None:
            self._scheduler.outbox_written()
        elif self.client.outage is None:
            try:
                with within(REPLY_TIMEOUT):
                    self.client.call("outbox_written")
            except StorageUnavailableError as error:
                logger.debug("The relay will find the jobs when the scheduler is back: %s", error)

    # The rest of the hot path.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        if self._scheduler is not None:
            return self._scheduler.finish_here(outcomes, then)
        return self.client.finish(outcomes, then)

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        if self._scheduler is not None:
            return self._scheduler.finish_here(outcomes, then)
        return await self.client.afinish(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        renewals: list[Renewal] = self.call("renew", list(leases))
        if self._scheduler is None:
            ended = [lease.token for lease, one in zip(leases, renewals, strict=True) if not one.held]
            self.client.attempts.lost(ended)
        return renewals

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        accepted: list[bool] = self.call("report", list(reports))
        return accepted

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        if self._scheduler is not None:
            return self._scheduler.emit(emissions)
        accepted: list[bool] = self.client.call("emit", list(emissions))
        return accepted

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        names = None if queues is None else list(queues)
        return self.subscribe("listen", (names,), wake)

    def subscribe(self, operation: str, args: tuple[Any, ...], wake: Callable[..., None]) -> Unsubscribe:
        """Begin a subscription; `wake` has no argument unless events are subscribed to."""
        if self._scheduler is not None:
            return self._scheduler.subscribe(operation, args, wake)
        handler = wake if operation == "events.subscribe" else lambda _none: wake()
        return self.client.subscriptions.subscribe(
            operation, args, handler, min(CONFIRM_TIMEOUT, self._timeout)
        )

    def probe(self) -> Sequence[Finding]:
        found: Sequence[Finding] = self.call("probe")
        return found

    def sweep(self) -> Swept:
        swept: Swept = self.call("sweep")
        return swept

    def maintain(self) -> None:
        """Sweep in the scheduler's process, and nowhere else; keep its socket where clients look for it."""
        if self._scheduler is not None:
            self._scheduler.sweep()
        if self._server is not None:
            self._server.restore()


class ProcessRoleOfScheduler(SchedulerRole):
    """The role that a process has when it connects."""

    def __init__(self, storage: SchedulerStorage) -> None:
        self.starts_here = False
        self.on_lost: Callable[[], None] | None = None
        self._storage = storage

    @property
    def is_here(self) -> bool:
        return self._storage.scheduler is not None

    @property
    def clock(self) -> Clock:
        return self._storage.clock

    def refused(self, ids: Iterable[str]) -> list[JobKey]:
        scheduler = self._storage.scheduler
        return [] if scheduler is None else scheduler.journal.refused(frozenset(ids))

    def lost(self) -> None:
        """Call `on_lost`."""
        if self.on_lost is not None:
            self.on_lost()


class RemoteFacet:
    """A facet whose operations are carried out by the scheduler."""

    def __init__(self, facet: str, storage: SchedulerStorage) -> None:
        self._storage = storage
        for operation in OPERATIONS:
            owner, _, name = operation.rpartition(".")
            if owner == facet:
                setattr(self, name, partial(storage.call, operation))


class RemoteWorkers(RemoteFacet):
    """The workers of the scheduler."""

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when commands may wait for a worker."""
        return self._storage.subscribe("workers.on_command", (worker_id,), wake)


class RemoteReads(RemoteFacet):
    """Reads of the scheduler."""

    async def ajobs(self, queue: str, ids: Sequence[str]) -> Any:
        """Async version of `jobs`."""
        return await self._storage.async_call("reads.jobs", queue, list(ids))

    async def aitems(self, queue: str, marks: Sequence[Any]) -> Any:
        """Async version of `items`."""
        return await self._storage.async_call("reads.items", queue, list(marks))


class SchedulerEvents(Events):
    """Events of the scheduler."""

    def __init__(self, storage: SchedulerStorage) -> None:
        self._storage = storage

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._storage.subscribe("events.subscribe", (queue, job_id), handler)


class RemoteSnapshots(Snapshots):
    """Snapshots of the scheduler, part by part."""

    schedules = None

    def __init__(self, storage: SchedulerStorage) -> None:
        self._storage = storage

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        if (scheduler := self._storage.scheduler) is not None:
            with scheduler.snapshots.read(page) as parts:
                yield parts
            return
        with self._storage.client.stream("snapshots.read", page) as stream:

            def received() -> Iterator[Part]:
                while (frame := stream.receive())[0] == "part":
                    yield Part(*frame[1:])
                result_of(frame)

            yield received()

    def is_empty(self) -> bool:
        is_empty: bool = self._storage.call("snapshots.is_empty")
        return is_empty

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        if (scheduler := self._storage.scheduler) is not None:
            return scheduler.snapshots.write(parts, replace=replace)
        with self._storage.client.stream("snapshots.write", replace=replace) as stream:
            for part in parts:
                for frame in frames_of(part):
                    stream.send(frame)
            stream.send(pack(["end"]))
            return SnapshotCounts(*result_of(stream.receive()))
