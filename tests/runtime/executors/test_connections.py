"""Django's database connections around jobs."""

import asyncio
import logging
import threading
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test.utils import override_settings

from djqueue.runtime.executors import connections as module
from djqueue.runtime.executors import threadpool as pool
from tests.runtime.running import HANDLER, messages, new_threads, record, work_off, working
from tests.support import PATIENCE, aeventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.dialect]


class Census:
    """Every connection that has been used."""

    def __init__(self) -> None:
        self.used: list[tuple[BaseDatabaseWrapper, Any]] = []

    def note(self) -> int:
        """Use this thread's connection; the number of connections used before it was opened."""
        wrapper = connections["default"]
        with wrapper.cursor() as cursor:
            cursor.execute("SELECT 1")
        for number, (_, raw) in enumerate(self.used):
            if raw is wrapper.connection:
                return number
        self.used.append((wrapper, wrapper.connection))
        return len(self.used) - 1

    @property
    def open(self) -> int:
        return sum(wrapper.connection is raw for wrapper, raw in self.used)


@pytest.fixture
def census() -> Census:
    return Census()


@pytest.fixture
def keep_alive():
    """Connections may live on, as a project with CONN_MAX_AGE has it."""
    before = connections.settings["default"]["CONN_MAX_AGE"]
    connections.settings["default"]["CONN_MAX_AGE"] = None
    yield
    connections.settings["default"]["CONN_MAX_AGE"] = before


def handler_of(census: Census, is_async: bool):
    def synchronous(job):
        return census.note()

    async def asynchronous(job):
        return await sync_to_async(census.note)()

    return asynchronous if is_async else synchronous


BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])


@BOTH
async def test_database_connections_are_closed_between_jobs(storage, queue, census, is_async):
    queue.enqueue_many(range(10), name=HANDLER)

    async with working(storage, handler_of(census, is_async), concurrency=3) as worker:
        await aeventually(lambda: worker.counters.completed == 10)
        assert census.open == 0

    assert census.used


@BOTH
async def test_persistent_connections_are_reused_by_later_jobs(storage, queue, census, keep_alive, is_async):
    ids = [result.id for result in queue.enqueue_many(range(30), name=HANDLER)]

    async with working(storage, handler_of(census, is_async), concurrency=1) as worker:
        await aeventually(lambda: worker.counters.completed == 30)
        assert census.open == 1
    await aeventually(lambda: census.open == 0)

    assert {queue.get_result(job_id) for job_id in ids} == {0}


@BOTH
async def test_connections_of_idle_threads_are_closed(
    storage, queue, census, keep_alive, is_async, monkeypatch
):
    monkeypatch.setattr(pool, "IDLE", 0.02)
    monkeypatch.setattr(module, "IDLE", 0.02)
    queue.enqueue(name=HANDLER)

    async with working(storage, handler_of(census, is_async)) as worker:
        await aeventually(lambda: worker.counters.completed == 1)
        await aeventually(lambda: census.open == 0)


async def test_broken_connection_is_not_reused(storage, queue, census, keep_alive):
    def handler(job):
        raw = census.note()
        if job.payload == "breaks":
            connections["default"].errors_occurred = True
            connections["default"].is_usable = lambda: False
        return raw

    broken = queue.enqueue("breaks", name=HANDLER, priority=1).id
    after = queue.enqueue("works", name=HANDLER).id
    await work_off(storage, handler, concurrency=1)

    assert queue.get_result(broken) != queue.get_result(after)


@BOTH
async def test_connection_older_than_its_maximum_age_is_not_reused(
    storage, queue, census, keep_alive, monkeypatch, is_async
):
    monkeypatch.setattr(module, "RECHECK_AFTER", 0)

    async with working(storage, handler_of(census, is_async), concurrency=1) as worker:
        threads = worker.parts.executor._threads._pool
        before = queue.enqueue(name=HANDLER).id
        await aeventually(lambda: worker.counters.completed == 1)
        await aeventually(lambda: is_async or threads._idle, message="the thread is idle")
        census.used[0][0].close_at = 0
        after = queue.enqueue(name=HANDLER).id
        await aeventually(lambda: worker.counters.completed == 2)

    assert (queue.get_result(before), queue.get_result(after)) == (0, 1)


async def test_query_log_is_reset_between_jobs(storage, queue, keep_alive):
    lengths = []

    def handler(job):
        Group.objects.count()
        lengths.append(len(connection.queries_log))

    with override_settings(DEBUG=True):
        queue.enqueue_many(range(5), name=HANDLER)
        await work_off(storage, handler, concurrency=1)

    assert lengths == [1] * 5


