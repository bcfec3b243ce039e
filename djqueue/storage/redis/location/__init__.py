"""The address of Redis in `OPTIONS`: `CACHE`, `URL`, `SENTINELS` or `CLIENT`, and related options."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.messages import kind_of, shown_name
from djqueue.core.suggest import nearest
from djqueue.core.units import milliseconds
from djqueue.storage.redis.endpoints import CLUSTER_ARGUMENTS, Address, Endpoint, Sentinel

from . import urls
from .arguments import SETTLED, check_argument, taken

WITH_SENTINELS = ("MASTER_NAME", "DB", "USERNAME", "PASSWORD", "SENTINEL_KWARGS")
READ_HERE = ("CACHE", "URL", "SENTINELS", "CLIENT", *WITH_SENTINELS, "CONNECTION", "TIMEOUT")
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
    endpoint = replace(endpoint, arguments=arguments, timeout=_timeout(given))
    endpoint.check()
    return endpoint


def _watched(endpoint: Endpoint, way: str, given: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint with the options of its sentinels, if it has any."""
    for name in WITH_SENTINELS:
        goes = way == "SENTINELS" or (isinstance(endpoint, Sentinel) and name == "SENTINEL_KWARGS")
        if name in given and not goes:
            raise ConfigurationError(f"{name} requires SENTINELS, and can't be combined with {way}")
    if not isinstance(endpoint, Sentinel):
        return endpoint
    arguments = _mapping(given, "SENTINEL_KWARGS")
    for name in arguments:
        check_argument("SENTINEL_KWARGS", name)
    return replace(endpoint, sentinel_arguments={**endpoint.sentinel_arguments, **taken(arguments)})


def _connection(given: Mapping[str, Any], endpoint: Endpoint) -> Mapping[str, Any]:
    arguments = _mapping(given, "CONNECTION")
    for name in arguments:
        if name in CLUSTER_ARGUMENTS:
            if not endpoint.is_cluster:
                raise ConfigurationError(f"CONNECTION: {name!r} requires a cluster")
            continue
        check_argument("CONNECTION", name)
        if name in SETTLED:
            raise ConfigurationError(f"CONNECTION: {name!r} cannot be set: {SETTLED[name]}")
    return arguments


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} must be a dict of keyword arguments; got {kind_of(value)}")
    return value


def _timeout(given: Mapping[str, Any]) -> float:
    if "TIMEOUT" not in given:
        return Endpoint.timeout
    try:
        value = milliseconds("TIMEOUT", given["TIMEOUT"])
    except OptionError as error:
        raise ConfigurationError(str(error)) from None  # the text of the error may contain a URL
    if not 0 < value <= LONGEST_TIMEOUT:
        raise ConfigurationError(
            f"TIMEOUT: must be greater than 0 and at most 60 seconds; got {given['TIMEOUT']!r}"
        )
    return value / 1_000


def _from_sentinels(sentinels: Any, given: Mapping[str, Any]) -> Sentinel:
    if "MASTER_NAME" not in given:
        raise ConfigurationError("MASTER_NAME is missing: set the name that the sentinels use for the master")
    arguments = {name.lower(): given[name] for name in ("DB", "USERNAME", "PASSWORD") if name in given}
    addresses = _addresses(sentinels)
    return Sentinel(addresses=addresses, master=str(given["MASTER_NAME"]), arguments=arguments)


def _addresses(sentinels: Any) -> tuple[Address, ...]:
    if isinstance(sentinels, str) or not isinstance(sentinels, Iterable):
        raise ConfigurationError(f"SENTINELS must be a list of (host, port) pairs; got {kind_of(sentinels)}")
    addresses = tuple(urls.address_of(pair, "SENTINELS") for pair in sentinels)
    if not addresses:
        raise ConfigurationError("SENTINELS is empty: list at least one (host, port) pair")
    return addresses


def _from_cache(alias: Any, _: Mapping[str, Any]) -> Endpoint:
    # Import late: processes that are given a URL, such as Spark's executors, may lack Django.
    from .caches import read_cache

    return read_cache(alias)


def _from_client(make: Any, _: Mapping[str, Any]) -> Endpoint:
    # Import late, for the same reason.
    from .clients import read_client

    return read_client(make)


WAYS: dict[str, Callable[[Any, Mapping[str, Any]], Endpoint]] = {
    "CACHE": _from_cache,
    "URL": lambda url, _: urls.read_url(url),
    "SENTINELS": _from_sentinels,
    "CLIENT": _from_client,
}
