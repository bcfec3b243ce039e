"""OPTIONS that name the Redis server: URLs, caches and clients."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.cache import caches
from redis.sentinel import Sentinel

from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.storage.redis.connections import Connections
from tests import servers

DJANGO_REDIS = "django_redis.cache.RedisCache"
DJANGO = "django.core.cache.backends.redis.RedisCache"
SENTINEL_FACTORY = "django_redis.pool.SentinelConnectionFactory"


@pytest.mark.parametrize(
    ("options", "description"),
    [
        ({"URL": "redis://10.0.0.1"}, "redis 10.0.0.1:6379/0"),
        ({"URL": "redis://user:secret@10.0.0.1:6380/3"}, "redis 10.0.0.1:6380/3"),
        ({"URL": "rediss://:secret@example.org/1?ssl_cert_reqs=none"}, "redis example.org:6379/1"),
        ({"URL": "redis://[::1]:6380/0?password=secret"}, "redis [::1]:6380/0"),
        ({"URL": "redis://h?db=2&socket_timeout=9&decode_responses=True"}, "redis h:6379/2"),
        ({"URL": "unix:///run/redis.sock?db=2"}, "redis unix:/run/redis.sock/2"),
        (
            {"URL": "redis+sentinel://user:secret@a:1,b/main/2"},
            "redis sentinel main at a:1, b:26379",
        ),
        ({"URL": "rediss+sentinel://[::1]:1/main"}, "redis sentinel main at [::1]:1"),
        ({"URL": "redis+cluster://:secret@a:1,b"}, "redis cluster at a:1, b:6379"),
        ({"URL": "rediss+cluster://a/0?ssl_check_hostname=no"}, "redis cluster at a:6379"),
        (
            {
                "SENTINELS": [("a", 1), ["::1", "2"]],
                "MASTER_NAME": "main",
                "DB": 1,
                "PASSWORD": "secret",
                "SENTINEL_KWARGS": {"password": "secret"},
            },
            "redis sentinel main at a:1, [::1]:2",
        ),
        ({"CLIENT": lambda: redis.Redis("h", 1, db=4, password="secret")}, "redis h:1/4"),
        ({"CLIENT": "tests.storage.redis.test_location.unix_client"}, "redis unix:/run/r.sock/0"),
        (
            {"CLIENT": lambda: Sentinel([("a", 1), ("b", 2)], password="secret").master_for("main")},
            "redis sentinel main at a:1, b:2",
        ),
        ({"URL": "redis://h", "LEASE": 5, "PREFIX": "x", "MIRROR": 1, "OUTBOX": 1}, "redis h:6379/0"),
        ({"URL": "redis://h", "CACHE": None, "CONNECTION": {"password": "secret"}}, "redis h:6379/0"),
    ],
)
def test_description_contains_the_address_and_no_secrets(options, description):
    connections = Connections(options)

    assert connections.describe() == description
    assert connections.is_cluster == ("cluster" in description)
    assert "secret" not in repr(connections._endpoint)


def unix_client() -> redis.Redis:
    return redis.Redis(unix_socket_path="/run/r.sock")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "set one of CACHE, URL, SENTINELS, CLIENT"),
        ({"URL": "redis://h", "CACHE": "default"}, "CACHE and URL can't be combined"),
        ({"UR": "redis://h"}, "'UR' is not an option .* did you mean 'URL'"),
        ({"URL": "http://user:secret@h"}, "URL must begin with one of redis://, rediss://"),
        ({"URL": 5}, "URL must begin with"),
        ({"URL": "redis://:secret/1@h"}, "URL cannot be read: .* percent-encoded"),
        ({"URL": "redis://h:99999999"}, "URL cannot be read"),
        ({"URL": "redis://h/secrets"}, "URL: the path must be a database number"),
        ({"URL": "redis://h?ssl_cert=1&sockettimeout=1"}, "URL: 'sockettimeout' .* 'socket_timeout'"),
        ({"URL": "redis://h?db=x"}, "URL: Invalid value for 'db'"),
        ({"URL": "unix://"}, "URL has no path"),
        ({"URL": "redis+sentinel://a:1,b:2"}, "URL does not name the master"),
        ({"URL": "redis+sentinel://a:x/main"}, "URL: expected host:port"),
        ({"URL": "redis+sentinel://a:1,/main"}, "URL: expected host:port"),
        ({"URL": "redis+cluster://a:1/1"}, "URL: a cluster has only database 0"),
        ({"SENTINELS": [("a", 1)]}, "MASTER_NAME is missing"),
        ({"SENTINELS": [], "MASTER_NAME": "main"}, "SENTINELS is empty"),
        ({"SENTINELS": "a:1", "MASTER_NAME": "main"}, r"SENTINELS must be a list of \(host, port\)"),
        (
            {"SENTINELS": ["a:1"], "MASTER_NAME": "main"},
            r"SENTINELS: expected a \(host, port\) pair, got a str",
        ),
        (
            {"URL": "redis://h", "PASSWORD": "x"},
            "PASSWORD requires SENTINELS, and can't be combined with URL",
        ),
        ({"URL": "redis://h", "SENTINEL_KWARGS": {}}, "SENTINEL_KWARGS requires SENTINELS"),
        ({"URL": "redis+sentinel://a/m", "SENTINEL_KWARGS": {"pasword": 1}}, "'pasword' .* 'password'"),
        ({"URL": "redis://h", "CONNECTION": {"pasword": 1}}, "CONNECTION: 'pasword' .* 'password'"),
        ({"URL": "redis://h", "CONNECTION": {"socket_timeout": 1}}, "'socket_timeout' .* use TIMEOUT"),
        ({"URL": "redis://h", "CONNECTION": {"decode_responses": True}}, "'decode_responses' cannot be"),
        ({"URL": "redis://h", "CONNECTION": {"retry_on_timeout": True}}, "'retry_on_timeout' cannot be"),
        ({"URL": "redis://h", "CONNECTION": {"address_remap": len}}, "'address_remap' requires a clust"),
        ({"URL": "redis://h", "CONNECTION": 5}, "CONNECTION must be a dict"),
        ({"URL": "redis://h", "CONNECTION": {"ssl": True, "ssl_x": 1}}, "CONNECTION: .* 'ssl_x'"),
        ({"URL": "redis://h", "TIMEOUT": 0}, "TIMEOUT: must be greater than 0 .* got 0"),
        (
            {"URL": "redis://h", "TIMEOUT": 61},
            "TIMEOUT: must be greater than 0 and at most 60 seconds; got 61",
        ),
        ({"URL": "redis://h", "TIMEOUT": "5"}, "TIMEOUT: expected seconds"),
        ({"CLIENT": "no.such.function"}, "CLIENT: No module named 'no'"),
        ({"CLIENT": 5}, "CLIENT must be a function"),
        ({"CLIENT": dict}, "CLIENT must return a redis.Redis .*; got a builtins.dict"),
        ({"CLIENT": redis.asyncio.Redis}, "CLIENT must return a redis.Redis"),
        ({"CACHE": "defalt"}, "CACHE: 'defalt' is not in CACHES; did you mean 'default'"),
        ({"CACHE": "default"}, "'default' is a django.core.cache.backends.locmem.LocMemCache, .* URL"),
    ],
)
def test_option_error_contains_the_option_and_no_secrets(options, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        Connections(options)

    assert "secret" not in str(caught.value).replace("'secrets'", "")


def test_error_for_a_missing_package_says_how_to_install_the_package():
    script = """
