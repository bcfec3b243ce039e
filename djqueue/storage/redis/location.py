"""The address of Redis in `OPTIONS` (`CACHE`, `URL`, `SENTINELS` or `CLIENT`), and arguments of connections.

Only the address and the credentials are taken from a cache or client. Their pools are not used: they repeat
commands, and django-redis shares them by URL with other aliases, which may decode replies. Errors quote only
the scheme of a URL, which may contain a password.

Django is imported late: processes that are given a URL, such as Spark's executors, may lack it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

import redis
from redis.cluster import RedisCluster
from redis.connection import parse_url
from redis.exceptions import RedisClusterException
from redis.sentinel import SentinelConnectionPool

from djqueue.core.errors import ConfigurationError, OptionError, StorageUnavailableError
from djqueue.core.messages import NAME, kind_of, shown_name, without_credentials
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds

from .client import CLUSTER_ARGUMENTS, Address, Cluster, Endpoint, Sentinel, Single

SHARED = frozenset(
    {
        *("db", "username", "password", "credential_provider", "ssl"),
        *("socket_keepalive", "socket_keepalive_options", "socket_read_size", "max_connections"),
    }
)
"""Arguments that are also taken from a cache or client, besides those that begin with `ssl_`."""
OWN = frozenset({"client_name", "health_check_interval"})
"""Arguments for djqueue's connections only."""
SETTLED = {
    **dict.fromkeys(("host", "port", "path"), "use URL"),
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout"), "use TIMEOUT"),
    **dict.fromkeys(("decode_responses", "encoding", "encoding_errors"), "djqueue reads bytes"),
    **dict.fromkeys(("protocol", "legacy_responses", "parser_class"), "djqueue reads RESP2 replies"),
    **dict.fromkeys(("retry", "retry_on_timeout", "retry_on_error"), "the storage has its own retries"),
    **dict.fromkeys(("connection_class", "timeout"), "djqueue has its own connection pools"),
}
"""Arguments that can't be set, and why. They are ignored in a URL, a cache or a client."""
REDIS_PORT, SENTINEL_PORT = 6379, 26379
UNREADABLE = "{} cannot be read: are all special characters of the password percent-encoded?"
HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?")
WITH_SENTINELS = ("MASTER_NAME", "DB", "USERNAME", "PASSWORD", "SENTINEL_KWARGS")
WAYS_HERE = ("CACHE", "URL", "SENTINELS", "CLIENT")
READ_HERE = (*WAYS_HERE, *WITH_SENTINELS, "CONNECTION", "TIMEOUT", "SOCKET_TIMEOUT")
READ_ELSEWHERE = ("LEASE", "PREFIX", "MIRROR", "OUTBOX", "REPLICAS", "STREAM")
"""Options of the storage itself."""
LONGEST_TIMEOUT = 60_000
"""Maximum of TIMEOUT in milliseconds, so that callers learn of failures in time."""


