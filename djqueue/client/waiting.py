"""Waiting for what a job returns: subscribed before the enqueue, so that no answer is missed."""

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from threading import Event as ThreadEvent
from typing import Any

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadline import within
from djqueue.core.durations import milliseconds
from djqueue.core.errors import StorageUnavailableError, WaitInTransactionError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult, Event, JobRecord
from djqueue.core.states import TERMINAL
from djqueue.storage.base import EventHandler, Storage, Unsubscribe

from .info import outcome
from .sending import aenqueue, enqueue
from .timeouts import atoo_late, too_late

logger = logging.getLogger("djqueue.client")

CHECK_EVERY = 2.0
"""Seconds between looks at the job itself, should an event have been lost with a connection."""
RETRY = 0.25
"""The same while the storage is away."""
SUBSCRIPTION_TIMEOUT = 1.0
"""Seconds to wait for a subscription before the job is enqueued without one."""
UNSUBSCRIBED = 0.5
"""Seconds between looks at a job whose events do not arrive."""
LAST_LOOK = 0.25
"""Seconds that the last look at the job may take when the time to wait is over."""
ENDINGS = frozenset({"completed", "failed", "cancelled", "removed"})

_ids = IdSource()


def enqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta) -> Any:
    """Enqueue one job, and return what it returns. A job that is there already is waited for.

    Raises JobFailedError, MaxRetriesError, JobCancelledError; JobTimeoutError after `wait` seconds,
    while the job goes on; WaitInTransactionError at once where that would be in vain.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return _enqueue_and_wait(storage, batch, wait, deadline)


def _enqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta, deadline: int) -> Any:
    batch = with_id(batch)
    assert batch.ids is not None
    refuse_in_vain(batch, storage.capabilities.transactions.alias_for(batch))
    done = ThreadEvent()
    handler = _on_ending(done.set)
    unsubscribe = _subscribe(storage, batch.queue, handler, batch.ids[0])
    try:
        result = enqueue(storage, batch)[0]
        if result.id != batch.ids[0]:
            if unsubscribe is not None:
                unsubscribe()
            unsubscribe = _subscribe(storage, batch.queue, handler, result.id)
        if result.status != "queued":
            done.set()
        usual = patience = UNSUBSCRIBED if unsubscribe is None else CHECK_EVERY
        while True:
            done.wait(min(patience, _left(deadline)))
            done.clear()
            away = None
            try:
                record = storage.reads.jobs(batch.queue, [result.id])[0]
            except StorageUnavailableError as error:
                patience, away = RETRY, error
            else:
                patience = usual
                if has_ended(record):
                    return outcome(record, result.id)
            if not _left(deadline):
                raise too_late(storage, result.queue, result.id, wait, away) from away
    finally:
        if unsubscribe is not None:
            unsubscribe()


async def aenqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta) -> Any:
    """See `enqueue_and_wait`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await _aenqueue_and_wait(storage, batch, wait, deadline)


async def _aenqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta, deadline: int) -> Any:
    batch = with_id(batch)
    assert batch.ids is not None
    refuse_in_vain(batch, await storage.capabilities.transactions.aalias_for(batch))
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake() -> None:
        # The loop may be gone by the time that a late event comes in on another thread.
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    handler = _on_ending(wake)
    unsubscribe = await storage.acall(_subscribe, storage, batch.queue, handler, batch.ids[0])
    try:
        result = (await aenqueue(storage, batch))[0]
        if result.id != batch.ids[0]:
            if unsubscribe is not None:
                unsubscribe()
            unsubscribe = await storage.acall(_subscribe, storage, batch.queue, handler, result.id)
        if result.status != "queued":
            done.set()
        usual = patience = UNSUBSCRIBED if unsubscribe is None else CHECK_EVERY
        while True:
            try:
                await asyncio.wait_for(done.wait(), min(patience, _left(deadline)))
            except TimeoutError:
                pass
            done.clear()
            away = None
            try:
                record = (await storage.reads.ajobs(batch.queue, [result.id]))[0]
            except StorageUnavailableError as error:
                patience, away = RETRY, error
            else:
                patience = usual
                if has_ended(record):
                    return outcome(record, result.id)
            if not _left(deadline):
                raise await atoo_late(storage, result.queue, result.id, wait, away) from away
    finally:
        if unsubscribe is not None:
            unsubscribe()


