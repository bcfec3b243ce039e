"""Redis clients: sharing, closing, lost replies, failovers, moving slots and forks."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis

from djqueue.core.errors import StorageUnavailableError
from djqueue.testing.waiting import together
from tests import servers
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.redis

# Counts, and then keeps the server busy for a while: its answer comes too late.
SLOW_COUNT = """
local count = redis.call('INCR', KEYS[1])
local now = redis.call('TIME')
local start = now[1] * 1000000 + now[2]
repeat now = redis.call('TIME') until now[1] * 1000000 + now[2] - start > 300000
return count
"""

KINDS = ("redis_options", "sentinel_options", "cluster_options")
OURS = "djqueue"
"""What the server knows our connections as."""


@pytest.fixture(params=KINDS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The OPTIONS for each kind of server."""
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> list[servers.RedisServer]:
    """The servers that `options` or one of its kinds means."""
    if "redis_server" in request.fixturenames:
        return [request.getfixturevalue("redis_server")]
    kind = "redis_sentinel" if "redis_sentinel" in request.fixturenames else "redis_cluster"
    group: servers.RedisSentinel | servers.RedisCluster = request.getfixturevalue(kind)
    return group.nodes


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that complains of everything that is left open."""
    command = [sys.executable, "-X", "dev", "-c", script]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment
    )


def connected(nodes: list[servers.RedisServer]) -> int:
    """How many connections of ours servers have."""
    count = 0
    for node in nodes:
        with node.client() as client:
            count += sum(entry["name"] == OURS for entry in client.client_list())
    return count


# Clients of threads.


def test_threads_of_a_process_share_one_client(options, make_connections):
    connections = make_connections(options)

    clients = together([connections.sync] * 10)

    assert all(client is clients[0] for client in clients)


def test_hundred_threads_use_one_client_concurrently(options, make_connections):
    connections = make_connections(options)

    answers = together([lambda: connections.sync().incr("count")] * 100)

    assert sorted(answers) == list(range(1, 101))


def test_threads_wait_for_a_free_connection_of_the_pool(redis_options, nodes, make_connections):
    connections = make_connections({**redis_options, "CONNECTION": {"max_connections": 2}})

    answers = together([lambda: connections.sync().incr("count")] * 50)

    assert sorted(answers) == list(range(1, 51))
    assert connected(nodes) <= 2


def test_closed_connections_reopen_at_the_next_use(options, nodes, make_connections):
    connections = make_connections(options)
    first = connections.sync()
    first.set("key", "value")
    assert connected(nodes)

    connections.close()
    connections.close()

    eventually(lambda: not connected(nodes), message="all connections are closed")
    assert connections.sync() is not first
    assert connections.sync().get("key") == b"value"


@pytest.mark.slow
def test_process_end_closes_connections_without_warnings(request):
    script = """
import asyncio
from djqueue.storage.redis.connections import Connections

every = [Connections(options) for options in %r]
for connections in every:
    connections.sync().set("key", "value")

async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no news
    return [await connections.for_loop().get("key") for connections in every]

