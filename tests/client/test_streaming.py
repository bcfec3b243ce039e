"""`enqueue_and_stream`, `stream`: items of generator jobs."""

import asyncio
import gc
import threading
from contextlib import aclosing, contextmanager
from datetime import timedelta

import pytest

from djqueue import JobFailedError, Queue, ResultTimeoutError, Retry, StorageUnavailableError, Worker, job
from djqueue.client import streaming
from djqueue.core.job import Event
from djqueue.core.states import State
from djqueue.errors import JobNotFoundError, OptionError, QueueFullError, StreamRestartedError
from djqueue.testing.factories import claim_one, completing, emit, enqueue, finish
from tests.support import PATIENCE

VALUES = [None, False, 0, "", [], b"\xff\0", "x" * (1024 * 1024 - 10)]


@contextmanager
def working(*job_types, **handlers):
    handlers.update({job_type.name: job_type for job_type in job_types})
    with Worker(handlers=handlers, concurrency=4):
        yield


@pytest.fixture
def queue():
    return Queue("orders")


@pytest.fixture(params=["sync", "async"])
def collect(request):
    """All items of a stream, by the sync method or its async twin."""

    def call(thing, method, *args, into=None, **kwargs):
        found = [] if into is None else into
        if request.param == "sync":
            for item in getattr(thing, method)(*args, **kwargs):
                found.append(item)
            return found

        async def twin():
            async for item in getattr(thing, f"a{method}")(*args, **kwargs):
                found.append(item)

        asyncio.run(twin())
        return found

    return call


@pytest.fixture
def listeners(storage, monkeypatch):
    """How many subscriptions there are."""
    there = []
    subscribe = storage.events.subscribe

    def counting(*args):
        unsubscribe = subscribe(*args)
        there.append(args)

        def ended():
            unsubscribe()
            there.remove(args)

        return ended

    monkeypatch.setattr(storage.events, "subscribe", counting)
    return there


@pytest.fixture
def numbers():
    @job(name="numbers", queue="orders")
    def numbers(count, *, of="sync"):
        for number in range(count):
            yield of, number
        return f"{count} numbers"

    return numbers


def test_stream_returns_every_yielded_value(queue, collect):
    def handler(job):
        yield from VALUES

    with working(orders=handler):
        found = collect(queue, "enqueue_and_stream", 1, wait=PATIENCE)

    assert found == VALUES
    assert list(map(type, found)) == list(map(type, VALUES))


def test_job_type_stream_uses_options_and_arguments(numbers, collect):
    with working(numbers):
        found = collect(numbers, "enqueue_and_stream", 3, of="kwargs", wait=timedelta(seconds=PATIENCE))
        assert found == [("kwargs", 0), ("kwargs", 1), ("kwargs", 2)]
        named = numbers.using(id="the one")
        assert collect(named, "enqueue_and_stream", 1, wait=PATIENCE) == [("sync", 0)]

    assert collect(Queue("orders"), "stream", "the one", wait=0) == [("sync", 0)]


def test_result_of_enqueue_can_be_streamed(numbers, collect):
    with working(numbers):
        result = numbers.enqueue(2)
        assert collect(numbers, "stream", result, wait=PATIENCE) == [("sync", 0), ("sync", 1)]
        assert collect(numbers, "stream", result, wait=0) == [("sync", 0), ("sync", 1)]


def test_waiting_for_a_generator_job_returns_its_return_value(numbers, do):
    with working(numbers):
        assert do(numbers, "enqueue_and_wait", 3, wait=PATIENCE) == "3 numbers"


def test_stream_ends_with_the_return_value_of_the_job(numbers):
    with working(numbers):
        stream = numbers.enqueue_and_stream(2, wait=PATIENCE)
        assert [next(stream), next(stream)] == [("sync", 0), ("sync", 1)]
        with pytest.raises(StopIteration) as end:
            next(stream)

    assert end.value.value == "2 numbers"


def test_job_without_items_has_an_empty_stream(queue, collect):
    with working(orders=lambda job: "result"):
        assert collect(queue, "enqueue_and_stream", wait=PATIENCE) == []


