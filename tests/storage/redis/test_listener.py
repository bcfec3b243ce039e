"""The pub/sub listener: subscriptions survive lost connections, failovers and forks."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.redis import pubsub
from djqueue.testing.waiting import together
from tests import servers
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.redis

THREAD = "djqueue-redis-listener"


class Place:
    """Servers of one kind, to publish on and to disturb."""

    def __init__(self, options: dict[str, Any], servers_of: Callable[[str], servers.RedisServer], nodes: Any):
        self.options = options
        self.nodes: list[servers.RedisServer] = nodes
        self._server_of = servers_of

    def publish(self, channel: str, message: str) -> int:
        """Publish; how many connections were told."""
        command = "SPUBLISH" if len(self.nodes) == 3 else "PUBLISH"
        return int(self._server_of(channel).run(command, channel, message))

    def kill(self) -> None:
        """End all subscribing connections."""
        for node in self.nodes:
            node.run("CLIENT", "KILL", "TYPE", "pubsub")

    def subscribers(self) -> int:
        """How many connections subscribe to something."""
        count = 0
        for node in self.nodes:
            with node.client() as client:
                count += len(client.client_list(_type="pubsub"))
        return count


@pytest.fixture
def single(redis_options, redis_server):
    return Place(redis_options, lambda _: redis_server, [redis_server])


@pytest.fixture
def sentinel(sentinel_options, redis_sentinel):
    return Place(sentinel_options, lambda _: redis_sentinel.master, redis_sentinel.nodes)


@pytest.fixture
def cluster(cluster_options, redis_cluster):
    return Place(cluster_options, redis_cluster.node_of, redis_cluster.nodes)


@pytest.fixture(params=["single", "cluster"])
def place(request):
    """Servers without and with sharding."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def listen(make_connections, make_listener):
    """Makes a listener to a place."""
    return lambda place, **options: make_listener(make_connections({**place.options, **options}))


class Heard:
    """A subscriber that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.reconnected: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __call__(self, message: bytes) -> None:
        self.messages.put(message)

    def missed(self) -> None:
        self.reconnected.put(None)

    def next(self) -> bytes:
        return self.messages.get(timeout=PATIENCE)

    def reconnects(self) -> bool:
        self.reconnected.get(timeout=PATIENCE)
        return True


@pytest.fixture
def threads():
    """Returns the names of this test's listener threads."""
    others = set(threading.enumerate())
    return lambda: [one.name for one in threading.enumerate() if one.name == THREAD and one not in others]


# Subscribing.


def test_every_subscriber_receives_every_message_of_its_channel(place, listen):
    listener = listen(place)
    first, second, other = Heard(), Heard(), Heard()
    listener.add("{a}:x", first)
    listener.add("{a}:x", second)
    listener.add("{b}:x", other)

    for number in range(3):
        place.publish("{a}:x", f"message {number}")
    place.publish("{b}:x", "another")

    expected = [b"message 0", b"message 1", b"message 2"]
    assert [first.next() for _ in range(3)] == [second.next() for _ in range(3)] == expected
    assert other.next() == b"another"
    assert first.messages.empty()


def test_message_published_right_after_subscribing_arrives(place, listen):
    listener = listen(place)
    heard = Heard()

    for number in range(100):
        remove = listener.add("channel", heard)
        assert place.publish("channel", str(number)) == 1
        assert heard.next() == str(number).encode()
        remove()


def test_many_channels_use_one_connection_per_node(place, listen):
    listener = listen(place)
    heard = Heard()
    channels = [f"channel {number}" for number in range(60)]

    together([lambda channel=channel: listener.add(channel, heard) for channel in channels])

    assert place.subscribers() == len(place.nodes)
    assert all(place.publish(channel, channel) == 1 for channel in channels)
    assert sorted(heard.next() for _ in channels) == sorted(map(str.encode, channels))


def test_removed_subscriber_receives_no_more_messages(place, listen):
    listener = listen(place)
    first, second = Heard(), Heard()
    remove = listener.add("channel", first)
    listener.add("channel", second)

    remove()
    remove()
    place.publish("channel", "message")

    assert second.next() == b"message"
    assert first.messages.empty()


