"""The Redis of another client."""

from collections.abc import Mapping
from typing import Any

import redis
from django.utils.module_loading import import_string
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException
from redis.sentinel import SentinelConnectionPool

from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.core.messages import NAME, kind_of, without_credentials
from djqueue.storage.redis.endpoints import Address, Cluster, Endpoint, Sentinel, Single

from .arguments import taken
from .urls import REDIS_PORT


def read_client(make: Any) -> Endpoint:
    """Return the endpoint of the client that a function, or its dotted path, returns.

    The client itself is not used. Raises ConfigurationError, or StorageUnavailableError if making it
    requires a server that can't be reached.
    """
    if isinstance(make, str):
        if not NAME.fullmatch(make):
            raise ConfigurationError(
                "CLIENT must be a function that returns a client, or its dotted path; to pass a URL, set URL"
            )
        try:
            make = import_string(make)
        except ImportError as error:
            raise ConfigurationError(f"CLIENT: {error}") from error
    if not callable(make):
        raise ConfigurationError(
            f"CLIENT must be a function that returns a client, or its dotted path; got {kind_of(make)}"
        )
    try:
        client = make()
    except (redis.RedisError, RedisClusterException) as error:
        raise StorageUnavailableError(f"CLIENT: {without_credentials(str(error))}") from error
    if isinstance(client, RedisCluster):
        nodes = client.nodes_manager
        addresses = tuple((node.host, int(node.port)) for node in nodes.startup_nodes.values())
        return Cluster(addresses=addresses, arguments=taken(nodes.connection_kwargs))
    if isinstance(client, redis.Redis):
        return _read_pool(client.connection_pool)
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    raise ConfigurationError(f"CLIENT must return a redis.Redis or a redis.RedisCluster; got a {kind}")


def _read_pool(pool: redis.ConnectionPool) -> Endpoint:
    arguments = taken(_arguments_of(pool))
    if isinstance(pool, SentinelConnectionPool):
        watchers = [_arguments_of(watcher.connection_pool) for watcher in pool.sentinel_manager.sentinels]
        return Sentinel(
            addresses=tuple(map(_address, watchers)),
            master=pool.service_name,
            arguments=arguments,
            sentinel_arguments=taken(watchers[0]),
        )
    if path := pool.connection_kwargs.get("path"):
        return Single(path=path, arguments=arguments)
    return Single(address=_address(pool.connection_kwargs), arguments=arguments)


def _arguments_of(pool: redis.ConnectionPool) -> dict[str, Any]:
    return {"connection_class": pool.connection_class, **pool.connection_kwargs}


def _address(arguments: Mapping[str, Any]) -> Address:
    return arguments.get("host", "localhost"), int(arguments.get("port", REDIS_PORT))
