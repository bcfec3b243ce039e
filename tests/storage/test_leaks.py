"""Closed storages, workers and queues leave no objects, threads or descriptors."""

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from djqueue.client import Queue
from djqueue.core import threads
from djqueue.core.errors import StorageUnavailableError
from djqueue.runtime import Worker
from djqueue.storage.base import Storage
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.scheduler import SchedulerStorage
from tests import servers
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)
Made = list["weakref.ref[Any]"]
STORAGES = ("memory", "database", "redis", "scheduler", "client", "producer")
SPARE = 2
"""Descriptors of closed connections that SQLite keeps for the next ones, while another holds a lock."""


@pytest.fixture(scope="module")
def redis_options() -> Iterator[dict[str, Any]]:
    with servers.RedisServer() as server:
        yield server.options


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("djqueue-")}


def used(storage: Storage, made: Made) -> None:
    """Do with a storage what producers, workers and waiting callers do."""
    queue = Queue("leaks", storage=storage)
    unsubscribe = storage.events.subscribe("leaks", lambda event: None)
    stop_listening = storage.listen(["leaks"], lambda: None)
    queue.enqueue(name="nothing")
    eventually(lambda: queue.counts()["waiting"] == 1)  # a scheduler takes in what others enqueue
    worker = Worker(storage, "leaks", {"nothing": lambda job: None}, until_empty=True)
    with worker:
        worker.join(timeout=PATIENCE)
    assert queue.counts()["waiting"] == 0
    unsubscribe()
    stop_listening()
    made += [weakref.ref(storage), weakref.ref(queue), weakref.ref(worker)]


async def used_async(storage: Storage, made: Made) -> None:
    queue = Queue("leaks", storage=storage)
    await queue.aenqueue(name="nothing")
    worker = Worker(storage, "leaks", {"nothing": lambda job: None}, until_empty=True)
    await worker.run()
    made += [weakref.ref(storage), weakref.ref(queue), weakref.ref(worker)]


def synchronously(make: Callable[[], Storage]) -> Callable[[Made], None]:
    def run(made: Made) -> None:
        storage = make()
        storage.connect()
        try:
            used(storage, made)
        finally:
            storage.close()

    return run


def on_a_loop(make: Callable[[], Storage]) -> Callable[[Made], None]:
    def run(made: Made) -> None:
        storage = make()
        storage.connect()
        try:
            asyncio.run(used_async(storage, made))
        finally:
            storage.close()

    return run


def as_scheduler(made: Made) -> None:
    """A scheduler that is used in its own process."""
    scheduler = started_scheduler()
    used(scheduler, made)
    scheduler.close()


def as_client(made: Made) -> None:
    """A scheduler, and a client that uses its socket."""
    scheduler, client = started_scheduler(), SchedulerStorage(timeout=PATIENCE)
    try:
        used(client, made)
    finally:
        client.close()
        scheduler.close()
    made.append(weakref.ref(scheduler))


def as_producer(made: Made) -> None:
    """A client where no scheduler runs."""
    producer = SchedulerStorage(timeout=0.1)
    queue = Queue("leaks", storage=producer)
    queue.enqueue(name="nothing")
    with pytest.raises(StorageUnavailableError):
        queue.counts()
    producer.close()
    made += [weakref.ref(producer), weakref.ref(queue)]


def started_scheduler() -> SchedulerStorage:
    scheduler = SchedulerStorage(timeout=PATIENCE)
    scheduler.role.starts_here = True
    scheduler.connect()
    return scheduler


def redis(options: dict[str, Any]) -> Callable[[], Storage]:
    def make() -> Storage:
        from djqueue.storage.redis import RedisStorage

        return RedisStorage(**options)

    return make


def ways(kind: str, request: pytest.FixtureRequest) -> list[Callable[[Made], None]]:
    """Return functions that use a storage of a kind and close it."""
    if kind == "client":
        return [as_client]
    if kind == "scheduler":
        return [as_scheduler]
    if kind == "producer":
        return [as_producer]
    makers: dict[str, Callable[[], Storage]] = {
        "memory": MemoryStorage,
        "database": DatabaseStorage,
    }
    make = redis(request.getfixturevalue("redis_options")) if kind == "redis" else makers[kind]
    return [synchronously(make), on_a_loop(make)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts file descriptors in /proc")
@pytest.mark.parametrize("rounds", [8, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("kind", STORAGES)
def test_closed_storages_leave_no_objects_threads_or_descriptors(
    kind: str, rounds: int, request: pytest.FixtureRequest
) -> None:
    made: Made = []
    others = own_threads()  # of tests before this one
    use = ways(kind, request)
    for one in use:  # modules, pools and caches that a process has once
        one(made)
    connections.close_all()
    eventually(lambda: own_threads() <= others)
    gc.collect()
    registered, open_files = threads.registered(), descriptors()

    for _ in range(rounds):
        for one in use:
            one(made)
    connections.close_all()
    # First the threads, which hold what they use until they have ended.
    eventually(lambda: own_threads() <= others)
    gc.collect()

    assert [one() for one in made if one() is not None] == []
    assert threads.registered() == registered
    assert descriptors() <= open_files + SPARE
