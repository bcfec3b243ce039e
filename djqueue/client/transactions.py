"""Jobs and the caller's transaction: the option `enqueue_on_commit`, and waits that would never end.

Jobs that wait for a commit are checked and encoded at once, and get their ids. A callback of Django enqueues
them after the commit. Django drops it when the transaction or its savepoint rolls back, and raises its errors
from the `atomic()` that commits.

Jobs that join the transaction (rows of the database storage, an outbox) are enqueued at once instead: the
commit itself enqueues them, even if the process dies before a callback could.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.conf import has_django, is_testing, uses_memory_in_tests
from djqueue.core.errors import JobNotFoundError, OptionError, WaitInTransactionError
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.suggest import nearest
from djqueue.storage.base import Storage
from djqueue.storage.capabilities import TransactionalEnqueue

from .envelope import with_ids

HELPERS = (
    "To run jobs when they are enqueued, use the fixture djqueue_immediate, or JobTestMixin from "
    "djqueue.testing.cases with immediate_jobs = True"
)
"""The end of errors about waits in tests."""

When = bool | str
"""The option `enqueue_on_commit`: False; True for the storage's database, or `default`; or an alias."""
Send = Callable[[Storage, Sequence[Batch]], list[EnqueueResult]]


def open_alias(storage: Storage, when: When) -> str | None:
    """Return the alias of the database to wait for; None if the caller has no transaction there."""
    if not when or not has_django():
        return None
    from django.db import connections

    alias = when if isinstance(when, str) else storage.capabilities.database or "default"
    if alias not in connections.settings:
        raise OptionError(
            f"enqueue_on_commit: {alias!r} is not one of DATABASES{nearest(alias, connections.settings)}"
        )
    connection = connections[alias]
    # In a transaction managed by hand, Django's `on_commit` raises an error that says so.
    is_by_hand = connection.connection is not None and not connection.autocommit
    return alias if connection.in_atomic_block or is_by_hand else None


def open_block() -> str | None:
    """Return the alias of a database of which the caller is in an `atomic()` block; None if there is none."""
    if not has_django():
        return None
    from django.db import connections

    opened = connections.all(initialized_only=True)
    return next((connection.alias for connection in opened if connection.in_atomic_block), None)


async def aopen_alias(storage: Storage, when: When) -> str | None:
    """Async version of `open_alias`."""
    return await sync_to_async(open_alias)(storage, when) if when else None


def check_waiting(storage: Storage, batch: Batch, when: When) -> None:
    """Raise WaitInTransactionError if the job would start only after the caller's transaction commits.

    Raises RuntimeError in a test of which no worker runs the job.
    """
    check_worker(storage, batch.queue)
    joins = storage.capabilities.transactions
    alias = joins.alias_for(_held_up(joins, batch)) or open_alias(storage, when)
    _refuse(batch, alias, when, can_leave=joins.can_leave)


async def acheck_waiting(storage: Storage, batch: Batch, when: When) -> None:
    """Async version of `check_waiting`."""
    check_worker(storage, batch.queue)
    joins = storage.capabilities.transactions
    alias = await joins.aalias_for(_held_up(joins, batch)) or await aopen_alias(storage, when)
    _refuse(batch, alias, when, can_leave=joins.can_leave)


def check_worker(storage: Storage, queue: str) -> None:
    """Raise RuntimeError in a test of which no worker runs the jobs of its memory storage."""
    if storage.has_worker or not storage.capabilities.in_process or not uses_memory_in_tests():
        return
    raise RuntimeError(
        f"cannot wait for a job of queue {queue!r} in a test: no worker runs here. {HELPERS}, or drain "
        "the queues between enqueue() and result.wait(0)."
    )


def _held_up(joins: TransactionalEnqueue, batch: Batch) -> Batch:
    """Return a batch that joins a transaction which would hold up this one."""
    if joins.can_leave or batch.options.durable is not False:
        return batch
    return batch._replace(options=replace(batch.options, durable=None))


def _refuse(batch: Batch, alias: str | None, when: When, *, can_leave: bool) -> None:
    if alias is not None:
        options = "enqueue_on_commit=False and durable=False" if when else "durable=False"
        remedy = f", or pass {options}, which enqueues outside the transaction" if can_leave else ""
        raise WaitInTransactionError(
            f"cannot wait for a job of queue {batch.queue!r} inside a transaction of database {alias!r}: "
            "the job starts only after the transaction commits. Wait after the commit (in "
            f"transaction.on_commit){remedy}{f'. {HELPERS}' if is_testing() else ''}"
        )


