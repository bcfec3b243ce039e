"""Calls to an unavailable Redis fail within TIMEOUT, and most of them at once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from djqueue.client import Queue
from djqueue.core.deadlines import within
from djqueue.core.errors import DjqueueError, StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.options import RedisOptions
from djqueue.testing.factories import NAME, QUEUE, batch, claim, completing, enqueue, finish, state
from tests.proxies import SlowProxy
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.redis

SLACK = 20.0
"""Seconds that a busy machine may add."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + SLACK, f"it took {took:.1f} s"


@contextmanager
def counted_requests(storage) -> Iterator[list]:
    """Yield the requests of a storage, each of which is one round trip."""
    exchange = storage._roundtrips._exchange
    ask, ask_many, requests = exchange.ask, exchange.ask_many, []
    exchange.ask = lambda words: requests.append(words) or ask(words)
    exchange.ask_many = lambda many: requests.append(many) or ask_many(many)
    yield requests
    exchange.ask, exchange.ask_many = ask, ask_many


@pytest.fixture
def open_storage():
    opened: list[RedisStorage] = []

    def open_one(url: str, **options):
        storage = RedisStorage(url=url, **options)
        opened.append(storage)
        return storage

    yield open_one
    for storage in opened:
        storage.close()


def reach(storage) -> None:
    """Enqueue a job, also on a busy machine, where connecting may take longer than TIMEOUT."""
    eventually(lambda: not isinstance(attempt(storage), DjqueueError))


async def areach(storage) -> None:
    """Async version of `reach`."""

    async def is_reached() -> bool:
        try:
            return bool(await storage.aenqueue([batch()]))
        except StorageUnavailableError:
            return False

    await aeventually(is_reached)


def test_default_timeout_is_at_most_two_seconds():
    assert RedisOptions().timeout <= 2


def test_refused_connection_fails_every_enqueue_at_once(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server.url)
    reach(storage)
    redis_server.stop()
    try:
        for _ in range(20):
            with at_most(0), pytest.raises(StorageUnavailableError, match="refused"):
                enqueue(storage)
    finally:
        redis_server.start()
    reach(storage)


def test_refused_connection_fails_enqueue_and_wait_at_once(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server.url)
    reach(storage)
    redis_server.stop()
    try:
        for _ in range(3):
            with at_most(0), pytest.raises(StorageUnavailableError, match="refused"):
                Queue(QUEUE, storage=storage).enqueue_and_wait(None, name="nothing", wait=30)
    finally:
        redis_server.start()


async def test_refused_connection_fails_every_async_enqueue_at_once(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server.url)
    await areach(storage)
    redis_server.stop()
    try:
        for _ in range(20):
            with at_most(0), pytest.raises(StorageUnavailableError, match=r"Error 111|refused"):
                await storage.aenqueue([batch()])
    finally:
        redis_server.start()
    await areach(storage)


def test_frozen_server_delays_one_caller_and_fails_the_others_at_once(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server.url)
    reach(storage)
    assert storage.outage is None
    with redis_server.frozen():
        with at_most(2), pytest.raises(StorageUnavailableError):
            enqueue(storage)
        assert storage.outage is not None
        began = time.monotonic()
        for _ in range(30):
            with pytest.raises(StorageUnavailableError):
                enqueue(storage)
        # Some of them may be probes. If each waited, all would take a minute.
        assert time.monotonic() - began < 2 + SLACK
    eventually(lambda: not isinstance(attempt(storage), DjqueueError))
    assert storage.outage is None


async def test_frozen_server_delays_one_coroutine_and_fails_the_others_at_once(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server.url)
    await areach(storage)
    with redis_server.frozen():
        with at_most(2), pytest.raises(StorageUnavailableError):
            await storage.aenqueue([batch()])
        began = time.monotonic()
        for _ in range(30):
            with pytest.raises(StorageUnavailableError):
                await storage.aenqueue([batch()])
        assert time.monotonic() - began < 2 + SLACK


def test_many_threads_share_one_deadline_of_a_frozen_server(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server.url)
    reach(storage)
    failed = []

    def try_it() -> None:
        failed.append(attempt(storage))

    threads = [Thread(target=try_it) for _ in range(20)]
    with redis_server.frozen(), at_most(2.5):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(isinstance(error, StorageUnavailableError) for error in failed)


def test_enqueue_and_wait_ends_at_its_own_deadline(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server.url)
    reach(storage)
    with redis_server.frozen(), at_most(1), pytest.raises(DjqueueError):
        Queue(QUEUE, storage=storage).enqueue_and_wait(None, name="nothing", wait=1)


@pytest.mark.parametrize("is_known", [False, True])
def test_calls_fail_at_the_timeout_when_the_network_drops_packets(
    redis_options, redis_server, open_storage, is_known
):
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url)
        if is_known:
            reach(storage)
        proxy.swallow()
        with at_most(2), pytest.raises(StorageUnavailableError):
            enqueue(storage)
        with at_most(2), pytest.raises(StorageUnavailableError):
            storage.reads.overview()
        storage.close()


