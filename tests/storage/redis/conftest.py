"""Servers, one of each kind to a test process and started when first asked for; URLs of empty ones."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from djqueue.storage.redis.connections import Connections
from djqueue.storage.redis.pubsub import Listener
from tests import servers

BUSY = {"TIMEOUT": 25}
"""Options for a busy machine, where connecting may take longer than the default timeout."""

MakeConnections = Callable[[Mapping[str, Any]], Connections]
MakeListener = Callable[[Connections], Listener]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.RedisServer]:
    """A single server."""
    with servers.RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[servers.RedisSentinel]:
    """A master and a replica behind three sentinels."""
    with servers.RedisSentinel() as group:
        yield group


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[servers.RedisCluster]:
    """Three masters."""
    with servers.RedisCluster() as group:
        yield group


@pytest.fixture
def redis_options(redis_server: servers.RedisServer) -> dict[str, Any]:
    """The OPTIONS for the single server, which runs and is empty."""
    redis_server.clean()
    return {**redis_server.options, **BUSY}


@pytest.fixture
def sentinel_options(redis_sentinel: servers.RedisSentinel) -> dict[str, Any]:
    """The OPTIONS for the sentinels, whose master runs and is empty."""
    redis_sentinel.clean()
    return {**redis_sentinel.options, **BUSY}


@pytest.fixture
def cluster_options(redis_cluster: servers.RedisCluster) -> dict[str, Any]:
    """The OPTIONS for the cluster, whose nodes run and are empty."""
    redis_cluster.clean()
    return {**redis_cluster.options, **BUSY}


@pytest.fixture
def redis_url(redis_options: dict[str, Any], redis_server: servers.RedisServer) -> str:
    """The URL of the same single server."""
    return redis_server.url


@pytest.fixture
def sentinel_url(sentinel_options: dict[str, Any], redis_sentinel: servers.RedisSentinel) -> str:
    """The URL of the same sentinels."""
    return redis_sentinel.url


@pytest.fixture
def cluster_url(cluster_options: dict[str, Any], redis_cluster: servers.RedisCluster) -> str:
    """The URL of the same cluster."""
    return redis_cluster.url


@pytest.fixture
def make_connections() -> Iterator[MakeConnections]:
    """Makes `Connections`, and closes them."""
    with ExitStack() as stack:

        def make(options: Mapping[str, Any]) -> Connections:
            connections = Connections(options)
            stack.callback(connections.close)
            return connections

        yield make


@pytest.fixture
def make_listener() -> Iterator[MakeListener]:
    """Makes listeners, and closes them."""
    with ExitStack() as stack:

        def make(connections: Connections) -> Listener:
            listener = Listener(connections)
            stack.callback(listener.close)
            return listener

        yield make
