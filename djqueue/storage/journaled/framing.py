"""Connect to the scheduler's socket, and send and receive its frames."""

import select
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

from djqueue.core.errors import SerializationError
from djqueue.storage.wire import LENGTH, MAX_FRAME, unpack_frame

from .address import Address
from .folder import connect_privately

CONNECT_TIMEOUT = 1.0
SHORT_FRAME = 32 * 1024
"""Maximum bytes of a frame that a writable socket takes at once: a part of the usual buffers."""


def connect(address: Address, timeout: float = CONNECT_TIMEOUT) -> socket.socket:
    """Return a connected socket.

    Raises:
        OSError: The connection failed.
        ConfigurationError: The socket belongs to another user.
    """
    timeout = max(timeout, 0.001)  # 0 would make the socket non-blocking.
    if address.host:
        connection = socket.create_connection((address.host, address.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = connect_privately(address.path, timeout)
    connection.settimeout(None)
    return connection


def send_all(connection: socket.socket, data: bytes, until: float) -> None:
    """Send on a blocking socket that another thread reads. Raises TimeoutError, or another OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            wait = until - monotonic()
            outgoing = select.poll()
            outgoing.register(connection, select.POLLOUT)
            if wait <= 0 or not outgoing.poll(wait * 1_000):
                raise TimeoutError("the peer is not reading its socket") from None


def takes_at_once(connection: socket.socket, data: bytes) -> bool:
    """Return whether a socket has room for a short frame, so that sending it does not wait."""
    if len(data) > SHORT_FRAME:
        return False
    outgoing = select.poll()
    outgoing.register(connection, select.POLLOUT)
    return bool(outgoing.poll(0))


def frames(buffer: bytearray) -> Iterator[Any]:
    """Remove the complete frames from a buffer of received bytes, and yield them."""
    while len(buffer) >= LENGTH.size:
        (length,) = LENGTH.unpack_from(buffer)
        if length > MAX_FRAME:
            raise SerializationError(f"a frame of {length} bytes exceeds the limit of {MAX_FRAME}")
        end = LENGTH.size + length
        if len(buffer) < end:
            return
        body = bytes(buffer[LENGTH.size : end])
        del buffer[:end]
        yield unpack_frame(body)
