"""Failovers under load with real sentinels, and durable enqueues, which replicas confirm."""

import asyncio
import socket
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import redis

from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.connections import Connections
from djqueue.storage.redis.exchange import Exchange
from djqueue.storage.redis.failover import PROMOTED, PROMOTING, SWITCHED, FailoverWatch
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.redis

ALMOST_NONE = 5
LATE = 0.5
"""Seconds of enqueues that a planned failover may lose, besides a few jobs, where the announcement of the
promotion arrives late: replication is asynchronous. Without the pause, it is a second of them, or more.
"""


def allowed(acknowledged: int, since: float) -> int:
    """Return how many jobs may be lost, if so many have been acknowledged since a moment."""
    return ALMOST_NONE + int(LATE * acknowledged / (time.monotonic() - since))


class Producer:
    """A thread that enqueues one job after another and keeps the ids that were acknowledged."""

    def __init__(self, storage: RedisStorage, *, durable: bool | None = None) -> None:
        self.acknowledged: list[str] = []
        self.refused = 0
        self._storage = storage
        self._durable = durable
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> "Producer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _produce(self) -> None:
        number = 0
        while not self._over.is_set():
            number += 1
            job_id = f"job-{number}"
            try:
                self._storage.enqueue([batch(job_id, durable=self._durable)])
            except StorageError:
                self.refused += 1
            else:
                self.acknowledged.append(job_id)


def batch(job_id: str, *, durable: bool | None = None) -> Batch:
    return Batch("default", "job", JobOptions(durable=durable), [b"\x90"], [job_id])


def lost(storage: RedisStorage, ids: list[str]) -> list[str]:
    """The jobs that the storage does not know."""
    states = storage.reads.states("default", ids)
    return [job_id for job_id, state in zip(ids, states, strict=True) if state is None]


def test_enqueues_pause_during_a_planned_failover(sentinel_options, redis_sentinel):
    with closing(RedisStorage(**sentinel_options)) as storage:
        began = time.monotonic()
        with Producer(storage) as producer:
            eventually(lambda: len(producer.acknowledged) > 100, message="jobs come in")
            limit = allowed(len(producer.acknowledged), began)
            redis_sentinel.fail_over()
            enough = len(producer.acknowledged) + 100
            eventually(lambda: len(producer.acknowledged) > enough, message="the new master takes jobs")

        assert len(lost(storage, producer.acknowledged)) <= limit
        assert producer.refused == 0


def test_enqueues_of_a_coroutine_pause_during_a_planned_failover(sentinel_options, redis_sentinel):
    acknowledged: list[str] = []
    began = time.monotonic()

    async def produce(storage: RedisStorage, over: asyncio.Event) -> None:
        while not over.is_set():
            job_id = f"job-{len(acknowledged)}"
            await storage.aenqueue([batch(job_id)])
            acknowledged.append(job_id)

    async def run(storage: RedisStorage) -> int:
        over = asyncio.Event()
        producing = asyncio.create_task(produce(storage, over))
        await aeventually(lambda: len(acknowledged) > 100, message="jobs come in")
        limit = allowed(len(acknowledged), began)
        await asyncio.to_thread(redis_sentinel.fail_over)
        enough = len(acknowledged) + 100
        await aeventually(lambda: len(acknowledged) > enough, message="the new master takes jobs")
        over.set()
        await producing
        return limit

    with closing(RedisStorage(**sentinel_options)) as storage:
        # The loop's end closes its connections.
        limit = asyncio.run(run(storage))

        assert len(lost(storage, acknowledged)) <= limit


def test_calls_wait_from_before_the_promotion_until_the_new_master_is_known():
    watch = FailoverWatch("jobs", (("127.0.0.1", 1),), {})
    epoch = watch.epoch

    watch.hear(
        "+failover-state-send-slaveof-noone", "slave 10.0.0.2:6379 10.0.0.2 6379 @ other 10.0.0.9 6379"
    )
    watch.check()
    watch.hear(PROMOTING, "slave 10.0.0.2:6379 10.0.0.2 6379 @ jobs 10.0.0.1 6379")
    with pytest.raises(redis.ConnectionError, match="failing over jobs"):
        watch.check()
    watch.hear(PROMOTED, "slave 10.0.0.2:6379 10.0.0.2 6379 @ jobs 10.0.0.1 6379")
    watch.check()
    watch.hear(SWITCHED, "jobs 10.0.0.1 6379 10.0.0.2 6379")

    assert watch.announced == ("10.0.0.2", 6379)
    assert watch.epoch == epoch + 1


def test_calls_continue_after_an_aborted_failover():
    watch = FailoverWatch("jobs", (("127.0.0.1", 1),), {})

    watch.hear(PROMOTING, "slave 10.0.0.2:6379 10.0.0.2 6379 @ jobs 10.0.0.1 6379")
    watch.hear("-failover-abort-slave-timeout", "master jobs 10.0.0.1 6379")

    watch.check()
    assert watch.announced is None


def test_missed_failover_is_noticed_when_a_sentinel_answers_again():
    watch = FailoverWatch("jobs", (("127.0.0.1", 1),), {})
    watch.compare(("10.0.0.1", 6379))
    epoch = watch.epoch

    watch.compare(("10.0.0.2", 6379))

    assert watch.epoch == epoch + 1
    assert watch.announced == ("10.0.0.2", 6379)


