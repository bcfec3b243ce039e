"""Wait for the result of a job: subscribe before the enqueue, so that no event is missed."""

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Event as ThreadEvent
from typing import Any

from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import within
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult, Event, JobRecord
from djqueue.core.states import TERMINAL
from djqueue.core.units import milliseconds
from djqueue.middleware import layers_of
from djqueue.storage.base import EventHandler, Storage, Unsubscribe

from .info import outcome
from .sending import aenqueue, enqueue
from .steps import LoopSignal, Signal, Step, Steps, arun, in_thread, run
from .timeouts import timed_out
from .transactions import When, acheck_waiting, check_waiting, refuse_uncommitted

logger = logging.getLogger("djqueue.client")

CHECK_EVERY = 2.0
"""Seconds between reads of the job, in case an event was lost with a connection."""
RETRY = 0.25
"""Seconds between reads while the storage is unavailable."""
SUBSCRIPTION_TIMEOUT = 1.0
"""Seconds to wait for a subscription before the job is enqueued without one."""
UNSUBSCRIBED = 0.5
"""Seconds between reads of a job whose events could not be subscribed to."""
LAST_LOOK = 0.25
"""Seconds that the last read of the job may take after the deadline."""
ENDINGS = frozenset({"completed", "failed", "cancelled", "removed"})

_ids = IdSource()


def enqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta, on_commit: When = False) -> Any:
    """Enqueue one job, wait for it, and return its result. A duplicate waits for the existing job.

    Raises:
        JobFailedError, MaxRetriesError, JobCancelledError: The job ended without a result.
        JobTimeoutError: The job did not end within `wait` seconds; it continues.
        WaitInTransactionError: The job would start only after the caller's transaction has committed.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return run(_enqueue_and_wait(storage, batch, wait, on_commit, deadline, ThreadEvent()))


async def aenqueue_and_wait(
    storage: Storage, batch: Batch, wait: float | timedelta, on_commit: When = False
) -> Any:
    """Async version of `enqueue_and_wait`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await arun(_enqueue_and_wait(storage, batch, wait, on_commit, deadline, LoopSignal()))


def wait_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Wait for the end of an enqueued job, and return its result.

    Raises the errors of `enqueue_and_wait`, and JobNotFoundError.
    """
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return run(_wait_for(storage, result, wait, deadline, ThreadEvent()))


async def await_for(storage: Storage, result: EnqueueResult, wait: float | timedelta) -> Any:
    """Async version of `wait_for`."""
    deadline = _deadline(wait)
    with within(_left(deadline) + LAST_LOOK):
        return await arun(_wait_for(storage, result, wait, deadline, LoopSignal()))


def _enqueue_and_wait(
    storage: Storage,
    batch: Batch,
    wait: float | timedelta,
    on_commit: When,
    deadline: int,
    signal: Signal,
) -> Steps[Any]:
    batch = with_ids(batch)
    assert batch.ids is not None
    yield Step(check_waiting, acheck_waiting, (storage, batch, on_commit))
    handler = _on_ending(signal.set)
    # A thread of `acall` is not the one that enqueues.
    alone = in_thread(storage, _subscribe, storage, storage.events.subscribe)
    together = partial(_subscribe, storage, storage.subscribe_new)
    unsubscribe = yield Step(
        together, partial(alone.acall, *alone.args), (batch.queue, handler, batch.ids[0])
    )
    try:
        [result] = yield Step(enqueue, aenqueue, (storage, batch))
        if result.id != batch.ids[0]:
            if unsubscribe is not None:
                unsubscribe()
            subscribe = storage.events.subscribe
            unsubscribe = yield in_thread(
                storage, _subscribe, storage, subscribe, batch.queue, handler, result.id
            )
        interval = UNSUBSCRIBED if unsubscribe is None else CHECK_EVERY
        if result.status == "queued":
            yield _wait(signal, interval, deadline)
        return (yield from _watch(storage, result, wait, deadline, signal, interval))
    finally:
        if unsubscribe is not None:
            unsubscribe()


def _wait_for(
    storage: Storage, result: EnqueueResult, wait: float | timedelta, deadline: int, signal: Signal
) -> Steps[Any]:
    queue, job_id = result.queue, result.id
    transactions = storage.capabilities.transactions
    alias = yield Step(transactions.uncommitted_in, transactions.auncommitted_in, (queue, job_id))
    refuse_uncommitted(queue, job_id, alias, can_leave=transactions.can_leave)
    unsubscribe = yield in_thread(storage, storage.events.subscribe, queue, _on_ending(signal.set), job_id)
    try:
        return (yield from _watch(storage, result, wait, deadline, signal, CHECK_EVERY))
    finally:
        unsubscribe()


def _watch(
    storage: Storage,
    result: EnqueueResult,
    wait: float | timedelta,
    deadline: int,
    signal: Signal,
    interval: float,
) -> Steps[Any]:
    """Read the job now, after each signal, and every `interval` seconds, until it has ended."""
    while True:
        signal.clear()
        away, patience = None, interval
        try:
            [record] = yield Step(storage.reads.jobs, storage.reads.ajobs, (result.queue, [result.id]))
        except StorageUnavailableError as error:
            away, patience = error, RETRY
        else:
            if has_ended(record):
                return outcome(record, result.id)
        if not _left(deadline):
            raise (yield from timed_out(storage, result.queue, result.id, wait, away)) from away
        yield _wait(signal, patience, deadline)


def _wait(signal: Signal, seconds: float, deadline: int) -> Step:
    return Step(signal.wait, signal.wait, (min(seconds, _left(deadline)),))


def _subscribe(
    storage: Storage,
    subscribe: Callable[[str, EventHandler, str], Unsubscribe],
    queue: str,
    handler: EventHandler,
    job_id: str,
) -> Unsubscribe | None:
    """Subscribe to a job's events; None if the storage does not confirm it in time.

    A slow storage can still run the job, and one that is away fails the enqueue with its own error.
    """
    if storage.outage is not None:
        return None
    try:
        with within(SUBSCRIPTION_TIMEOUT):
            return subscribe(queue, handler, job_id)
    except StorageUnavailableError as error:
        logger.debug("Polling job %s, because its events could not be subscribed to: %s", job_id, error)
        return None


def with_ids(batch: Batch) -> Batch:
    """Return the batch with ids, to wait for or to name its jobs before they are enqueued."""
    if batch.ids is not None:
        return batch
    # A middleware may pass the batch more than once.
    fresh = not layers_of(get_settings()).enqueue
    return batch._replace(ids=_ids.many(len(batch.payloads), SYSTEM_CLOCK.now()), fresh=fresh)


def _on_ending(done: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in ENDINGS:
            done()

    return handler


def has_ended(record: JobRecord | None) -> bool:
    """Return whether the job has ended, or is gone."""
    return record is None or record.state in TERMINAL


def _deadline(wait: float | timedelta) -> int:
    return SYSTEM_CLOCK.monotonic() + milliseconds("wait", wait)


def _left(deadline: int) -> float:
    return max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000
