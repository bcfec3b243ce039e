"""Requests and replies on a connection, without the layers around it in redis-py.

Those layers take as long as the call itself. A few idle connections are kept here; the others return to the
pool, for callers that wait for one. In a Cluster the client itself is called, since it knows the nodes.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import redis
from hiredis import pack_command
from redis import exceptions as errors

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import CircuitBreaker, Outage, remaining
from djqueue.core.errors import RestoreInProgressError, StorageError, StorageUnavailableError
from djqueue.core.messages import in_one_line
from djqueue.core.threads import after_fork

from .connections import Connections
from .loopconnection import LoopConnection
from .refusals import is_refusal, refused

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


class Exchange:
    """Exchanges with one server, from any thread and any loop. Raises redis-py's errors."""

    def __init__(self, connections: Connections, timeout: float) -> None:
        self._connections = connections
        self._timeout = timeout
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
        client: Any = self._connections.sync()
        if self._connections.is_cluster:
            return client.execute_command(*words)
        with self.connection(client) as connection:
            connection.send_packed_command((pack_command(tuple(words)),), check_health=False)
            return connection.read_response()

    def ask_many(self, requests: Sequence[Words]) -> list[Any]:
        """Send requests that change nothing, each to the server with its keys.

        A reply may be one of redis-py's errors.
        """
        answers: list[Any] = [redis.ConnectionError("no request was sent")] * len(requests)
        for pool, places in self._by_server(requests):
            for start in range(0, len(places), READS):
                some = places[start : start + READS]
                try:
                    self._ask_some(pool, requests, some, answers)
                except redis.RedisError as error:
                    answers[some[0]] = error  # like requests without a reply
        return answers

    def ask_replicated(self, words: Words, key: bytes, replicas: int, patience: float) -> tuple[Any, int]:
        """Send one request to the server with a key; return the reply, and how many replicas have it.

        One connection is used for all: WAIT confirms the writes of its own connection, and a server that took
        over in a failover can't confirm writes of the old one.

        patience: seconds to wait for the replicas.
        """
        client: Any = self._connections.sync()
        if self._connections.is_cluster:
            by_server = self._by_server([words])
            if not by_server:
                raise errors.SlotNotCoveredError("no node serves the slot")
            using = _from(by_server[0][0])
        else:
            using = self.connection(client)
        # A repeated call writes nothing, so the marker is written.
        marker = ("SET", key, b"", "PX", 1)
        answers: list[Any] = []
        with using as connection:
            # The reply needs the rest of the time once the connection is open. WAIT 0 would never end.
            wait = max(1, int(min(patience, remaining(math.inf) * WAIT_SHARE) * 1_000))
            requests = (words, marker, ("WAIT", replicas, wait))
            packed = b"".join(pack_command(tuple(request)) for request in requests)
            connection.send_packed_command([packed], check_health=False)
            for _ in requests:
                try:
                    answers.append(connection.read_response())
                except redis.ResponseError as error:
                    answers.append(error)
        for answer in answers:
            if isinstance(answer, errors.MovedError):
                # The client learns where the slot is now. The call has a number, so it is applied once.
                client.execute_command(*words)
                raise redis.ConnectionError(str(answer)) from answer
            if isinstance(answer, redis.ResponseError):
                raise answer
        return answers[0], answers[2]

    def _by_server(self, requests: Sequence[Words]) -> list[tuple[Any, list[int]]]:
        client: Any = self._connections.sync()
        if not self._connections.is_cluster:
            return [(None, list(range(len(requests))))]
        found: dict[Any, tuple[Any, list[int]]] = {}
        for place, words in enumerate(requests):
            try:
                key = words[3] if words[0] in SCRIPT_CALLS else words[1]
                node = client.get_node_from_key(key)
            except errors.SlotNotCoveredError:
                continue
            if node is not None and node.redis_connection is not None:
                found.setdefault(node.name, (node.redis_connection.connection_pool, []))[1].append(place)
        return list(found.values())

    def _ask_some(
        self, pool: Any, requests: Sequence[Words], places: Sequence[int], answers: list[Any]
    ) -> None:
        packed = [pack_command(tuple(requests[place])) for place in places]
        with self.connection() if pool is None else _from(pool) as connection:
            connection.send_packed_command([b"".join(packed)], check_health=False)
            for place in places:
                try:
                    answers[place] = connection.read_response()
                except redis.ResponseError as error:
                    answers[place] = error

    @contextmanager
    def connection(self, client: Any = None) -> Iterator[Any]:
        """A connection to the single server for one caller, who reads all replies."""
        pool, connection = self.take(client)
        try:
            yield connection
        except redis.ResponseError:
            self.give_back(pool, connection)
            raise
        except BaseException as error:
            self.drop(pool, connection, error)
            raise
        self.give_back(pool, connection)

    def take(self, client: Any = None) -> tuple[Any, Any]:
        """Take a connection to the single server, with its pool; `give_back` or `drop` it."""
        watch = self._watch
        if watch is not None:
            watch.check()
        try:
            spare = self._spare.pop()
        except IndexError:
            spare = None
        if spare is not None:
            pool, connection = spare
        else:
            found: Any = client if client is not None else self._connections.sync()
            pool = found.connection_pool
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
        if self._connections.is_cluster:
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
                await connection.disconnect(nowait=True)  # see `connection`
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
def _from(pool: Any) -> Iterator[Any]:
    """A connection to a cluster node for one caller, who reads all replies."""
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