def test_connection_to_a_replica_is_refused(sentinel_options, redis_sentinel):
    with closing(Connections(sentinel_options)) as connections:
        pool: Any = connections.sync().connection_pool
        connection = pool.connection_class(**pool.connection_kwargs)

        with pytest.raises(redis.ConnectionError, match="is not the master"):
            connection.connect_to(redis_sentinel.replica.address)

        assert not connection.is_connected


def test_durable_enqueue_returns_when_a_replica_has_the_job(sentinel_options, redis_sentinel):
    with closing(RedisStorage(**sentinel_options)) as storage:
        [result] = storage.enqueue([batch("one", durable=True)])
        [again] = storage.enqueue([batch("one", durable=True)])

    assert (result.status, again.status) == ("queued", "duplicate")
    assert redis_sentinel.replica.run("HEXISTS", "{q:default}:jobs", "one") == 1


async def test_durable_enqueue_fails_without_a_responding_replica(sentinel_options, redis_sentinel):
    with (
        closing(RedisStorage(**{**sentinel_options, "TIMEOUT": 4})) as storage,
        redis_sentinel.replica.frozen(),
    ):
        errors = await asyncio.gather(
            asyncio.to_thread(storage.enqueue, [batch("one", durable=True)]),
            storage.aenqueue([batch("two", durable=True)]),
            return_exceptions=True,
        )
        [plain] = storage.enqueue([batch("three")])

    for error in errors:
        assert isinstance(error, StorageUnavailableError)
        assert "0 of 1 replicas confirmed" in str(error)
    assert plain.status == "queued"


def test_error_of_an_unconfirmed_durable_enqueue_contains_the_generated_ids(sentinel_options, redis_sentinel):
    with (
        closing(RedisStorage(**{**sentinel_options, "TIMEOUT": 3})) as storage,
        redis_sentinel.replica.frozen(),
    ):
        with pytest.raises(StorageUnavailableError, match="0 of 1 replicas confirmed") as refused:
            storage.enqueue([batch("", durable=True)._replace(ids=None)])
        [record] = storage.reads.page("default", State.WAITING, 5)

    assert record.id in str(refused.value)


def test_repeated_durable_enqueue_waits_only_for_the_remaining_time(
    sentinel_options, redis_sentinel, monkeypatch
):
    patiences = []
    ask = Exchange.ask_replicated

    def failing_once(self, words, key, replicas, patience):
        patiences.append(patience)
        if len(patiences) == 1:
            raise redis.ConnectionError("the connection was lost")
        return ask(self, words, key, replicas, patience)

    monkeypatch.setattr(Exchange, "ask_replicated", failing_once)
    with closing(RedisStorage(**sentinel_options)) as storage:
        [result] = storage.enqueue([batch("one", durable=True)])

    assert result.status == "queued"
    assert patiences[1] < patiences[0]


def test_durable_enqueue_to_a_cluster_requires_the_configured_number_of_replicas(cluster_options):
    with closing(RedisStorage(**cluster_options)) as storage:
        [result] = storage.enqueue([batch("one", durable=True)])
    with (
        closing(RedisStorage(**{**cluster_options, "REPLICAS": 1, "TIMEOUT": 4})) as storage,
        pytest.raises(StorageUnavailableError, match="0 of 1 replicas confirmed"),
    ):
        storage.enqueue([batch("two", durable=True)])

    assert result.status == "queued"


def test_silent_sentinel_does_not_delay_messages_of_the_other_sentinels(sentinel_options, redis_sentinel):
    sentinel = redis_sentinel.sentinels[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = (silent.getsockname(), sentinel.address)
        watch = FailoverWatch(redis_sentinel.master_name, addresses, {"socket_timeout": 30, "protocol": 2})
        watch.start()
        try:
            followed = threading.Thread(target=redis_sentinel.fail_over)
            eventually(lambda: watch._known is not None, message="the sentinel is followed")
            followed.start()

            eventually(lambda: is_paused(watch) or watch.announced is not None, message="it is heard")
            followed.join()
        finally:
            watch.close()


def is_paused(watch: FailoverWatch) -> bool:
    try:
        watch.check()
    except redis.ConnectionError:
        return True
    return False


def test_failover_between_a_sentinel_reply_and_the_connection_is_noticed(sentinel_options, redis_sentinel):
    with closing(Connections(sentinel_options)) as connections:
        pool: Any = connections.sync().connection_pool
        watch = connections.watch
        connection = pool.connection_class(**pool.connection_kwargs)
        discover = pool.sentinel_manager.discover_master

        def discover_too_early(name: str) -> Any:
            address = discover(name)
            watch.epoch += 1
            return address

        pool.sentinel_manager.discover_master = discover_too_early
        with pytest.raises(redis.ConnectionError, match="was replaced as the master"):
            connection.connect()

        assert not connection.is_connected
        pool.sentinel_manager.discover_master = discover
        connection.connect()
        connection.disconnect()


def test_failover_watch_can_be_started_again_after_close(sentinel_options, redis_sentinel):
    watch = FailoverWatch(redis_sentinel.master_name, (redis_sentinel.sentinels[0].address,), {"protocol": 2})
    watch.start()
    eventually(lambda: len(watch._threads) == 3, message="the other sentinels are followed, too")
    threads = list(watch._threads.values())
    watch.close()
    eventually(lambda: not any(thread.is_alive() for thread in threads), message="the threads have ended")

    watch.start()

    eventually(lambda: len(watch._threads) == 3, message="they are followed again")
    watch.close()