print(asyncio.run(main()))
"""
    done = in_a_process(script % ([request.getfixturevalue(kind) for kind in KINDS],))

    assert (done.stdout, done.stderr) == (f"{[b'value'] * len(KINDS)}\n", "")


# Clients of event loops.


async def test_each_event_loop_has_its_own_client(options, make_connections):
    connections = make_connections(options)
    client = connections.for_loop()

    async def of_another_loop() -> Any:
        other = connections.for_loop()
        await other.execute_command(b"SET", b"key", b"value")
        return other

    assert connections.for_loop() is client
    assert await asyncio.to_thread(lambda: asyncio.run(of_another_loop())) is not client
    assert await client.execute_command("GET", "key") == b"value"


def test_ended_event_loop_closes_its_client(options, nodes, make_connections):
    connections = make_connections(options)

    async def use() -> Any:
        await connections.for_loop().set("key", "value")
        assert connected(nodes)
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(use())

    eventually(lambda: not connected(nodes), message="all connections are closed")
    gc.collect()
    assert loop() is None, "the connections keep the loop"


async def test_close_closes_the_client_of_a_running_event_loop(options, nodes, make_connections):
    connections = make_connections(options)
    client = connections.for_loop()
    await client.set("key", "value")

    connections.close()

    await aeventually(lambda: not connected(nodes), message="all connections are closed")
    assert connections.for_loop() is not client
    assert await connections.for_loop().get("key") == b"value"


async def test_hundred_coroutines_use_one_client_concurrently(options, make_connections):
    client = make_connections(options).for_loop()

    answers = await asyncio.gather(*(client.incr("count") for _ in range(100)))

    assert sorted(answers) == list(range(1, 101))


async def test_reply_of_a_cancelled_call_is_not_read_by_the_next_call(options, make_connections):
    client = make_connections(options).for_loop()
    call = asyncio.create_task(client.eval(SLOW_COUNT, 1, "count"))
    await aeventually(lambda: client.get("count"), message="the script has run")
    call.cancel()

    answers = await asyncio.gather(*(client.execute_command("GET", f"{{count}}{i}") for i in range(3)))

    assert answers == [None] * 3


# What is lost, and what is late.


def test_command_with_a_lost_reply_is_not_sent_again(options, nodes, make_connections):
    connections = make_connections({**options, "TIMEOUT": 0.1})
    client = eventually(lambda: reached(connections), message="the server of the key is connected to")

    def is_lost() -> bool:
        """Return False on a busy machine that receives the answer before it sees that it is late."""
        forget_count(nodes)
        with suppress(redis.ConnectionError):
            try:
                client.eval(SLOW_COUNT, 1, "count")
            except redis.TimeoutError:
                return bool(counted(nodes))
        return False

    eventually(is_lost, message="an answer is lost")
    assert eventually(lambda: counted(nodes)) == ["1"]


async def test_event_loop_client_does_not_resend_a_command_with_a_lost_reply(
    options, nodes, make_connections
):
    client = make_connections({**options, "TIMEOUT": 0.1}).for_loop()
    await aeventually(lambda: areached(client), message="the server of the key is connected to")

    async def is_lost() -> bool:
        forget_count(nodes)
        with suppress(redis.ConnectionError):
            try:
                await client.eval(SLOW_COUNT, 1, "count")
            except redis.TimeoutError:
                return bool(counted(nodes))
        return False

    await aeventually(is_lost, message="an answer is lost")
    assert await aeventually(lambda: counted(nodes)) == ["1"]


def reached(connections: Any) -> Any:
    """The client, when it has a connection to the server of the key: on a busy machine that, too, takes long,
    and a timeout would come before the command was sent.
    """
    with suppress(redis.RedisError):
        client = connections.sync()
        client.get("count")
        return client
    return None


async def areached(client: Any) -> bool:
    """Whether the client of a loop has that connection; see `reached`."""
    with suppress(redis.RedisError):
        await client.get("count")
        return True
    return False


def forget_count(nodes: list[servers.RedisServer]) -> None:
    """Delete what the script has counted, after it has ended."""
    for node in nodes:
        with suppress(redis.ResponseError), node.client() as client:
            client.delete("count")


def counted(nodes: list[servers.RedisServer]) -> list[str]:
    """What the script has counted, on the servers that have it and that do not run it any more."""
    found = []
    for node in nodes:
        with node.client() as client:
            if client.info("replication")["role"] == "master" and client.keys("count"):
                found.append(client.get("count"))
    return found


class Interruption(BaseException):
    """What a signal's handler, or another thread, may raise anywhere."""


def test_reply_of_an_interrupted_call_is_not_read_by_the_next_call(options, make_connections):
    client = make_connections(options).sync()
    client.ping()

    def interrupt(*_: object) -> None:
        raise Interruption

    def evaluate_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        client.eval(SLOW_COUNT, 1, "count")

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interruption):
            evaluate_interrupted()
    finally:
        signal.signal(signal.SIGALRM, former)

    assert client.get("{count}other") is None


def test_call_to_a_frozen_server_fails_at_the_timeout(options, nodes, make_connections):
    connections = make_connections({**options, "TIMEOUT": 0.2})
    client = eventually(lambda: reached(connections), message="the server of the key is connected to")

    with ExitStack() as frozen:
        for node in nodes:
            frozen.enter_context(node.frozen())
        start = time.monotonic()
        with pytest.raises((redis.TimeoutError, redis.ConnectionError)):
            client.execute_command("GET", "count")

    assert time.monotonic() - start < PATIENCE / 2


def test_client_reconnects_to_a_restarted_server(redis_options, redis_server, make_connections):
    client = make_connections(redis_options).sync()
    client.ping()

    redis_server.stop()
    with pytest.raises(redis.ConnectionError):
        client.ping()
    redis_server.start()

    assert client.ping()


# Failover.


def test_threads_follow_a_failover(sentinel_options, redis_sentinel, make_connections):
    client = make_connections(sentinel_options).sync()
    client.set("before", "1")
    former = redis_sentinel.master

    master = redis_sentinel.fail_over()

    assert (former.run("ROLE")[0], master.run("ROLE")[0]) == ("slave", "master")
    assert eventually(lambda: attempt(client.set, "after", "1"), message="the new master takes a write")
    assert master.run("EXISTS", "before", "after") == 2