def test_listener_thread_and_connections_end_with_the_last_subscription(place, listen, threads):
    listener = listen(place)
    removals = [listener.add(channel, Heard()) for channel in ("{a}", "{b}", "{c}", "{c}")]
    assert threads() == [THREAD]

    for remove in removals:
        remove()
    eventually(lambda: not threads() and not place.subscribers(), message="nothing is left")

    heard = Heard()
    listener.add("{a}", heard)
    place.publish("{a}", "message")
    assert heard.next() == b"message"


def test_connection_without_channels_is_closed(cluster, redis_cluster, listen):
    listener = listen(cluster)
    here = "{a}"
    there = next(
        f"{{{n}}}" for n in range(99) if redis_cluster.node_of(str(n)) is not redis_cluster.node_of("a")
    )
    listener.add(here, Heard())
    remove = listener.add(there, Heard())
    assert cluster.subscribers() == 2

    remove()

    eventually(lambda: cluster.subscribers() == 1, message="one connection is closed")


def test_closed_listener_accepts_new_subscriptions(place, listen, threads):
    listener = listen(place)
    first, second = Heard(), Heard()
    listener.add("channel", first)

    listener.close()
    listener.close()
    assert threads() == []
    listener.add("channel", second)
    place.publish("channel", "message")

    assert second.next() == b"message"
    assert first.messages.empty()


# Callbacks.


def test_failing_callback_is_logged_and_the_listener_continues(place, listen, caplog):
    listener = listen(place)
    heard = Heard()

    def fail(_: bytes) -> None:
        raise ValueError("of no use")

    listener.add("channel", fail)
    listener.add("channel", heard)

    place.publish("channel", "one")
    place.publish("channel", "two")

    assert [heard.next(), heard.next()] == [b"one", b"two"]
    assert [record.name for record in caplog.records if record.levelno == logging.ERROR] == [
        "djqueue.redis"
    ] * 2
    assert "of no use" in caplog.text


def test_callback_may_subscribe_and_unsubscribe(place, listen):
    listener = listen(place)
    heard, inner = Heard(), Heard()
    removals: list[Callable[[], None]] = []

    def change(message: bytes) -> None:
        removals.pop()()
        removals.append(listener.add(message.decode(), inner))
        heard(message)

    removals.append(listener.add("{b}", inner))
    listener.add("{a}", change)

    for number in range(20):
        place.publish("{a}", f"{{b}}{number}")
        assert heard.next() == f"{{b}}{number}".encode()
        assert place.publish(f"{{b}}{number}", "inner") == 1
        assert inner.next() == b"inner"


def test_messages_during_a_subscribing_callback_are_delivered_after_the_callback(place, listen):
    listener = listen(place)
    heard = Heard()
    started, go_on = threading.Event(), threading.Event()

    def subscribe(message: bytes) -> None:
        if message == b"first":
            started.set()
            assert go_on.wait(PATIENCE)
            listener.add("{a}:inner", Heard())
        heard(message)

    listener.add("{a}", subscribe)
    place.publish("{a}", "first")
    assert started.wait(PATIENCE)
    place.publish("{a}", "second")
    go_on.set()

    assert [heard.next(), heard.next()] == [b"first", b"second"]


def test_callback_may_close_the_listener(place, listen, threads):
    listener = listen(place)
    listener.add("channel", lambda _: listener.close())

    place.publish("channel", "message")

    eventually(lambda: not threads(), message="the thread has ended")


def test_threads_subscribe_and_unsubscribe_concurrently(place, listen, threads):
    listener = listen(place)

    def come_and_go(name: str) -> int:
        heard = Heard()
        for number in range(15):
            remove = listener.add(f"{{{name}}}", heard)
            shared = listener.add("{shared}", Heard())
            place.publish(f"{{{name}}}", str(number))
            assert heard.next() == str(number).encode()
            shared()
            remove()
        return heard.messages.qsize()

    assert together([lambda n=n: come_and_go(f"thread {n}") for n in range(4)]) == [0] * 4
    eventually(lambda: not threads(), message="the thread has ended")


# Lost connections.


def test_killed_connection_is_replaced_and_every_subscriber_notified(place, listen):
    listener = listen(place)
    subscribers = {channel: Heard() for channel in ("{a}", "{b}", "{c}", "{d}")}
    for channel, heard in subscribers.items():
        listener.add(channel, heard, heard.missed)

    for _ in range(2):
        place.kill()
        assert all(heard.reconnects() for heard in subscribers.values())
        for channel, heard in subscribers.items():
            place.publish(channel, channel)
            assert heard.next() == channel.encode()

    assert all(heard.reconnected.empty() for heard in subscribers.values())