def test_stream_enqueues_the_job_at_the_first_read(queue, storage):
    stream = queue.enqueue_and_stream()
    assert storage.reads.counts("orders")[State.WAITING] == 0
    with pytest.raises(ResultTimeoutError):
        list(queue.enqueue_and_stream(wait=0))
    assert storage.reads.counts("orders")[State.WAITING] == 1
    stream.close()


def test_items_arrive_while_the_generator_runs(queue):
    go_on = threading.Event()

    def handler(job):
        yield 1
        assert go_on.wait(PATIENCE)
        yield 2

    with working(orders=handler):
        stream = queue.enqueue_and_stream(wait=PATIENCE)
        assert next(stream) == 1
        go_on.set()
        assert list(stream) == [2]


async def test_items_arrive_at_a_coroutine_while_the_generator_runs(queue):
    go_on = asyncio.Event()

    async def handler(job):
        yield 1
        await go_on.wait()
        yield 2

    found = []
    async with Worker(handlers={"orders": handler}):
        async for item in queue.aenqueue_and_stream(wait=PATIENCE):
            found.append(item)
            go_on.set()

    assert found == [1, 2]


def test_failed_job_raises_after_its_items(queue, collect):
    def handler(job):
        yield 1
        raise ValueError("no such order")

    found = []
    with working(orders=handler), pytest.raises(JobFailedError) as caught:
        collect(queue, "enqueue_and_stream", into=found, wait=PATIENCE, max_attempts=1)

    assert found == [1]
    assert (caught.value.error_type, caught.value.error_message) == ("builtins.ValueError", "no such order")
    assert "no such order" in caught.value.traceback


def test_stream_raises_at_a_restart_unless_on_restart_is_continue(queue, collect):
    seen = threading.Event()

    def handler(job):
        yield "first", job.attempts
        if job.attempts == 1:
            assert seen.wait(PATIENCE)
            raise Retry(delay=0)
        yield "second", job.attempts

    def seeing(item):
        seen.set()
        return item

    class Seeing(list):
        def append(self, item):
            super().append(seeing(item))

    found = Seeing()
    with working(orders=handler):
        with pytest.raises(StreamRestartedError, match="1 item"):
            collect(queue, "enqueue_and_stream", into=found, wait=PATIENCE)
        assert found == [("first", 1)]
        seen.clear()
        found = Seeing()
        collect(queue, "enqueue_and_stream", into=found, wait=PATIENCE, on_restart="continue")

    assert found == [("first", 1), ("first", 2), ("second", 2)]


@pytest.mark.parametrize("wrong", [{"on_restart": "again"}, {"wait": -1}, {"wait": "soon"}])
def test_wrong_stream_arguments_are_rejected_immediately(queue, wrong):
    for method in (queue.stream, queue.astream, queue.enqueue_and_stream, queue.aenqueue_and_stream):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            method("an id", **wrong)


def test_stream_without_time_limit_reads_to_the_end(queue, collect, storage):
    with working(orders=lambda job: iter(())):
        pass
    run_id = enqueue(storage, queue="orders")
    run = claim_one(storage, queues=["orders"])
    emit(storage, run, b"\x01")
    finish(storage, completing(run))

    assert collect(queue, "stream", run_id, wait=None) == [1]


def test_abandoned_stream_unsubscribes(queue, storage, listeners):
    enqueue(storage, queue="orders", id="a")
    emit(storage, claim_one(storage, queues=["orders"]), b"\x01", b"\x02")

    for item in queue.stream("a"):
        assert item == 1
        assert len(listeners) == 1
        break
    if listeners:
        gc.collect()  # without reference counts, generators are closed by the collector
    assert listeners == []
    stream = queue.stream("a")
    assert next(stream) == 1
    stream.close()
    assert listeners == []


async def test_abandoned_async_stream_unsubscribes(queue, storage, listeners):
    enqueue(storage, queue="orders", id="a")
    emit(storage, claim_one(storage, queues=["orders"]), b"\x01", b"\x02")

    async with aclosing(queue.astream("a")) as stream:
        async for item in stream:
            assert item == 1
            assert len(listeners) == 1
            break

    assert listeners == []