async def test_event_loops_follow_the_death_of_a_master(sentinel_options, redis_sentinel, make_connections):
    client = make_connections({**sentinel_options, "TIMEOUT": 10}).for_loop()
    await client.set("before", "1")
    master, replica = redis_sentinel.master, redis_sentinel.replica

    master.stop()
    with pytest.raises(redis.ConnectionError):
        await client.set("lost", "1")

    async def write() -> bool:
        try:
            return bool(await client.set("after", "1"))
        except redis.ConnectionError:
            return False

    assert await aeventually(write, message="the new master takes a write")
    assert replica.run("EXISTS", "after") == 1


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What a call answers, or None if the server cannot be reached."""
    try:
        return call(*args)
    except (redis.ConnectionError, redis.TimeoutError):
        return None


# Clusters.


def test_threads_follow_a_moving_slot(cluster_options, redis_cluster, make_connections):
    client = make_connections(cluster_options).sync()
    client.set("key", "1")

    with redis_cluster.moving_slot("key", redis_cluster.other_than(redis_cluster.node_of("key"))):
        assert client.incr("key") == 2
    assert client.incr("key") == 3


@pytest.mark.parametrize("connections", [1, 2, 3, 4])
async def test_event_loops_follow_a_moving_slot_with_any_number_of_connections(
    cluster_options, redis_cluster, make_connections, connections
):
    client = make_connections(cluster_options).for_loop()
    await client.set("key", "0")
    target = redis_cluster.other_than(redis_cluster.node_of("key"))
    for node in client.get_nodes():
        await asyncio.gather(*(client.ping(target_nodes=node) for _ in range(connections)))

    with redis_cluster.moving_slot("key", target):
        during = [await client.incr("key") for _ in range(6)]
        many = await asyncio.gather(*(client.incr("key") for _ in range(6)))
    after = await client.incr("key")

    assert during == [1, 2, 3, 4, 5, 6]
    assert sorted(many) == [7, 8, 9, 10, 11, 12]
    assert after == 13


def test_script_fails_with_tryagain_while_its_keys_are_on_two_nodes(
    cluster_options, redis_cluster, make_connections
):
    client = make_connections(cluster_options).sync()

    with (
        redis_cluster.moving_slot("{a}", redis_cluster.other_than(redis_cluster.node_of("{a}"))),
        pytest.raises(redis.exceptions.TryAgainError),
    ):
        client.eval("return redis.call('MSET', KEYS[1], 1, KEYS[2], 1)", 2, "{a}1", "{a}2")

    assert client.eval("return redis.call('MSET', KEYS[1], 1, KEYS[2], 1)", 2, "{a}1", "{a}2") == b"OK"


async def test_unavailable_cluster_fails_like_a_single_server(
    cluster_options, redis_cluster, make_connections
):
    connections = make_connections(cluster_options)
    client, of_loop = connections.sync(), connections.for_loop()
    client.set("key", "1")
    await of_loop.get("key")

    for node in redis_cluster.nodes:
        node.stop()
    with pytest.raises(redis.ConnectionError):
        client.get("key")
    for _ in range(2):  # it asks for the nodes the second time
        with pytest.raises(redis.ConnectionError):
            await of_loop.get("key")
    with pytest.raises(StorageUnavailableError, match=r"redis cluster at .* cannot be reached"):
        make_connections(cluster_options).sync()
    redis_cluster.settle()

    assert client.set("key", "2")
    assert await of_loop.get("key") == b"2"


# Forks.

FORK = """
import os, threading, warnings
from djqueue.storage.redis.connections import Connections

warnings.simplefilter("ignore")  # threads and fork: that is what this is about

def hold(owners, held):
    for owner in owners:
        if hasattr(owner, "_lock"):
            owner._lock.acquire()
    held.set()
    threading.Event().wait()

for options in %r:
    connections = Connections(options)
    client = connections.sync()
    client.set("key", "0")
    owners = [connections, client, getattr(client, "nodes_manager", None)]
    node = client.get_node_from_key("key").redis_connection if connections.is_cluster else client
    owners += [getattr(one, "connection_pool", None) for one in (client, node)]
    held = threading.Event()
    threading.Thread(target=hold, args=(owners, held), daemon=True).start()
    held.wait()
    child = os.fork()
    if child == 0:
        assert connections.sync() is not client
        connections.sync().incr("key")
        del client, owners, node
        connections.close()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_forked_child_opens_its_own_connections_whatever_locks_were_held(request):
    done = in_a_process(FORK % ([request.getfixturevalue(kind) for kind in KINDS],))

    assert (done.stdout, done.stderr) == ("0\n" * len(KINDS), "")


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_fork_leaves_the_connections_of_the_parent_open(options, nodes, make_connections):
    connections = make_connections(options)
    connections.sync().set("key", "0")
    before = connected(nodes)

    child = os.fork()
    if child == 0:
        try:
            connections.sync().incr("key")
            connections.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)

    assert connections.sync().incr("key") == 2
    eventually(lambda: connected(nodes) == before, message="the child's connections are closed")
