"""Run the waiting jobs of a test with a real worker."""

import asyncio
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from asgiref.sync import async_to_sync

from djqueue.client import get_storage
from djqueue.runtime import Worker
from djqueue.runtime.events import Counters
from djqueue.runtime.immediate import CallersWorker, UntilIdle, has_running_loop
from djqueue.storage.base import Storage

LONGEST = 60.0
"""Seconds after which a drain gives up."""
ENDLESS = f"jobs are still running or being enqueued after {LONGEST:g} s"


def drain(
    storage: Storage | None = None,
    *,
    queues: Iterable[str] | str | None = None,
    handlers: Any = None,
    concurrency: int = 1,
) -> Counters:
    """Run all waiting jobs, and the jobs that they enqueue, until nothing can be claimed.

    Delayed jobs stay delayed, also those that wait for a retry. `queues` and `handlers` are those of
    `djqueue.Worker`.

    Jobs run one at a time on the thread of the test, with its database connections, and see what the test has
    written. With `concurrency`, or in a coroutine, they run on threads of their own as in production: then a
    test that uses the database needs pytest-django's `transactional_db`, or Django's `TransactionTestCase`.

    Returns:
        The numbers of attempts claimed, completed, retried, failed, cancelled and released.

    Raises:
        AssertionError: Jobs are still running or arriving after a minute.
    """
    apart = concurrency > 1 or has_running_loop()
    total = Counters()
    while True:
        watched = UntilIdle(storage if storage is not None else get_storage())
        if apart:
            worker = watched.worker = Worker(
                watched, queues, handlers, concurrency=concurrency, maintain=False, inline=True
            )
            worker.start()
            if not worker.join(LONGEST):
                worker.stop(hurry=True)
                raise AssertionError(ENDLESS)
        else:
            worker = watched.worker = CallersWorker(watched, queues, handlers)
            async_to_sync(_run)(worker)
        _add(total, worker.counters)
        if not worker.counters.claimed:
            return total


async def adrain(
    storage: Storage | None = None,
    *,
    queues: Iterable[str] | str | None = None,
    handlers: Any = None,
) -> Counters:
    """Async version of `drain`: async functions run on the test's event loop."""
    total = Counters()
    while True:
        watched = UntilIdle(storage if storage is not None else get_storage())
        worker = watched.worker = CallersWorker(watched, queues, handlers)
        await _run(worker)
        _add(total, worker.counters)
        if not worker.counters.claimed:
            return total


async def _run(worker: Worker) -> None:
    try:
        await asyncio.wait_for(worker.run(), LONGEST)
    except TimeoutError:
        raise AssertionError(ENDLESS) from None


def _add(total: Counters, counters: Counters) -> None:
    for field in fields(Counters):
        setattr(total, field.name, getattr(total, field.name) + getattr(counters, field.name))