def test_unread_stream_does_not_subscribe(queue, listeners):
    queue.stream("a")
    queue.astream("a")

    assert listeners == []


def test_slow_reader_does_not_block_the_job(queue):
    def handler(job):
        yield from range(5_000)
        return "done"

    with working(orders=handler):
        stream = queue.enqueue_and_stream(id="a", wait=PATIENCE)
        assert next(stream) == 0
        assert Queue("orders").enqueue_and_wait(id="a", wait=PATIENCE) == "done"
        assert list(stream) == list(range(1, 5_000))


def test_stream_reads_items_only_after_events(queue, storage, monkeypatch, collect):
    """Events alone cause reads: the slow poll behind them is far away."""
    monkeypatch.setattr(streaming, "CHECK_EVERY", 600)
    enqueue(storage, queue="orders", id="a")
    run = claim_one(storage, queues=["orders"])
    looks = 0
    items = storage.reads.items

    def counting(*args):
        nonlocal looks
        looks += 1
        page = items(*args)
        if looks == 1:
            threading.Timer(0.1, emit, (storage, run, b"\x01")).start()
        if looks == 2:
            threading.Timer(0.3, finish, (storage, completing(run))).start()
        return page

    monkeypatch.setattr(storage.reads, "items", counting)

    assert collect(queue, "stream", "a", wait=PATIENCE) == [1]
    assert looks == 3


def test_stream_recovers_from_a_lost_event_by_polling(queue, storage, monkeypatch, collect):
    monkeypatch.setattr(streaming, "CHECK_EVERY", 0.05)
    monkeypatch.setattr(storage.events, "subscribe", lambda *args: lambda: None)
    enqueue(storage, queue="orders", id="a")
    run = claim_one(storage, queues=["orders"])

    def work():
        emit(storage, run, b"\x01", b"\x02")
        finish(storage, completing(run))

    threading.Timer(0.1, work).start()

    assert collect(queue, "stream", "a", wait=PATIENCE) == [1, 2]


def test_stream_retries_an_unavailable_storage(queue, storage, monkeypatch, collect):
    enqueue(storage, queue="orders", id="a")
    run = claim_one(storage, queues=["orders"])
    emit(storage, run, b"\x01", b"\x02")
    finish(storage, completing(run))
    failures = iter([True, True, False, True, False, False])
    for name in ("items", "jobs"):
        verb = getattr(storage.reads, name)

        def failing(*args, verb=verb):
            if next(failures, False):
                raise StorageUnavailableError("a moment, please")
            return verb(*args)

        monkeypatch.setattr(storage.reads, name, failing)

    assert collect(queue, "stream", "a", wait=PATIENCE) == [1, 2]


def test_stream_timeout_during_an_outage_names_the_cause(queue, storage, monkeypatch, collect):
    def failing(*args):
        raise StorageUnavailableError("a moment, please")

    monkeypatch.setattr(storage.reads, "items", failing)

    with pytest.raises(ResultTimeoutError) as caught:
        collect(queue, "stream", "a", wait=0)

    assert isinstance(caught.value.__cause__, StorageUnavailableError)


def test_stream_of_job_that_cannot_be_enqueued_unsubscribes(storage, listeners, collect, monkeypatch):
    def full(batches):
        raise QueueFullError

    monkeypatch.setattr(storage, "enqueue", full)

    with pytest.raises(QueueFullError):
        collect(Queue("orders"), "enqueue_and_stream", wait=PATIENCE)

    assert listeners == []


def test_stream_of_unknown_job_raises(queue, collect):
    with pytest.raises(JobNotFoundError):
        collect(queue, "stream", "nobody", wait=PATIENCE)


def test_item_events_can_be_subscribed_to(queue, storage):
    told = []
    off = queue.on("item", told.append)
    run_id = enqueue(storage, queue="orders")
    emit(storage, claim_one(storage, queues=["orders"]), b"\x01", b"\x02")
    off()

    [event] = told
    assert isinstance(event, Event)
    assert (event.id, event.event, event.items) == (run_id, "item", 2)
