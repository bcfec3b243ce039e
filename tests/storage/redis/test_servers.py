"""Test servers behave as the tests expect."""

import pytest
import redis

from tests import servers

pytestmark = pytest.mark.redis


def test_killed_server_with_an_append_only_file_keeps_its_data():
    with servers.RedisServer(appendonly=True, config={"databases": 2}) as server:
        server.stop_signal = "KILL"
        server.run("SET", "key", "value")
        port = server.port

        server.stop()
        with pytest.raises(redis.ConnectionError):
            server.run("PING")
        server.start()

        assert (server.port, server.run("GET", "key")) == (port, "value")
        assert server.run("CONFIG", "GET", "databases") == ["databases", "2"]


def test_restarted_server_without_persistence_is_empty(redis_options, redis_server):
    redis_server.run("SET", "key", "value")

    redis_server.stop()
    redis_server.start()

    assert redis_server.run("GET", "key") is None


def test_frozen_server_does_not_answer(redis_options, redis_server):
    with (
        redis.Redis(port=redis_server.port, socket_timeout=1, retry=None) as client,
        redis_server.frozen(),
        pytest.raises(redis.TimeoutError),
    ):
        client.ping()

    assert redis_server.run("PING")


@pytest.mark.usefixtures("cluster_options")
def test_slot_moves_with_its_keys(redis_cluster):
    source = redis_cluster.node_of("key")
    target = redis_cluster.other_than(source)
    source.run("SET", "key", "value")

    redis_cluster.move_slot("key", target)

    assert redis_cluster.node_of("key") is target
    assert target.run("GET", "key") == "value"
    with pytest.raises(redis.exceptions.MovedError):
        source.run("GET", "key")


@pytest.mark.usefixtures("cluster_options")
def test_moving_slot_has_its_keys_at_the_target(redis_cluster):
    source = redis_cluster.node_of("key")
    target = redis_cluster.other_than(source)
    source.run("SET", "key", "value")

    with (
        redis_cluster.moving_slot("key", target),
        pytest.raises(redis.exceptions.AskError, match=str(target.port)),
    ):
        source.run("GET", "key")
