"""Requests and replies on connections, without the layers in redis-py that take as long as the call itself.

redis-py opens the connections, and they stay in its pools. A few idle ones are kept here, since a pool takes
time; the others return to it, for callers that wait for one. In a Cluster the client itself is called, since
it knows the nodes.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import redis
from hiredis import Reader, pack_command
from redis import exceptions as errors

from djqueue.core.deadlines import remaining
from djqueue.core.threads import after_fork

from .connections import Connections

NOTHING = object()
"""Returned by the reader while a reply is incomplete."""
AT_HAND = 8
"""Idle connections that are kept here: about the likely number of concurrent callers."""
WAIT_SHARE = 0.8
"""Share of the remaining seconds in which replicas have to confirm a call."""
TO_CONNECT = 3
"""Multiple of TIMEOUT that opening a connection on an event loop may take if the caller has no deadline: each
step has TIMEOUT, so that a slow server can be used."""
READS = 500
"""Requests that are sent before their replies are read."""
SCRIPT_CALLS = frozenset({b"EVALSHA", b"EVAL"})
"""Commands whose first key follows the script and the number of keys."""
Words = Sequence[Any]


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
        self._transport.write(packed)
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._future = future
        self._seconds = seconds
        until = self._until = self._loop.time() + seconds
        timer = self._timer
        if timer is None or timer.when() > until:
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(until, self._check)
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


class Exchange:
    """Exchanges with one server, from any thread and any loop. Raises redis-py's errors."""

    def __init__(self, connections: Connections, timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
        self._is_cluster = connections.is_cluster
        self._watch = connections.watch
        self._spare: deque[tuple[Any, Any]] = deque()
        """Idle connections of threads, each with its pool."""
        self._spare_of: WeakKeyDictionary[Any, deque[LoopConnection]] = WeakKeyDictionary()
        """Idle connections of each event loop."""
        after_fork(self.forget)

    def forget(self) -> None:
        """Drop the idle connections: they are closed with their pools, or belong to the parent."""
        self._spare.clear()
        self._spare_of.clear()

    def ask(self, words: Words) -> Any:
        """Send one request and return its reply."""
        if self._is_cluster:
            client: Any = self._connections.sync()
            return client.execute_command(*words)
        with self.connection() as connection:
            connection.send_packed_command((pack_command(tuple(words)),), check_health=False)
            return connection.read_response()

    def ask_many(self, requests: Sequence[Words]) -> list[Any]:
        """Send requests that change nothing, each to the server with its keys.

        A reply may be one of redis-py's errors.
        """
        answers: list[Any] = [redis.ConnectionError("no request was sent")] * len(requests)
        for pool, positions in self._by_server(requests):
            for start in range(0, len(positions), READS):
                some = positions[start : start + READS]
                packed = b"".join([pack_command(tuple(requests[position])) for position in some])
                try:
                    with self.connection() if pool is None else _node_connection(pool) as connection:
                        connection.send_packed_command([packed], check_health=False)
                        for position in some:
                            answers[position] = _reply(connection)
                except redis.RedisError as error:
                    answers[some[0]] = error  # like requests without a reply
        return answers

    def ask_replicated(self, words: Words, key: bytes, replicas: int, patience: float) -> tuple[Any, int]:
        """Send one request to the server with a key; return the reply, and how many replicas have it.

        One connection is used for all: WAIT confirms the writes of its own connection, and a server that took
        over in a failover can't confirm writes of the old one.

        patience: seconds to wait for the replicas.
        """
        if self._is_cluster:
            by_server = self._by_server([words])
            if not by_server:
                raise errors.SlotNotCoveredError("no node serves the slot")
            using = _node_connection(by_server[0][0])
        else:
            using = self.connection()
        # A repeated call writes nothing, so the marker is written.
        marker = ("SET", key, b"", "PX", 1)
        with using as connection:
            # The reply needs the rest of the time once the connection is open. WAIT 0 would never end.
            wait = max(1, int(min(patience, remaining(math.inf) * WAIT_SHARE) * 1_000))
            requests = (words, marker, ("WAIT", replicas, wait))
            packed = b"".join(pack_command(tuple(request)) for request in requests)
            connection.send_packed_command([packed], check_health=False)
            answers = [_reply(connection) for _ in requests]
        for answer in answers:
            if isinstance(answer, errors.MovedError):
                # The client learns where the slot is now. The call has a number, so it is applied once.
                client: Any = self._connections.sync()
                client.execute_command(*words)
                raise redis.ConnectionError(str(answer)) from answer
            if isinstance(answer, redis.ResponseError):
                raise answer
        return answers[0], answers[2]

    def _by_server(self, requests: Sequence[Words]) -> list[tuple[Any, list[int]]]:
        """Return the positions of the requests for each server, with the pool of a cluster's node."""
        if not self._is_cluster:
            return [(None, list(range(len(requests))))]
        client: Any = self._connections.sync()
        by_node: dict[Any, tuple[Any, list[int]]] = {}
        for position, words in enumerate(requests):
            try:
                key = words[3] if words[0] in SCRIPT_CALLS else words[1]
                node = client.get_node_from_key(key)
            except errors.SlotNotCoveredError:
                continue
            if node is not None and node.redis_connection is not None:
                pool = node.redis_connection.connection_pool
                by_node.setdefault(node.name, (pool, []))[1].append(position)
        return list(by_node.values())

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection to the single server for one caller, who reads all replies."""
        pool, connection = self.take()
        try:
            yield connection
        except redis.ResponseError:
            self.give_back(pool, connection)
            raise
        except BaseException as error:
            self.drop(pool, connection, error)
            raise
        self.give_back(pool, connection)

    def take(self) -> tuple[Any, Any]:
        """Take a connection to the single server, with its pool; `give_back` or `drop` it."""
        watch = self._watch
        if watch is not None:
            watch.check()
        try:
            pool, connection = self._spare.pop()
        except IndexError:
            client: Any = self._connections.sync()
            pool = client.connection_pool
            connection = pool.get_connection()
        if watch is not None and connection.epoch != watch.epoch:
            try:
                connection.disconnect()  # It is connected to an old master.
                connection.connect()
            except BaseException as error:
                self.drop(pool, connection, error)
                raise
        return pool, connection

    def give_back(self, pool: Any, connection: Any) -> None:
        """Return a connection all of whose replies have been read."""
        if len(self._spare) < AT_HAND:
            self._spare.append((pool, connection))
        else:
            pool.release(connection)

    def drop(self, pool: Any, connection: Any, error: BaseException | None = None) -> None:
        """Close a connection: a late reply must not be read as that of another call."""
        connection.disconnect()
        pool.release(connection)
        if isinstance(error, redis.ConnectionError):
            # The others are probably dead, too; a pool checks a connection before it returns it.
            while self._spare:
                spare_pool, spare = self._spare.pop()
                spare_pool.release(spare)

    async def aask(self, words: Words) -> Any:
        """Async version of `ask`, on the connections of this loop."""
        if self._is_cluster:
            client: Any = self._connections.for_loop()
            return await client.execute_command(*words)
        [answer] = await self._aask_packed(pack_command(tuple(words)), 1)
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    async def aask_many(self, requests: Sequence[Words]) -> list[Any]:
        """Send requests to the single server in one round trip; a reply may be an error."""
        packed = b"".join([pack_command(tuple(words)) for words in requests])
        return await self._aask_packed(packed, len(requests))

    async def _aask_packed(self, packed: bytes, count: int) -> list[Any]:
        watch = self._watch
        if watch is not None:
            watch.check()
        loop = asyncio.get_running_loop()
        spare = self._spare_of.get(loop)
        if spare is None:
            spare = self._spare_of[loop] = deque()
        if watch is None and spare and spare[-1].is_open:
            connection = spare.pop()
        else:
            connection = await self._loop_connection(spare)
        try:
            answers = await connection.ask(packed, count, remaining(self._timeout))
            for answer in answers:
                if isinstance(answer, redis.ConnectionError):
                    raise answer
        except BaseException as error:
            await connection.close()
            if isinstance(error, redis.ConnectionError):
                # The others are probably dead, too.
                while spare:
                    await spare.pop().close()
            raise
        if len(spare) < AT_HAND:
            spare.append(connection)
        else:
            await connection.give_back()
        return answers

    async def _loop_connection(self, spare: deque[LoopConnection]) -> LoopConnection:
        """Return an idle connection to the current server, or a new one."""
        watch = self._watch
        while spare:
            idle = spare.pop()
            # With sentinels, it may be connected to an old master.
            if idle.is_open and (watch is None or idle.connection.epoch == watch.epoch):
                return idle
            await idle.close()
        client: Any = self._connections.for_loop()
        pool = client.connection_pool
        left = remaining(TO_CONNECT * self._timeout)
        try:
            async with asyncio.timeout(left):
                return await self._open(pool)
        except TimeoutError as error:
            raise errors.TimeoutError(f"no connection within {left:.3g} s") from error

    async def _open(self, pool: Any) -> LoopConnection:
        watch = self._watch
        connection = await pool.get_connection()
        try:
            if watch is not None and connection.epoch != watch.epoch:
                await connection.disconnect(nowait=True)  # see `take`
                await connection.connect()
            return LoopConnection(pool, connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            await pool.release(connection)
            raise


class Pipeline:
    """Requests on one connection, whose replies are received later. Raises redis-py's errors on receipt."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._held: tuple[Any, Any] | None = None
        self._error: redis.RedisError | None = None
        """The error that broke the connection, for the requests without a reply."""

    @property
    def is_open(self) -> bool:
        """False once the connection is broken; the replies that are due are lost then."""
        return self._error is None

    def send(self, words: Words) -> None:
        """Send a request. If that fails, `receive` raises the error."""
        self._error = None
        try:
            if self._held is None:
                self._held = self._exchange.take()
            self._held[1].send_packed_command([pack_command(tuple(words))], check_health=False)
        except redis.RedisError as error:
            self._broken(error)
        except BaseException:
            self._broken(redis.ConnectionError("a request was interrupted"))
            raise

    def receive(self) -> Any:
        """Return the reply of the oldest request without one."""
        if self._error is not None:
            raise self._error
        assert self._held is not None
        try:
            return self._held[1].read_response()
        except redis.ResponseError:
            raise
        except redis.RedisError as error:
            self._broken(error)
            raise
        except BaseException:
            self._broken(redis.TimeoutError("the wait for a reply was interrupted"))
            raise

    def close(self, *, is_clean: bool) -> None:
        """End; `is_clean` if all replies have been received."""
        held, self._held = self._held, None
        if held is not None and is_clean:
            self._exchange.give_back(*held)
        elif held is not None:
            self._exchange.drop(*held)

    def _broken(self, error: redis.RedisError) -> None:
        self._error = error
        held, self._held = self._held, None
        if held is not None:
            self._exchange.drop(*held, error)


@contextmanager
def _node_connection(pool: Any) -> Iterator[Any]:
    """A connection to a cluster node for one caller, who reads all replies."""
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _reply(connection: Any) -> Any:
    """Return the next reply, which may be an error of the server."""
    try:
        return connection.read_response()
    except redis.ResponseError as error:
        return error