def test_enqueue_of_many_slow_round_trips_fails_at_the_timeout(redis_options, redis_server, open_storage):
    with SlowProxy(redis_server.port, delay=0.8) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=1)
        with at_most(1), pytest.raises(StorageUnavailableError):
            enqueue(storage)
        storage.close()


def test_each_step_of_a_new_connection_may_take_the_whole_timeout(redis_options, redis_server, open_storage):
    with SlowProxy(redis_server.port, delay=1.5) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=5)
        began = time.monotonic()
        assert storage.reads.states(QUEUE, ["none"]) == [None]
        assert time.monotonic() - began > 5
        storage.close()


def test_enqueue_and_read_make_one_round_trip_each_to_a_slow_server(
    redis_options, redis_server, open_storage
):
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=25)
        reach(storage)
        with counted_requests(storage) as requests:
            proxy.slow_down(1.0)
            job_id = enqueue(storage)
            assert state(storage, job_id) is State.WAITING
        assert len(requests) == 2
        storage.close()


def test_pause_makes_one_round_trip_to_a_slow_server(redis_options, redis_server, open_storage):
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=25)
        reach(storage)
        proxy.slow_down(0.8)
        with counted_requests(storage) as requests:
            storage.queues.pause(QUEUE)
        assert len(requests) == 1
        assert storage.queues.is_paused(QUEUE)
        storage.queues.resume(QUEUE)
        assert not storage.queues.is_paused(QUEUE)
        storage.close()


def test_pause_fails_at_the_timeout_of_a_slow_server(redis_options, redis_server, open_storage):
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=1)
        reach(storage)
        proxy.slow_down(1.5)
        with at_most(1), pytest.raises(StorageUnavailableError, match="does not answer"):
            storage.queues.pause(QUEUE)
        assert storage.outage is not None
        storage.close()


def test_enqueue_and_wait_returns_the_result_from_a_slow_server(redis_options, redis_server, open_storage):
    direct = open_storage(redis_server.url, TIMEOUT=25)
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=25)
        enqueue(storage, queue="slow")
        proxy.slow_down(1.0)
        queue = Queue("slow", storage=storage)
        ended = Thread(target=run_both, args=(direct, "slow"))
        ended.start()
        try:
            assert queue.enqueue_and_wait(None, name="nothing", wait=PATIENCE) == "result"
        finally:
            ended.join()
        storage.close()


async def test_async_enqueue_and_wait_returns_the_result_from_a_slow_server(
    redis_options, redis_server, open_storage
):
    direct = open_storage(redis_server.url, TIMEOUT=25)
    with SlowProxy(redis_server.port) as proxy:
        storage = open_storage(proxy.url, TIMEOUT=25)
        await storage.aenqueue([batch(queue="slow")])
        proxy.slow_down(1.0)
        queue = Queue("slow", storage=storage)
        ended = Thread(target=run_both, args=(direct, "slow"))
        ended.start()
        try:
            assert await queue.aenqueue_and_wait(None, name="nothing", wait=PATIENCE) == "result"
        finally:
            ended.join()
        storage.close()


def run_both(storage, queue):
    """Complete the job that is there and the one that comes."""
    eventually(lambda: storage.reads.counts(queue)[State.WAITING] == 2)
    names = ["nothing", NAME]
    finish(storage, *map(completing, claim(storage, 2, queues=(queue,), names=names)))


def test_enqueue_with_a_late_reply_takes_effect_once(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server.url, TIMEOUT=5)
    given = batch(count=1)._replace(ids=["the-one"])
    reach(storage)
    with redis_server.frozen(), pytest.raises(StorageUnavailableError):
        storage.enqueue([given])
    eventually(lambda: not isinstance(attempt(storage), DjqueueError))
    [answer] = storage.enqueue([given])
    assert answer.status in ("queued", "duplicate")
    assert storage.reads.states(QUEUE, ["the-one"]) == [State.WAITING]


def test_second_call_to_a_frozen_cluster_node_fails_at_once(cluster_options, redis_cluster):
    storage = RedisStorage(**{**cluster_options, "TIMEOUT": 2})
    try:
        reach(storage)
        with redis_cluster.node_of(f"{{q:{QUEUE}}}").frozen():
            with at_most(2.5), pytest.raises(StorageUnavailableError):
                enqueue(storage)
            with at_most(0), pytest.raises(StorageUnavailableError, match="has been unavailable for"):
                enqueue(storage)
        eventually(lambda: not isinstance(attempt(storage), DjqueueError))
    finally:
        storage.close()


def attempt(storage, queue=QUEUE):
    try:
        return enqueue(storage, queue=queue)
    except StorageUnavailableError as error:
        return error


def test_call_with_little_time_that_probes_in_vain_lets_other_calls_probe(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server.url)
    reach(storage)

    def probe_briefly() -> str:
        with within(0.1), pytest.raises(StorageUnavailableError) as raised:
            storage.probe()
        return str(raised.value)

    with redis_server.frozen():
        assert isinstance(attempt(storage), StorageUnavailableError)
        assert "retrying soon" in probe_briefly()
        eventually(lambda: "retrying soon" not in probe_briefly())
        breaker = storage._roundtrips._breakers[""]
        assert breaker.enter(at_once=True)
        breaker.gave_up()
    reach(storage)