AWAY = (
    errors.ConnectionError,
    errors.TimeoutError,
    errors.ReadOnlyError,
    errors.ClusterDownError,
    errors.MasterDownError,
    errors.TryAgainError,
    errors.SlotNotCoveredError,
)
"""Errors that may pass in a moment: a failover, a restart, a slot that is moving."""
ABSENT = (errors.ConnectionError, errors.TimeoutError, errors.ClusterDownError, errors.MasterDownError)
"""Errors of an unavailable server, after which other calls fail at once."""
WITHOUT_REPLICAS = "NOREPLICAS"
TEMPORARY = ("BUSY ", "LOADING", "UNKILLABLE", WITHOUT_REPLICAS)
"""Prefixes of errors that may pass in a moment."""
FIRST_WAIT, LAST_WAIT = 0.02, 0.5
"""Seconds between attempts: the first wait, which doubles, and the longest."""


class RetryWindow:
    """The time in which a call may be repeated, and what its end says about the server."""

    def __init__(
        self,
        timeout: float,
        connections: Connections,
        breakers: dict[str, CircuitBreaker],
        name: str,
        *,
        counts: bool,
    ) -> None:
        self._counts = counts
        self._until = time.monotonic() + timeout
        self._wait = FIRST_WAIT
        self._connections = connections
        self._breakers = breakers
        self._name = name
        self._is_settled = False

    @property
    def remaining(self) -> float:
        """Seconds left for the call."""
        return max(0.0, self._until - time.monotonic())

    def wait(self, error: redis.RedisError) -> float:
        """Return the seconds until the next attempt. Raises the error for callers if there is none."""
        if is_refusal(error) or not (isinstance(error, AWAY) or str(error).startswith(TEMPORARY)):
            self.succeeded()  # the server has replied
            raise failure(error, self._connections) from error
        if self._connections.is_single and is_refused(error):
            # Nothing listens there, and no other server takes over: the next call may try at once.
            self.succeeded()
            raise away(error, self._connections) from error
        if time.monotonic() + self._wait > self._until:
            unavailable = away(error, self._connections)
            if isinstance(error, ABSENT):
                self._failed(str(unavailable))
            else:
                self.succeeded()
            raise unavailable from error
        wait, self._wait = self._wait, min(2 * self._wait, LAST_WAIT)
        return wait

    def succeeded(self) -> None:
        """Note that the server replies."""
        self._is_settled = True
        if self._breakers and (breaker := self._breakers.get(self._name)) is not None:
            breaker.succeeded()

    def gave_up(self, error: BaseException) -> None:
        """Note that the call has ended without a reply."""
        if self._is_settled:
            return
        if isinstance(error, StorageUnavailableError):
            self._failed(str(error))  # the nodes of a cluster could not be read
        elif (breaker := self._breakers.get(self._name)) is not None:
            breaker.gave_up()

    def judge(self, replies: Sequence[Any]) -> None:
        """Note what replies say about the server. Raises the error for callers if none can be repeated."""
        for reply in replies:
            if isinstance(reply, redis.RedisError) and not isinstance(reply, errors.NoScriptError):
                time.sleep(self.wait(reply))
                self.gave_up(reply)
                return
        self.succeeded()

    def _failed(self, reason: str) -> None:
        if self._counts:
            self._is_settled = True
            self._breakers.setdefault(self._name, CircuitBreaker()).failed(reason)


def is_refused(error: BaseException) -> bool:
    """Return whether nothing listens at the address of a failed connection."""
    return isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)


def unavailable_for(outage: Outage) -> str:
    seconds = max(0, SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"{outage.reason} The server has been unavailable for {seconds:.1f} s; retrying soon."


def away(error: Exception, connections: Connections) -> StorageUnavailableError:
    """Return the error for a server that cannot be reached or accepts no writes."""
    reason = in_one_line(error)
    if reason.startswith(WITHOUT_REPLICAS):
        return StorageUnavailableError(
            f"{connections.describe()} accepts no writes: {reason} The server has fewer replicas than its "
            "min-replicas-to-write requires."
        )
    return StorageUnavailableError(
        f"{connections.describe()} does not answer: {reason.rstrip('.')}. Is it running?"
    )


def failure(error: redis.RedisError, connections: Connections) -> StorageError:
    """Return the error for a command that Redis rejects."""
    reason = in_one_line(error)
    if reason.startswith("RESTORING"):  # see `request.lua`
        return RestoreInProgressError()
    if isinstance(error, errors.OutOfMemoryError):
        return StorageUnavailableError(
            f"{connections.describe()} is out of memory: {reason}. Increase maxmemory or free memory."
        )
    if is_refusal(error):
        return refused(connections.describe(), error)
    return StorageError(f"{connections.describe()}: {reason}")
