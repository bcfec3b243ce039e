"""The kombu transport, on a Redis and in memory."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from kombu.exceptions import OperationalError
from kombu.transport.base import Message

from djqueue.client.storages import use_storage
from djqueue.contrib.celery.broker import broker_for
from djqueue.contrib.celery.storages import location, storage_at
from djqueue.contrib.celery.values import EXCHANGES, MESSAGE
from djqueue.core.errors import ConfigurationError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.states import State
from djqueue.storage.base import Storage
from djqueue.storage.memory import MemoryStorage
from tests.servers import RedisServer
from tests.support import PATIENCE, eventually


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[str]:
    if request.param == "redis":
        redis_server.run("flushall")
        yield f"djqueue://127.0.0.1:{redis_server.port}/0"
        return
    storage = MemoryStorage()
    use_storage(lambda: storage)
    yield "djqueue://"
    import djqueue.client.storages as storages

    storages._make = None
    storages.close_storage()


@pytest.fixture
def connection(url: str) -> Iterator[kombu.Connection]:
    with kombu.Connection(url) as connection:
        yield connection


@pytest.fixture
def storage(connection: kombu.Connection) -> Storage:
    connection.connect()
    found: Storage = connection.transport.broker.storage
    return found


def take(connection: kombu.Connection, queue: kombu.Queue, count: int, **kwargs: Any) -> list[Any]:
    """Consume and acknowledge messages, and return their bodies."""
    bodies: list[Any] = []

    def received(body: Any, message: Message) -> None:
        bodies.append(body)
        message.ack()

    with connection.Consumer([queue], callbacks=[received], **kwargs):
        while len(bodies) < count:
            connection.drain_events(timeout=PATIENCE)
    return bodies


def test_message_is_an_active_job_until_it_is_acknowledged(
    connection: kombu.Connection, storage: Storage
) -> None:
    with connection.SimpleQueue("letters") as queue:
        queue.put({"to": "Ada"}, headers={"task": "shop.send"})
        (job,) = storage.reads.page("letters", State.WAITING, 10)
        message = queue.get(timeout=PATIENCE)
        states = storage.reads.counts("letters")
        message.ack()

    assert (job.name, job.options.tags, job.options.content_type) == (
        MESSAGE,
        ("shop.send",),
        "application/json",
    )
    assert b"Ada" in job.payload  # text is readable in the dashboard
    assert message.payload == {"to": "Ada"}
    assert states[State.ACTIVE] == 1
    storage.sweep()
    assert storage.reads.counts("letters")[State.ACTIVE] == 0


MALFORMED = (
    *(b"", b"\xff\xfe", b"\x81\xa1", b"nope", b"null", b"[1]", b"{}", b"[" * 100_000),
    *(
        b'{"properties": null}',
        b'{"properties": {}, "headers": [1]}',
        b'{"properties": {"delivery_info": 1}}',
    ),
    b'{"properties": {"body_encoding": "base64"}, "body": "x"}',
    b'{"properties": {}, "when": {"__type__": "datetime", "__value__": 1}}',
)
"""Payloads that kombu did not write."""


@pytest.mark.parametrize("is_consumer", [True, False])
def test_malformed_message_becomes_a_dead_letter_and_the_next_one_is_delivered(
    connection: kombu.Connection, storage: Storage, caplog: pytest.LogCaptureFixture, is_consumer: bool
) -> None:
    queue = kombu.Queue("letters", routing_key="letters")
    queue(connection.default_channel).declare()
    options = JobOptions(content_type="application/json", max_attempts=100)
    ids = [f"bad-{number}" for number in range(len(MALFORMED))]
    storage.enqueue([Batch("letters", MESSAGE, options, list(MALFORMED), ids)])
    connection.Producer().publish("hello", routing_key="letters")

    if is_consumer:
        assert take(connection, queue, 1) == ["hello"]
    else:
        message = connection.default_channel.basic_get("letters")
        assert message.payload == "hello"
        message.ack()

    letters = storage.reads.dead_letters("letters")
    assert {letter.id: letter.reason for letter in letters} == dict.fromkeys(ids, "invalid_payload")
    lines = [record for record in caplog.records if "cannot be read" in record.message]
    assert len(lines) == len(ids)


def test_maintenance_ends_without_consumers_and_held_messages(
    connection: kombu.Connection, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djqueue.contrib.celery.broker.MAINTENANCE_INTERVAL", 0.2)

    def is_maintained() -> bool:
        broker = connection.transport.broker
        return broker._maintenance is not None

    queue = kombu.Queue("letters", routing_key="letters")
    producer = connection.Producer()
    for _ in range(2):
        producer.publish("hello", routing_key="letters", declare=[queue])
        assert take(connection, queue, 1) == ["hello"]
        eventually(lambda: not is_maintained(), message="the maintenance has ended")

    producer.publish("hello", routing_key="letters")
    message = connection.default_channel.basic_get("letters")
    broker = connection.transport.broker
    assert is_maintained()
    broker._round()
    assert is_maintained(), "a message is held"
    message.ack()
    eventually(lambda: not is_maintained(), message="the maintenance has ended")


@pytest.mark.parametrize(
    ("direction", "expected"), [("lowest_first", [0, 3, 9]), ("highest_first", [9, 3, 0])]
)
def test_priority_direction_decides_the_order_of_messages(
    url: str, direction: str, expected: list[int]
) -> None:
    options = {"priority_direction": direction}
    with kombu.Connection(url, transport_options=options) as connection:
        queue = kombu.Queue("urgent", routing_key="urgent")
        producer = connection.Producer()
        for priority in (3, 9, 0):
            producer.publish(priority, routing_key="urgent", declare=[queue], priority=priority)

        assert take(connection, queue, 3) == expected


def test_message_that_is_not_delivered_before_its_expiration_is_a_dead_letter(
    connection: kombu.Connection, storage: Storage
) -> None:
    queue = kombu.Queue("letters", routing_key="letters")
    queue(connection.default_channel).declare()
    for body, expiration in (("late", 0.001), ("in time", 3_600), ("lasting", None)):
        connection.Producer().publish(body, routing_key="letters", expiration=expiration)
    eventually(lambda: storage.sweep() is not None and storage.reads.counts("letters")[State.FAILED] == 1)

    assert take(connection, queue, 2) == ["in time", "lasting"]
    (dead,) = storage.reads.page("letters", State.FAILED, 10)
    assert (dead.reason, dead.options.ttl) == ("ttl_expired", 1)


def test_unknown_priority_direction_is_rejected(url: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="'lowest_first' or 'highest_first'; got 'up'"),
        kombu.Connection(url, transport_options={"priority_direction": "up"}) as connection,
    ):
        connection.connect()


def test_exchanges_route_messages_between_connections(url: str, connection: kombu.Connection) -> None:
    direct = kombu.Exchange("direct", "direct")
    topic = kombu.Exchange("topic", "topic")
    fanout = kombu.Exchange("fanout", "fanout")
    queues = [
        kombu.Queue("a", direct, "one"),
        kombu.Queue("b", topic, "stock.*"),
        kombu.Queue("c", topic, "#"),
        kombu.Queue("d", fanout),
        kombu.Queue("e", fanout),
    ]
    for queue in queues:
        queue(connection.default_channel).declare()

    with kombu.Connection(url) as other:
        producer = other.Producer()
        for exchange, key in (
            (direct, "one"),
            (direct, "two"),
            (topic, "stock.us"),
            (topic, "x"),
            (fanout, ""),
        ):
            producer.publish(f"{exchange.name}:{key}", exchange=exchange, routing_key=key, declare=[exchange])

    got = {queue.name: take(connection, queue, 2 if queue.name == "c" else 1) for queue in queues}
    assert got == {
        "a": ["direct:one"],
        "b": ["topic:stock.us"],
        "c": ["topic:stock.us", "topic:x"],
        "d": ["fanout:"],
        "e": ["fanout:"],
    }


def test_prefetch_count_limits_unacknowledged_messages(connection: kombu.Connection) -> None:
    queue = kombu.Queue("work", routing_key="work")
    producer = connection.Producer()
    for number in range(3):
        producer.publish(number, routing_key="work", declare=[queue])
    messages: list[Message] = []

    with connection.Consumer(
        [queue], callbacks=[lambda _, message: messages.append(message)], prefetch_count=2
    ):
        while len(messages) < 2:
            connection.drain_events(timeout=PATIENCE)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        messages[0].ack()
        connection.drain_events(timeout=PATIENCE)

    assert [message.payload for message in messages] == [0, 1, 2]


def test_requeued_message_is_redelivered_and_rejected_one_is_a_dead_letter(
    connection: kombu.Connection, storage: Storage
) -> None:
    with connection.SimpleQueue("orders") as queue:
        queue.put("order")
        first = queue.get(timeout=PATIENCE)
        first.requeue()
        second = queue.get(timeout=PATIENCE)
        second.reject()

    assert "redelivered" not in first.delivery_info
    assert second.delivery_info["redelivered"] is True
    assert [dead.reason for dead in storage.reads.dead_letters("orders")] == ["explicit_fail"]


def test_closed_connection_returns_its_messages(url: str) -> None:
    with kombu.Connection(url) as first:
        queue = first.SimpleQueue("returned")
        queue.put("again")
        queue.get(timeout=PATIENCE)
        queue.consumer.channel.close()

    with kombu.Connection(url) as second, second.SimpleQueue("returned") as queue:
        message = queue.get(timeout=PATIENCE)
        message.ack()
        assert message.payload == "again"


def test_message_without_acknowledgement_is_removed_at_delivery(
    connection: kombu.Connection, storage: Storage
) -> None:
    with connection.SimpleQueue("events", no_ack=True) as queue:
        queue.put("event")
        message = queue.get(timeout=PATIENCE)
        message.channel.basic_ack(message.delivery_tag)

    assert message.payload == "event"
    assert storage.reads.counts("events")[State.ACTIVE] == 0


def test_queue_can_be_declared_read_purged_and_deleted(connection: kombu.Connection) -> None:
    channel = connection.default_channel
    queue = kombu.Queue("parcels", kombu.Exchange("post", "direct"), "parcel")(channel)
    with pytest.raises(connection.channel_errors):
        queue.queue_declare(passive=True)
    queue.declare()
    producer = connection.Producer()
    for number in range(2):
        producer.publish(number, exchange="post", routing_key="parcel")

    assert queue.queue_declare(passive=True).message_count == 2
    got = queue.get()
    assert got is not None
    got.ack()
    assert queue.purge() == 1
    assert queue.get() is None
    queue.delete()
    with pytest.raises(connection.channel_errors):
        queue.queue_declare(passive=True)


def test_queue_of_a_dead_consumer_expires_with_its_bindings_and_messages(
    connection: kombu.Connection, storage: Storage
) -> None:
    broker = broker_for(storage)
    fanout = kombu.Exchange("news", "fanout")
    queue = kombu.Queue("reader", fanout, expires=0.2, auto_delete=True)(connection.default_channel)
    queue.declare()
    connection.Producer().publish("unread", exchange=fanout)

    def is_gone() -> bool:
        storage.sweep()
        broker.routing.delete_expired()
        return not broker.routing.is_declared("reader")

    eventually(is_gone, message="the queue has expired")
    assert broker.routing.table("news") == []
    assert sum(storage.reads.counts("reader").values()) == 0


def test_transports_of_a_storage_share_its_broker_and_do_not_outlive_it() -> None:
    storage = MemoryStorage()
    broker = broker_for(storage)
    assert broker_for(storage) is broker
    left = weakref.ref(storage)

    del storage, broker
    gc.collect()

    assert left() is None


def test_queue_of_a_live_consumer_is_renewed(connection: kombu.Connection, storage: Storage) -> None:
    broker = broker_for(storage)
    queue = kombu.Queue("reader", kombu.Exchange("news", "fanout"), expires=0.3)
    with connection.Consumer([queue], callbacks=[lambda *_: None]):
        eventually(lambda: storage.sweep().promoted, message="the queue has expired")
        broker.routing.delete_expired()
        broker.renew_queues()

        assert broker.routing.is_declared("reader")
        assert [row.queue for row in broker.routing.table("news")] == ["reader"]


def test_table_of_an_exchange_is_a_delayed_job(connection: kombu.Connection, storage: Storage) -> None:
    kombu.Queue("a", kombu.Exchange("x", "direct"), "k")(connection.default_channel).declare()

    (job,) = storage.reads.page(EXCHANGES, State.DELAYED, 10)
    assert (job.id, job.payload) == ("x", b'[["k",null,"a"]]')


def test_unavailable_storage_is_a_connection_error() -> None:
    with kombu.Connection("djqueue://127.0.0.1:1/0") as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def test_url_determines_the_storage_and_its_options() -> None:
    where = location("redis.example.com", 6380, "app", "se/cret", "/2", {"ssl": True, "lease": 5})

    assert where.url == "rediss://app:se%2Fcret@redis.example.com:6380/2"
    assert where.options == (("lease", 5),)
    assert location(None, None, None, None, "/", {"lease": 5}) == location("", None, None, None, "", {})
    with pytest.raises(ConfigurationError, match="number of a Redis database"):
        location("localhost", None, None, None, "/jobs", {})


def test_storages_of_equal_urls_are_shared(redis_server: RedisServer) -> None:
    where = location("127.0.0.1", redis_server.port, None, None, "/0", {})

    assert storage_at(where) is storage_at(location("127.0.0.1", str(redis_server.port), "", "", "0", {}))
