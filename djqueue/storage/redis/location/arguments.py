"""Arguments of connections, and where they come from."""

from collections.abc import Mapping
from typing import Any

import redis

from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import shown_name
from djqueue.core.suggest import nearest
from djqueue.storage.redis.endpoints import CLUSTER_ARGUMENTS

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


def check_argument(where: str, name: object) -> None:
    """Raise ConfigurationError if a name is not an argument of connections."""
    known = SHARED | OWN | SETTLED.keys()
    if name not in known and not str(name).startswith("ssl_"):
        hint = nearest(str(name), known | CLUSTER_ARGUMENTS)
        raise ConfigurationError(f"{where}: {shown_name(name)} is not an argument of Redis connections{hint}")


def taken(*sources: Mapping[str, Any]) -> dict[str, Any]:
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
