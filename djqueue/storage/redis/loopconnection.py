"""Requests of an event loop: redis-py opens the connection, and this takes over its transport.

redis-py's readers and writers for asyncio take several times as long as the request itself, because every
reply passes through a stream, a parser that is a coroutine, and a time limit of its own.
"""

import asyncio
from typing import Any

import redis
from hiredis import Reader
from redis import exceptions as errors

NOTHING = object()
"""Returned by the reader while a reply is incomplete."""


class LoopConnection(asyncio.Protocol):
    """An open connection of redis-py for one caller at a time, on the loop that opened it."""

    def __init__(self, pool: Any, connection: Any) -> None:
        """Take over the transport of an open connection without unread replies."""
        self.pool = pool
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        parse_error = connection._parser.parse_error
        self._reader = Reader(
            protocolError=errors.InvalidResponse, replyError=parse_error, notEnoughData=NOTHING
        )
        self._transport = connection._writer.transport
        self._stream = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._future: asyncio.Future[list[Any]] | None = None
        self._replies: list[Any] = []
        self._count = 0
        self._seconds = self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.is_open = not self._transport.is_closing()

    async def ask(self, packed: bytes, count: int, seconds: float) -> list[Any]:
        """Send packed requests and return their replies, which may be redis-py's errors.

        Raises a ConnectionError if the connection is or gets closed, and a TimeoutError of redis-py. After
        any exception the connection must be closed: a late reply would be read as that of another request.
        """
        if not self.is_open:
            raise redis.ConnectionError("Connection closed by server.")
        self._count = count
        self._replies = []
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._future = future
        self._seconds = seconds
        until = self._until = self._loop.time() + seconds
        timer = self._timer
        if timer is None or timer.when() > until:
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(until, self._check)
        self._transport.write(packed)
        try:
            return await future
        finally:
            self._future = None

    async def close(self) -> None:
        """Close the connection, and return it to its pool, which opens it again when it is needed."""
        self._stop_timer()
        await self.connection.disconnect(nowait=True)
        await self.pool.release(self.connection)

    async def give_back(self) -> None:
        """Return the open connection to its pool."""
        self._stop_timer()
        self._transport.set_protocol(self._stream)
        await self.pool.release(self.connection)

    # Called by the transport.

    def data_received(self, data: bytes) -> None:
        """Read replies; wake the caller when all are there."""
        reader, replies = self._reader, self._replies
        future = self._future
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not NOTHING:
                replies.append(reply)
        except errors.RedisError as error:
            if future is not None and not future.done():
                future.set_exception(error)
            return
        if len(replies) >= self._count and future is not None and not future.done():
            future.set_result(replies)

    def eof_received(self) -> bool | None:
        """Note that the server has closed the connection."""
        self.connection_lost(None)
        keeps_open: bool | None = self._stream.eof_received()
        return keeps_open

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in progress."""
        if not self.is_open:
            return
        self.is_open = False
        self._stop_timer()
        future = self._future
        if future is not None and not future.done():
            text = str(exc) if exc is not None else "Connection closed by server."
            future.set_exception(redis.ConnectionError(text))
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        """Tell redis-py's writer, as its own protocol does."""
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        """Tell redis-py's writer, as its own protocol does."""
        self._stream.resume_writing()

    def _check(self) -> None:
        """Fail the request in progress if its time is over. One timer serves many requests."""
        self._timer = None
        future = self._future
        if future is None or future.done():
            return
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._check)
        else:
            future.set_exception(errors.TimeoutError(f"no answer within {self._seconds:.3g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
