"""A pub/sub connection and its messages."""

from collections import deque
from collections.abc import Collection, Iterator
from time import monotonic
from typing import Any, Literal, NamedTuple

import redis

from .endpoints import Connection

QUIET = 10.0
"""Seconds of silence before a ping, and for its reply."""
AT_ONCE = 1_000
"""Replies that are read at a time."""


class News(NamedTuple):
    """A message of the server about a channel."""

    what: Literal["message", "subscribed", "lost", "refused"]
    """`lost`: the server ended the subscription, because another node has the slot now."""
    channel: bytes
    detail: Any = None
    """The message, or the error."""


class PubSubConnection:
    """A connection that one thread writes to and reads from."""

    def __init__(self, connection: Connection, *, sharded: bool) -> None:
        self._connection: Any = connection
        self._prefix = "S" if sharded else ""
        self.channels: set[bytes] = set()
        """Channels that are subscribed to."""
        self._asked: deque[tuple[bytes, bytes]] = deque()
        """(SUBSCRIBE or UNSUBSCRIBE, channel) of requests without a reply."""
        self._heard_at = monotonic()
        self._pinged_at = 0.0
        """When a ping was sent that has no reply yet; 0: none."""
        self.has_more = False
        """True if there is something to read even if the socket is empty."""

    def open(self) -> None:
        """Connect. Raises a RedisError."""
        self._connection.connect()
        self._heard_at = monotonic()

    def close(self) -> None:
        """Disconnect. In a forked child, the parent's connection stays open."""
        self._connection.disconnect()

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        number: int = self._connection._sock.fileno()
        return number

    def subscribe(self, channels: Collection[bytes]) -> None:
        """Subscribe to channels. Raises a RedisError."""
        self.channels.update(channels)
        self._send(b"SUBSCRIBE", channels)

    def unsubscribe(self, channels: Collection[bytes]) -> None:
        """Unsubscribe from channels. Raises a RedisError."""
        self.channels.difference_update(channels)
        self._send(b"UNSUBSCRIBE", channels)

    def _send(self, operation: bytes, channels: Collection[bytes]) -> None:
        # One command for each: in a cluster, a command may not name channels of two slots.
        command = self._prefix + operation.decode()
        commands = [(command, channel) for channel in channels]
        self._asked.extend((operation, channel) for channel in channels)
        self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)

    @property
    def due(self) -> float:
        """Return when `check` has to be called."""
        return (self._pinged_at or self._heard_at) + QUIET

    def check(self) -> None:
        """Check that the server still replies. Raises a RedisError."""
        if monotonic() < self.due:
            return
        if self._pinged_at:
            raise redis.TimeoutError(f"the server has been silent for {2 * QUIET:g} s")
        self._pinged_at = monotonic()
        self._connection.send_command("PING", check_health=False)

    def read(self) -> Iterator[News]:
        """Yield the messages that have arrived. Raises a RedisError."""
        for _ in range(AT_ONCE):
            self.has_more = self._connection.can_read(0)
            if not self.has_more:
                return
            try:
                reply = self._connection.read_response()
            except redis.ResponseError as error:
                news = self._refused(error)
            else:
                news = self._understood(reply)
            self._heard_at, self._pinged_at = monotonic(), 0.0
            if news is not None:
                yield news

    def _refused(self, error: redis.ResponseError) -> News | None:
        if not self._asked:
            raise error
        operation, channel = self._asked.popleft()
        if operation == b"UNSUBSCRIBE":
            return None
        self.channels.discard(channel)
        return News("refused", channel, error)

    def _understood(self, reply: Any) -> News | None:
        if not isinstance(reply, list) or len(reply) != 3:
            return None  # the reply to a ping
        kind, channel, detail = reply
        if kind in (b"message", b"smessage"):
            return News("message", channel, detail)
        operation = kind.removeprefix(b"s").upper() if self._prefix else kind.upper()
        if self._asked and self._asked[0] == (operation, channel):
            self._asked.popleft()
        elif operation == b"UNSUBSCRIBE":
            self.channels.discard(channel)
            return News("lost", channel)
        if operation == b"UNSUBSCRIBE" or any(asked == channel for _, asked in self._asked):
            return None  # otherwise a later reply decides
        return News("subscribed", channel)
