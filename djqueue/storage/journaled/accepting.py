"""Accepts connections to the scheduler's socket, within limits that leave file descriptors for the rest."""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable
from typing import NamedTuple

from djqueue.core.throttle import ThrottledLog

from .address import Address
from .folder import refusal_of

MAX_UNAUTHENTICATED = 64
"""Connections that may wait for their first request; with one more, the oldest is closed."""
MAX_DESCRIPTORS = 65_536
"""File descriptors that are assumed where the process may open any number."""
BACKLOG = 1_024
RETRY = 1.0
"""Seconds until connections are accepted again after the system had no descriptor or no memory for one."""

Accepted = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str | None], None]
"""Called with each connection, and with why it is refused, if it is."""

logger = logging.getLogger("djqueue.server")
log = ThrottledLog(logger, 60.0)


class Limits(NamedTuple):
    """Maximum number of connections."""

    unauthenticated: int
    """Connections that have sent neither a valid request nor a token yet."""
    total: int

    @classmethod
    def of_process(cls) -> "Limits":
        """Leave at least three eighths of the process's file descriptors for databases and jobs."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)
        return cls(max(1, min(MAX_UNAUTHENTICATED, limit // 8)), max(2, limit // 2))


async def bind_tcp(address: Address) -> list[socket.socket]:
    """Listen on every address of a host, on one port. Raises OSError if none can be had."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[socket.socket] = []
    port, missing = address.port, None
    try:
        for family, kind, protocol, _, place in dict.fromkeys(found):
            listener = socket.socket(family, kind, protocol)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((place[0], port, *place[2:]))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                # A name may have addresses of a family that this host does not use.
                missing = error
                listeners.pop().close()
                continue
            port = listener.getsockname()[1]
        if not listeners and missing is not None:
            raise missing
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


async def accept(listener: socket.socket, accepted: Accepted) -> None:
    """Accept connections on a listening socket until cancelled."""
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except ConnectionAbortedError:
            continue
        except OSError as error:
            log.log(
                logging.ERROR,
                "accept",
                "Cannot accept connections: %s. Retrying every %g s.",
                error,
                RETRY,
            )
            await asyncio.sleep(RETRY)
            continue
        try:
            await _open(loop, connection, accepted)
        except OSError as error:
            connection.close()
            log.log(logging.WARNING, "open", "Closed an unusable connection: %s.", error)


async def _open(loop: asyncio.AbstractEventLoop, connection: socket.socket, accepted: Accepted) -> None:
    refusal = refusal_of(connection) if connection.family == socket.AF_UNIX else None
    reader = asyncio.StreamReader(loop=loop)

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted(reader, writer, refusal)

    await loop.connect_accepted_socket(
        lambda: asyncio.StreamReaderProtocol(reader, connected, loop=loop), connection
    )