import importlib.util, sys
sys.modules["redis"] = None
spec = importlib.util.find_spec("djqueue.storage.redis")
sys.modules["djqueue.storage.redis"] = importlib.util.module_from_spec(spec)
import djqueue.storage.redis.connections
"""

    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr

    assert "ConfigurationError: the Redis storage" in said
    assert "pip install djqueue[redis]" in said


# Caches.


@pytest.fixture
def user(redis_options, redis_server):
    """A user of the single server who has to give a password."""
    redis_server.run("ACL", "SETUSER", "worker", "on", ">secret", "~*", "&*", "+@all")
    yield "worker"
    redis_server.run("ACL", "DELUSER", "worker")


@pytest.fixture
def cache(settings):
    """Makes a cache whose alias is `jobs`."""

    def make(backend: str, location: Any, **options: Any) -> dict[str, str]:
        default = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
        jobs = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        settings.CACHES = {"default": default, "jobs": jobs}
        return {"CACHE": "jobs"}

    return make


def whoami(connections: Connections) -> bytes:
    answer: bytes = connections.sync().execute_command("ACL", "WHOAMI")
    return answer


def test_django_redis_cache_provides_server_and_password(cache, user, redis_server, make_connections):
    address = f"redis://{user}@127.0.0.1:{redis_server.port}/2"

    connections = make_connections(cache(DJANGO_REDIS, [address, "redis://replica"], PASSWORD="secret"))

    assert connections.describe() == f"redis 127.0.0.1:{redis_server.port}/2"
    assert whoami(connections) == b"worker"


def test_cache_provides_pool_options_except_decoding_and_timeouts(
    cache, user, redis_server, make_connections
):
    pool = {"username": user, "password": "secret", "decode_responses": True, "retry_on_timeout": True}
    options = cache(DJANGO_REDIS, redis_server.url, CONNECTION_POOL_KWARGS=pool, SOCKET_TIMEOUT=3)
    caches["jobs"].client.get_client()  # its pool exists

    connections = make_connections(options)

    assert whoami(connections) == b"worker"  # and no text
    assert connections.timeout == 2
    assert caches["jobs"].client.get_client().connection_pool is not connections.sync().connection_pool
    caches["jobs"].close()


def test_django_cache_provides_server_and_password(cache, user, redis_server, make_connections):
    address = f"redis://127.0.0.1:{redis_server.port}"

    connections = make_connections(
        cache(DJANGO, f"{address};redis://replica", db=3, username=user, password="secret")
    )

    assert connections.describe() == f"redis 127.0.0.1:{redis_server.port}/3"
    assert whoami(connections) == b"worker"


def test_cache_behind_sentinels_provides_the_sentinels(
    cache, sentinel_options, redis_sentinel, make_connections
):
    addresses = sentinel_options["SENTINELS"]
    location = [f"redis://djqueue/1?is_master={role}" for role in (0, 1)]

    connections = make_connections(
        cache(DJANGO_REDIS, location, CONNECTION_FACTORY=SENTINEL_FACTORY, SENTINELS=addresses)
    )

    connections.sync().set("key", "value")
    assert connections.describe().startswith("redis sentinel djqueue at 127.0.0.1:")
    with redis_sentinel.master.client() as client:
        client.select(1)
        assert client.get("key") == "value"


@pytest.mark.parametrize(
    ("backend", "location", "options", "words"),
    [
        (DJANGO_REDIS, "", {}, "CACHE: 'jobs': LOCATION has no Redis URL"),
        (DJANGO_REDIS, "redis://h/x", {}, "CACHE: 'jobs': LOCATION: the path must be a database number"),
        (
            DJANGO_REDIS,
            ["redis://a", "redis://b"],
            {"CLIENT_CLASS": "django_redis.client.ShardClient"},
            "CACHE: 'jobs' spreads its keys over several servers",
        ),
        ("no_such_package.Cache", "redis://h", {}, "CACHE: 'jobs': .*; pip install"),
    ],
)
def test_unsuitable_cache_is_rejected(cache, backend, location, options, words):
    with pytest.raises(ConfigurationError, match=words.replace("[", r"\[")):
        Connections(cache(backend, location, **options))


# Clients.


def test_given_client_provides_server_and_password(user, redis_server, make_connections):
    def theirs() -> redis.Redis:
        return redis.Redis(port=redis_server.port, username=user, password="secret", decode_responses=True)

    assert whoami(make_connections({"CLIENT": theirs})) == b"worker"


def test_given_cluster_client_provides_its_nodes(cluster_url, redis_cluster, make_connections):
    port = redis_cluster.nodes[0].port

    with redis.RedisCluster(host="127.0.0.1", port=port) as theirs:
        connections = make_connections({"CLIENT": lambda: theirs})

    assert connections.is_cluster
    assert all(str(node.port) in connections.describe() for node in redis_cluster.nodes)
    assert connections.sync().execute_command("SET", "key", "value")


def test_unavailable_server_of_a_given_client_is_no_configuration_error():
    def theirs() -> redis.RedisCluster:
        return redis.RedisCluster(host="127.0.0.1", port=1)

    with pytest.raises(StorageUnavailableError, match="CLIENT: "):
        Connections({"CLIENT": theirs})


@pytest.mark.parametrize("kind", ["redis_url", "sentinel_url", "cluster_url"])
def test_url_connects_to_its_server(kind, request, make_connections):
    connections = make_connections({"URL": request.getfixturevalue(kind)})

    assert connections.sync().execute_command(b"SET", b"key", b"value")
    assert connections.sync().execute_command("GET", "key") == b"value"


def test_unix_socket_connects_to_its_server(redis_options, redis_server, make_connections, tmp_path):
    with servers.RedisServer(config={"unixsocket": "redis.sock"}) as server:
        connections = make_connections({"URL": f"unix://{server.folder}/redis.sock?db=1"})

        assert connections.sync().set("key", "value")
        assert asyncio.run(async_answer(connections, "GET", "key")) == b"value"


async def async_answer(connections: Connections, *command: object) -> Any:
    return await connections.for_loop().execute_command(*command)
