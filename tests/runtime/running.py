"""Running workers in tests."""

import logging
import threading
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from djqueue import Queue, State, Worker
from djqueue.core.job import JobRecord
from djqueue.storage.base import Storage
from tests.support import PATIENCE, aeventually

HANDLER = "handler"


@asynccontextmanager
async def working(storage: Storage, handler: Any, **options: Any) -> AsyncIterator[Worker]:
    """A worker with one handler (or a mapping of them), stopped at the end."""
    handlers = handler if isinstance(handler, Mapping) else {HANDLER: handler}
    options.setdefault("shutdown_timeout", PATIENCE)
    async with Worker(storage, handlers=handlers, **options) as worker:
        yield worker


async def work_off(storage: Storage, handler: Any, **options: Any) -> Worker:
    """Run all jobs that there are."""
    handlers = handler if isinstance(handler, Mapping) else {HANDLER: handler}
    worker = Worker(storage, handlers=handlers, until_empty=True, **options)
    await worker.run()
    return worker


def record(queue: Queue, job_id: str) -> JobRecord:
    found = queue.storage.reads.jobs(queue.name, [job_id])[0]
    assert found is not None
    return found


async def reached(queue: Queue, job_id: str, state: str) -> JobRecord:
    """The job's record, once it is in a state."""
    await aeventually(
        lambda: queue.storage.reads.states(queue.name, [job_id])[0] == State(state),
        message=f"job is {state}",
    )
    return record(queue, job_id)


def new_threads(before: Iterable[threading.Thread]) -> list[str]:
    """Names of the package's threads that have been started since."""
    threads = set(threading.enumerate()) - set(before)
    return [thread.name for thread in threads if thread.name.startswith("djqueue")]


def messages(caplog: Any, level: int = logging.WARNING) -> list[str]:
    """What the package has logged from a level on."""
    return [
        entry.getMessage()
        for entry in caplog.records
        if entry.levelno >= level and entry.name.startswith("djqueue")
    ]