def locate(options: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that `OPTIONS` describes. Raises ConfigurationError naming an invalid key."""
    given = {name: value for name, value in options.items() if value is not None}
    known = READ_HERE + READ_ELSEWHERE
    for name in given:
        if name not in known:
            raise ConfigurationError(
                f"{shown_name(name)} is not an option of the Redis storage{nearest(str(name), known)}"
            )
    ways = [name for name in WAYS if name in given]
    if not ways:
        raise ConfigurationError(f"no Redis address is set: set one of {', '.join(WAYS)}")
    if len(ways) > 1:
        raise ConfigurationError(f"{' and '.join(ways)} can't be combined: keep one of them")
    way = ways[0]
    endpoint = _watched(WAYS[way](given[way], given), way, given)
    arguments = {**endpoint.arguments, **_connection(given, endpoint)}
    if endpoint.is_cluster and arguments.get("db"):
        raise ConfigurationError(f"{way}: a cluster has only database 0")
    timeout = read_timeout(given)
    timeout = min(timeout, read_timeout(given, "SOCKET_TIMEOUT", timeout))
    endpoint = replace(endpoint, arguments=arguments, timeout=timeout)
    endpoint.check()
    return endpoint


def _watched(endpoint: Endpoint, way: str, given: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint with the options of its sentinels, if it has any."""
    for name in WITH_SENTINELS:
        is_allowed = way == "SENTINELS" or (isinstance(endpoint, Sentinel) and name == "SENTINEL_KWARGS")
        if name in given and not is_allowed:
            raise ConfigurationError(f"{name} requires SENTINELS, and can't be combined with {way}")
    if not isinstance(endpoint, Sentinel):
        return endpoint
    arguments = _mapping(given, "SENTINEL_KWARGS")
    for name in arguments:
        _check_argument("SENTINEL_KWARGS", name)
    return replace(endpoint, sentinel_arguments={**endpoint.sentinel_arguments, **_taken(arguments)})


def _connection(given: Mapping[str, Any], endpoint: Endpoint) -> Mapping[str, Any]:
    arguments = _mapping(given, "CONNECTION")
    for name in arguments:
        if name in CLUSTER_ARGUMENTS:
            if not endpoint.is_cluster:
                raise ConfigurationError(f"CONNECTION: {name!r} requires a cluster")
            continue
        _check_argument("CONNECTION", name)
        if name in SETTLED:
            raise ConfigurationError(f"CONNECTION: {name!r} cannot be set: {SETTLED[name]}")
    return arguments


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict of keyword arguments; got {kind_of(value)}")
    return value


def read_timeout(given: Mapping[str, Any], name: str = "TIMEOUT", default: float = Endpoint.timeout) -> float:
    """Return the seconds of TIMEOUT or another option. Raises ConfigurationError if it is invalid."""
    if name not in given:
        return default
    try:
        value = milliseconds(name, given[name])
    except OptionError as error:
        raise ConfigurationError(str(error)) from None  # the text of the error may contain a URL
    if not 0 < value <= LONGEST_TIMEOUT:
        raise ConfigurationError(
            f"{name}: must be greater than 0 and at most 60 seconds; got {given[name]!r}"
        )
    return value / 1_000


def _from_url(url: Any, _: Mapping[str, Any]) -> Endpoint:
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    reader = READERS.get(scheme)
    if reader is None:
        raise ConfigurationError(f"URL must begin with one of {', '.join(f'{name}://' for name in READERS)}")
    _check_special_characters(url)
    return reader(url)


def _check_special_characters(url: str) -> None:
    """Raise ConfigurationError if a special character in the password splits the URL."""
    _, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :] and not url.startswith("unix:"):
        raise ConfigurationError(UNREADABLE.format("URL"))


def _read_single(url: str, where: str = "URL") -> Single:
    """Return the endpoint of a URL of one server."""
    parsed = _parsed(url, where)
    arguments = _arguments(parsed)
    if url.startswith("unix:"):
        if "path" not in parsed:
            raise ConfigurationError(f"{where} has no path; expected unix:///run/redis.sock?db=0")
        return Single(path=parsed["path"], arguments=arguments)
    _check_database(_split(url, where).path, where)
    address = (parsed.get("host", "localhost"), parsed.get("port", REDIS_PORT))
    return Single(address=address, arguments=arguments)


def _read_sentinels(url: str) -> Sentinel:
    addresses, path, arguments = _read_hosts(url, SENTINEL_PORT)
    master, _, database = path.partition("/")
    if not master:
        raise ConfigurationError(
            "URL does not name the master; expected redis+sentinel://host:port,host:port/master_name/0"
        )
    _check_database(database, "URL")
    encryption = {name: value for name, value in arguments.items() if name.startswith("ssl")}
    return Sentinel(
        addresses=addresses,
        master=master,
        arguments={"db": int(database or 0), **arguments},
        sentinel_arguments=encryption,
    )


def _read_cluster(url: str) -> Cluster:
    addresses, path, arguments = _read_hosts(url, REDIS_PORT)
    _check_database(path, "URL")
    return Cluster(addresses=addresses, arguments={"db": int(path or 0), **arguments})


