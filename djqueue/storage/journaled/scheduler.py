"""The storage in the scheduler's process: engine, journal and inbox."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from asgiref.sync import sync_to_async
from django.db import Error, connections

from djqueue.core.breaker import Outage
from djqueue.core.clock import Clock
from djqueue.core.deadline import within
from djqueue.core.engine import DEFAULT_POLICY, NO_CLAIMS, Engine
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.flow import outside
from djqueue.core.job import (
    Batch,
    Claimed,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Incident,
    Outcome,
)
from djqueue.core.maintenance import Swept
from djqueue.core.metrics import DEFAULT_TIERS, Tiers
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import NO_RETENTION
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.shown import in_one_line
from djqueue.core.states import State
from djqueue.storage import backpressure
from djqueue.storage.base import P, T
from djqueue.storage.commits import is_called_by_sync_code
from djqueue.storage.engined import WORKER_TTL, EngineStorage
from djqueue.storage.journaled.operations import TIMEOUT, patience
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.dialects import Dialect

from . import recovery
from .endedjobs import EndedJobs
from .export import DatabaseExport
from .inbox import Inbox
from .journal import DatabaseJournal, JournalGate
from .lease import LeaseLost, PauseWatch, SchedulerLease
from .metrics import DatabaseMetrics
from .modes import GroupModes
from .payloads import TablePayloads
from .processes import has_died, own_process
from .purging import Purge
from .scheduler_facets import SchedulerJobs, SchedulerLimiters, SchedulerQueues, SchedulerReads
from .staging import LOCK_TIMEOUT, DatabaseStaging
from .transactions import EngineInserter, are_simple, is_detached, is_durable
from .unanswered import UnansweredEnds, accept_also, accepted_claims, written_claims

logger = logging.getLogger("djqueue.scheduler")

CAREFUL = 60_000
"""Milliseconds after a crash of the last scheduler in which one of its jobs may crash this one, too."""


class SchedulerStorage(EngineStorage):
    """The storage in the scheduler's process: the engine answers for live jobs, the tables for ended ones."""

    def __init__(
        self,
        dialect: Dialect,
        lease: SchedulerLease,
        clock: Clock,
        policies: Mapping[str, QueuePolicy] | None = None,
        limiters: Mapping[str, LimiterPolicy] | None = None,
        cores: int | None = None,
        lost: Callable[[], None] | None = None,
        incidents: Callable[[list[Incident]], None] | None = None,
        tiers: Tiers = DEFAULT_TIERS,
        timeout: float = TIMEOUT,
    ) -> None:
        self._timeout = timeout
        self._alias = alias = dialect.alias
        self._dialect = dialect
        self._lease = lease
        self._clock = clock
        retention = {
            name: policy.retention
            for name, policy in (policies or {}).items()
            if policy.retention is not NO_RETENTION
        }
        self.journal = DatabaseJournal(
            dialect,
            lease.hold,
            lambda ended: self._ended.written(ended),
            lost or (lambda: None),
            retention,
            clock,
            own_process(),
            lease.ttl,
            lease.lag,
        )
        self.engine = engine = Engine(
            clock=clock,
            journal=self.journal,
            policies=policies,
            default_policy=DEFAULT_POLICY,
            limiters=limiters,
            keep_finished=False,
            cores=cores,
            metrics=DatabaseMetrics(alias, self.journal),
            incidents=incidents,
        )
        # Also after the wall clock was set back, tokens are higher than those of earlier schedulers.
        engine.context.start_tokens_above(lease.started_at << 20)
        self.gate = JournalGate(self.journal, lease, dialect, timeout)
        self._ended = EndedJobs(alias, engine, self.journal)
        engine.context.loaded = self._ended.known
        self._modes = GroupModes(alias, engine, self.journal)
        self._payloads = TablePayloads(alias)
        self.inbox = Inbox(
            alias, engine, self.journal, self.gate, self._ended, self._modes, clock, self._payloads
        )
        self._inserter = EngineInserter(dialect, clock, engine)
        self.staging = DatabaseStaging(dialect, clock, self.enqueue_at_once, self._settle, LOCK_TIMEOUT)
        self.export = DatabaseExport(alias, self.gate.flush)
        self.unanswered = UnansweredEnds(alias, engine, clock)
        jobs = SchedulerJobs(engine, self.journal, self.gate, self._ended)
        self._purge = Purge(
            self.staging, engine, self.journal, self.gate, retention, tiers, clock, jobs.remove_ended
        )
        self.jobs = jobs
        self.queues = SchedulerQueues(alias, engine, self.journal, self.gate, self._modes, self.inbox, jobs)
        self.limiters = SchedulerLimiters(engine, self.journal, self.gate)
        self.workers = engine.workers
        self.reads = SchedulerReads(
            alias,
            engine,
            self.journal,
            self.gate,
            self._ended,
            self.inbox,
            clock,
            lambda: self._swept_at,
        )
        self.events = engine.events
        self._swept_at: int | None = None
        """Time of the last sweep in UTC milliseconds."""
        self._pauses = PauseWatch(self._make_up)
        self._careful_until = 0
        """Monotonic milliseconds until which claims of this process are written before they are returned."""
        self.is_connected: Callable[[str], bool] = _is_never
        """Returns whether the process of another worker may still send requests; set by the server."""

    # Start and end.

    def open(self) -> dict[str, int]:
        """Load all live jobs and start writing; return the counts."""
        self._modes.accept(*recovery.agree(self._alias, self.engine))
        self.journal.book.open(self.gate.transaction)
        self.journal.start()
        self.gate.is_open = True
        recovery.note_kept(self._alias, self.engine)
        counts = recovery.recover(
            self._alias,
            self.engine,
            self.journal,
            self.inbox.take_in_all,
            self._ended.known,
            self._lease.left_at,
            was_released=self._lease.was_released,
            payloads=self._payloads,
        )
        self.gate.flush()
        self._lease.serve()
        if counts["interrupted"] or not self._lease.was_released:
            self._careful_until = self._clock.monotonic() + CAREFUL
        self.inbox.start()
        return counts

    def welcome(self) -> None:
        """Give workers of other processes a full lease in which to connect to this scheduler."""
        self.engine.leases.renew_all()
        if not isinstance(self._clock, DatabaseClock):
            return  # A clock that tests control does not show how long this process was suspended.
        self._pauses.start()

    def open_for(self, queue: str, ids: Sequence[str] | None, to: str | None = None) -> None:
        """Load some or all (None) of one queue's jobs, with their dependents; this thread writes the
        changes.

        Args:
            to: Another queue to which they move; its jobs with the same ids or unique keys are loaded,
            too.
        """
        recovery.borrow(
            self._alias,
            self.engine,
            self.journal,
            self.inbox.take,
            self._ended.known,
            queue,
            ids,
            to,
            self._lease.left_at,
            was_released=self._lease.was_released,
        )

    def close(self) -> None:
        """Write the remaining changes, so that the next scheduler can start."""
        self._pauses.stop()
        self.inbox.close()
        try:
            self.engine.record_totals()
        finally:
            self._payloads.close()
            self.journal.close()

    def describe(self) -> str:
        return f"database {self._alias!r}"

    outage: Outage | None = None

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a sync method on the async ORM's thread, because most of them read tables."""
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs. In a transaction, the jobs are part of it, and the call does not wait for room."""
        if self.engine.context.may_block and not connections[self._alias].in_atomic_block:
            return backpressure.enqueue(
                self.events, self.engine.context.policy, batches, self.enqueue_at_once
            )
        return self.enqueue_at_once(batches)

    def enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs without waiting for room, or past the deadline for another process's lock."""
        with within(patience(self._timeout, batches, self._dialect)):
            return self._enqueue_in_time(batches)

    def _enqueue_in_time(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.engine.context.policy(batch.queue).check_batch(batch)
        if not connections[self._alias].in_atomic_block:
            for batch in batches:
                self._modes.agree(batch.queue)
        elif not all(is_detached(batch) for batch in batches):
            # Group modes are checked when the rows are read back: a transaction that reads first may fail
            # to write.
            return self._inserter.insert(batches, self.inbox.arrived.set)
        self.gate.check()
        results = self._accept(batches)
        try:
            if is_durable(batches):
                self.journal.sync(durable=True)
            elif self.journal.is_full():
                self.journal.wait_for_room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    def enqueue_written(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs for another process: they are committed when this returns."""
        results = self.enqueue_at_once(batches)
        if not is_durable(batches):
            try:
                with within(patience(self._timeout, batches, self._dialect)):
                    self.journal.sync()
            except (Error, OSError, StorageUnavailableError) as error:
                self._take_back(results, error)
        return results

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if self.engine.context.may_block:
            if is_called_by_sync_code():
                return await self.acall(self.enqueue, batches)
            return await backpressure.aenqueue(self, self.engine.context.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        is_known = self._modes.are_known(*(batch.queue for batch in batches))
        if not is_known or not are_simple(batches) or is_called_by_sync_code():
            return await self.acall(self.enqueue_at_once, batches)
        with within(patience(self._timeout, batches, self._dialect)):
            return await self._enqueue_simple(batches)

    async def _enqueue_simple(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.engine.context.policy(batch.queue).check_batch(batch)
        await self.gate.acheck()
        results = self.engine.enqueue(batches)
        try:
            if is_durable(batches):
                await self.gate.written(durable=True)
            await self.gate.room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    def _accept(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if are_simple(batches):
            return self.engine.enqueue(batches)
        keys = [
            (batch.queue, job_id)
            for batch in batches
            if batch.ids is not None and not batch.fresh
            for job_id in batch.ids
        ]
        keys += outside(batches)
        with self._ended.known(keys), self.journal.together():
            return self.engine.enqueue(batches)

    def _take_back(self, results: list[EnqueueResult], error: BaseException) -> None:
        """Remove jobs that could not be written, unless a worker has started them, and raise the error."""
        started = [
            result.id
            for result in reversed(results)
            if result.status in ("queued", "rejected")
            and result.existing_state is None
            and not self.engine.jobs.remove(result.queue, [result.id])[0]
        ]
        if isinstance(error, LeaseLost):
            raise error
        but = f" except jobs that a worker has already started: {', '.join(started)}" if started else ""
        raise StorageUnavailableError(
            f"writing to database {self._alias!r} failed: {in_one_line(error)}; nothing was enqueued{but}"
        ) from error

    def settled(self, queue: str, ids: Sequence[str], believed: Sequence[State | None]) -> list[State | None]:
        """Like `reads.states`, but write the journal first if a state differs from `believed`."""
        found = self.reads.states(queue, ids)
        if found != list(believed):
            self.gate.flush()
        return found

    def _settle(self, queue: str, believed: Mapping[str, State | None]) -> None:
        self.settled(queue, list(believed), list(believed.values()))

    # Attempts.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        self.gate.check()
        if self.journal.is_full():
            self.journal.wait_for_room()
        finished = self.engine.finish(outcomes, then)
        if finished.claims.jobs and self._is_careful():
            try:
                with self._unclaiming(finished.claims.jobs):
                    self.journal.sync()
            except (Error, OSError, StorageUnavailableError) as error:
                return _without_claims(finished, error)
        return finished

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        await self.gate.acheck()
        await self.gate.room()
        finished = self.engine.finish(outcomes, then)
        if finished.claims.jobs and self._is_careful():
            try:
                with self._unclaiming(finished.claims.jobs):
                    await self.gate.written()
            except (Error, OSError, StorageUnavailableError) as error:
                return _without_claims(finished, error)
        return finished

    async def finish_written(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """Finish and claim for a worker of another process, which may outlive this one.

        When this returns, the ends and the claims are committed. An outcome that is reported again counts if
        it was accepted before without an answer, by this scheduler or an earlier one.
        """
        await self.gate.acheck()
        await self.gate.room()
        finished = self.engine.finish(outcomes, then)
        if not outcomes and not finished.claims.jobs:
            return finished
        try:
            with self._unclaiming(finished.claims.jobs):
                await self.gate.written()
                # Inside: the worker receives an error only if the tables cannot be read.
                return await self.unanswered.recognize(outcomes, finished)
        except BaseException:
            self.unanswered.note(accepted_claims(outcomes, finished))
            raise

    def finish_here(self, outcomes: Sequence[Outcome]) -> Finished:
        """End attempts of this process while no scheduler runs; the caller has a transaction."""
        ids: dict[str, list[str]] = {}
        for outcome in outcomes:
            ids.setdefault(outcome.queue, []).append(outcome.id)
        for queue, mine in ids.items():
            self.open_for(queue, mine)
        finished = self.engine.finish(outcomes)
        return accept_also(outcomes, finished, written_claims(self._alias, ids))

    def unclaim(self, claimed: Sequence[Claimed]) -> None:
        """Release jobs whose worker never received them, without using an attempt."""
        self.engine.finish([Outcome(one.queue, one.id, one.token, "release") for one in claimed])

    @contextmanager
    def _unclaiming(self, claimed: Sequence[Claimed]) -> Iterator[None]:
        """Release claims that could not be written, and are therefore not returned."""
        try:
            yield
        except BaseException:
            self.unclaim(claimed)
            raise

    def _is_careful(self) -> bool:
        return self._clock.monotonic() < self._careful_until

    def _make_up(self, paused: int) -> None:
        """Extend all leases by the milliseconds for which this process was suspended."""
        self.engine.leases.postpone(paused)
        logger.warning(
            "This process was paused for %.1f s; the leases of running jobs were extended by that time.",
            paused / 1_000,
        )

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """Add streamed items. A sender that is faster than the journal waits; repeated items are
        recognized.
        """
        self.gate.check()
        accepted = self.engine.emit(emissions)
        if self.journal.has_many_items():
            self.gate.flush()
        return accepted

    def emit_written(self, emissions: Sequence[Emission]) -> list[bool]:
        """Add streamed items for another process: they are committed when this returns."""
        accepted = self.emit(emissions)
        self.gate.flush()
        return accepted

    # Sweep.

    def sweep(self) -> Swept:
        self.gate.check()
        swept = super().sweep()
        self._swept_at = self._clock.now()
        self.gate.flush()
        return swept._replace(removed=swept.removed + self._purge.run(self._swept_at))

    def _sweep(self) -> Swept:
        # In this order, a pause after the first line does not affect the leases that are swept here.
        tick = self._clock.monotonic()
        self._pauses.check()
        self._end_leases_of_dead_processes(tick)
        return self.engine.sweep(WORKER_TTL, tick)

    def _end_leases_of_dead_processes(self, tick: int) -> None:
        """End the leases of this machine's dead processes, once everything they sent was read."""
        processes = self.engine.leases.processes()
        if processes:
            is_gone = has_died()
            dead = {name for name in processes if is_gone(name) and not self.is_connected(name)}
            if dead:
                self.engine.leases.expire(dead, tick)


def _without_claims(finished: Finished, error: BaseException) -> Finished:
    """Return the answer for the accepted outcomes alone, so that the worker does not send them again.

    Raises `error` if none was accepted, or if this process is no longer the scheduler.
    """
    if isinstance(error, LeaseLost) or not any(finished.accepted):
        raise error
    logger.warning(
        "Released %d claimed jobs, because the claim could not be written: %s",
        len(finished.claims.jobs),
        in_one_line(error),
    )
    return finished._replace(claims=NO_CLAIMS)


def _is_never(_process: str) -> bool:
    return False