async def test_queries_of_async_jobs_run_concurrently(storage, queue):
    """Left to Django, all async jobs of a loop would share one thread for their queries."""
    together = threading.Barrier(4)

    async def handler(job):
        return await sync_to_async(together.wait)(PATIENCE) >= 0

    ids = [result.id for result in queue.enqueue_many(range(4), name=HANDLER)]
    await work_off(storage, handler, concurrency=4)

    assert all(queue.get_result(job_id) for job_id in ids)


async def test_queries_of_one_async_job_run_in_one_thread(storage, queue):
    async def handler(job):
        threads = [await sync_to_async(threading.get_ident)() for _ in range(3)]
        threads.append(await asyncio.create_task(sync_to_async(threading.get_ident)()))
        return threads

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert len(set(queue.get_result(job_id))) == 1


async def test_async_jobs_without_queries_start_no_database_thread(storage, queue):
    before = threading.enumerate()

    async def handler(job):
        await asyncio.sleep(0)
        return [name for name in new_threads(before) if name.startswith("djqueue-database")]

    ids = [result.id for result in queue.enqueue_many(range(20), name=HANDLER)]
    await work_off(storage, handler)

    assert all(queue.get_result(job_id) == [] for job_id in ids)


async def test_async_orm_works_in_handlers(storage, queue):
    async def handler(job):
        await Group.objects.acreate(name=job.payload)
        return await Group.objects.acount()

    job_id = queue.enqueue("crew", name=HANDLER).id
    await work_off(storage, handler)

    assert queue.get_result(job_id) == 1
    assert await Group.objects.filter(name="crew").aexists()


async def test_database_thread_of_an_interrupted_job_is_not_reused(storage, queue, keep_alive):
    """It may still be in the middle of a query when the next job comes."""
    go_on = threading.Event()
    threads = []

    def query():
        threads.append(threading.get_ident())
        assert go_on.wait(PATIENCE)

    async def handler(job):
        if job.payload == "interrupted":
            await sync_to_async(query)()
        return await sync_to_async(threading.get_ident)()

    cut = queue.enqueue("interrupted", name=HANDLER, timeout=0.03, max_attempts=1, priority=1).id
    after = queue.enqueue("after", name=HANDLER).id
    await work_off(storage, handler, concurrency=1)
    go_on.set()

    assert record(queue, cut).reason == "timeout"
    assert queue.get_result(after) not in threads


async def test_open_transaction_does_not_reach_the_next_job(storage, queue, keep_alive):
    def handler(job):
        if job.payload == "leaves it open":
            connection.set_autocommit(False)
            Group.objects.create(name="never committed")
            return None
        return [connection.get_autocommit(), Group.objects.count()]

    queue.enqueue("leaves it open", name=HANDLER, priority=1)
    after = queue.enqueue("looks", name=HANDLER).id
    await work_off(storage, handler, concurrency=1)

    assert queue.get_result(after) == [True, 0]


@BOTH
async def test_open_atomic_block_does_not_reach_the_next_job(storage, queue, keep_alive, caplog, is_async):
    def leave_open():
        transaction.atomic().__enter__()
        Group.objects.create(name="never committed")

    def look():
        Group.objects.create(name="committed")
        return connection.in_atomic_block

    def synchronous(job):
        return leave_open() if job.payload == "leaves it open" else look()

    async def asynchronous(job):
        return await sync_to_async(synchronous)(job)

    queue.enqueue("leaves it open", name=HANDLER, id="bad", priority=1)
    after = queue.enqueue("looks", name=HANDLER).id
    await work_off(storage, asynchronous if is_async else synchronous, concurrency=1)

    assert queue.get_result(after) is False
    assert [group.name async for group in Group.objects.all()] == ["committed"]
    [line] = messages(caplog)
    assert line.startswith("handler [bad] left database connections")
    assert "a transaction of 'default' was still open, and has been rolled back" in line


async def test_failed_job_rolls_back_its_transaction(storage, queue):
    @transaction.atomic
    def handler(job):
        Group.objects.create(name="half")
        raise ValueError

    queue.enqueue(name=HANDLER, max_attempts=1)
    await work_off(storage, handler)

    assert not await Group.objects.aexists()


@BOTH
async def test_error_while_closing_connections_does_not_fail_the_job(
    storage, queue, monkeypatch, caplog, is_async
):
    def broken():
        raise OSError("the connection is in a strange state")

    monkeypatch.setattr(module, "clean_connections", broken)
    monkeypatch.setattr("djqueue.runtime.executors.threads.clean_connections", broken)

    async def asynchronous(job):
        return await sync_to_async(lambda: "done")()

    job_id = queue.enqueue(name=HANDLER).id
    caplog.set_level(logging.WARNING, "djqueue")
    await work_off(storage, asynchronous if is_async else lambda job: "done")

    assert queue.get_result(job_id) == "done"
    assert any("left database connections that" in line for line in messages(caplog))
