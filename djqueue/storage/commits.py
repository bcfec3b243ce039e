"""Track jobs enqueued in a transaction that is still open."""

import asyncio
from collections.abc import Callable, Sequence

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections, transaction

from djqueue.core.job import Batch, EnqueueResult

from .capabilities import TransactionalEnqueue


class AfterCommit:
    """An on-commit callback. Django drops it when the transaction or its savepoint rolls back."""

    def __init__(self, results: Sequence[EnqueueResult], then: Callable[[], object] | None) -> None:
        self._results = results
        self._then = then
        self.__qualname__ = type(self).__qualname__  # Django logs it if the callback fails.

    def __call__(self) -> None:
        """Call the function registered for the commit."""
        if self._then is not None:
            self._then()

    def has(self, queue: str, id: str) -> bool:
        """Return whether the job is one of the tracked jobs."""
        return any(result.id == id and result.queue == queue for result in self._results)


def note(
    alias: str,
    results: Sequence[EnqueueResult],
    then: Callable[[], object] | None = None,
    *,
    robust: bool = True,
) -> None:
    """Track jobs until the current transaction ends, and call `then` after its commit.

    Args:
        robust: True logs an error of `then`, so that it does not look like a failed enqueue: the jobs are
            committed by then. False raises it from the `atomic()` that commits.
    """
    transaction.on_commit(AfterCommit(results, then), using=alias, robust=robust)


def has_uncommitted(alias: str, queue: str, id: str) -> bool:
    """Return whether the caller enqueued the job in a transaction of this database that is still open."""
    connection = connections[alias]
    if not connection.in_atomic_block:
        return False
    callbacks = (entry[1] for entry in connection.run_on_commit)
    return any(isinstance(callback, AfterCommit) and callback.has(queue, id) for callback in callbacks)


class JoinedTransactions(TransactionalEnqueue):
    """Jobs are rows in the caller's transaction, unless `durable` is False."""

    def __init__(self, alias: str, *, can_leave: bool = True) -> None:
        self._alias = alias
        self.can_leave = can_leave

    def alias_for(self, batch: Batch) -> str | None:
        is_detached = batch.options.durable is False
        return self._alias if connections[self._alias].in_atomic_block and not is_detached else None

    async def aalias_for(self, batch: Batch) -> str | None:
        return await sync_to_async(self.alias_for)(batch)

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        return self._alias if has_uncommitted(self._alias, queue, id) else None

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        return await sync_to_async(self.uncommitted_in)(queue, id)


def is_called_by_sync_code() -> bool:
    """Return whether `async_to_sync` runs this coroutine: its caller may be in a transaction."""
    if getattr(AsyncToSync.executors, "current", None) is not None:
        return True
    return asyncio.get_running_loop() in AsyncToSync.loop_thread_executors
