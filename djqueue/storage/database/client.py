"""The storage in a process that is not the scheduler: rows for enqueues, the socket for the rest."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.db import connections

from djqueue.core.breaker import Outage
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import within
from djqueue.core.diagnostics import Diagnostics
from djqueue.core.engine import DEFAULT_POLICY
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.explain import Explanation, decide
from djqueue.core.graph import MOST, FlowGraph
from djqueue.core.groups import GroupLimit, GroupWords
from djqueue.core.ids import IdSource
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    DeadLetterPage,
    DeadLetterRecord,
    Emission,
    EnqueueResult,
    Finished,
    Incident,
    ItemMark,
    ItemPage,
    JobRecord,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    WorkerDump,
    WorkerInfo,
)
from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.maintenance import Swept
from djqueue.core.metrics import Bucket, RunStats, assemble, span_of
from djqueue.core.overview import GroupsOverview, Overview
from djqueue.core.pages import JobPage
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import NO_LIMITS, LimiterPolicy, LimiterState
from djqueue.core.states import TERMINAL, State
from djqueue.core.summaries import JobSummaryPage
from djqueue.storage import backpressure
from djqueue.storage.base import EventHandler, P, Storage, T, Unsubscribe

from . import capped, diagnosis, metrics
from .address import Address, parse_address
from .clock import set_right
from .dberrors import AWAY, drop_if_broken, is_unreachable, named, unavailable
from .dialects import Dialect
from .export import DatabaseExport
from .groups import record_mode, recorded_modes
from .inspector import DatabaseInspector
from .lease import SchedulerLease, present_holder
from .patience import TIMEOUT, patience
from .producer import Inserter
from .remote import Remote
from .scheduler import SchedulerStorage
from .staging import DatabaseStaging

logger = logging.getLogger("djqueue.client")

TO_WRITE = 0.5
"""Part of these seconds that is kept for writing the jobs, should the scheduler not take them."""
AT_LEAST = 0.5
"""Seconds that a change made here gets to begin, after the scheduler has not answered."""


class ClientStorage(Storage):
    """Enqueues need the database alone. What concerns live jobs is asked of the scheduler; where none
    runs, this process does it itself, holding the scheduler's lease for that moment.
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
        self._remote = Remote(self._find, token, leave=lambda: connections[self._alias].close())
        self._inserter = _AskingInserter(dialect, clock, self.policy, self._remote)
        self._staging = DatabaseStaging(dialect, clock, self._enqueue_at_once, self._changed_by_now)
        self._export = DatabaseExport(dialect.alias)
        self._ids = IdSource()
        self._agreed: set[str] = set()
        """Queues that this process uses in the mode in which they are used elsewhere."""

    def close(self) -> None:
        """See `Storage.close`."""
        self._remote.close()

    @property
    def staging(self) -> DatabaseStaging:
        """See `Storage.staging`."""
        return self._staging

    @property
    def export(self) -> DatabaseExport:
        """See `Storage.export`."""
        return self._export

    def policy(self, queue: str) -> QueuePolicy:
        """What a queue is configured to do."""
        return (self._policies or {}).get(queue, DEFAULT_POLICY)

    def describe(self) -> str:
        """See `Storage.describe`."""
        return f"database {self._alias!r}"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """See `Storage.acall`."""
        return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)

    # Enqueue.

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `Storage.enqueue`. A row in the caller's transaction, unless `durable` is False; in one, nobody
        waits for room.
        """
        if self._may_block and not self._is_in_transaction():
            return backpressure.enqueue(self, self.policy, batches, self._enqueue_at_once)
        return self._enqueue_at_once(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if self._may_block and not await self.acall(self._is_in_transaction):
            return await backpressure.aenqueue(self, self.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return await self.acall(self._enqueue_at_once, batches)

    def _is_in_transaction(self) -> bool:
        return connections[self._alias].in_atomic_block

    @property
    def outage(self) -> Outage | None:
        """See `Storage.outage`."""
        return self._remote.outage

    def _enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        with within(patience(self._timeout, batches, self._dialect)):
            return self._enqueue_in_time(batches)

    def _enqueue_in_time(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)
        unrecorded = [
            queue for queue in {batch.queue for batch in batches} - self._agreed if not self._agree(queue)
        ]
        wake = partial(self._wake, unrecorded)
        if all(batch.options.durable is False for batch in batches):
            return self._hand_over("enqueue_at_once", batches, wake)
        if self._has_bounds and self._are_bounded(batches) and not self._is_in_transaction():
            # Only the scheduler can count all of them, and tell which of them can be dropped for others.
            return self._hand_over("enqueue_written", batches, wake)
        return self._insert(batches, wake)

    def _insert(self, batches: Sequence[Batch], wake: Callable[[], None]) -> list[EnqueueResult]:
        """Write jobs. A duplicate of a job that has ended, or is to be replaced, as the scheduler knows, is
        tried again: the tables are a moment behind it. In a transaction nobody is asked.
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

    def _changed_by_now(self, queue: str, believed: Mapping[str, State | None]) -> dict[str, State]:
        """Those of these jobs that the scheduler, if it is heard, knows in another state; then the tables do,
        too, when this returns.
        """
        if not believed:
            return {}
        ids = list(believed)
        try:
            states: list[State | None] = self._remote.ask("settled", queue, ids, list(believed.values()))
        except StorageUnavailableError as error:
            logger.debug("Trusting the states in the tables, because no scheduler answered: %s", error)
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
        """To the scheduler; to the tables if there is none."""
        # With ids, so that it can be said again should the answer be lost.
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
        """Write jobs of which the scheduler, had it lived to say so, may have taken some already."""
        mine = {job_id for batch in batches if batch.fresh for job_id in batch.ids or ()}
        answers = self._inserter.insert([batch._replace(fresh=False) for batch in batches], wake)
        return [
            EnqueueResult(answer.id, "queued", answer.queue) if answer.id in mine else answer
            for answer in answers
        ]

    def _agree(self, queue: str) -> bool:
        """See that the queue is used in the mode recorded with it; False if none is.

        Without any settings it is used in whatever mode it has; the scheduler records one.
        """
        if self._policies is None:
            return True
        connections[self._alias].validate_no_broken_transaction()
        try:
            with self._dialect.transaction():
                mode = recorded_modes(self._alias, queue=queue).get(queue)
        except AWAY as error:
            drop_if_broken(self._alias)
            raise unavailable(self._alias, error, ", and none of the jobs was enqueued") from error
        if mode is None:
            return False
        self.policy(queue).check_mode(queue, mode)
        self._agreed.add(queue)
        return True

    def _wake(self, unrecorded: Iterable[str]) -> None:
        """Have the scheduler look into the inbox; before that, record modes: no lock is held by now."""
        for queue in unrecorded:
            record_mode(self._alias, queue, self.policy(queue).group_mode)
        self._remote.tell("inbox")

    # Runs: of the scheduler's engine alone.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        try:
            finished: Finished = self._remote.call("finish", outcomes, then)
        except StorageUnavailableError as unreachable:
            if then is not None or not outcomes or is_unreachable(self._alias, unreachable):
                raise
            # The worker may be about to end, and the next scheduler may come late.
            return self._finish_here(outcomes, unreachable)
        return finished

    def _finish_here(self, outcomes: Sequence[Outcome], unreachable: StorageUnavailableError) -> Finished:
        """Write how runs have ended, where no scheduler runs. Raises `unreachable` if one does."""
        connection = connections[self._alias]
        was_open = connection.connection is not None
        try:
            with named(self._alias), self._dialect.transaction():
                storage, lease = self._take_place(unreachable)
                finished = storage.finish_here(outcomes)
                storage.close()
                lease.release_unserved()
            return finished
        finally:
            if not was_open:
                connection.close()

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`: not on the one thread of the async ORM, which a job may keep busy."""
        return await sync_to_async(self.finish, thread_sensitive=False)(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """See `Storage.renew`."""
        renewals: list[Renewal] = self._remote.call("renew", leases)
        return renewals

    def report(self, reports: Sequence[ProgressReport]) -> list[bool]:
        """See `Storage.report`."""
        accepted: list[bool] = self._remote.call("report", reports)
        return accepted

    def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        """See `Storage.emit`."""
        accepted: list[bool] = self._remote.call("emit", emissions)
        return accepted

    # Single jobs and queues: the scheduler's, or this process's for a moment.

    def cancel(self, queue: str, ids: Sequence[str], reason: str = "cancelled") -> list[CancelResult]:
        """See `Storage.cancel`."""
        answer: list[CancelResult] = self._steer("cancel", ids, queue, list(ids), reason)
        return answer

    def promote(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.promote`."""
        answer: list[bool] = self._steer("promote", ids, queue, list(ids))
        return answer

    def reschedule(self, queue: str, ids: Sequence[str], run_at: int) -> list[bool]:
        """See `Storage.reschedule`."""
        answer: list[bool] = self._steer("reschedule", ids, queue, list(ids), run_at)
        return answer

    def update(
        self, queue: str, ids: Sequence[str], priority: int | None = None, payload: bytes | None = None
    ) -> list[bool]:
        """See `Storage.update`."""
        answer: list[bool] = self._steer("update", ids, queue, list(ids), priority, payload)
        return answer

    def replace_payload(self, queue: str, id: str, payload: bytes, old: bytes, *, retry: bool = False) -> str:
        """See `Storage.replace_payload`."""
        answer: str = self._steer("replace_payload", [id], queue, id, payload, old, retry=retry)
        return answer

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`."""
        if queue == to:
            raise ValueError(f"the jobs are already in queue {to!r}; name another queue")
        answer: list[str] = self._steer("move", ids, queue, list(ids), to, into=to)
        return answer

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        answer: list[str] = self._steer("retry", ids, queue, list(ids), dry_run=dry_run)
        return answer

    def remove(self, queue: str, ids: Sequence[str], *, ended_before: int | None = None) -> list[bool]:
        """See `Storage.remove`."""
        answer: list[bool] = self._steer("remove", ids, queue, list(ids), ended_before=ended_before)
        return answer

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self._steer("pause", (), queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self._steer("resume", (), queue)

    def set_limits(self, queue: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limits`."""
        self._steer("set_limits", (), queue, **_given(rate, concurrency))

    def set_group_limit(self, queue: str, group: str | None, **said: Unpack[GroupWords]) -> None:
        """See `Storage.set_group_limit`."""
        self._steer("set_group_limit", (), queue, group, **said)

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self._steer("pause_group", (), queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        self._steer("resume_group", (), queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """See `Storage.group_limits`."""
        return self._inspector.group_limits(queue)

    def set_limiter(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        """See `Storage.set_limiter`."""
        self._steer("set_limiter", (), name, **_given(rate, concurrency))

    def limiter_state(self, name: str) -> LimiterState:
        """See `Storage.limiter_state`. Nothing is used while no scheduler runs."""
        try:
            state: LimiterState = self._remote.read("limiter_state", name)
        except StorageUnavailableError as error:
            logger.debug("Limiter %r is idle, because no scheduler answered: %s", name, error)
        else:
            return state
        configured = (self._limiters or {}).get(name, NO_LIMITS)
        said = self._inspector.limiter(name)
        rate, concurrency = (configured.rate, configured.concurrency) if said is None else said
        return LimiterState(rate, concurrency, 0, None if rate is None else rate.capacity, ())

    def clean(self, queue: str, states: frozenset[State], before: int, limit: int | None = None) -> int:
        """See `Storage.clean`."""
        answer: int = self._steer("clean", None, queue, states, before, limit)
        return answer

    def obliterate(self, queue: str, *, force: bool = False) -> int:
        """See `Storage.obliterate`."""
        answer: int = self._steer("obliterate", None, queue, force=force)
        return answer

    # Reads: of the tables, a moment behind the engine; of single jobs by the scheduler if it is heard.

    def jobs(self, queue: str, ids: Sequence[str]) -> list[JobRecord | None]:
        """See `Storage.jobs`."""
        answer: list[JobRecord | None] = self._read("jobs", queue, ids)
        return answer

    def items(self, queue: str, marks: Sequence[ItemMark]) -> list[ItemPage | None]:
        """See `Storage.items`."""
        if self._remote.connected:
            try:
                pages: list[ItemPage | None] = self._remote.read("items", queue, list(marks))
            except StorageUnavailableError as error:
                logger.debug("Reading the tables, because the scheduler disconnected: %s", error)
            else:
                return pages
        return self._inspector.items(queue, marks, self._clock.now())

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        answer: list[State | None] = self._read("states", queue, ids)
        return answer

    def counts(self, queue: str) -> dict[State, int]:
        """Count jobs by state, as the scheduler knows them, or, while none answers, as the tables do."""
        if self._is_in_transaction():
            # Its own jobs are in the tables alone, and the scheduler may be waiting for its locks.
            return {**dict.fromkeys(State, 0), **self._inspector.counts(queue)}
        try:
            answer: dict[State, int] = self._remote.read("counts", queue)
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            return {**dict.fromkeys(State, 0), **self._inspector.counts(queue)}
        return answer

    def overview(self, queues: Sequence[str] | None = None) -> Overview:
        """See `Storage.overview`: the scheduler's numbers, or, while none lives, those of the tables."""
        try:
            answer: Overview = self._remote.read("overview", None if queues is None else list(queues))
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            names = self._inspector.queues() if queues is None else queues
            return capped.overview(self._alias, names, self._clock.now(), self.policy)
        return answer

    def change_version(self) -> str | None:
        """See `Storage.change_version`: the scheduler's; while none lives, nobody counts."""
        try:
            answer: str | None = self._remote.read("change_version")
        except StorageUnavailableError as error:
            logger.debug("No change version is available, because no scheduler answered: %s", error)
            return None
        # Rows of producers are there a moment before the scheduler takes them in.
        return f"{answer}:{self._inspector.last_row()}"

    def groups(self, queue: str, limit: int, names: Sequence[str] = ()) -> GroupsOverview:
        """See `Storage.groups`: the scheduler's numbers, or, while none lives, those of the tables."""
        try:
            answer: GroupsOverview = self._remote.read("groups", queue, limit, list(names))
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            return capped.groups(self._alias, queue, limit, names, self.policy(queue))
        return answer

    def explain(self, queue: str, id: str) -> Explanation | None:
        """See `Storage.explain`: while no scheduler lives, nobody can run anything."""
        try:
            answer: Explanation | None = self._remote.read("explain", queue, id)
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            facts = capped.facts(self._alias, queue, id, self._clock.now(), self.policy(queue))
            return None if facts is None else decide(facts, [])
        return answer

    def flow(self, queue: str, id: str, limit: int = MOST) -> FlowGraph | None:
        """See `Storage.flow`."""
        try:
            answer: FlowGraph | None = self._remote.read("flow", queue, id, limit)
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            return capped.flow(self._alias, (queue, id), limit)
        return answer

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool = False
    ) -> list[Bucket]:
        """See `Storage.series`: the tables have them, but for the last second or two."""
        span = span_of(start, end, step)
        rows = metrics.read(self._alias, queues, span, by_name=by_name)
        return assemble(rows, queues, span, by_name=by_name)

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """See `Storage.record_runs`."""
        self._remote.call("record_runs", list(stats))

    def cursor_page(
        self, queue: str, state: State, limit: int, cursor: str | None = None, newest_first: bool = True
    ) -> JobPage:
        """See `Storage.cursor_page`."""
        return self._inspector.cursor_page(queue, state, limit, cursor, newest_first=newest_first)

    def find(self, id: str, queues: Sequence[str] | None = None) -> list[tuple[str, State]]:
        """See `Storage.find`."""
        return self._inspector.find(id, self.queues() if queues is None else queues)

    def about(
        self, subject: str, limit: int, cursor: str | None = None, queues: Sequence[str] | None = None
    ) -> JobSummaryPage:
        """See `Storage.about`."""
        return self._inspector.about(subject, limit, cursor, queues)

    def diagnostics(self) -> Diagnostics:
        """See `Storage.diagnostics`: the scheduler's, or what can be seen without it."""
        try:
            answer: Diagnostics = self._remote.read("diagnostics")
        except StorageUnavailableError as error:
            logger.debug("Reading diagnostics from the tables, because no scheduler answered: %s", error)
            now = self._clock.now()
            return Diagnostics("database", now, diagnosis.of_database(self._alias, now))
        return answer

    def waiting_names(self, queue: str) -> dict[str, int]:
        """Count claimable jobs by name; without a scheduler also those that a group holds back."""
        if self._is_in_transaction():
            # Its own jobs are in the tables alone, and the scheduler may be waiting for its locks.
            return self._inspector.waiting_names(queue)
        try:
            answer: dict[str, int] = self._remote.read("waiting_names", queue)
        except StorageUnavailableError as error:
            logger.debug("Reading the tables, because no scheduler answered: %s", error)
            return self._inspector.waiting_names(queue)
        return answer

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        return self._inspector.page(queue, state, limit, after)

    def dead_letters(self, queue: str) -> list[DeadLetterRecord]:
        """See `Storage.dead_letters`."""
        return self._inspector.dead_letters(queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> DeadLetterPage:
        """See `Storage.dead_letter_page`."""
        return self._inspector.dead_letter_page(queue, limit, after, self._clock.now())

    def queues(self) -> list[str]:
        """See `Storage.queues`."""
        return self._inspector.queues()

    def is_paused(self, queue: str) -> bool:
        """See `Storage.is_paused`."""
        return self._inspector.is_paused(queue)

    def workers(self) -> list[WorkerInfo]:
        """See `Storage.workers`."""
        return self._inspector.workers(self._clock.now())

    # Being told.

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.listen`."""
        names = None if queues is None else list(queues)
        return self._remote.subscribe("listen", (names,), lambda _: wake())

    def subscribe(self, queue: str, handler: EventHandler, job_id: str | None = None) -> Unsubscribe:
        """See `Storage.subscribe`. Nothing comes while no scheduler runs."""
        return self._remote.subscribe("subscribe", (queue, job_id), handler)

    # Workers of this process claim from the scheduler.

    def register_worker(self, info: WorkerInfo) -> tuple[str, ...]:
        """See `Storage.register_worker`."""
        told: tuple[str, ...] = self._remote.call("register_worker", info)
        return told

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`. A scheduler that cannot be reached forgets it by itself."""
        try:
            self._remote.call("unregister_worker", worker_id)
        except StorageUnavailableError as error:
            logger.debug(
                "Worker %s could not be unregistered; the scheduler removes its entry later: %s",
                worker_id,
                error,
            )

    def control_worker(self, worker_id: str, command: str) -> str:
        """See `Storage.control_worker`. Raises StorageUnavailableError where there is no scheduler."""
        answer: str = self._remote.call("control_worker", worker_id, command)
        return answer

    def on_worker_command(self, worker_id: str, wake: Callable[[], None]) -> Unsubscribe:
        """See `Storage.on_worker_command`."""
        return self._remote.subscribe("on_worker_command", (worker_id,), lambda _: wake())

    def save_dump(self, worker_id: str, text: str) -> bool:
        """See `Storage.save_dump`."""
        return bool(self._remote.call("save_dump", worker_id, text))

    def worker_dump(self, worker_id: str) -> WorkerDump | None:
        """See `Storage.worker_dump`: the scheduler has it, and with none it is gone."""
        try:
            dump: WorkerDump | None = self._remote.read("worker_dump", worker_id)
        except StorageUnavailableError as error:
            logger.debug(
                "The dump of worker %s is not available, because no scheduler answered: %s", worker_id, error
            )
            return None
        return dump

    def maintain(self) -> Swept:
        """See `Storage.maintain`: the scheduler sees to it."""
        return Swept()

    def reaches_scheduler(self) -> bool:
        """Whether a scheduler can be reached, and answers."""
        try:
            self._remote.call("ping")
        except StorageUnavailableError as error:
            logger.debug("No scheduler answered: %s", error)
            return False
        return True

    # Inside.

    def _with_ids(self, batch: Batch) -> Batch:
        if batch.ids is not None:
            return batch
        ids = self._ids.many(len(batch.payloads), self._clock.now())
        return batch._replace(ids=ids, fresh=True)

    def _read(self, operation: str, queue: str, ids: Sequence[str]) -> Any:
        if self._remote.connected:
            try:
                return self._remote.read(operation, queue, list(ids))
            except StorageUnavailableError as error:
                logger.debug("Reading the tables, because the scheduler disconnected: %s", error)
        return getattr(self._inspector, operation)(queue, ids)

    def _steer(
        self,
        operation: str,
        concerned: Sequence[str] | None,
        queue: str,
        *args: Any,
        into: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Have the scheduler do it, or do it here; `concerned` are the ids of jobs that it needs.

        into: another queue, where they go.
        """
        began = SYSTEM_CLOCK.monotonic()
        try:
            return self._remote.call(operation, queue, *args, **kwargs)
        except StorageUnavailableError as unreachable:
            if is_unreachable(self._alias, unreachable):
                raise
            took = (SYSTEM_CLOCK.monotonic() - began) / 1_000
            # The deadline bounds the wait for the database's locks, and not the work.
            with within(max(AT_LEAST, self._timeout - took)):
                return self._steer_here(operation, concerned, queue, args, kwargs, into, unreachable)

    def _steer_here(
        self,
        operation: str,
        concerned: Sequence[str] | None,
        queue: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        into: str | None,
        unreachable: StorageUnavailableError,
    ) -> Any:
        # One transaction, if need be the caller's, which keeps every scheduler from starting.
        with self._dialect.transaction():
            storage, lease = self._take_place(unreachable)
            storage.open_for(queue, concerned, into)
            answer = getattr(storage, operation)(queue, *args, **kwargs)
            storage.close()
            lease.release_unserved()
        return answer

    def _take_place(self, unreachable: StorageUnavailableError) -> tuple[SchedulerStorage, SchedulerLease]:
        """The scheduler's place, for this transaction. Raises `unreachable` if a scheduler has it."""
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
        """Where the scheduler listens. Leaves no connection open that was not."""
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


class _AskingInserter(Inserter):
    """Asks the scheduler about what is not in the tables."""

    def __init__(
        self, dialect: Dialect, clock: Clock, policy: Callable[[str], QueuePolicy], remote: Remote
    ) -> None:
        super().__init__(dialect, clock, policy)
        self._remote = remote

    def is_known(self, queue: str, job_id: str) -> bool:
        """See `Inserter`."""
        try:
            return bool(self._remote.read("states", queue, [job_id])[0])
        except StorageUnavailableError:
            return False


def _some_of(batch: Batch, places: Sequence[int]) -> Batch:
    """A batch of some jobs of a batch."""
    ids = None if batch.ids is None else [batch.ids[place] for place in places]
    return batch._replace(payloads=[batch.payloads[place] for place in places], ids=ids)


def _given(rate: SetRate, concurrency: SetConcurrency) -> dict[str, Any]:
    return {
        name: value for name, value in (("rate", rate), ("concurrency", concurrency)) if value is not UNSET
    }