def test_failing_reconnect_callback_is_logged_and_the_listener_continues(single, listen, caplog):
    listener = listen(single)
    heard = Heard()

    def fail() -> None:
        raise ValueError("of no use")

    listener.add("channel", heard, fail)
    listener.add("channel", heard, heard.missed)

    single.kill()

    assert heard.reconnects()
    assert "of no use" in caplog.text


def test_listener_survives_an_internal_error(single, listen, monkeypatch, caplog):
    listener = listen(single)
    heard = Heard()
    listener.add("channel", heard, heard.missed)

    def mistake(_: pubsub.PubSubConnection) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("by mistake")

    monkeypatch.setattr(pubsub.PubSubConnection, "check", mistake)
    single.publish("channel", "message")

    assert heard.reconnects()
    assert "by mistake" in caplog.text
    single.publish("channel", "another")
    assert heard.next() in (b"message", b"another")


def test_listener_resubscribes_to_a_restarted_server(single, redis_server, listen, caplog, threads):
    listener = listen(single)
    heard = Heard()
    listener.add("channel", heard, heard.missed)

    redis_server.stop()
    eventually(lambda: "could not subscribe" in caplog.text, message="the loss is noticed")
    redis_server.start()

    assert heard.reconnects()
    single.publish("channel", "message")
    assert heard.next() == b"message"
    assert threads() == [THREAD]


def test_listener_reconnects_after_a_silent_server(place, listen, monkeypatch, caplog):
    monkeypatch.setattr(pubsub, "PING_AFTER", 1)
    listener = listen(place)
    heard = Heard()
    listener.add("channel", heard, heard.missed)

    node = next(node for node in place.nodes if node.run("PUBSUB", "SHARDCHANNELS") or len(place.nodes) == 1)
    with node.frozen():
        eventually(lambda: "the server has been silent for 2 s" in caplog.text, message="it is noticed")

    assert heard.reconnects()
    monkeypatch.undo()
    eventually(lambda: place.publish("channel", "message") and not heard.messages.empty())
    assert heard.next() == b"message"


def test_listener_pings_a_quiet_server_and_stays_connected(place, listen, monkeypatch):
    monkeypatch.setattr(pubsub, "PING_AFTER", 2)
    listener = listen(place)
    heard = Heard()
    listener.add("channel", heard, heard.missed)

    def pings() -> int:
        found = 0
        for node in place.nodes:
            with node.client() as client:
                found += client.info("commandstats").get("cmdstat_ping", {}).get("calls", 0)
        return found

    before = pings()
    eventually(lambda: pings() > before + 1, message="signs of life are asked for")

    assert heard.reconnected.empty()
    assert place.publish("channel", "message") == 1
    assert heard.next() == b"message"


def test_listener_follows_a_failover(sentinel, redis_sentinel, listen):
    listener = listen(sentinel)
    heard = Heard()
    listener.add("channel", heard, heard.missed)

    redis_sentinel.fail_over()

    assert heard.reconnects()
    eventually(lambda: sentinel.publish("channel", "message"), message="the new master has the subscription")
    assert heard.next() == b"message"


def test_listener_follows_a_slot_to_its_new_node(cluster, redis_cluster, listen):
    listener = listen(cluster)
    moved, stays = Heard(), Heard()
    listener.add("{moves}:x", moved, moved.missed)
    listener.add("{a}:x", stays, stays.missed)

    for _ in range(2):
        redis_cluster.move_slot("{moves}:x", redis_cluster.other_than(redis_cluster.node_of("{moves}:x")))
        assert moved.reconnects()
        # It may reconnect once more while the nodes tell each other of the slot's new owner.
        eventually(lambda: cluster.publish("{moves}:x", "message") == 1, message="the new owner has it")
        assert moved.next() == b"message"

    assert stays.reconnected.empty()
    assert cluster.publish("{a}:x", "message") == 1