def _subscribe(storage: Storage, queue: str, handler: EventHandler, job_id: str) -> Unsubscribe | None:
    """Subscribe to a job's events; None if the storage does not confirm it in time.

    A slow storage can still run the job, and one that is away fails the enqueue with its own error.
    """
    if storage.outage is not None:
        return None
    try:
        with within(SUBSCRIPTION_TIMEOUT):
            return storage.events.subscribe(queue, handler, job_id)
    except StorageUnavailableError as error:
        logger.debug("Polling job %s, because subscribing to its events failed: %s", job_id, error)
        return None


def with_id(batch: Batch) -> Batch:
    """The batch of one job, with the id that it is waited for by."""
    if batch.ids is not None:
        return batch
    return batch._replace(ids=[_ids.new(SYSTEM_CLOCK.now())], fresh=True)


def refuse_in_vain(batch: Batch, alias: str | None) -> None:
    """Raise WaitInTransactionError if a job is part of the open transaction of a database."""
    if alias is not None:
        raise WaitInTransactionError(
            f"cannot wait for a job of queue {batch.queue!r} inside a transaction of database {alias!r}: "
            "the job starts only after the transaction commits. Wait after the commit (in "
            "transaction.on_commit), or pass durable=False, which enqueues outside the transaction"
        )


def refuse_uncommitted(queue: str, job_id: str, alias: str | None) -> None:
    """Raise WaitInTransactionError for a job that the caller enqueued in a transaction that is still open."""
    if alias is not None:
        raise WaitInTransactionError(
            f"Job {job_id!r} of queue {queue!r} was enqueued in a transaction of database {alias!r} that "
            "is still open, so workers cannot see the job yet: wait after the commit (in "
            "transaction.on_commit), or enqueue with durable=False, which enqueues outside the "
            "transaction"
        )


def _on_ending(done: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in ENDINGS:
            done()

    return handler


def has_ended(record: JobRecord | None) -> bool:
    """Whether nothing more is to be waited for."""
    return record is None or record.state in TERMINAL


def _deadline(wait: float | timedelta) -> int:
    return SYSTEM_CLOCK.monotonic() + milliseconds("wait", wait)


def _left(deadline: int) -> float:
    return max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000


def wait_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Wait for the end of a job that was enqueued, and return what it returned.

    Raises as `enqueue_and_wait` does, and JobNotFoundError.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return _wait_for(storage, result, wait, deadline)


def _wait_for(storage: Storage, result: EnqueueResult, wait: float | timedelta, deadline: int) -> Any:
    refuse_uncommitted(
        result.queue, result.id, storage.capabilities.transactions.uncommitted_in(result.queue, result.id)
    )
    done = ThreadEvent()
    unsubscribe = storage.events.subscribe(result.queue, _on_ending(done.set), result.id)
    try:
        while True:
            away, patience = None, CHECK_EVERY
            try:
                record = storage.reads.jobs(result.queue, [result.id])[0]
            except StorageUnavailableError as error:
                away, patience = error, RETRY
            else:
                if has_ended(record):
                    return outcome(record, result.id)
            if not _left(deadline):
                raise too_late(storage, result.queue, result.id, wait, away) from away
            done.wait(min(patience, _left(deadline)))
            done.clear()
    finally:
        unsubscribe()


async def await_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Async version of `wait_for`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await _await_for(storage, result, wait, deadline)


async def _await_for(storage: Storage, result: EnqueueResult, wait: float | timedelta, deadline: int) -> Any:
    refuse_uncommitted(
        result.queue,
        result.id,
        await storage.capabilities.transactions.auncommitted_in(result.queue, result.id),
    )
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake() -> None:
        # A late event may come in on another thread after the loop has been closed.
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    unsubscribe = await storage.acall(storage.events.subscribe, result.queue, _on_ending(wake), result.id)
    try:
        while True:
            away, patience = None, CHECK_EVERY
            try:
                record = (await storage.reads.ajobs(result.queue, [result.id]))[0]
            except StorageUnavailableError as error:
                away, patience = error, RETRY
            else:
                if has_ended(record):
                    return outcome(record, result.id)
            if not _left(deadline):
                raise await atoo_late(storage, result.queue, result.id, wait, away) from away
            try:
                await asyncio.wait_for(done.wait(), min(patience, _left(deadline)))
            except TimeoutError:
                pass
            done.clear()
    finally:
        unsubscribe()
