"""The storage in a process that is not the scheduler."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from djqueue.core.breaker import Outage
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import within
from djqueue.core.engine import DEFAULT_POLICY
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.ids import IdSource
from djqueue.core.job import (
    Batch,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Incident,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
)
from djqueue.core.maintenance import Swept
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.states import TERMINAL, State
from djqueue.storage import backpressure
from djqueue.storage.base import EventHandler, P, T, Unsubscribe
from djqueue.storage.facets import Events
from djqueue.storage.journaled.operations import TIMEOUT, patience
from djqueue.storage.reads import Reads
from djqueue.storage.tables.clock import set_right
from djqueue.storage.tables.dberrors import AWAY, drop_if_broken, is_unreachable, named, unavailable
from djqueue.storage.tables.dialects import Dialect
from djqueue.storage.tables.groups import record_modes, recorded_modes
from djqueue.storage.tables.inspector import DatabaseInspector

from .address import Address, parse_address
from .export import DatabaseExport
from .lease import SchedulerLease, present_holder
from .operations import FLUSH, AnsweredBy, Operation, operation_of
from .producer import Inserter
from .remote import Remote
from .scheduler import SchedulerStorage
from .staging import DatabaseStaging
from .tables import TableAnswers

logger = logging.getLogger("djqueue.client")

TO_WRITE = 0.5
"""Share of the time limit that is reserved for writing the jobs, in case the scheduler does not respond."""
AT_LEAST = 0.5
"""Minimum seconds for which a change in this process may wait for locks after the scheduler did not
respond.
"""


class ClientStorage:
    """The storage in a process that is not the scheduler.

    Enqueues only need the database. The table in `operations` says who answers all other operations: the
    scheduler, the tables, or, while no scheduler is running, this process, which holds the scheduler's
    lease for one transaction.
    """

    def __init__(
        self,
        dialect: Dialect,
        clock: Clock,
        token: str | None,
        policies: Mapping[str, QueuePolicy] | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        incidents: Callable[[list[Incident]], None] | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        self._incidents = incidents
        self._timeout = timeout
        self._alias = dialect.alias
        self._dialect = dialect
        self._clock = clock
        self._policies = policies
        self._limiters = limiters
        self._may_block = any(policy.when_full == "block" for policy in (policies or {}).values())
        self._has_bounds = any(policy.max_size is not None for policy in (policies or {}).values())
        self._inspector = DatabaseInspector(dialect.alias)
        self._tables = TableAnswers(dialect.alias, clock, self.policy, limiters)
        self._remote = Remote(self._find, token, leave=lambda: connections[self._alias].close())
        self._inserter = _AskingInserter(dialect, clock, self.policy, self._remote)
        self._staging = DatabaseStaging(dialect, clock, self._enqueue_at_once, self._changed_by_now)
        self._export = DatabaseExport(dialect.alias)
        self.events = _RemoteEvents(self._remote)
        self._ids = IdSource()
        self._agreed: set[str] = set()
        """Queues whose recorded group mode agrees with this process's settings."""

    def close(self) -> None:
        self._remote.close()

    @property
    def staging(self) -> DatabaseStaging:
        return self._staging

    @property
    def export(self) -> DatabaseExport:
        return self._export

    def policy(self, queue: str) -> QueuePolicy:
        """The configuration of a queue."""
        return (self._policies or {}).get(queue, DEFAULT_POLICY)

    def describe(self) -> str:
        return f"database {self._alias!r}"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Insert rows in the caller's transaction, unless `durable` is False; in a transaction no call waits
        for room.
        """
        if self._may_block and not self._is_in_transaction():
            return backpressure.enqueue(self.events, self.policy, batches, self._enqueue_at_once)
        return self._enqueue_at_once(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self._may_block and not await self.acall(self._is_in_transaction):
            return await backpressure.aenqueue(self, self.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return await self.acall(self._enqueue_at_once, batches)

    def _is_in_transaction(self) -> bool:
        return connections[self._alias].in_atomic_block

    @property
    def outage(self) -> Outage | None:
        return self._remote.outage

    def _enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with within(patience(self._timeout, batches, self._dialect)):
            return self._enqueue_in_time(batches)

    def _enqueue_in_time(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)
        unrecorded = self._agree({batch.queue for batch in batches} - self._agreed)
        wake = partial(self._wake, unrecorded)
        if all(batch.options.durable is False for batch in batches):
            return self._hand_over("enqueue_at_once", batches, wake)
        if self._has_bounds and self._are_bounded(batches) and not self._is_in_transaction():
            # Only the scheduler can count all jobs, and decide which of them to drop for others.
            return self._hand_over("enqueue_written", batches, wake)
        return self._insert(batches, wake)

    def _insert(self, batches: Sequence[Batch], wake: Callable[[], None]) -> list[EnqueueResult]:
        """Write jobs. If the scheduler knows that the existing job of a duplicate has ended, or is to be
        replaced, try again, because the tables are a moment behind. In a transaction, do not ask the
        scheduler.
        """
        answers = self._inserter.insert(batches, wake)
        is_graph = len(batches) > 1 and any(batch.options.depends_on for batch in batches)
        if is_graph or self._is_in_transaction():
            return answers
        first = 0
        for batch in batches:
            places = range(first, first + len(batch.payloads))
            first = places.stop
            found = {at: answers[at] for at in places if answers[at].status == "duplicate"}
            mine = {answers[at].id for at in places if at not in found}
            found = {at: answer for at, answer in found.items() if answer.id not in mine}
            believed = {answer.id: answer.existing_state for answer in found.values()}
            changed = self._changed_by_now(batch.queue, believed)
            ended = {job_id for job_id, state in changed.items() if state in TERMINAL}
            may_go = ended if batch.options.on_duplicate == "keep" else changed
            again = [at for at, answer in found.items() if answer.id in may_go]
            for at, answer in found.items():
                if answer.id in changed:
                    answers[at] = answer._replace(existing_state=changed[answer.id])
            if again:
                some = _some_of(batch, [at - places.start for at in again])
                for at, answer in zip(again, self._inserter.insert([some], wake), strict=True):
                    answers[at] = answer
        return answers

    def flush(self) -> None:
        """Let the scheduler write what is not in the tables yet, if it responds."""
        try:
            self._remote.ask(FLUSH.name)
        except StorageUnavailableError as error:
            logger.debug("Reading the tables as they are, because no scheduler answered: %s", error)

    def _changed_by_now(self, queue: str, believed: Mapping[str, State | None]) -> dict[str, State]:
        """Return the jobs whose state differs in the scheduler, if it responds; the tables agree when this
        returns.
        """
        if not believed:
            return {}
        ids = list(believed)
        try:
            states: list[State | None] = self._remote.ask("settled", queue, ids, list(believed.values()))
        except StorageUnavailableError as error:
            logger.debug("Using the job states in the tables, because no scheduler answered: %s", error)
            return {}
        return {
            job_id: state
            for job_id, state in zip(ids, states, strict=True)
            if state is not None and state is not believed[job_id]
        }

    def _are_bounded(self, batches: Sequence[Batch]) -> bool:
        return any(self.policy(batch.queue).max_size is not None for batch in batches)

    def _hand_over(
        self, operation: str, batches: Sequence[Batch], wake: Callable[[], None]
    ) -> list[EnqueueResult]:
        """Pass jobs to the scheduler, or to the tables if no scheduler is running."""
        # With ids, so that the request can be repeated if the response is lost.
        batches = [self._with_ids(batch) for batch in batches]
        try:
            limit = (1 - TO_WRITE) * patience(self._timeout, batches, self._dialect)
            answers: list[EnqueueResult] = self._remote.read(operation, batches, timeout=limit)
        except StorageUnavailableError as error:
            logger.debug("Writing the jobs to the tables, because no scheduler accepted them: %s", error)
            return self._enqueue_again(batches, wake)
        else:
            return answers

    def _enqueue_again(self, batches: Sequence[Batch], wake: Callable[[], None]) -> list[EnqueueResult]:
        """Write jobs after the scheduler failed without a response; it may have accepted some of them."""
        mine = {job_id for batch in batches if batch.fresh for job_id in batch.ids or ()}
        answers = self._inserter.insert([batch._replace(fresh=False) for batch in batches], wake)
        return [
            EnqueueResult(answer.id, "queued", answer.queue) if answer.id in mine else answer
            for answer in answers
        ]

    def _agree(self, queues: Collection[str]) -> list[str]:
        """Check the queues' group modes against those recorded; return the queues of which none is recorded.

        A process without policies checks nothing; the scheduler records the modes. Otherwise, `_wake`
        records modes that are missing.
        """
        if self._policies is None or not queues:
            return []
        connections[self._alias].validate_no_broken_transaction()
        try:
            with self._dialect.transaction():
                modes = recorded_modes(self._alias, queues)
        except AWAY as error:
            drop_if_broken(self._alias)
            raise unavailable(self._alias, error, ", and none of the jobs was enqueued") from error
        for queue, mode in modes.items():
            self.policy(queue).check_mode(queue, mode)
        self._agreed.update(modes)
        return [queue for queue in queues if queue not in modes]

    def _wake(self, unrecorded: Iterable[str]) -> None:
        """Notify the scheduler of rows in the inbox. Record group modes first, because no lock is held
        now.
        """
        record_modes(self._alias, {queue: self.policy(queue).group_mode for queue in unrecorded})
        self._remote.tell("inbox")

    # Only the scheduler's engine knows attempts.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        try:
            finished: Finished = self._remote.call("finish", outcomes, then)
        except StorageUnavailableError as unreachable:
            if then is not None or not outcomes:
                raise
            return self._finish_unless_away(outcomes, unreachable)
        return finished

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        try:
            finished: Finished = await self._remote.acall("finish", outcomes, then)
        except StorageUnavailableError as unreachable:
            if then is not None or not outcomes:
                raise
            # On a separate thread, because a job may block the only thread of the async ORM.
            write = sync_to_async(self._finish_unless_away, thread_sensitive=False)
            return await write(outcomes, unreachable)
        return finished

    def _finish_unless_away(
        self, outcomes: Sequence[Outcome], unreachable: StorageUnavailableError
    ) -> Finished:
        """Write outcomes if the database can be reached: the worker may stop before the next scheduler
        starts.
        """
        if is_unreachable(self._alias, unreachable):
            raise unreachable
        return self._finish_here(outcomes, unreachable)

    def _finish_here(self, outcomes: Sequence[Outcome], unreachable: StorageUnavailableError) -> Finished:
        """Write outcomes while no scheduler is running. Raises `unreachable` if one is."""
        connection = connections[self._alias]
        was_open = connection.connection is not None
        try:
            with named(self._alias), self._dialect.transaction():
                storage, lease = self._take_lease(unreachable)
                finished = storage.finish_here(outcomes)
                storage.close()
                lease.release_unserved()
            return finished
        finally:
            if not was_open:
                connection.close()

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        renewals: list[Renewal] = self._remote.call("renew", leases)
        return renewals

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        accepted: list[bool] = self._remote.call("report", reports)
        return accepted

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        accepted: list[bool] = self._remote.call("emit", emissions)
        return accepted

    def sweep(self) -> Swept:
        """Do nothing: the scheduler sweeps."""
        return Swept()

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        names = None if queues is None else list(queues)
        return self._remote.subscribe("listen", (names,), lambda _: wake())

    def on_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """Call `wake` when the scheduler has commands for a worker of this process."""
        return self._remote.subscribe("on_command", (worker_id,), lambda _: wake())

    def unregister_worker(self, worker_id: str) -> None:
        """Remove a worker from the scheduler, which does so itself later if it is unavailable now."""
        try:
            self._remote.call("workers.unregister", worker_id)
        except StorageUnavailableError as error:
            logger.debug(
                "Worker %s could not be unregistered; the scheduler will remove its entry later: %s",
                worker_id,
                error,
            )

    def change_version(self) -> str | None:
        """Return the scheduler's version with the newest row, because rows of producers appear before it
        knows them.
        """
        answer = self.ask(operation_of(Reads.change_version), (), {})
        return None if answer is None else f"{answer}:{self._inspector.last_row()}"

    def reaches_scheduler(self) -> bool:
        """Return whether a scheduler responds."""
        try:
            self._remote.call("ping")
        except StorageUnavailableError as error:
            logger.debug("No scheduler answered: %s", error)
            return False
        return True

    # All other operations, answered as the table says.

    def ask(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in the scheduler, in the tables, or in this process with the scheduler's lease."""
        who = operation.answered_by
        if who is AnsweredBy.SCHEDULER:
            return self._remote.call(operation.name, *args, **kwargs)
        if who is AnsweredBy.LEASE_HOLDER:
            return self._change(operation, args, kwargs)
        is_asked = who is not AnsweredBy.TABLES and not (
            (who is AnsweredBy.CONNECTED_OR_TABLES and not self._remote.connected)
            or (operation.sees_transaction and self._is_in_transaction())
        )
        if is_asked:
            try:
                return self._remote.read(operation.name, *args, **kwargs)
            except StorageUnavailableError as error:
                logger.debug("Reading the tables, because no scheduler answered: %s", error)
        return operation.of(self._tables)(*args, **kwargs)

    def _change(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a change in the scheduler, or in this process while none is running."""
        began = SYSTEM_CLOCK.monotonic()
        try:
            return self._remote.call(operation.name, *args, **kwargs)
        except StorageUnavailableError as unreachable:
            if is_unreachable(self._alias, unreachable):
                raise
            took = (SYSTEM_CLOCK.monotonic() - began) / 1_000
            # The deadline limits the wait for locks of the database, not the work.
            with within(max(AT_LEAST, self._timeout - took)):
                return self._change_here(operation, args, kwargs, unreachable)

    def _change_here(
        self,
        operation: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        unreachable: StorageUnavailableError,
    ) -> Any:
        queue, *rest = args
        concern = operation.concern(*rest, **kwargs)
        # One transaction, the caller's if one is open; no scheduler can start before it ends.
        with self._dialect.transaction():
            storage, lease = self._take_lease(unreachable)
            storage.open_for(queue, concern.ids, concern.into)
            answer = operation.of(storage)(*args, **kwargs)
            storage.close()
            lease.release_unserved()
        return answer

    # Implementation.

    def _with_ids(self, batch: Batch) -> Batch:
        if batch.ids is not None:
            return batch
        ids = self._ids.many(len(batch.payloads), self._clock.now())
        return batch._replace(ids=ids, fresh=True)

    def _take_lease(self, unreachable: StorageUnavailableError) -> tuple[SchedulerStorage, SchedulerLease]:
        """Take the scheduler's lease for this transaction. Raises `unreachable` if a scheduler holds it."""
        lease = SchedulerLease(self._alias, self._clock, "")
        if not lease.acquire():
            raise unreachable
        logger.debug(
            "Acting as the scheduler for one operation, because no scheduler is running: %s", unreachable
        )
        storage = SchedulerStorage(
            self._dialect,
            lease,
            self._clock,
            self._policies,
            self._limiters,
            incidents=self._incidents,
            timeout=self._timeout,
        )
        return storage, lease

    def _find(self) -> Address | None:
        """Return the scheduler's address. Database connections opened here are closed again."""
        connection = connections[self._alias]
        if connection.needs_rollback:
            return None
        was_open = connection.connection is not None
        try:
            with named(self._alias):
                set_right(self._clock)
                holder = present_holder(self._alias, self._clock.now())
        finally:
            if not was_open:
                connection.close()
        if holder is None or not holder.address:
            return None
        return parse_address(holder.address)


class _RemoteEvents(Events):
    """Events that the scheduler sends; none while no scheduler runs."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        return self._remote.subscribe("subscribe", (queue, job_id), handler)


class _AskingInserter(Inserter):
    """Inserts rows, and asks the scheduler for states that the tables do not have yet."""

    def __init__(
        self, dialect: Dialect, clock: Clock, policy: Callable[[str], QueuePolicy], remote: Remote
    ) -> None:
        super().__init__(dialect, clock, policy)
        self._remote = remote

    def is_known(self, queue: str, job_id: str) -> bool:
        try:
            return bool(self._remote.read("reads.states", queue, [job_id])[0])
        except StorageUnavailableError:
            return False


def _some_of(batch: Batch, places: Sequence[int]) -> Batch:
    """Return a batch with some of a batch's jobs."""
    ids = None if batch.ids is None else [batch.ids[place] for place in places]
    return batch._replace(payloads=[batch.payloads[place] for place in places], ids=ids)
