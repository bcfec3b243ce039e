"""Enqueue jobs when the caller's transaction commits: the option `enqueue_on_commit`.

Jobs are checked and encoded at once, and get their ids. A callback of Django enqueues them after the commit.
Django drops it when the transaction or its savepoint rolls back, and raises its errors from the `atomic()`
that commits.

Jobs that join the transaction (rows of the database storage, an outbox) are enqueued at once instead: the
commit itself enqueues them, even if the process dies before a callback could.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from asgiref.sync import sync_to_async

from djqueue.core.job import Batch, EnqueueResult
from djqueue.storage.base import Storage

from . import sending
from .results import DeferredResult, of_storage
from .transactions import When, aopen_alias, open_alias
from .waiting import with_ids

Send = Callable[[Storage, Sequence[Batch]], list[EnqueueResult]]


def send(storage: Storage, batches: Iterable[Batch], when: When) -> list[EnqueueResult]:
    """Enqueue batches as `sending.send` does, or when the transaction commits."""
    if when and (alias := open_alias(storage, when)) is not None:
        batches = list(batches)
        found = _defer_or_join(storage, batches, alias, sending.send)
        if found is not None:
            return found
    return sending.send(storage, batches)


async def asend(storage: Storage, batches: Iterable[Batch], when: When) -> list[EnqueueResult]:
    """Async version of `send`."""
    if when and (alias := await aopen_alias(storage, when)) is not None:
        batches = list(batches)
        found = await sync_to_async(_defer_or_join)(storage, batches, alias, sending.send)
        if found is not None:
            return found
    return await sending.asend(storage, batches)


def send_one(storage: Storage, batch: Batch, when: When) -> EnqueueResult:
    """Enqueue one job as `sending.send_one` does, or when the transaction commits."""
    return send(storage, [batch], when)[0] if when else sending.send_one(storage, batch)


async def asend_one(storage: Storage, batch: Batch, when: When) -> EnqueueResult:
    """Async version of `send_one`."""
    return (await asend(storage, [batch], when))[0] if when else await sending.asend_one(storage, batch)


def send_together(storage: Storage, batches: Sequence[Batch], when: When) -> list[EnqueueResult]:
    """Enqueue a flow as `sending.send_together` does, or when the transaction commits."""
    if when and (alias := open_alias(storage, when)) is not None:
        found = _defer_or_join(storage, batches, alias, sending.send_together)
        if found is not None:
            return found
    return sending.send_together(storage, batches)


async def asend_together(storage: Storage, batches: Sequence[Batch], when: When) -> list[EnqueueResult]:
    """Async version of `send_together`."""
    if when and (alias := await aopen_alias(storage, when)) is not None:
        found = await sync_to_async(_defer_or_join)(storage, batches, alias, sending.send_together)
        if found is not None:
            return found
    return await sending.asend_together(storage, batches)


def _joins(storage: Storage, batches: Sequence[Batch], alias: str) -> bool:
    """Return whether the jobs become part of the transaction."""
    has_links = any(batch.options.depends_on or batch.options.dependents for batch in batches)
    if has_links and storage.capabilities.has_outbox:
        return False  # An outbox takes no job with dependencies.
    return all(storage.capabilities.transactions.alias_for(batch) == alias for batch in batches)


def _defer_or_join(
    storage: Storage, batches: Sequence[Batch], alias: str, then: Send
) -> list[EnqueueResult] | None:
    """Defer the jobs, and return results with their ids; None if the jobs join the transaction."""
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


def _enqueue(
    storage: Storage, batches: Sequence[Batch], results: Sequence[DeferredResult], then: Send
) -> None:
    answers = of_storage(then(storage, batches), storage)
    for result, answer in zip(results, answers, strict=True):
        result.answer = answer