def _read_hosts(url: str, default_port: int) -> tuple[tuple[Address, ...], str, dict[str, Any]]:
    """Return hosts, path and arguments of a URL with several hosts."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    addresses = tuple(_address(host, default_port, "URL") for host in hosts.split(","))
    one = f"{scheme.partition('+')[0]}://{credentials}{at}localhost/?{query}"
    return addresses, path.rstrip("/"), _arguments(_parsed(one, "URL"))


READERS: dict[str, Callable[[str], Endpoint]] = {
    "redis": _read_single,
    "rediss": _read_single,
    "unix": _read_single,
    "redis+sentinel": _read_sentinels,
    "rediss+sentinel": _read_sentinels,
    "redis+cluster": _read_cluster,
    "rediss+cluster": _read_cluster,
}


def _from_sentinels(sentinels: Any, given: Mapping[str, Any]) -> Sentinel:
    if "MASTER_NAME" not in given:
        raise ConfigurationError("MASTER_NAME is missing: set the name that the sentinels use for the master")
    arguments = {name.lower(): given[name] for name in ("DB", "USERNAME", "PASSWORD") if name in given}
    if isinstance(sentinels, str) or not isinstance(sentinels, Iterable):
        raise ConfigurationError(f"SENTINELS must be a list of (host, port) pairs; got {kind_of(sentinels)}")
    addresses = tuple(_address_of(pair, "SENTINELS") for pair in sentinels)
    if not addresses:
        raise ConfigurationError("SENTINELS is empty: list at least one (host, port) pair")
    return Sentinel(addresses=addresses, master=str(given["MASTER_NAME"]), arguments=arguments)


def _from_cache(alias: Any, _: Mapping[str, Any]) -> Endpoint:
    from django.core.cache import caches
    from django.core.cache.backends.redis import RedisCache
    from django.utils.module_loading import import_string

    if not isinstance(alias, str) or alias not in caches.settings:
        hint = nearest(str(alias), caches.settings)
        raise ConfigurationError(f"CACHE: {shown_name(alias)} is not in CACHES{hint}")
    configured: Mapping[str, Any] = caches.settings[alias]
    backend = str(configured.get("BACKEND"))
    try:
        kind = import_string(backend)
    except ImportError as error:
        raise ConfigurationError(f"CACHE: {alias!r}: {error}; pip install djqueue[redis]") from error
    where = f"CACHE: {alias!r}: LOCATION"
    options = dict(configured.get("OPTIONS") or {})
    if issubclass(kind, RedisCache):
        single = _read_single(_first_url(configured, "[;,]", where), where)
        return replace(single, arguments=_taken(options, single.arguments))
    if any(base.__module__.startswith("django_redis.") for base in kind.__mro__):
        return _read_django_redis(alias, configured, options)
    raise ConfigurationError(
        f"CACHE: {alias!r} is a {backend}, which does not use Redis: name a Redis cache "
        "(django_redis.cache.RedisCache), or set URL instead"
    )


def _read_django_redis(alias: str, configured: Mapping[str, Any], options: dict[str, Any]) -> Endpoint:
    from django.utils.module_loading import import_string
    from django_redis.client import ShardClient
    from django_redis.pool import SentinelConnectionFactory, get_connection_factory

    client = options.get("CLIENT_CLASS")
    if client and issubclass(import_string(client), ShardClient):
        raise ConfigurationError(
            f"CACHE: {alias!r} spreads its keys over several servers: name another cache, or set URL instead"
        )
    where = f"CACHE: {alias!r}: LOCATION"
    url = _first_url(
        configured, ",", where, lambda url: ("is_master", "0") not in parse_qsl(urlsplit(url).query)
    )
    factory = get_connection_factory(options=options)
    params = factory.make_connection_params(url)
    single = _read_single(_without_role(params.get("url", url)), where)
    arguments = _taken(params, getattr(factory, "pool_cls_kwargs", {}), single.arguments)
    if not isinstance(factory, SentinelConnectionFactory):
        return replace(single, arguments=arguments)
    return Sentinel(
        addresses=tuple(_address_of(pair, f"CACHE: {alias!r}: SENTINELS") for pair in options["SENTINELS"]),
        master=single.address[0],
        arguments=arguments,
        sentinel_arguments=_taken(options.get("SENTINEL_KWARGS") or {}),
    )


def _first_url(
    configured: Mapping[str, Any], separator: str, where: str, fits: Callable[[str], bool] = bool
) -> str:
    """Return the first URL of a cache's LOCATION; the others are replicas."""
    location = configured.get("LOCATION") or ()
    urls = re.split(separator, location) if isinstance(location, str) else map(str, location)
    for url in urls:
        if fits(url.strip()):
            return url.strip()
    raise ConfigurationError(f"{where} has no Redis URL")


def _without_role(url: str) -> str:
    """Return the URL without the part that selects master or replicas."""
    parts = urlsplit(url)
    query = [(name, value) for name, value in parse_qsl(parts.query) if name != "is_master"]
    return urlunsplit(parts._replace(query=urlencode(query)))


