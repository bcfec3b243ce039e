"""Generators as handlers: their items are sent while they run, and they are closed in every case."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from django.db import connection

from djqueue import Queue, Retry, StorageUnavailableError, UnrecoverableError, current_job, job
from djqueue.client import registry
from djqueue.conf import Settings
from djqueue.core.policies import QueuePolicy
from djqueue.errors import ConfigurationError, OptionError
from djqueue.runtime import emitting, worker
from djqueue.runtime.handlers import read_handlers
from djqueue.testing.factories import items_of
from tests.runtime.running import HANDLER, reached, record, work_off, working
from tests.runtime.storages import RecordingStorage
from tests.support import PATIENCE, aeventually

BOTH = pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
VALUES = [None, False, 0, "", "text", [1, {"two": (2,)}]]


class EmittingStorage(RecordingStorage):
    """Notes what is sent; may have a gate before that, or fail for a while."""

    def __init__(self, **options):
        super().__init__(**options)
        self.groups = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0

    async def acall(self, method, *args, **kwargs):
        if method == self.emit:
            self.groups.append(sum(len(emission.items) for emission in args[0]))
            await self.gate.wait()
            if self.failures:
                self.failures -= 1
                raise StorageUnavailableError("a moment, please")
        return await super().acall(method, *args, **kwargs)


@pytest.fixture
def storage():
    return EmittingStorage()


def as_handler(is_async, steps, end=lambda: None):
    """A generator of either colour that yields what `steps(job)` does, and calls `end` when it is closed."""

    async def asynchronous(job):
        try:
            for step in steps(job):
                yield step
        finally:
            end()

    def synchronous(job):
        try:
            return (yield from steps(job))
        finally:
            end()

    return asynchronous if is_async else synchronous


def values_of(queue, job_id):
    return list(queue.stream(job_id, wait=0))


@BOTH
async def test_stream_items_are_stored_in_order_before_the_result(storage, queue, is_async):
    def steps(job):
        yield from VALUES
        return "result"

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(is_async, steps))

    assert values_of(queue, job_id) == VALUES
    assert queue.get_result(job_id) == (None if is_async else "result")
    assert queue.get_job(job_id).items == len(VALUES)


@BOTH
async def test_generator_without_items_completes(storage, queue, is_async):
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(is_async, lambda job: iter(())))

    assert values_of(queue, job_id) == []
    assert storage.groups == []


@BOTH
async def test_item_is_readable_while_the_generator_still_runs(storage, queue, is_async):
    go_on = threading.Event()
    job_id = queue.enqueue(name=HANDLER).id

    def synchronous(job):
        yield "first"
        assert go_on.wait(PATIENCE)
        yield "second"

    async def asynchronous(job):
        yield "first"
        await asyncio.to_thread(go_on.wait, PATIENCE)
        yield "second"

    async with working(storage, asynchronous if is_async else synchronous):
        await aeventually(lambda: record(queue, job_id).items == 1)
        assert record(queue, job_id).state == "active"
        go_on.set()
        await reached(queue, job_id, "completed")

    assert values_of(queue, job_id) == ["first", "second"]


@BOTH
async def test_many_items_are_sent_in_few_groups(storage, queue, is_async):
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(is_async, lambda job: iter(range(9_000))))

    assert values_of(queue, job_id) == list(range(9_000))
    assert sum(storage.groups) == 9_000
    assert len(storage.groups) < 200


async def test_items_of_several_jobs_are_sent_independently(storage, queue):
    ids = [queue.enqueue(number, name=HANDLER).id for number in range(20)]
    await work_off(
        storage, as_handler(True, lambda job: ((job.payload, n) for n in range(300))), concurrency=20
    )

    for number, job_id in enumerate(ids):
        assert values_of(queue, job_id) == [(number, n) for n in range(300)]


@BOTH
async def test_generator_pauses_while_the_storage_accepts_no_items(storage, queue, is_async):
    yielded = 0

    def steps(job):
        nonlocal yielded
        while yielded < 5_000:
            yielded += 1
            yield yielded

    storage.gate.clear()
    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, as_handler(is_async, steps)):
        await aeventually(lambda: yielded > emitting.AHEAD)
        for _ in range(50):
            await asyncio.sleep(0)
        assert yielded == emitting.AHEAD + 1
        storage.gate.set()
        await reached(queue, job_id, "completed")

    assert values_of(queue, job_id) == list(range(1, 5_001))


@BOTH
async def test_generator_pauses_by_size_of_unsent_items(storage, queue, is_async):
    yielded = 0

    def steps(job):
        nonlocal yielded
        while yielded < 10:
            yielded += 1
            yield b"x" * (emitting.AHEAD_BYTES - 100)

    storage.gate.clear()
    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, as_handler(is_async, steps)):
        await aeventually(lambda: yielded >= 3)
        for _ in range(50):
            await asyncio.sleep(0)
        assert yielded == 3
        storage.gate.set()
        await reached(queue, job_id, "completed")

    assert len(values_of(queue, job_id)) == 10


@BOTH
async def test_items_are_sent_again_after_a_storage_error(storage, queue, is_async, monkeypatch):
    monkeypatch.setattr("djqueue.runtime.emitting.RETRY", 0.01)
    storage.failures = 2
    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, as_handler(is_async, lambda job: iter(range(50)))):
        await reached(queue, job_id, "completed")

    assert values_of(queue, job_id) == list(range(50))


@BOTH
async def test_items_are_stored_before_the_failure_of_their_attempt(storage, queue, is_async):
    def steps(job):
        yield 1
        raise ValueError("no such order")

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, as_handler(is_async, steps))

    assert record(queue, job_id).error.message == "no such order"
    assert len(items_of(storage, job_id, queue.name)) == 1


@BOTH
async def test_second_attempt_starts_a_new_stream(storage, queue, is_async):
    def steps(job):
        yield "first of", job.attempts
        if job.attempts == 1:
            yield "second of", 1
            raise Retry(delay=0)

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(is_async, steps))

    assert values_of(queue, job_id) == [("first of", 2)]


@BOTH
@pytest.mark.parametrize("bad", [object(), {"file": [threading.Lock()]}])
async def test_item_that_cannot_be_encoded_fails_the_job_without_retry(storage, queue, is_async, bad):
    closed = []

    def steps(job):
        yield 1
        yield bad

    job_id = queue.enqueue(name=HANDLER, max_attempts=5).id
    await work_off(storage, as_handler(is_async, steps, lambda: closed.append(True)))

    failed = record(queue, job_id)
    assert (failed.state, failed.reason, failed.attempts) == ("failed", "invalid_result", 1)
    assert failed.error.type == "djqueue.core.errors.ItemError"
    assert "item 1 cannot be sent: item" in failed.error.message
    assert failed.items == 1
    assert closed == [True]


@BOTH
@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({"max_items": 3}, 'DJQUEUE["MAX_ITEMS"]'),
        ({"max_items_size": 350}, 'DJQUEUE["MAX_ITEMS_SIZE"]'),
        ({"max_payload": 50}, 'DJQUEUE["MAX_PAYLOAD"]'),
    ],
)
async def test_exceeded_item_limit_fails_the_job_and_is_named(
    storage, queue, is_async, limit, said, monkeypatch
):
    job_id = queue.enqueue(name=HANDLER).id
    monkeypatch.setattr(worker, "get_settings", lambda: Settings(**limit))
    sizes = [1, 1, 1, 98] if "max_payload" in limit else [98] * 4
    await work_off(storage, as_handler(is_async, lambda job: (b"x" * size for size in sizes)))

    failed = record(queue, job_id)
    assert (failed.state, failed.attempts, failed.items) == ("failed", 1, 3)
    assert failed.error.type == "djqueue.core.errors.ItemError"
    assert said in failed.error.message


@BOTH
async def test_generator_may_yield_exactly_the_limit_of_items(storage, queue, is_async, monkeypatch):
    monkeypatch.setattr(worker, "get_settings", lambda: Settings(max_items=3))
    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, as_handler(is_async, lambda job: iter(range(3))))

    assert values_of(queue, job_id) == [0, 1, 2]


@BOTH
async def test_cancelled_job_closes_its_generator_between_two_items(storage, queue, is_async):
    ends = []

    def synchronous(job):
        try:
            yield 1
            assert job.cancelled.wait(PATIENCE)
            yield 2
            yield 3
        except GeneratorExit:
            ends.append("closed")
            raise

    async def asynchronous(job):
        try:
            yield 1
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("closed")
            raise

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, asynchronous if is_async else synchronous):
        await aeventually(lambda: record(queue, job_id).items == 1)
        queue.cancel(job_id)
        await reached(queue, job_id, "cancelled")

    assert ends == ["closed"]
    assert len(items_of(storage, job_id, queue.name)) == 1


@BOTH
async def test_paused_generator_is_closed_when_its_job_is_cancelled(storage, queue, is_async):
    ends = []

    def steps(job):
        while True:
            yield "again"

    storage.gate.clear()
    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, as_handler(is_async, steps, lambda: ends.append(True))):
        await aeventually(lambda: storage.groups)
        await aeventually(lambda: queue.name in storage.subscribed, message="requests to cancel are awaited")
        queue.cancel(job_id)
        await aeventually(lambda: ends)
        storage.gate.set()
        await reached(queue, job_id, "cancelled")

    assert ends == [True]


@BOTH
async def test_timeout_closes_the_generator_and_fails_the_attempt(storage, queue, is_async):
    ends = []

    def synchronous(job):
        try:
            yield 1
            assert job.cancelled.wait(PATIENCE)
            yield 2
        finally:
            ends.append("closed")

    async def asynchronous(job):
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            ends.append("closed")

    job_id = queue.enqueue(name=HANDLER, timeout=0.05, max_attempts=1).id
    await work_off(storage, asynchronous if is_async else synchronous)

    failed = record(queue, job_id)
    assert (failed.state, failed.reason, failed.items) == ("failed", "timeout", 1)
    assert ends == ["closed"]


async def test_worker_waits_for_async_cleanup_of_a_generator(storage, queue):
    ends = []

    async def handler(job):
        try:
            yield 1
            yield object()
        finally:
            await asyncio.sleep(0.01)
            ends.append("closed")

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert record(queue, job_id).state == "failed"
    assert ends == ["closed"]


@BOTH
async def test_stopping_worker_closes_generators_and_releases_their_jobs(storage, queue, is_async):
    ends = []

    def synchronous(job):
        try:
            while True:
                yield "again"
                job.cancelled.wait(0.01)
        finally:
            ends.append("closed")

    async def asynchronous(job):
        try:
            while True:
                yield "again"
                await asyncio.sleep(0.01)
        finally:
            ends.append("closed")

    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, asynchronous if is_async else synchronous) as running:
        await aeventually(lambda: record(queue, job_id).items > 1)
        running.stop(hurry=True)

    given_back = record(queue, job_id)
    assert (given_back.state, given_back.attempts, given_back.items) == ("waiting", 0, 0)
    assert ends == ["closed"]


@BOTH
async def test_generator_is_closed_when_its_lease_is_lost(is_async):
    storage = EmittingStorage(policies={"work": QueuePolicy(lease=60_000)})
    queue = Queue("work", storage=storage)
    ends = []

    def steps(job):
        while True:
            yield "again"
            if not is_async:
                job.cancelled.wait(0.01)

    async def asynchronous(job):
        try:
            while True:
                yield "again"
                await asyncio.sleep(0.01)
        finally:
            ends.append("closed")

    handler = asynchronous if is_async else as_handler(False, steps, lambda: ends.append("closed"))
    job_id = queue.enqueue(name=HANDLER).id
    async with working(storage, handler):
        await aeventually(lambda: record(queue, job_id).items > 1)
        storage.queues.obliterate("work", force=True)
        await aeventually(lambda: ends)

    assert ends == ["closed"]
    assert storage.reads.jobs("work", [job_id]) == [None]


async def test_yielded_item_is_a_snapshot(storage, queue):
    def handler(job):
        value = [1]
        yield value
        value.append(2)
        yield value

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert values_of(queue, job_id) == [[1], [1, 2]]


@BOTH
async def test_generator_can_use_current_job_and_report_progress(storage, queue, is_async):
    def steps(job):
        assert current_job() == job
        job.progress("half")
        job.log("a line")
        yield job.payload

    job_id = queue.enqueue("payload", name=HANDLER).id
    await work_off(storage, as_handler(is_async, steps))

    done = record(queue, job_id)
    assert (done.progress, [line for _, line in done.logs]) == ("half", ["a line"])
    assert values_of(queue, job_id) == ["payload"]


async def test_database_connections_of_a_sync_generator_are_cleaned_after_its_end(
    storage, queue, monkeypatch
):
    cleaned = []
    monkeypatch.setattr("djqueue.runtime.executors.threads.clean_connections", lambda: cleaned.append(1))

    def handler(job):
        yield connection.vendor
        assert not cleaned

    job_id = queue.enqueue(name=HANDLER).id
    await work_off(storage, handler)

    assert record(queue, job_id).state == "completed"
    assert cleaned


async def test_callable_object_that_yields_is_a_generator_handler(storage, queue):
    class Counting:
        def __call__(self, job):
            yield from range(3)

    class Async:
        async def __call__(self, job):
            yield "async"

    one = queue.enqueue(name="one").id
    other = queue.enqueue(name="other").id
    await work_off(storage, {"one": Counting(), "other": Async()})

    assert values_of(queue, one) == [0, 1, 2]
    assert values_of(queue, other) == ["async"]


async def test_generator_that_ignores_close_fails_its_job(storage, queue):
    def handler(job):
        while True:
            try:
                yield object()
            except GeneratorExit:
                yield "not yet"
                raise UnrecoverableError from None

    job_id = queue.enqueue(name=HANDLER, max_attempts=1).id
    await work_off(storage, handler)

    assert record(queue, job_id).state == "failed"


def test_generator_with_done_callback_is_rejected():
    def handler(job, done):
        yield 1

    with pytest.raises(ConfigurationError, match="'two' is a generator function"):
        read_handlers({"two": handler})


@pytest.mark.parametrize("is_async", [True, False])
def test_batched_generator_is_rejected_at_declaration(monkeypatch, is_async):
    monkeypatch.setattr(registry, "_types", {})

    with pytest.raises(OptionError, match="batch: a generator function"):
        job(batch=10)(as_handler(is_async, iter))


class OneReport(emitting.Flushing):
    """Sends one report, and counts how often."""

    interval = 0.0
    operation = "report"
    flushed = 0

    @property
    def waiting(self):
        return False

    async def flush(self):
        self.flushed += 1
        return set()


@pytest.mark.parametrize("turns", [0, 1, 2], ids=["to be armed", "armed", "begun"])
async def test_nothing_is_flushed_after_the_end_of_its_worker(turns):
    loop = asyncio.get_running_loop()
    events = SimpleNamespace(storage_worked=lambda operation: None)
    control = SimpleNamespace(lose=lambda run: None)
    reports = OneReport(SimpleNamespace(storage=None, loop=loop, events=events, control=control))
    reports._schedule()
    for _ in range(turns):
        await asyncio.sleep(0)

    await reports.close()
    flushed, tasks = reports.flushed, asyncio.all_tasks()
    for _ in range(5):
        await asyncio.sleep(0)

    assert reports.flushed == flushed
    assert asyncio.all_tasks() == tasks
