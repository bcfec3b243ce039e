"""Waiting for what a job returns: subscribed before the enqueue, so that no answer is missed."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from threading import Event as ThreadEvent
from typing import Any

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import milliseconds
from djqueue.core.errors import JobTimeoutError
from djqueue.core.ids import IdSource
from djqueue.core.job import Batch, EnqueueResult, Event, JobRecord
from djqueue.core.states import TERMINAL
from djqueue.storage.base import Storage

from .info import outcome

CHECK_EVERY = 2.0
"""Seconds between looks at the job itself, should an event have been lost with a connection."""
ENDINGS = frozenset({"completed", "failed", "cancelled", "removed"})

_ids = IdSource()


def enqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta) -> Any:
    """Enqueue one job, and return what it returns. A job that is there already is waited for.

    Raises JobFailedError, MaxRetriesError, JobCancelledError; JobTimeoutError after `wait` seconds,
    while the job goes on.
    """
    deadline = _deadline(wait)
    batch = _with_id(batch)
    assert batch.ids is not None
    done = ThreadEvent()
    unsubscribe = storage.subscribe(batch.queue, _on_ending(done.set), batch.ids[0])
    try:
        result = storage.enqueue([batch])[0]
        if result.id != batch.ids[0]:
            unsubscribe()
            unsubscribe = storage.subscribe(batch.queue, _on_ending(done.set), result.id)
        if result.status != "queued":
            done.set()
        while True:
            done.wait(min(CHECK_EVERY, _left(deadline)))
            done.clear()
            record = storage.jobs(batch.queue, [result.id])[0]
            if _has_ended(record):
                return outcome(record, result.id)
            _check(deadline, wait, result)
    finally:
        unsubscribe()


async def aenqueue_and_wait(storage: Storage, batch: Batch, wait: float | timedelta) -> Any:
    """See `enqueue_and_wait`."""
    deadline = _deadline(wait)
    batch = _with_id(batch)
    assert batch.ids is not None
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake() -> None:
        # The loop may be gone by the time that a late event comes in on another thread.
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    handler = _on_ending(wake)
    unsubscribe = await storage.acall(storage.subscribe, batch.queue, handler, batch.ids[0])
    try:
        result = (await storage.aenqueue([batch]))[0]
        if result.id != batch.ids[0]:
            unsubscribe()
            unsubscribe = await storage.acall(storage.subscribe, batch.queue, handler, result.id)
        if result.status != "queued":
            done.set()
        while True:
            try:
                await asyncio.wait_for(done.wait(), min(CHECK_EVERY, _left(deadline)))
            except TimeoutError:
                pass
            done.clear()
            record = (await storage.ajobs(batch.queue, [result.id]))[0]
            if _has_ended(record):
                return outcome(record, result.id)
            _check(deadline, wait, result)
    finally:
        unsubscribe()


def _with_id(batch: Batch) -> Batch:
    if batch.ids is not None:
        return batch
    return batch._replace(ids=[_ids.new(SYSTEM_CLOCK.now())], fresh=True)


def _on_ending(done: Callable[[], None]) -> Callable[[Event], None]:
    def handler(event: Event) -> None:
        if event.event in ENDINGS:
            done()

    return handler


def _has_ended(record: JobRecord | None) -> bool:
    return record is None or record.state in TERMINAL


def _deadline(wait: float | timedelta) -> int:
    return SYSTEM_CLOCK.monotonic() + milliseconds("wait", wait)


def _left(deadline: int) -> float:
    return max(0, deadline - SYSTEM_CLOCK.monotonic()) / 1_000


def _check(deadline: int, wait: float | timedelta, result: EnqueueResult) -> None:
    if not _left(deadline):
        raise JobTimeoutError(
            f"job {result.id!r} of queue {result.queue!r} has not ended within {_text(wait)}; it goes on",
            job_id=result.id,
        )


def _text(wait: float | timedelta) -> str:
    return str(wait) if isinstance(wait, timedelta) else f"{wait:g} s"
