"""The storage in a process that is not the scheduler: rows for enqueues, the socket for the rest."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections

from djqueue import models
from djqueue.core.clock import Clock
from djqueue.core.engine import DEFAULT_POLICY
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.groups import GroupLimit
from djqueue.core.ids import IdSource
from djqueue.core.job import (
    Batch,
    CancelResult,
    ClaimRequest,
    DeadLetter,
    EnqueueResult,
    Finished,
    Incident,
    JobRecord,
    Lease,
    LetterPage,
    Outcome,
    Renewal,
    Report,
    WorkerInfo,
)
from djqueue.core.limiter import Rate
from djqueue.core.maintenance import Swept
from djqueue.core.queue import OPTIONAL, QueuePolicy
from djqueue.core.states import State
from djqueue.storage import room
from djqueue.storage.base import EventHandler, P, Storage, T, Unsubscribe

from .address import Address, parse_address
from .away import named
from .clock import set_right
from .dialects import Dialect
from .inspector import Inspector
from .lease import SchedulerLease, present_holder
from .producer import Inserter
from .remote import Remote
from .scheduler import SchedulerStorage

logger = logging.getLogger("djqueue.client")


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
        incidents: Callable[[list[Incident]], None] | None = None,
    ) -> None:
        self._incidents = incidents
        self._alias = dialect.alias
        self._dialect = dialect
        self._clock = clock
        self._policies = policies
        self._may_block = any(policy.when_full == "block" for policy in (policies or {}).values())
        self._inspector = Inspector(dialect.alias)
        self._remote = Remote(self._find, token, leave=lambda: connections[self._alias].close())
        self._inserter = _AskingInserter(dialect, clock, self.policy, self._remote)
        self._ids = IdSource()
        self._agreed: set[str] = set()
        """Queues that this process uses in the mode in which they are used elsewhere."""

    def close(self) -> None:
        """See `Storage.close`."""
        self._remote.close()

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
            return room.enqueue(self, self.policy, batches, self._enqueue_at_once)
        return self._enqueue_at_once(batches)

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """See `enqueue`."""
        if self._may_block and not await self.acall(self._is_in_transaction):
            return await room.aenqueue(self, self.policy, batches, self._enqueue_soon)
        return await self._enqueue_soon(batches)

    async def _enqueue_soon(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        return await self.acall(self._enqueue_at_once, batches)

    def _is_in_transaction(self) -> bool:
        return connections[self._alias].in_atomic_block

    def _enqueue_at_once(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        for batch in batches:
            self.policy(batch.queue).check_batch(batch)
            if batch.queue not in self._agreed:
                self._agree(batch.queue)
        if all(batch.options.durable is False for batch in batches):
            # With ids, so that it can be said again should the answer be lost.
            batches = [self._with_ids(batch) for batch in batches]
            try:
                answers: list[EnqueueResult] = self._remote.call("enqueue_at_once", batches)
            except StorageUnavailableError as error:
                logger.debug("No scheduler takes the jobs, so they are written: %s", error)
                return self._enqueue_again(batches)
            else:
                return answers
        return self._inserter.insert(batches, self._wake)

    def _enqueue_again(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Write jobs of which the scheduler, had it lived to say so, may have taken some already."""
        mine = {job_id for batch in batches if batch.fresh for job_id in batch.ids or ()}
        answers = self._inserter.insert([batch._replace(fresh=False) for batch in batches], self._wake)
        return [
            EnqueueResult(answer.id, "queued", answer.queue) if answer.id in mine else answer
            for answer in answers
        ]

    def _agree(self, queue: str) -> None:
        """See that the queue is used in the mode recorded with it; record one that is not the default."""
        policy = self.policy(queue)
        states = models.GroupState.objects.using(self._alias)
        with self._dialect.transaction():
            mode = states.filter(queue=queue, group="").values_list("mode", flat=True).first()
            if mode:
                policy.check_mode(queue, mode)
                self._agreed.add(queue)
            elif policy.group_mode != OPTIONAL:
                # Remembered when it is seen to be there: the caller's transaction may be rolled back.
                states.update_or_create(queue=queue, group="", defaults={"mode": policy.group_mode})
            else:
                self._agreed.add(queue)

    def _wake(self) -> None:
        self._remote.tell("inbox")

    # Runs: of the scheduler's engine alone.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`."""
        finished: Finished = self._remote.call("finish", outcomes, then)
        return finished

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        """See `Storage.finish`: not on the one thread of the async ORM, which a job may keep busy."""
        return await sync_to_async(self.finish, thread_sensitive=False)(outcomes, then)

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        """See `Storage.renew`."""
        renewals: list[Renewal] = self._remote.call("renew", leases)
        return renewals

    def report(self, reports: Sequence[Report]) -> list[bool]:
        """See `Storage.report`."""
        accepted: list[bool] = self._remote.call("report", reports)
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

    def move(self, queue: str, ids: Sequence[str], to: str) -> list[str]:
        """See `Storage.move`."""
        if queue == to:
            raise ValueError(f"the jobs are in queue {to!r} already")
        answer: list[str] = self._steer("move", ids, queue, list(ids), to, into=to)
        return answer

    def retry(self, queue: str, ids: Sequence[str], *, dry_run: bool = False) -> list[str]:
        """See `Storage.retry`."""
        answer: list[str] = self._steer("retry", ids, queue, list(ids), dry_run=dry_run)
        return answer

    def remove(self, queue: str, ids: Sequence[str]) -> list[bool]:
        """See `Storage.remove`."""
        answer: list[bool] = self._steer("remove", ids, queue, list(ids))
        return answer

    def pause(self, queue: str) -> None:
        """See `Storage.pause`."""
        self._steer("pause", (), queue)

    def resume(self, queue: str) -> None:
        """See `Storage.resume`."""
        self._steer("resume", (), queue)

    def set_limits(self, queue: str, rate: Rate | None, concurrency: int | None) -> None:
        """See `Storage.set_limits`."""
        self._steer("set_limits", (), queue, rate, concurrency)

    def set_group_limit(self, queue: str, group: str | None, concurrency: int | None) -> None:
        """See `Storage.set_group_limit`."""
        self._steer("set_group_limit", (), queue, group, concurrency)

    def pause_group(self, queue: str, group: str) -> None:
        """See `Storage.pause_group`."""
        self._steer("pause_group", (), queue, group)

    def resume_group(self, queue: str, group: str) -> None:
        """See `Storage.resume_group`."""
        self._steer("resume_group", (), queue, group)

    def group_limits(self, queue: str) -> dict[str | None, GroupLimit]:
        """See `Storage.group_limits`."""
        return self._inspector.group_limits(queue)

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

    def states(self, queue: str, ids: Sequence[str]) -> list[State | None]:
        """See `Storage.states`."""
        answer: list[State | None] = self._read("states", queue, ids)
        return answer

    def counts(self, queue: str) -> dict[State, int]:
        """See `Storage.counts`."""
        return {**dict.fromkeys(State, 0), **self._inspector.counts(queue)}

    def waiting_names(self, queue: str) -> dict[str, int]:
        """See `Storage.waiting_names`."""
        return self._inspector.waiting_names(queue)

    def page(self, queue: str, state: State | None, limit: int, after: str | None = None) -> list[JobRecord]:
        """See `Storage.page`."""
        return self._inspector.page(queue, state, limit, after)

    def dead_letters(self, queue: str) -> list[DeadLetter]:
        """See `Storage.dead_letters`."""
        return self._inspector.dead_letters(queue)

    def dead_letter_page(self, queue: str, limit: int, after: str | None = None) -> LetterPage:
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

    def register_worker(self, info: WorkerInfo) -> None:
        """See `Storage.register_worker`."""
        self._remote.call("register_worker", info)

    def unregister_worker(self, worker_id: str) -> None:
        """See `Storage.unregister_worker`. A scheduler that cannot be reached forgets it by itself."""
        try:
            self._remote.call("unregister_worker", worker_id)
        except StorageUnavailableError as error:
            logger.debug("The worker %s is not unregistered: %s", worker_id, error)

    def maintain(self) -> Swept:
        """See `Storage.maintain`: the scheduler sees to it."""
        return Swept()

    def reaches_scheduler(self) -> bool:
        """Whether a scheduler can be reached."""
        return self._remote.tell("inbox")

    # Inside.

    def _with_ids(self, batch: Batch) -> Batch:
        if batch.ids is not None:
            return batch
        ids = self._ids.many(len(batch.payloads), self._clock.now())
        return batch._replace(ids=ids, fresh=True)

    def _read(self, verb: str, queue: str, ids: Sequence[str]) -> Any:
        if self._remote.connected:
            try:
                return self._remote.call(verb, queue, list(ids))
            except StorageUnavailableError as error:
                logger.debug("The scheduler has gone, so the tables are read: %s", error)
        return getattr(self._inspector, verb)(queue, ids)

    def _steer(
        self,
        verb: str,
        concerned: Sequence[str] | None,
        queue: str,
        *args: Any,
        into: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Have the scheduler do it, or do it here; `concerned` are the ids of jobs that it needs.

        into: another queue, where they go.
        """
        try:
            return self._remote.call(verb, queue, *args, **kwargs)
        except StorageUnavailableError as unreachable:
            # One transaction, if need be the caller's, which keeps every scheduler from starting.
            with self._dialect.transaction():
                lease = SchedulerLease(self._alias, self._clock, "")
                if not lease.acquire():
                    raise
                logger.debug("No scheduler runs, so this process steers: %s", unreachable)
                storage = SchedulerStorage(
                    self._dialect, lease, self._clock, self._policies, incidents=self._incidents
                )
                storage.open_for(queue, concerned, into)
                answer = getattr(storage, verb)(queue, *args, **kwargs)
                storage.close()
                lease.release()
            return answer

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
            return bool(self._remote.call("states", queue, [job_id])[0])
        except StorageUnavailableError:
            return False
