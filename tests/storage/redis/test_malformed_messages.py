"""A malformed message on a channel is dropped; subscribers and workers go on."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis

from djqueue import Worker
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.subscriptions import malformed
from djqueue.testing.factories import NAME, QUEUE, enqueue
from tests import servers
from tests.support import eventually

pytestmark = pytest.mark.redis

MESSAGES = [
    b"",
    b"hello",
    b"\xff\xfe\x00",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\x91" * 100_000,
    b"a" * 1_000_000,
    *map(
        msgpack.packb,
        [1, None, {"a": 1}, [1], [[]], [["a", "b", "c", "d", 1]], [[1, 2, 3, "waiting", 1]]],
    ),
    msgpack.packb([["a", "b", "c", "waiting", 1, 2, 3, 4]]),
    msgpack.packb([["a", "b", "c", "waiting", "soon"]]),
]
"""Messages that no script publishes."""


@pytest.fixture
def storage(redis_options: dict[str, Any]) -> Iterator[RedisStorage]:
    made = RedisStorage(**redis_options)
    malformed._kinds.clear()
    yield made
    made.close()


@pytest.fixture
def client(redis_server: servers.RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=redis_server.port) as made:
        yield made


def test_malformed_events_are_dropped_with_one_line(
    storage: RedisStorage, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Any] = []
    storage.events.subscribe(QUEUE, received.append)

    with caplog.at_level(logging.DEBUG, logger="djqueue"):
        for message in MESSAGES:
            client.publish(storage.keys(QUEUE).events, message)
        job_id = enqueue(storage)
        eventually(lambda: received)

    assert [event.id for event in received] == [job_id]
    [line] = caplog.records
    assert line.getMessage().startswith(
        f"Dropped a malformed message on the channel of events of queue '{QUEUE}': "
    )
    assert line.exc_info is None


def test_malformed_messages_about_queues_and_commands_do_not_stop_a_worker(
    storage: RedisStorage, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    channels = ["{djqueue}:new-queues", "{djqueue}:commands", storage.keys(QUEUE).wake]
    enqueue(storage, name="warm up")
    handlers = {NAME: lambda job: None, "warm up": lambda job: None}
    with Worker(storage, handlers=handlers, maintain=False):
        eventually(lambda: storage.reads.counts(QUEUE)[State.COMPLETED] == 1)
        for message in MESSAGES:
            for channel in channels:
                client.publish(channel, message)
        enqueue(storage, queue="new")
        eventually(lambda: storage.reads.counts("new")[State.COMPLETED] == 1)

        assert [record for record in caplog.records if record.exc_info] == []
        subscribed = set(client.pubsub_channels())
        assert not any(message in channel for message in (b"hello", b"aaaa") for channel in subscribed)


def test_messages_about_many_new_queues_start_one_thread(storage: RedisStorage, client: redis.Redis) -> None:
    stop = storage.listen(None, lambda: None)
    for _ in range(200):
        client.publish("{djqueue}:new-queues", "x")

    enqueue(storage, queue="new")
    eventually(lambda: storage.keys("new").wake.encode() in client.pubsub_channels())

    named = [thread.name for thread in threading.enumerate() if thread.name == "djqueue-redis-queues"]
    assert len(named) <= 1
    stop()


def test_channels_of_obliterated_queues_are_left(storage: RedisStorage, client: redis.Redis) -> None:
    enqueue(storage, queue="old")
    stop = storage.listen(None, lambda: None)
    channel = storage.keys("old").wake.encode()
    eventually(lambda: channel in client.pubsub_channels())
    storage.queues.obliterate("old")

    enqueue(storage, queue="new")

    eventually(lambda: channel not in client.pubsub_channels())
    stop()
