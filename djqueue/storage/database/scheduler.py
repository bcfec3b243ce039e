"""The storage inside the scheduler's process: engine, journal, socket and inbox."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import Error, connections
from django.db.models import Model

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.clocksteps import STEP, keep_lengths
from djqueue.core.deadline import remaining, within
from djqueue.core.diagnostics import DiagnosticLine, Diagnostics
from djqueue.core.engine import DEFAULT_POLICY, NO_CLAIMS, Engine
from djqueue.core.errors import ConfigurationError, StorageError, StorageUnavailableError
from djqueue.core.explain import Explanation
from djqueue.core.flow import outside
from djqueue.core.graph import MOST, FlowGraph, JobLink
from djqueue.core.groups import NO_LIMIT, GroupWords
from djqueue.core.job import (
    Batch,
    CancelResult,
    Claimed,
    ClaimRequest,
    Emission,
    EngineJob,
    EnqueueResult,
    Finished,
    Incident,
    ItemMark,
    ItemPage,
    JobRecord,
    Lease,
    Outcome,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.maintenance import Swept, sweep
from djqueue.core.metrics import DEFAULT_TIERS, Bucket, Tiers
from djqueue.core.options import MAX_INTEGER, JobKey
from djqueue.core.pages import JobPage
from djqueue.core.queue import QueuePolicy
from djqueue.core.retention import NO_RETENTION
from djqueue.core.sharing import LimiterPolicy
from djqueue.core.shown import in_one_line
from djqueue.core.states import REUSABLE, TERMINAL, State
from djqueue.core.summaries import JobSummaryPage
from djqueue.storage import backpressure
from djqueue.storage.base import P, T
from djqueue.storage.engined import WORKER_TTL, EngineStorage

from . import diagnosis, metrics, recovery, rows
from .clock import DatabaseClock
from .dberrors import named
from .dialects import Dialect
from .export import DatabaseExport
from .groups import recorded_modes, row_of
from .inspector import DatabaseInspector
from .journal import DatabaseJournal, LeaseLost, Waiter
from .lease import SchedulerLease
from .metrics import DatabaseMetrics
from .patience import TIMEOUT, patience
from .pauses import PauseWatch
from .processes import has_died, own_process
from .producer import Found, Inserter, Owner
from .staging import DatabaseStaging, purge
from .steps import follow_missed_step

logger = logging.getLogger("djqueue.scheduler")

POLL = 1.0
"""Seconds between looks into the inbox, should a wake-up have been lost."""
INBOX_PAGE = 2_000
PURGE_LIMIT = 1_000
"""Old rows taken away at a time."""
STEPS = 10
"""So often, of each kind, in one round of upkeep."""
LONG_JOBS = 100
"""Jobs whose attempts, or log lines, are taken away at a time: each may have many."""
FOREVER = 2**62
MANY = 10_000
"""Ended jobs that wait to be forgotten: then those who would put that off wait first, but not for long."""
PATIENCE = 1.0
"""Seconds."""
CAREFUL = 60_000
"""Milliseconds after the unclean end of the last scheduler in which a job may be what kills this one, too."""

UNANSWERED_TTL = 600_000
"""Milliseconds for which an accepted end is remembered whose worker received an error or no answer."""
MAX_UNANSWERED = 10_000
"""Accepted ends of that kind that are remembered at most."""
DRIFT = 1_000
"""Milliseconds by which the wall clock drifts until the lease notes it."""


class SchedulerStorage(EngineStorage):
    """What the engine knows it answers; what has ended is in the tables."""

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
        self._alias = dialect.alias
        self._dialect = dialect
        self._lease = lease
        self._clock = clock
        self._inserter = _EngineInserter(dialect, clock, self)
        self._staging = DatabaseStaging(dialect, clock, self.enqueue_at_once, self._settle)
        self._export = DatabaseExport(dialect.alias, self._flush)
        self._inspector = DatabaseInspector(dialect.alias)
        self._identity = threading.Condition()
        """Held while the engine and the tables are asked for ids, and while the engine forgets ended jobs;
        not while others are told of anything.
        """
        self._pins = 0
        """How many are at work with ids that they have looked up: until they are done none is forgotten."""
        self._forgettable: list[EngineJob] = []
        self._inbox = threading.RLock()
        self._retention = {
            name: policy.retention
            for name, policy in (policies or {}).items()
            if policy.retention is not NO_RETENTION
        }
        self._journal = DatabaseJournal(
            dialect,
            lease.hold,
            self._written,
            lost or _nothing,
            self._retention,
            clock,
            own_process(),
            lease.ttl,
            lease.lag,
            lease.note_clock,
        )
        self._tiers = tiers
        self.metrics = DatabaseMetrics(self._alias, self._journal)
        self.engine = Engine(
            clock=clock,
            journal=self._journal,
            policies=policies,
            default_policy=DEFAULT_POLICY,
            limiters=limiters,
            keep_finished=False,
            cores=cores,
            incidents=incidents,
        )
        # Also after the wall clock was set back, tokens are higher than those of the schedulers before.
        self.engine.outbid(lease.started_at << 20)
        self.engine.knowing = self._knowing
        self._seen: dict[tuple[str, State, str], tuple[int, int]] = {}
        """Up to which ended job (its end, its row's number) attempts, log lines or items are taken away."""
        self._taken: set[int] = set()
        """Numbers of rows that were taken in, and of which the tables may not know it yet."""
        self._recorded: set[str] = set()
        """Queues whose mode is recorded."""
        self._is_open = False
        """Whether this is the scheduler, with all that is alive, and not for a moment with some jobs."""
        self._ticked_at: int | None = None
        """When this last did what time does: UTC milliseconds."""
        self._closing = threading.Event()
        self._arrived = threading.Event()
        self._pauses = PauseWatch(self._make_up)
        self._noted_offset = 0
        """Where the wall clock is, as the lease tells the next scheduler."""
        self._careful_until = 0
        """Until then (monotonic milliseconds) claims of this process are written before they are answered."""
        self._unanswered: dict[Lease, int] = {}
        """Claims whose ends were accepted while their workers received an error or no answer, with the
        monotonic milliseconds of that, oldest first."""
        self.is_connected: Callable[[str], bool] = _is_never
        """Whether a process of another worker can still be heard: the server's answer, once there is one."""
        self._inbox_thread = threading.Thread(target=self._watch_inbox, name="djqueue-inbox", daemon=True)

    # Life.

    def open(self) -> dict[str, int]:
        """Load everything that is alive, and begin to write; returns how much it was."""
        self._recorded |= recovery.agree(self._alias, self.engine)
        self._journal.book.open(self._held)
        with self._held():
            self._follow_missed_step()
            self._noted_offset = self.engine.clock_offset
            self._lease.note_clock(self._noted_offset)
        self._journal.start()
        self._is_open = True
        recovery.note_kept(self._alias, self.engine)
        counts = recovery.recover(
            self._alias,
            self.engine,
            self._journal,
            self._take_in_all,
            self._knowing,
            self._lease.left_at,
            was_released=self._lease.was_released,
        )
        self._flush()
        self._lease.serve()
        if counts["interrupted"] or not self._lease.was_released:
            self._careful_until = self._clock.monotonic() + CAREFUL
        self._inbox_thread.start()
        return counts

    def welcome(self) -> None:
        """Workers of other processes reach this one from now on: each has a whole lease to do so."""
        self.engine.renew_all()
        if not isinstance(self._clock, DatabaseClock):
            return  # It is set by hand: what it shows says nothing of how long this process was paused.
        self._pauses.start()

    def open_for(self, queue: str, ids: Sequence[str] | None, to: str | None = None) -> None:
        """Load these jobs (None: all) of one queue alone, and what depends on them; this thread writes.

        to: a queue to which they are moved, of which what may be in their way is loaded, too.
        """
        self._follow_missed_step()
        found = self._alias, self.engine, self._journal, self._take, self._knowing
        lease = self._lease
        recovery.borrow(*found, queue, ids, to, lease.left_at, was_released=lease.was_released)

    def _follow_missed_step(self) -> None:
        """Move times along if the wall clock was set while no scheduler ran; the caller has a transaction."""
        if step := self._lease.missed_step:
            follow_missed_step(self._dialect, step)
            self._lease.note_clock(self.engine.clock_offset)

    def close(self) -> None:
        """Write what is left, and let the next scheduler come."""
        self._closing.set()
        self._arrived.set()
        self._pauses.stop()
        if self._inbox_thread.is_alive():
            self._inbox_thread.join()
        try:
            self.note_totals()
        finally:
            self._journal.close()

    def describe(self) -> str:
        """See `Storage.describe`."""
        return f"database {self._alias!r}"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Storage.acall`: most verbs read tables, on the thread of the async ORM."""
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`. Inside a transaction the jobs are part of it, and do not wait for room."""
        if self.engine.may_block and not connections[self._alias].in_atomic_block:
            return backpressure.enqueue(self, self.engine.policy, batches, self.enqueue_at_once)
        return self.enqueue_at_once(batches)

    def enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`; never waits for room, nor for another process's lock beyond the deadline."""
        with within(patience(self._timeout, batches, self._dialect)):
            return self._enqueue_in_time(batches)

    def _enqueue_in_time(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.engine.policy(batch.queue).check_batch(batch)
        if not connections[self._alias].in_atomic_block:
            for batch in batches:
                self._agree(batch.queue)
        elif not all(_detached(batch) for batch in batches):
            # Modes are looked at when it is taken in: who reads first in a transaction may fail to write.
            return self._inserter.insert(batches, self._arrived.set)
        self._check()
        results = self._accept(batches)
        try:
            if _durable(batches):
                self._journal.sync(durable=True)
            elif self._journal.is_full():
                self._journal.wait_for_room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    def enqueue_written(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue_at_once`; when it returns the jobs are committed, as those of another process are."""
        results = self.enqueue_at_once(batches)
        if not _durable(batches):
            try:
                with within(patience(self._timeout, batches, self._dialect)):
                    self._journal.sync()
            except (Error, OSError, StorageUnavailableError) as error:
                self._take_back(results, error)
        return results

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if self.engine.may_block:
            if _called_by_sync_code():
                return await self.acall(self.enqueue, batches)
            return await backpressure.aenqueue(self, self.engine.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        is_new = any(batch.queue not in self._recorded for batch in batches)
        if is_new or not _simple(batches) or _called_by_sync_code():
            return await self.acall(self.enqueue_at_once, batches)
        with within(patience(self._timeout, batches, self._dialect)):
            return await self._enqueue_simple(batches)

    async def _enqueue_simple(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.engine.policy(batch.queue).check_batch(batch)
        await self._acheck()
        results = self.engine.enqueue(batches)
        try:
            if _durable(batches):
                await self._synced(durable=True)
            await self._room()
        except (Error, OSError, StorageUnavailableError) as error:
            self._take_back(results, error)
        return results

    @property
    def staging(self) -> DatabaseStaging:
        """See `Storage.staging`."""
        return self._staging

    @property
    def export(self) -> DatabaseExport:
        """See `Storage.export`."""
        return self._export

    def _settle(self, queue: str, believed: Mapping[str, State | None]) -> None:
        self.settled(queue, list(believed), list(believed.values()))

    # Runs.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        self._check()
        if self._journal.is_full():
            self._journal.wait_for_room()
        finished = self.engine.finish(outcomes, then)
        if finished.claims.jobs and self._is_careful():
            try:
                with self._unclaiming(finished.claims.jobs):
                    self._journal.sync()
            except (Error, OSError, StorageUnavailableError) as error:
                return _without_claims(finished, error)
        return finished

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        await self._acheck()
        await self._room()
        finished = self.engine.finish(outcomes, then)
        if finished.claims.jobs and self._is_careful():
            try:
                with self._unclaiming(finished.claims.jobs):
                    await self._synced()
            except (Error, OSError, StorageUnavailableError) as error:
                return _without_claims(finished, error)
        return finished

    async def finish_written(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `afinish`, for a worker of another process, which may outlive this one: when this returns, what
        has ended and what was claimed is committed.

        An outcome that is told again counts if this one could not answer for it, or the scheduler before it
        has written it: that one may have died before it answered.
        """
        await self._acheck()
        await self._room()
        finished = self.engine.finish(outcomes, then)
        if not outcomes and not finished.claims.jobs:
            return finished
        try:
            with self._unclaiming(finished.claims.jobs):
                await self._synced()
                # Inside: the worker hears of an error only if the tables cannot be read.
                known = set() if all(finished.accepted) else await self._known(outcomes, finished)
        except BaseException:
            self.note_unanswered(accepted_claims(outcomes, finished))
            raise
        if known:
            accepted = [
                is_accepted or _claim_of(outcome) in known
                for outcome, is_accepted in zip(outcomes, finished.accepted, strict=True)
            ]
            finished = finished._replace(accepted=accepted)
        return finished

    def finish_here(self, outcomes: Sequence[Outcome]) -> Finished:
        """End runs of this process, having loaded their jobs; the caller writes, and no scheduler runs."""
        ids: dict[str, list[str]] = {}
        for outcome in outcomes:
            ids.setdefault(outcome.queue, []).append(outcome.id)
        for queue, mine in ids.items():
            self.open_for(queue, mine)
        finished = self.engine.finish(outcomes)
        ended = {
            claim for queue, mine in ids.items() for claim in recovery.ended_claims(self._alias, queue, mine)
        }
        accepted = [
            is_accepted or _claim_of(outcome) in ended
            for outcome, is_accepted in zip(outcomes, finished.accepted, strict=True)
        ]
        return finished._replace(accepted=accepted)

    def note_unanswered(self, accepted: Iterable[Lease]) -> None:
        """Remember claims whose ends were accepted: a worker that does not hear of it reports them again."""
        now = self._clock.monotonic()
        noted = self._unanswered
        for claim in accepted:
            noted.pop(claim, None)
            noted[claim] = now
        while noted:
            oldest = next(iter(noted))
            if len(noted) <= MAX_UNANSWERED and now - noted[oldest] < UNANSWERED_TTL:
                break
            del noted[oldest]

    async def _known(self, outcomes: Sequence[Outcome], finished: Finished) -> set[Lease]:
        """Claims whose ends were refused now because they had been accepted before."""
        refused = {_claim_of(outcome) for outcome in outcomes} - accepted_claims(outcomes, finished)
        # They stay noted: the answer to this retry may be lost, too.
        known = refused & self._unanswered.keys()
        earlier: dict[str, list[str]] = {}
        for claim in refused:
            if claim.token < self.engine.least_token:
                earlier.setdefault(claim.queue, []).append(claim.id)
        if earlier:
            known |= refused & await asyncio.to_thread(self._ended_claims, earlier)
        return known

    def _ended_claims(self, ids: Mapping[str, Sequence[str]]) -> set[Lease]:
        try:
            found = [recovery.ended_claims(self._alias, queue, mine) for queue, mine in ids.items()]
            return {claim for claims in found for claim in claims}
        finally:
            connections[self._alias].close()

    def unclaim(self, claimed: Iterable[Claimed]) -> None:
        """Give back jobs of which their worker has not heard: no attempt is used up."""
        self.engine.finish([Outcome(one.queue, one.id, one.token, "release") for one in claimed])

    @contextmanager
    def _unclaiming(self, claimed: Sequence[Claimed]) -> Iterator[None]:
        """Claims that cannot be written are not answered: they are given back."""
        try:
            yield
        except BaseException:
            self.unclaim(claimed)
            raise

    def _is_careful(self) -> bool:
        return self._clock.monotonic() < self._careful_until

    def _make_up(self, paused: int) -> None:
        """For so many milliseconds this process did not run: nobody could renew a lease."""
        self.engine.postpone_leases(paused)
        logger.warning(
            "This process was paused for %.1f s; the leases of running jobs were extended by the same time.",
            paused / 1_000,
        )

    def _check(self) -> None:
        """Raise LeaseLost if this is the scheduler no more: one that was asleep learns that by writing."""
        self._journal.check()
        if self._lease.has_run_out():
            self._journal.sync()

    async def _acheck(self) -> None:
        self._journal.check()
        if self._lease.has_run_out():
            await self._synced()

    async def _room(self) -> None:
        if self._journal.is_full():
            await asyncio.to_thread(self._journal.wait_for_room)

    def _wait_for_room(self) -> None:
        """Wait, before a change, until the journal is no longer full: TIMEOUT at most."""
        if self._is_open and self._journal.is_full():
            self._journal.wait_for_room(self._timeout)

    def _accept(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if _simple(batches):
            return self.engine.enqueue(batches)
        keys = [
            (batch.queue, job_id)
            for batch in batches
            if batch.ids is not None and not batch.fresh
            for job_id in batch.ids
        ]
        keys += outside(batches)
        with self._knowing(keys), self._journal.together():
            return self.engine.enqueue(batches)

    async def _synced(self, *, durable: bool = False) -> None:
        waiter = Waiter(asyncio.get_running_loop())
        self._journal.when_written(waiter, durable=durable)
        left = remaining(math.inf)
        try:
            async with asyncio.timeout(None if left == math.inf else left):
                error = await waiter.written
        except TimeoutError:
            raise StorageUnavailableError("the journal could not be written in time") from None
        if error is not None:
            raise error

    def _take_back(self, results: list[EnqueueResult], error: BaseException) -> None:
        """What could not be written was not enqueued, but for what a worker has already begun."""
        begun = [
            result.id
            for result in reversed(results)
            if result.status in ("queued", "rejected")
            and result.existing_state is None
            and not self.engine.remove(result.queue, [result.id])[0]
        ]
        if isinstance(error, LeaseLost):
            raise error
        but = f" except jobs that a worker has already started: {', '.join(begun)}" if begun else ""
        raise StorageUnavailableError(
            f"writing to database {self._alias!r} failed: {in_one_line(error)}; nothing was enqueued{but}"
        ) from error

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """See `Storage.emit`. Whoever sends faster than is written waits; what is sent again is known."""
        self._check()
        accepted = self.engine.emit(emissions)
        if self._journal.has_many_items():
            self._flush()
        return accepted

    def emit_written(self, emissions: Sequence[Emission]) -> list[bool]:
        """See `emit`, for a worker of another process: when this returns the items are committed."""
        accepted = self.emit(emissions)
        self._flush()
        return accepted

    # Reads: what has ended is in the tables, once the journal is.

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        self._take_successors(queue, ids)
        with self._identity:
            found = self.engine.jobs(queue, ids)
            missing = [job_id for job_id, record in zip(ids, found, strict=True) if record is None]
            if missing:
                there = {
                    job_id: record
                    for job_id, record in rows.records(self._alias, queue, missing).items()
                    if not self._journal.is_gone((queue, job_id, record.created_at))
                }
                found = [record or there.get(job_id) for job_id, record in zip(ids, found, strict=True)]
        return found

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `Storage.items`."""
        with self._identity:
            found = self.engine.items(queue, marks)
            missing = [mark for mark, page in zip(marks, found, strict=True) if page is None]
            there = iter(self._inspector.items(queue, missing, self._clock.now()))
            return [next(there) if page is None else page for page in found]

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        self._take_successors(queue, ids)
        with self._identity:
            found = self.engine.states(queue, ids)
            missing = [job_id for job_id, state in zip(ids, found, strict=True) if state is None]
            if missing:
                there = self._states_in_tables(queue, missing)
                found = [state or there.get(job_id) for job_id, state in zip(ids, found, strict=True)]
        return found

    def _states_in_tables(self, queue: str, ids: Sequence[str]) -> dict[str, State]:
        """Without those of jobs that are gone, and are only to be deleted there."""
        found = {}
        for chunk in rows.chunked(ids):
            mine = self._all(queue).filter(job_id__in=chunk)
            for job_id, state, created_at in rows.raw_values(mine, ("job_id", "state", "created_at")):
                if not self._journal.is_gone((queue, job_id, created_at)):
                    found[job_id] = State(state)
        return found

    def settled(self, queue: str, ids: Sequence[str], believed: Sequence[State | None]) -> list[State | None]:
        """As `states`; where they are not what the caller believed, the tables have them, too, by then."""
        found = self.states(queue, ids)
        if found != list(believed):
            self._flush()
        return found

    def counts(self, queue: str) -> dict[State, int]:
        """See `Storage.counts`."""
        self._flush()
        with self._identity:
            counts = self.engine.counts(queue)
            kept = self._inspector.counts(queue, recovery.ENDED)
        return {**counts, **{state: kept.get(state, 0) for state in recovery.ENDED}}

    def explain(self, queue: str, id: str) -> Explanation | None:
        """See `Storage.explain`."""
        found = super().explain(queue, id)
        if found is None:
            with self._knowing([(queue, id)]):
                found = super().explain(queue, id)
        return found

    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        """See `Storage.flow`."""
        self._take_successors(queue, [id])
        return super().flow(queue, id, limit)

    def links(self, keys: Sequence[JobKey], most: int) -> Mapping[JobKey, JobLink]:
        """See `EngineStorage.links`."""
        with self._identity:
            found = self.engine.links(keys, most)
            missing = [key for key in keys if key not in found]
            if missing:
                for key, one in self._inspector.links(missing).items():
                    if not self._journal.is_gone((*key, one.node.created_at)):
                        waiting = (*self.engine.dependents(key, most), *one.dependents)
                        found[key] = one._replace(dependents=waiting)
        return found

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """See `Storage.series`."""
        self._flush()
        return super().series(queues, start, end, step, by_name)

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """See `Storage.cursor_page`."""
        self._flush()
        return self._inspector.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """See `Storage.find`."""
        self._flush()
        return self._inspector.find(id, self.queues() if queues is None else queues)

    def about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """See `Storage.about`."""
        self._flush()
        return self._inspector.about(subject, limit, cursor, queues)

    def change_version(self) -> str | None:
        """See `Storage.change_version`: of the engine and of the tables, which are written a little later."""
        return f"{super().change_version()}:{self._journal.changes.value}"

    def diagnostics(self) -> Diagnostics:
        """See `Storage.diagnostics`."""
        now = self._clock.now()
        names = self.engine.queues()
        journal = self._journal
        lines = [
            DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(names):,}"),
            *diagnosis.of_database(self._alias, now),
            *diagnosis.of_journal(journal.backlog, journal.flushed_at, self._ticked_at, now),
        ]
        return Diagnostics("database", now, lines)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        self._flush()
        return self._inspector.page(queue, state, limit, after)

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return sorted({*self.engine.queues(), *self._inspector.queues()})

    # Jobs that have ended, or have just arrived, are in the tables alone.

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """See `Storage.cancel`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.cancel(queue, ids, reason)

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.promote`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.promote(queue, ids)

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """See `Storage.reschedule`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.reschedule(queue, ids, run_at)

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """See `Storage.update`."""
        self._check()
        with self._knowing((queue, job_id) for job_id in ids):
            return self.engine.update(queue, ids, priority, payload)

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """See `Storage.replace_payload`."""
        self._check()
        self._wait_for_room()
        # One transaction: a job that waits again has its new payload, whoever dies when.
        with self._knowing([(queue, id)]), self._journal.together():
            answer = self.engine.replace_payload(queue, id, payload, old, retry=retry)
        self._flush()
        return answer

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`."""
        self._check()
        self._wait_for_room()
        keys = [(name, job_id) for job_id in ids for name in (queue, to)]
        with self._knowing(keys):
            answers = self.engine.move(queue, ids, to)
        self._flush()
        return answers

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        self._check()
        self._wait_for_room()
        with self._knowing((queue, job_id) for job_id in ids):
            answers = self.engine.retry(queue, ids, dry_run=dry_run)
        # To a producer elsewhere, who sees the tables, the ids are not to be free any more.
        self._flush()
        return answers

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """See `Storage.remove`."""
        self._check()
        removed = self._remove(queue, ids, ended_before)
        self._flush()
        return removed

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        self._check()
        self._take_in_all()
        self._flush()
        removed = self._clean_ended(queue, states, before, limit)
        others = states - {*recovery.ENDED}
        if others and (limit is None or removed < limit):
            left = None if limit is None else limit - removed
            parts = self.engine.clean_in_parts(queue, frozenset(others), before, left)
            gone: int | None = 0
            while gone is not None:
                with self._journal.together():
                    gone = next(parts, None)
                removed += gone or 0
                self._flush()
        return removed

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        self._check()
        self._take_in_all()
        groups = {None, *self.engine.group_limits(queue)}
        self._recorded.discard(queue)
        with self._journal.together():
            removed = self.engine.obliterate(queue, force=force)
        if removed < 0:
            raise StorageError(f"queue {queue!r} has active jobs: wait until they end, or pass force=True")
        self._journal.queue_changed(queue, None)
        for group in groups:
            self._journal.group_changed((queue, group or ""), None)
        self._flush()
        removed += self._clean_ended(queue, frozenset(recovery.ENDED), FOREVER, None)
        # The queue itself, which has come back with the last of its jobs.
        removed += max(0, self.engine.obliterate(queue))
        self.metrics.forget(queue)
        self._flush()
        return removed

    def _clean_ended(self, queue: str, states: frozenset[State], before: int, limit: int | None) -> int:
        removed = 0
        ended = [state.value for state in recovery.ENDED if state in states]
        while ended and (limit is None or removed < limit):
            found = self._all(queue).filter(state__in=ended, finished_at__lt=before)
            room = PURGE_LIMIT if limit is None else min(PURGE_LIMIT, limit - removed)
            ids = list(found.order_by("finished_at", "id").values_list("job_id", flat=True)[:room])
            gone = self._remove_ended(queue, ids, before)
            removed += gone
            self._flush()
            if not gone:
                break
        return removed

    def _remove(self, queue: str, ids: Sequence[str], ended_before: int | None = None) -> list[bool]:
        # To the next scheduler a job that is gone has completed: what becomes of its dependents goes with it.
        with self._knowing((queue, job_id) for job_id in ids), self._journal.together():
            return self.engine.remove(queue, ids, ended_before)

    def _remove_ended(self, queue: str, ids: Sequence[str], ended_before: int) -> int:
        """Remove records that were found in the tables; return how many were there.

        A producer may have enqueued one of the ids again since: that job is not the one found, and stays.
        """
        return sum(self._remove(queue, ids, ended_before))

    @contextmanager
    def _knowing(self, keys: Iterable[JobKey]) -> Iterator[None]:
        """The engine knows these jobs, if there are such, for as long as this lasts."""
        with self._identity:
            if len(self._forgettable) > MANY:
                self._identity.wait_for(lambda: not self._pins, PATIENCE)
            self._pins += 1
            try:
                found = recovery.find(self._alias, self.engine, self._journal, keys)
                self.engine.restore(found.ended, kept=True)
                self._forgettable += found.ended
            except BaseException:
                self._unpin()
                raise
        try:
            self._take_found(found.arrived)
            yield
        finally:
            with self._identity:
                self._unpin()

    def _unpin(self) -> None:
        self._pins -= 1
        self._forget()

    def _forget(self) -> None:
        if not self._pins:
            ended, self._forgettable = self._forgettable, []
            self.engine.evict(ended)
            self._identity.notify_all()

    # What is said to queues is kept.

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self._check()
        self.engine.pause(queue)
        self._keep_queue(queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self._check()
        self.engine.resume(queue)
        self._keep_queue(queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limits`."""
        self._check()
        self.engine.set_limits(queue, rate, concurrency)
        self._keep_queue(queue)

    def set_group_limit(self, queue: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """See `Storage.set_group_limit`."""
        self._check()
        self.engine.set_group_limit(queue, group, **said)
        self._keep_group(queue, group)

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self._check()
        self.engine.pause_group(queue, group)
        self._keep_group(queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        self._check()
        self.engine.resume_group(queue, group)
        self._keep_group(queue, group)

    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limiter`."""
        self._check()
        self.engine.set_limiter(name, rate, concurrency)
        rate, concurrency, *_ = self.engine.limiter_state(name)
        policy = self.engine.limiter(name).policy
        row = None
        if (rate, concurrency) != (policy.rate, policy.concurrency):
            capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
            row = (name, capacity, per, None if concurrency is None else min(concurrency, MAX_INTEGER))
        # Else the settings may say something else after the next start.
        self._journal.limiter_changed(name, row)
        self._flush(in_effect=f"limiter {name!r}")

    def _agree(self, queue: str) -> None:
        """See that the queue is used in the mode recorded with it; record it if none is.

        Raises ConfigurationError.
        """
        if queue in self._recorded:
            return
        with named(self._alias):
            mode = recorded_modes(self._alias, queue=queue).get(queue)
        if mode is not None:
            self.engine.policy(queue).check_mode(queue, mode)
        else:
            self._note_group(queue, None)
        self._recorded.add(queue)

    def _keep_group(self, queue: str, group: str | None) -> None:
        self._agree(queue)
        self._note_group(queue, group)
        self._flush(in_effect=f"queue {queue!r}")

    def _note_group(self, queue: str, group: str | None) -> None:
        said = self.engine.group_limits(queue).get(group, NO_LIMIT)
        mode = self.engine.policy(queue).group_mode if group is None else ""
        self._journal.group_changed((queue, group or ""), row_of(queue, group, said, mode))

    def _keep_queue(self, queue: str) -> None:
        rate, concurrency = self.engine.limits(queue)
        policy = self.engine.policy(queue)
        if (rate, concurrency) == (policy.rate, policy.concurrency):
            # The settings' own: they may say something else after the next start.
            rate = concurrency = None
        capacity, per = (rate.capacity, rate.per) if rate is not None else (None, None)
        concurrency = None if concurrency is None else min(concurrency, MAX_INTEGER)
        row = (queue, self.engine.is_paused(queue), capacity, per, concurrency)
        self._journal.queue_changed(queue, row)
        self._flush(in_effect=f"queue {queue!r}")

    # Workers.

    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """See `Storage.register_worker`."""
        told = self.engine.register_worker(info)
        self._journal.worker_seen(info.id, info._replace(seen_at=self._clock.now()))
        return told

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`."""
        self.engine.unregister_worker(worker_id)
        self._journal.worker_seen(worker_id, None)

    # Time.

    def maintain(self) -> Swept:
        """See `Storage.maintain`."""
        self._check()
        swept = super().maintain()
        if abs(self.engine.clock_offset - self._noted_offset) >= DRIFT:
            self._noted_offset = self.engine.clock_offset
            self._journal.clock_set(self._noted_offset)
        self._ticked_at = self._clock.now()
        now = self._clock.now()
        self._flush()
        return swept._replace(removed=swept.removed + self._purge(now))

    def _sweep(self) -> Swept:
        # In this order: a pause after the first line has nothing to do with the leases swept here.
        tick = self._clock.monotonic()
        self._pauses.check()
        self._end_leases_of_the_dead(tick)
        return sweep(self.engine, WORKER_TTL, tick)

    def _end_leases_of_the_dead(self, tick: int) -> None:
        """End the leases of other processes of this machine that have died, and have said their last.

        One may have died before it was connected to this scheduler. What it has sent is heard first.
        """
        processes = self.engine.processes()
        if processes:
            is_gone = has_died()
            dead = {name for name in processes if is_gone(name) and not self.is_connected(name)}
            if dead:
                self.engine.end_leases(dead, tick)

    def _purge(self, now: int) -> int:
        """Rows whose time is over, and those above what queues keep."""
        removed = self._in_steps(lambda: self._purge_jobs(now))
        for queue, retention in self._retention.items():
            if retention.counts:
                if self.engine.put_off(queue):
                    self._flush()  # what is held does not count
                for state in recovery.ENDED:
                    removed += self._in_steps(partial(self._trim, queue, state))
                self._in_steps(partial(self._trim_results, queue))
            kinds: tuple[tuple[type[Model], int | None, Iterable[State]], ...] = (
                (models.JobAttempt, retention.attempts.age, TERMINAL),
                (models.JobLog, retention.logs.age, TERMINAL),
                (models.JobItem, retention.results.age, (State.COMPLETED,)),
            )
            for model, age, states in kinds:
                for state in states if age is not None else ():
                    self._in_steps(partial(self._forget_belongings, queue, state, model, now - (age or 0)))
        self._in_steps(lambda: self._purge_results(now))
        self._in_steps(lambda: purge(self._dialect, now, PURGE_LIMIT))
        metrics.purge(self._alias, self._tiers, now, PURGE_LIMIT)
        models.WorkerState.objects.using(self._alias).filter(seen_at__lte=now - WORKER_TTL).delete()
        return removed

    def _in_steps(self, step: Callable[[], int]) -> int:
        """Do it again as long as there may be more, but not for ever; in between others have their turn."""
        done = 0
        for _ in range(STEPS):
            part = step()
            done += part
            if not part:
                break
        if done:
            self.engine.changes.bump()
        return done

    def _purge_jobs(self, now: int) -> int:
        old = self._all().filter(expires_at__lte=now, state__in=recovery.ENDED)
        found = list(old.order_by("expires_at").values_list("queue", "job_id")[:PURGE_LIMIT])
        removed = sum(self._remove_ended(queue, ids, now + 1) for queue, ids in self._free(found).items())
        if removed:
            self._flush()
        return removed

    def _free(self, found: Iterable[JobKey]) -> dict[str, list[str]]:
        """By queue, the ended jobs that are not kept for others; the ends of these are put off."""
        keys: dict[str, list[str]] = {}
        for queue, job_id in found:
            keys.setdefault(queue, []).append(job_id)
        for queue, ids in keys.items():
            if needed := self.engine.put_off(queue, ids):
                keys[queue] = [job_id for job_id in ids if job_id not in needed]
                # Else the next look would find the same rows.
                self._flush()
        return keys

    def _trim(self, queue: str, state: State) -> int:
        """Forget some of the records above what a queue keeps of one outcome."""
        surplus = self._journal.book.surplus(queue, state, PURGE_LIMIT)
        free = self._free((queue, job_id) for job_id in surplus)
        now = self._clock.now()
        removed = sum(self._remove_ended(queue, ids, now + 1) for ids in free.values() if ids)
        if removed:
            self._flush()
        return removed

    def _trim_results(self, queue: str) -> int:
        return self._forget_results(self._journal.book.surplus_results(queue, PURGE_LIMIT))

    def _purge_results(self, now: int) -> int:
        old = models.JobResult.objects.using(self._alias).filter(expires_at__lte=now).order_by("expires_at")
        due = [tuple(row) for row in rows.raw_values(old[:PURGE_LIMIT], ("queue", "job_id", "completed_at"))]
        return self._forget_results(due)

    def _forget_results(self, due: Sequence[tuple[str, str, int]]) -> int:
        """Take away results, by queue, id and end of their jobs; not those that are kept for others."""
        free = self._free(row[:2] for row in due)
        named = {(queue, job_id) for queue, ids in free.items() for job_id in ids}
        found = [row for row in due if row[:2] in named]
        if found:
            self._journal.results_over(found)
            self._flush()
        return len(found)

    def _forget_belongings(self, queue: str, state: State, model: type[Model], before: int) -> int:
        """Take away the attempts, log lines or items of some of the jobs that ended before a time."""
        place = (queue, state, model.__name__)
        seen = self._seen.get(place, (0, 0))
        if seen[0] > before:
            seen = (0, 0)  # the clock was set back
        old = self._all(queue).filter(state=state.value, finished_at__gte=seen[0], finished_at__lte=before)
        old = old.exclude(finished_at=seen[0], id__lte=seen[1]).order_by("finished_at", "id")
        page = list(rows.raw_values(old[:LONG_JOBS], ("job_id", "finished_at", "id")))
        if page:
            ids = [job_id for job_id, *_ in page]
            if state is State.FAILED:
                ids = self.engine.forget_belongings(queue, ids, logs=model is models.JobLog)
            with self._held():
                self._dialect.delete(model, rows.KEY, [(queue, job_id) for job_id in ids])
            self._seen[place] = page[-1][1:]
        return len(page)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """A transaction of the scheduler's. Raises LeaseLost if this process is that no more."""
        self._dialect.tune()
        with self._dialect.transaction():
            self._lease.hold()
            yield

    # The inbox.

    def arrived(self) -> None:
        """Rows of other producers may be there."""
        self._arrived.set()

    def _watch_inbox(self) -> None:
        try:
            while not self._closing.is_set():
                self._arrived.wait(POLL)
                self._arrived.clear()
                try:
                    self._take_in_all()
                except Exception as error:
                    connections[self._alias].close()
                    if not self._closing.wait(POLL):
                        logger.warning("Reading the inbox failed, retrying: %s", in_one_line(error))
                        self._arrived.set()
        finally:
            connections[self._alias].close()

    def _take_in_all(self) -> None:
        if not self._is_open:
            return  # What concerns it is here, and nobody else's jobs are to be.
        while self.take_in() == INBOX_PAGE and not self._closing.is_set():
            # Else the next look would find the same rows.
            self._flush()

    def take_in(self) -> int:
        """Take in what other producers have written; returns how many rows there were."""
        with self._inbox:
            found = recovery.arrived(self._alias, INBOX_PAGE)
            last = max(found, default=0) if len(found) == INBOX_PAGE else FOREVER
            self._taken = {number for number in self._taken if number in found or number > last}
            self._take(found)
        return len(found)

    def _take(self, jobs: Mapping[int, EngineJob]) -> None:
        """Take in jobs, by the numbers of their rows; before them those that they wait for."""
        if not jobs:
            return
        with self._inbox, self._knowing(self._outside(jobs)):
            new = {number: job for number, job in jobs.items() if number not in self._taken}
            # Before they come in: they are by the clock as it is now.
            self.engine.follow_clock()
            now = self._clock.now()
            for job in new.values():
                if job.state is State.WAITING:
                    # Its producer's clock may be a little ahead.
                    job.run_at = min(job.run_at, now)
                if job.created_at >= now + STEP and keep_lengths(job, now - job.created_at):
                    # The wall clock was set back since the producer wrote it.
                    self._journal.updated(job)
            for queue in {job.queue for job in new.values()} - self._recorded:
                try:
                    self._agree(queue)
                except ConfigurationError as error:
                    # Its jobs are there: they run, and the next start is refused.
                    logger.error("%s", error)
                    self._recorded.add(queue)
            replacing = set()
            for job in new.values():
                if job.process == rows.REPLACES_CANCELLED:
                    replacing.add((job.queue, job.id))
                job.process = ""
            self.engine.accept(new.values(), replacing)
            self._taken.update(new)

    def _outside(self, jobs: Mapping[int, EngineJob]) -> set[JobKey]:
        """Return what these rows depend on, other than one another, which keep their order."""
        wanted = {key for job in jobs.values() for key in job.options.depends_on}
        if wanted:
            wanted.difference_update(
                (job.queue, job.id) for number, job in jobs.items() if number not in self._taken
            )
        return wanted

    def _take_found(self, jobs: Mapping[int, EngineJob]) -> None:
        """As `_take`, for rows that were read while others could take them in: what came of them may have
        ended since.
        """
        if not jobs:
            return
        with self._inbox:
            left = recovery.left_in_inbox(self._alias, jobs)
            self._take({number: jobs[number] for number in sorted(left)})

    def _take_successors(self, queue: str, ids: Sequence[str]) -> None:
        """Take in what has the id of a job that failed or was cancelled: to its producer it is there."""
        if not self._is_open:
            return
        states = zip(ids, self.engine.states(queue, ids), strict=True)
        ended = [job_id for job_id, state in states if state in REUSABLE]
        if ended:
            self._take_found(recovery.succeeding(self._alias, queue, ended))

    # Inside.

    def _written(self, ended: list[EngineJob]) -> None:
        with self._identity:
            self._forgettable += ended
            self._forget()

    def _flush(self, *, in_effect: str = "") -> None:
        """Write the engine's changes to the tables, unless this thread's own transaction holds them back.

        in_effect: what a change that the engine has already made concerns, for the error if the write fails.
        """
        if self._is_open and connections[self._alias].in_atomic_block:
            return
        try:
            self._journal.sync()
        except (Error, OSError, StorageUnavailableError) as error:
            if isinstance(error, StorageUnavailableError) and not in_effect:
                raise
            reason = str(error)
            if not isinstance(error, StorageUnavailableError):
                reason = f"writing to database {self._alias!r} failed: {in_one_line(error)}"
            if in_effect:
                reason += f"; the change of {in_effect} is in effect, and will be written as soon as possible"
            raise StorageUnavailableError(reason) from error

    def _all(self, queue: str | None = None) -> Any:
        found = models.Job.objects.using(self._alias)
        return found if queue is None else found.filter(queue=queue)


class _EngineInserter(Inserter):
    """Knows what the journal has not written yet."""

    def __init__(self, dialect: Dialect, clock: Clock, storage: SchedulerStorage) -> None:
        super().__init__(dialect, clock, lambda queue: storage.engine.policy(queue))
        self._storage = storage

    def find_job(self, queue: str, job_id: str) -> Found | None:
        """See `Inserter`."""
        [record] = self._storage.engine.jobs(queue, [job_id])
        return None if record is None else (record.state, record.result)

    def find_owners(self, queue: str, key: str) -> list[Owner]:
        """See `Inserter`."""
        return [(job.id, job.state) for job in self._storage.engine.unique_owners(queue, key)]

    def have_ended(self, queue: str, ids: Sequence[str]) -> set[str]:
        """See `Inserter`."""
        states = self._storage.engine.states(queue, ids)
        return {job_id for job_id, state in zip(ids, states, strict=True) if state in TERMINAL}


def _simple(batches: Sequence[Batch]) -> bool:
    """Whether no id of these jobs can be in the tables, and none of their dependencies."""
    return all((batch.ids is None or batch.fresh) and not batch.options.depends_on for batch in batches)


def _detached(batch: Batch) -> bool:
    """Whether the caller asked for an enqueue outside its transaction."""
    return batch.options.durable is False


def _durable(batches: Sequence[Batch]) -> bool:
    return any(batch.options.durable for batch in batches)


def _called_by_sync_code() -> bool:
    """Whether this coroutine is run by `async_to_sync`, whose caller may be in a transaction."""
    if getattr(AsyncToSync.executors, "current", None) is not None:
        return True
    return asyncio.get_running_loop() in AsyncToSync.loop_thread_executors


def accepted_claims(outcomes: Sequence[Outcome], finished: Finished) -> set[Lease]:
    """Return the claims whose ends were accepted."""
    answers = zip(outcomes, finished.accepted, strict=True)
    return {_claim_of(outcome) for outcome, is_accepted in answers if is_accepted}


def _without_claims(finished: Finished, error: BaseException) -> Finished:
    """Answer for the accepted outcomes alone, since their worker must not send them again.

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


def _claim_of(outcome: Outcome) -> Lease:
    return Lease(outcome.queue, outcome.id, outcome.token)


def _is_never(_process: str) -> bool:
    return False


def _nothing() -> None:
    pass