def refuse_uncommitted(queue: str, job_id: str, alias: str | None, *, can_leave: bool = True) -> None:
    """Raise WaitInTransactionError for a job that the caller enqueued in a transaction that is still open."""
    if alias is not None:
        remedy = ", or enqueue with durable=False, which enqueues outside the transaction"
        raise WaitInTransactionError(
            f"Job {job_id!r} of queue {queue!r} was enqueued in a transaction of database {alias!r} that "
            "is still open, so workers cannot see the job yet: wait after the commit (in "
            f"transaction.on_commit){remedy if can_leave else ''}"
        )


class StoredResult(EnqueueResult):
    """A result of a storage other than the configured one."""

    storage: Storage

    def __reduce__(self) -> Any:
        return EnqueueResult, tuple(self)


class DeferredResult(StoredResult):
    """A result of a job that is enqueued when a transaction commits: see `defer`."""

    alias: str
    """The database of the transaction."""
    answer: EnqueueResult | None
    """The storage's answer; None until the job was enqueued."""

    @classmethod
    def of(cls, job_id: str, queue: str, storage: Storage, alias: str) -> "DeferredResult":
        """Return the result of a job that is not enqueued yet."""
        result = cls(job_id, "deferred", queue)
        result.storage, result.alias, result.answer = storage, alias, None
        return result

    @property
    def is_uncommitted(self) -> bool:
        """Whether the job waits for a transaction of the caller that is still open."""
        from djqueue.storage.commits import has_uncommitted

        return self.answer is None and has_uncommitted(self.alias, self.queue, self.id)


def enqueued(result: EnqueueResult) -> EnqueueResult:
    """Return the storage's answer for a deferred result, and other results as they are.

    Raises:
        WaitInTransactionError: The transaction is still open.
        JobNotFoundError: The job was not enqueued.
    """
    if not isinstance(result, DeferredResult):
        return result
    if result.answer is None:
        refuse_uncommitted(result.queue, result.id, result.alias if result.is_uncommitted else None)
        raise JobNotFoundError(
            f"job {result.id!r} was to be enqueued in queue {result.queue!r} at the commit of a transaction "
            f"of database {result.alias!r}, and was not: the transaction was rolled back or is open in "
            "another thread, or enqueueing failed after the commit",
            job_id=result.id,
        )
    return result.answer


async def aenqueued(result: EnqueueResult) -> EnqueueResult:
    """Async version of `enqueued`."""
    return await sync_to_async(enqueued)(result) if isinstance(result, DeferredResult) else result


def is_uncommitted(result: EnqueueResult) -> bool:
    """Return whether the job waits for a transaction of the caller that is still open."""
    return isinstance(result, DeferredResult) and result.is_uncommitted


async def ais_uncommitted(result: EnqueueResult) -> bool:
    """Async version of `is_uncommitted`."""
    return isinstance(result, DeferredResult) and await sync_to_async(is_uncommitted)(result)


def of_storage(results: Sequence[EnqueueResult], storage: Storage | None) -> list[EnqueueResult]:
    """Return results that read from this storage later; with None, from the configured one."""
    if storage is None:
        return list(results)
    return [
        result if isinstance(result, DeferredResult) else stored_result(result, storage) for result in results
    ]


def stored_result(result: EnqueueResult, storage: Storage) -> StoredResult:
    """Return a result that reads from this storage later."""
    stored = StoredResult(*result)
    stored.storage = storage
    return stored


def defer(storage: Storage, batches: Sequence[Batch], alias: str, then: Send) -> list[EnqueueResult] | None:
    """Enqueue the jobs when the transaction commits, and return results with their ids.

    Returns None, and defers nothing, if the jobs join the transaction.

    Args:
        alias: The database of the transaction, from `open_alias`.
        then: The call that enqueues them.
    """
    if _joins(storage, batches, alias):
        return None
    from djqueue.storage.commits import note

    batches = [with_ids(batch) for batch in batches]
    results = [
        DeferredResult.of(job_id, batch.queue, storage, alias)
        for batch in batches
        for job_id in batch.ids or ()
    ]
    note(alias, results, partial(_enqueue, storage, batches, results, then), robust=False)
    return list(results)


def _joins(storage: Storage, batches: Sequence[Batch], alias: str) -> bool:
    """Return whether the jobs become part of the transaction."""
    has_links = any(batch.options.depends_on or batch.options.dependents for batch in batches)
    if has_links and storage.capabilities.has_outbox:
        return False  # An outbox takes no job with dependencies.
    return all(storage.capabilities.transactions.alias_for(batch) == alias for batch in batches)


def _enqueue(
    storage: Storage, batches: Sequence[Batch], results: Sequence[DeferredResult], then: Send
) -> None:
    answers = of_storage(then(storage, batches), storage)
    for result, answer in zip(results, answers, strict=True):
        result.answer = answer