def _from_client(make: Any, _: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint of the client that a function, or its dotted path, returns.

    Raises ConfigurationError, or StorageUnavailableError if making the client requires a server that can't be
    reached.
    """
    from django.utils.module_loading import import_string

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
        return Cluster(addresses=addresses, arguments=_taken(nodes.connection_kwargs))
    if isinstance(client, redis.Redis):
        return _read_pool(client.connection_pool)
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    raise ConfigurationError(f"CLIENT must return a redis.Redis or a redis.RedisCluster; got a {kind}")


def _read_pool(pool: redis.ConnectionPool) -> Endpoint:
    arguments = _taken(_arguments_of(pool))
    if isinstance(pool, SentinelConnectionPool):
        watchers = [_arguments_of(watcher.connection_pool) for watcher in pool.sentinel_manager.sentinels]
        return Sentinel(
            addresses=tuple(map(_client_address, watchers)),
            master=pool.service_name,
            arguments=arguments,
            sentinel_arguments=_taken(watchers[0]),
        )
    if path := pool.connection_kwargs.get("path"):
        return Single(path=path, arguments=arguments)
    return Single(address=_client_address(pool.connection_kwargs), arguments=arguments)


def _arguments_of(pool: redis.ConnectionPool) -> dict[str, Any]:
    return {"connection_class": pool.connection_class, **pool.connection_kwargs}


def _client_address(arguments: Mapping[str, Any]) -> Address:
    return arguments.get("host", "localhost"), int(arguments.get("port", REDIS_PORT))


WAYS: dict[str, Callable[[Any, Mapping[str, Any]], Endpoint]] = {
    "CACHE": _from_cache,
    "URL": _from_url,
    "SENTINELS": _from_sentinels,
    "CLIENT": _from_client,
}


def _check_argument(where: str, name: object) -> None:
    """Raise ConfigurationError if a name is not an argument of connections."""
    known = SHARED | OWN | SETTLED.keys()
    if name not in known and not str(name).startswith("ssl_"):
        hint = nearest(str(name), known | CLUSTER_ARGUMENTS)
        raise ConfigurationError(f"{where}: {shown_name(name)} is not an argument of Redis connections{hint}")


def _taken(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to take from other connections; later sources override earlier ones."""
    arguments: dict[str, Any] = {}
    for source in sources:
        arguments |= {
            name: value
            for name, value in source.items()
            if value is not None and (name in SHARED or name.startswith("ssl_"))
        }
        kind = source.get("connection_class")
        if isinstance(kind, type) and issubclass(kind, redis.SSLConnection):
            arguments["ssl"] = True
    return arguments


def _arguments(parsed: dict[str, Any]) -> dict[str, Any]:
    return {**_taken(parsed), **{name: parsed[name] for name in OWN if name in parsed}}


def _address_of(pair: Any, where: str) -> Address:
    """Return the address of a (host, port) pair."""
    parts = () if isinstance(pair, str) or not isinstance(pair, Iterable) else tuple(pair)
    if len(parts) != 2:
        raise ConfigurationError(f"{where}: expected a (host, port) pair, got {kind_of(pair)}")
    host, port = map(str, parts)
    return _address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", 0, where)


def _address(text: str, default_port: int, where: str) -> Address:
    match = HOST.fullmatch(text.strip())
    if match is None or int(match[2] or 0) > 65_535:
        raise ConfigurationError(f"{where}: expected host:port, or host:port,host:port for several hosts")
    return match[1].strip("[]"), int(match[2] or default_port)


def _parsed(url: str, where: str) -> dict[str, Any]:
    """Return the parts of a URL of one host, as redis-py reads it."""
    for name, _ in parse_qsl(_split(url, where).query, keep_blank_values=True):
        _check_argument(where, name)
    try:
        parsed: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    return parsed


def _split(url: str, where: str) -> SplitResult:
    with suppress(ValueError):  # Its message may quote a part of the password, so it is no context either.
        parts = urlsplit(url)
        _ = parts.port
        return parts
    raise ConfigurationError(UNREADABLE.format(where))


def _check_database(text: str, where: str) -> None:
    if not re.fullmatch(r"/?[0-9]{0,6}/?", text):
        raise ConfigurationError(f"{where}: the path must be a database number, such as /0")