def test_listener_finds_a_slot_that_has_moved(cluster, redis_cluster, make_connections, make_listener):
    connections = make_connections(cluster.options)
    connections.sync()  # knows where slots are now
    redis_cluster.move_slot("{moved}", redis_cluster.other_than(redis_cluster.node_of("{moved}")))
    heard = Heard()

    make_listener(connections).add("{moved}", heard)

    assert cluster.publish("{moved}", "message") == 1
    assert heard.next() == b"message"


def test_unavailable_node_does_not_affect_subscriptions_of_other_nodes(cluster, redis_cluster, listen):
    listener = listen(cluster)
    here, away = Heard(), Heard()
    listener.add("{a}", here, here.missed)
    home = redis_cluster.node_of("{a}")
    node = redis_cluster.other_than(home)
    channel = next(f"{{{n}}}" for n in range(99) if redis_cluster.node_of(str(n)) is node)
    listener.add(channel, away, away.missed)

    node.stop()
    home.run("SPUBLISH", "{a}", "meanwhile")
    assert here.next() == b"meanwhile"
    redis_cluster.settle()

    assert away.reconnects()
    cluster.publish(channel, "message")
    assert away.next() == b"message"
    assert here.reconnected.empty()


# What is refused, or never comes.


def test_subscription_to_an_unavailable_server_fails_in_time(single, redis_server, listen, threads):
    listener = listen(single, TIMEOUT=0.3)
    redis_server.stop()
    start = time.monotonic()

    with pytest.raises(
        StorageUnavailableError, match=r"redis 127.0.0.1:\d+/0: could not subscribe: .*refused"
    ):
        listener.add("channel", Heard())

    assert time.monotonic() - start < PATIENCE / 2
    eventually(lambda: not threads(), message="the thread has ended")


def test_subscription_waits_for_a_frozen_server_to_resume(single, redis_server, listen):
    listener = listen(single)
    heard = Heard()
    adding = threading.Thread(target=lambda: listener.add("channel", heard))
    with redis_server.frozen():
        adding.start()
        eventually(lambda: listener._reader, message="it is being tried")

    adding.join(PATIENCE)
    assert not adding.is_alive()
    single.publish("channel", "message")

    assert heard.next() == b"message"


def test_subscription_to_a_forbidden_channel_fails_at_once(
    single, redis_server, make_connections, make_listener
):
    redis_server.run("ACL", "SETUSER", "worker", "on", "nopass", "~*", "resetchannels", "&allowed", "+@all")
    url = f"redis://worker:any@127.0.0.1:{redis_server.port}"
    listener = make_listener(make_connections({"URL": url}))
    heard = Heard()
    listener.add("allowed", heard)

    with pytest.raises(StorageUnavailableError, match=r"(?i)no permissions"):
        listener.add("forbidden", Heard())

    single.publish("allowed", "message")
    assert heard.next() == b"message"
    listener.close()
    redis_server.run("ACL", "DELUSER", "worker")


def test_closing_the_listener_fails_a_pending_subscription(single, redis_server, listen):
    listener = listen(single, TIMEOUT=2)
    errors: queue.SimpleQueue[StorageUnavailableError] = queue.SimpleQueue()

    def add() -> None:
        try:
            listener.add("channel", Heard())
        except StorageUnavailableError as error:
            errors.put(error)

    adding = threading.Thread(target=add)
    with redis_server.frozen():
        adding.start()
        eventually(lambda: listener._reader and listener._reader.channels, message="it is being tried")
        listener.close()

    assert "the listener has been closed" in str(errors.get(timeout=PATIENCE))
    adding.join()


# Forks.


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_forked_child_uses_its_own_listener_and_the_parent_continues(place, listen, threads):
    listener = listen(place)
    heard = Heard()
    listener.add("{a}", heard, heard.missed)
    read, write = os.pipe()

    child = os.fork()
    if child == 0:
        try:
            ours = Heard()
            before = threads()
            listener.add("{b}", ours)
            os.write(write, f"{len(before)} {len(threads())} ".encode())
            os.write(write, ours.next())
            listener.close()
        finally:
            os._exit(0)
    os.close(write)
    eventually(lambda: place.publish("{b}", "to the child"), message="the child has subscribed")
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as said:
        assert said.read() == b"0 1 to the child"

    assert place.publish("{a}", "to the parent") == 1
    assert heard.next() == b"to the parent"
    assert heard.reconnected.empty()
