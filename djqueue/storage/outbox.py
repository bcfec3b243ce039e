"""The outbox: a table of jobs written in a caller's transaction, or while the server is unavailable.

`djqueue.operations.relay` sends them to the server. Django is not imported before the table is used.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

import msgpack
from asgiref.sync import sync_to_async

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.options import JobOptions

from .capabilities import TransactionalEnqueue

Enqueue = Callable[[Sequence[Batch]], list[EnqueueResult]]
AsyncEnqueue = Callable[[Sequence[Batch]], Awaitable[list[EnqueueResult]]]

REPLY_TIMEOUT = 1.0
"""Seconds after which the table is written if the server does not reply, unless TIMEOUT is shorter."""
RETRY_AFTER = 1_000
"""Milliseconds until the server is tried again after that."""
ROWS = 1_000
"""Rows of one statement."""

logger = Log("djqueue.outbox")


class OutboxTable(TransactionalEnqueue):
    """Enqueue for a storage some of whose queues have an outbox.

    Args:
        covers: Returns whether a queue has an outbox.
        direct: Enqueues on the server, for queues without an outbox, and for workflows.
        adirect: Async version of `direct`.
        hasty: The same, but fails soon if the server does not answer.
        ahasty: Async version of `hasty`.
        server: The server's name in messages.
        detaches: Whether jobs with `durable=False` leave the caller's transaction.
        on_commit: Called after the commit of a transaction with jobs.
        is_away: Returns whether the server, after an error, has not answered at all.
        clock: Replaces the server's time, for tests.
    """

    def __init__(
        self,
        covers: Callable[[str], bool],
        direct: Enqueue,
        adirect: AsyncEnqueue,
        hasty: Enqueue,
        ahasty: AsyncEnqueue,
        *,
        server: str,
        detaches: bool = False,
        on_commit: Callable[[], None] | None = None,
        is_away: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        self._covers = covers
        self._direct, self._adirect = direct, adirect
        self._hasty, self._ahasty = hasty, ahasty
        self._server = server
        self._detaches = detaches
        self._on_commit = on_commit
        self._is_away = is_away
        self._clock = clock or SYSTEM_CLOCK
        self._ids = IdSource()
        self._away_until = 0
        """When the server is tried again; 0: it is available."""

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Add jobs. A job in the table counts as `queued`, whatever job has its id."""
        if _is_flow(batches):
            return self._enqueue_flow(batches)
        return [answer for batch in batches for answer in self._enqueue(batch)]

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Async version of `enqueue`."""
        if _is_flow(batches):
            await sync_to_async(self._check_flow)(batches)
            return await self._adirect(batches)
        return [answer for batch in batches for answer in await self._aenqueue(batch)]

    def _enqueue_flow(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        self._check_flow(batches)
        return self._direct(batches)

    def _check_flow(self, batches: Sequence[Batch]) -> None:
        """Reject dependencies between jobs of the table, which are sent one by one."""
        kept = [batch.queue for batch in batches if self._covers(batch.queue)]
        if kept and is_in_transaction():
            raise _no_dependencies(kept[0])

    def alias_for(self, batch: Batch) -> str | None:
        return database() if self._covers(batch.queue) and self._joins(batch) else None

    def _joins(self, batch: Batch) -> bool:
        return is_in_transaction() and not (self._detaches and batch.options.durable is False)

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        from .commits import has_uncommitted

        return database() if self._covers(queue) and has_uncommitted(database(), queue, id) else None

    async def aalias_for(self, batch: Batch) -> str | None:
        return await sync_to_async(self.alias_for)(batch)

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        return await sync_to_async(self.uncommitted_in)(queue, id)

    def _enqueue(self, batch: Batch) -> list[EnqueueResult]:
        if not self._covers(batch.queue):
            return self._direct([batch])
        batch = self._with_ids(batch)
        answers = self._write_at_once(batch)
        if answers is not None:
            return answers
        try:
            answers = self._hasty([batch])
        except StorageUnavailableError as error:
            return self._write_instead(batch, error)
        self._away_until = 0
        return answers

    async def _aenqueue(self, batch: Batch) -> list[EnqueueResult]:
        if not self._covers(batch.queue):
            return await self._adirect([batch])
        batch = self._with_ids(batch)
        # Run on the thread of the async ORM, which knows whether the caller has a transaction.
        answers = await sync_to_async(self._write_at_once)(batch)
        if answers is not None:
            return answers
        try:
            answers = await self._ahasty([batch])
        except StorageUnavailableError as error:
            return await sync_to_async(self._write_instead)(batch, error)
        self._away_until = 0
        return answers

    def _with_ids(self, batch: Batch) -> Batch:
        """Return the batch with ids, so that a job added without a reply is not added twice."""
        if batch.ids is None:
            ids = self._ids.many(len(batch.payloads), SYSTEM_CLOCK.now())
            return batch._replace(ids=ids, fresh=True)
        batch.check_ids()
        return batch

    def _write_at_once(self, batch: Batch) -> list[EnqueueResult] | None:
        """Write to the table in a transaction, or soon after the server did not reply; else return None."""
        if self._joins(batch):
            if batch.options.depends_on:
                raise _no_dependencies(batch.queue)
            return self._write(batch)
        if SYSTEM_CLOCK.monotonic() < self._away_until and not batch.options.depends_on:
            return self._write(batch)
        return None

    def _write_instead(self, batch: Batch, error: StorageUnavailableError) -> list[EnqueueResult]:
        if batch.options.depends_on:
            raise StorageUnavailableError(
                f"{error} The outbox cannot store jobs with depends_on in the meantime."
            ) from error
        answers = self._write(batch, error)
        if not self._is_away():
            return answers
        if not self._away_until:
            logger.warning(
                "Writing jobs to the outbox, a table, until %s is available again: %s",
                self._server,
                str(error),  # A handler of logs that keeps records must not keep the storage.
            )
        self._away_until = SYSTEM_CLOCK.monotonic() + RETRY_AFTER
        return answers

    def _write(self, batch: Batch, tried: StorageUnavailableError | None = None) -> list[EnqueueResult]:
        """Write rows; `tried` is the error of the server, which may have the jobs nevertheless."""
        from django.db import Error, connections

        from djqueue.models import OutboxJob

        from .commits import note

        alias = database()
        if is_in_transaction():
            connections[alias].validate_no_broken_transaction()
        else:
            connections[alias].close_if_unusable_or_obsolete()
        now = self._clock.now()
        alike: dict[str, Any] = {
            "queue": batch.queue,
            "name": batch.name,
            "fresh": batch.fresh,
            "options": pack_options(batch.options),
            "run_at": now + batch.delay if batch.delay else batch.run_at,
            "created_at": now,
        }
        ids = batch.ids or ()
        rows = [
            OutboxJob(job_id=job_id, payload=payload, **alike)
            for job_id, payload in zip(ids, batch.payloads, strict=True)
        ]
        try:
            OutboxJob.objects.using(alias).bulk_create(rows, batch_size=ROWS)
        except Error as error:
            reason = in_one_line(error)
            before = (
                f", after {self._server} failed ({tried})" if tried else ", and none of the jobs was enqueued"
            )
            raise StorageUnavailableError(
                f"writing the outbox of queue {batch.queue!r} to database {alias!r} failed{before}: {reason}"
            ) from error
        answers = [EnqueueResult(job_id, "queued", batch.queue) for job_id in ids]
        if connections[alias].in_atomic_block:
            note(alias, answers, self._on_commit)
        return answers


def _is_flow(batches: Sequence[Batch]) -> bool:
    return len(batches) > 1 and any(batch.options.depends_on for batch in batches)


def _no_dependencies(queue: str) -> OptionError:
    return OptionError(
        f"depends_on: queue {queue!r} has an outbox, so jobs enqueued in a transaction cannot have "
        "dependencies or be dependencies; enqueue them in transaction.on_commit"
    )


def database() -> str:
    """Return the alias of the database with the table."""
    from django.db import router

    from djqueue.models import OutboxJob

    return router.db_for_write(OutboxJob)


def is_in_transaction() -> bool:
    """Return whether the caller has a transaction in that database."""
    from django.db import connections

    connection = connections[database()]
    is_by_hand = connection.connection is not None and not connection.autocommit
    return connection.in_atomic_block or is_by_hand


@lru_cache(maxsize=256)
def pack_options(options: JobOptions) -> bytes:
    """Return the options that differ from their defaults, as in rows of jobs."""
    packed: bytes = msgpack.packb(options.as_dict())
    return packed
