"""Arguments of connections: whose word counts."""

from collections.abc import Mapping
from typing import Any

import redis

from djqueue.core.errors import ConfigurationError
from djqueue.core.hiding import shown_name
from djqueue.core.suggest import nearest
from djqueue.storage.redis.endpoints import CLUSTER_ARGUMENTS

SHARED = frozenset(
    {
        *("db", "username", "password", "credential_provider", "ssl"),
        *("socket_keepalive", "socket_keepalive_options", "socket_read_size", "max_connections"),
    }
)
"""What is taken from a cache's or another client's connections too, next to all that begins with `ssl_`."""
OWN = frozenset({"client_name", "health_check_interval"})
"""What is said of djqueue's connections alone."""
SETTLED = {
    **dict.fromkeys(("host", "port", "path"), "use URL"),
    **dict.fromkeys(("socket_timeout", "socket_connect_timeout"), "use TIMEOUT"),
    **dict.fromkeys(("decode_responses", "encoding", "encoding_errors"), "djqueue reads bytes"),
    **dict.fromkeys(("protocol", "legacy_responses", "parser_class"), "djqueue reads RESP2 replies"),
    **dict.fromkeys(("retry", "retry_on_timeout", "retry_on_error"), "the storage has its own retries"),
    **dict.fromkeys(("connection_class", "timeout"), "djqueue has its own connection pools"),
}
"""What nobody chooses, and why. In a URL, a cache or a client it may stand, for others to use."""


def check_argument(where: str, name: object) -> None:
    """Raise ConfigurationError for what is no argument of connections."""
    known = SHARED | OWN | SETTLED.keys()
    if name not in known and not str(name).startswith("ssl_"):
        hint = nearest(str(name), known | CLUSTER_ARGUMENTS)
        raise ConfigurationError(f"{where}: {shown_name(name)} is not an argument of Redis connections{hint}")


def taken(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """What is taken of the arguments of somebody else's connections; the last word counts."""
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
