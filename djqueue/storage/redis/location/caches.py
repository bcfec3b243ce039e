"""The Redis of one of the project's caches.

Only the address and the credentials are taken from the cache. Its pools are not used: django-redis shares
them by URL with other aliases, which may decode replies, and all of them repeat commands.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from django.core.cache import caches
from django.core.cache.backends.redis import RedisCache
from django.utils.module_loading import import_string

from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import shown_name
from djqueue.core.suggest import nearest
from djqueue.storage.redis.endpoints import Endpoint, Sentinel

from .arguments import taken
from .urls import address_of, read_single


def read_cache(alias: Any) -> Endpoint:
    """Return the endpoint of a cache. Raises ConfigurationError."""
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
        found = read_single(_first(configured, "[;,]", where), where)
        return replace(found, arguments=taken(options, found.arguments))
    if any(base.__module__.startswith("django_redis.") for base in kind.__mro__):
        return _read_django_redis(alias, configured, options)
    raise ConfigurationError(
        f"CACHE: {alias!r} is a {backend}, which does not use Redis: name a Redis cache "
        "(django_redis.cache.RedisCache), or set URL instead"
    )


def _read_django_redis(alias: str, configured: Mapping[str, Any], options: dict[str, Any]) -> Endpoint:
    from django_redis.client import ShardClient
    from django_redis.pool import SentinelConnectionFactory, get_connection_factory

    client = options.get("CLIENT_CLASS")
    if client and issubclass(import_string(client), ShardClient):
        raise ConfigurationError(
            f"CACHE: {alias!r} spreads its keys over several servers: name another cache, or set URL instead"
        )
    where = f"CACHE: {alias!r}: LOCATION"
    url = _first(configured, ",", where, lambda url: ("is_master", "0") not in parse_qsl(urlsplit(url).query))
    factory = get_connection_factory(options=options)
    params = factory.make_connection_params(url)
    found = read_single(_without_role(params.get("url", url)), where)
    arguments = taken(params, getattr(factory, "pool_cls_kwargs", {}), found.arguments)
    if not isinstance(factory, SentinelConnectionFactory):
        return replace(found, arguments=arguments)
    return Sentinel(
        addresses=tuple(address_of(pair, f"CACHE: {alias!r}: SENTINELS") for pair in options["SENTINELS"]),
        master=found.address[0],
        arguments=arguments,
        sentinel_arguments=taken(options.get("SENTINEL_KWARGS") or {}),
    )


def _first(
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
