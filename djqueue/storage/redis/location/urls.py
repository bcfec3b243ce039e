"""URLs of a server, of sentinels or of a cluster.

Errors quote only the scheme, since a URL may contain a password.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from redis.connection import parse_url

from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import kind_of
from djqueue.storage.redis.endpoints import Address, Cluster, Endpoint, Sentinel, Single

from .arguments import OWN, check_argument, taken

REDIS_PORT, SENTINEL_PORT = 6379, 26379
UNREADABLE = "{} cannot be read: are all special characters of the password percent-encoded?"
HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?")


def read_url(url: Any) -> Endpoint:
    """Return the endpoint of a `URL`. Raises ConfigurationError."""
    scheme = url.partition("://")[0] if isinstance(url, str) else ""
    reader = READERS.get(scheme)
    if reader is not None:
        _check_marks(url)
    if reader is None:
        raise ConfigurationError(f"URL must begin with one of {', '.join(f'{name}://' for name in READERS)}")
    return reader(url)


def _check_marks(url: str) -> None:
    """Raise ConfigurationError if a special character in the password splits the URL."""
    _, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :] and not url.startswith("unix:"):
        raise ConfigurationError(UNREADABLE.format("URL"))


def read_single(url: str, where: str = "URL") -> Single:
    """Return the endpoint of a URL of one server. Raises ConfigurationError."""
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
    addresses, path, arguments = _several(url, SENTINEL_PORT)
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
    addresses, path, arguments = _several(url, REDIS_PORT)
    _check_database(path, "URL")
    return Cluster(addresses=addresses, arguments={"db": int(path or 0), **arguments})


def _several(url: str, default_port: int) -> tuple[tuple[Address, ...], str, dict[str, Any]]:
    """Return hosts, path and arguments of a URL with several hosts."""
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    credentials, at, hosts = authority.rpartition("@")
    addresses = tuple(_address(host, default_port, "URL") for host in hosts.split(","))
    one = f"{scheme.partition('+')[0]}://{credentials}{at}localhost/?{query}"
    return addresses, path.rstrip("/"), _arguments(_parsed(one, "URL"))


def address_of(pair: Any, where: str) -> Address:
    """Return the address of a (host, port) pair. Raises ConfigurationError."""
    parts = () if isinstance(pair, str) or not isinstance(pair, Iterable) else tuple(pair)
    if len(parts) != 2:
        raise ConfigurationError(f"{where}: expected a (host, port) pair, got {kind_of(pair)}")
    host, port = map(str, parts)
    return _address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", 0, where)


def _address(text: str, default_port: int, where: str) -> Address:
    found = HOST.fullmatch(text.strip())
    if found is None or int(found[2] or 0) > 65_535:
        raise ConfigurationError(f"{where}: expected host:port, or host:port,host:port for several hosts")
    return found[1].strip("[]"), int(found[2] or default_port)


def _parsed(url: str, where: str) -> dict[str, Any]:
    """Return the parts of a URL of one host, as redis-py reads it."""
    for name, _ in parse_qsl(_split(url, where).query, keep_blank_values=True):
        check_argument(where, name)
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


def _arguments(parsed: dict[str, Any]) -> dict[str, Any]:
    return {**taken(parsed), **{name: parsed[name] for name in OWN if name in parsed}}


READERS: dict[str, Callable[[str], Endpoint]] = {
    "redis": read_single,
    "rediss": read_single,
    "unix": read_single,
    "redis+sentinel": _read_sentinels,
    "rediss+sentinel": _read_sentinels,
    "redis+cluster": _read_cluster,
    "rediss+cluster": _read_cluster,
}
