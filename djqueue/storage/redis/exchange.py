"""A request and its answer on a connection, without the layers around it in redis-py.

Those take as long as the call itself. A few connections are kept at hand, the others go back to the pool,
where whoever waits for one finds it. A Cluster's client is asked as it is: it knows the nodes.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import redis
from hiredis import pack_command
from redis import exceptions as errors

from djqueue.core.deadline import remaining
from djqueue.core.forks import after_fork

from .connections import Connections

AT_HAND = 8
"""Idle connections that do not go back to the pool: as many callers as there are likely to be at once."""

WAIT_SHARE = 0.8
"""Part of the seconds that are left in which replicas have to confirm a call."""
TO_CONNECT = 3
"""Times TIMEOUT that a new connection and its first answer may take, where the caller has no deadline: each
step has TIMEOUT, so that a server that is slow, and not away, can be worked with."""

READS = 500
"""Requests that are sent before their answers are read."""

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
        """(pool, connection) of threads."""
        self._spare_of: WeakKeyDictionary[Any, deque[tuple[Any, Any]]] = WeakKeyDictionary()
        """The same of each loop."""
        after_fork(self.forget)

    def forget(self) -> None:
        """Keep no connection at hand any more: they are closed with their pools, or are the parent's."""
        self._spare.clear()
        self._spare_of.clear()

    def ask(self, words: Words) -> Any:
        """One exchange."""
        client: Any = self._connections.sync()
        if self._connections.is_cluster:
            return client.execute_command(*words)
        with self.connection(client) as connection:
            connection.send_packed_command([pack_command(tuple(words))], check_health=False)
            return connection.read_response()

    def ask_many(self, requests: Sequence[Words]) -> list[Any]:
        """Calls of scripts, or commands, that change nothing: to each server all that it has the keys of.

        An answer may be one of redis-py's errors.
        """
        answers: list[Any] = [redis.ConnectionError("no request was sent")] * len(requests)
        for pool, places in self._by_server(requests):
            for start in range(0, len(places), READS):
                some = places[start : start + READS]
                try:
                    self._ask_some(pool, requests, some, answers)
                except redis.RedisError as error:
                    answers[some[0]] = error  # as for those that were not answered
        return answers

    def ask_replicated(self, words: Words, key: bytes, replicas: int, patience: float) -> tuple[Any, int]:
        """One exchange with the server that has a key; returns the answer, and how many replicas have it.

        All is asked on one connection: WAIT confirms what this connection has written, and a server that a
        failover has put in another's place cannot confirm what that one was told.

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
        # A call that is answered from memory writes nothing: the marker does.
        marker = ("SET", key, b"", "PX", 1)
        answers: list[Any] = []
        with using as connection:
            # The answer needs the rest of what is left once the connection is there. WAIT 0 would not end.
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
                # The client learns where the slot is now. The call is numbered: it counts once.
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
        """A connection to the single server, for one caller, who reads all that it asks for."""
        watch = self._watch
        if watch is not None:
            watch.check()
        try:
            pool, connection = self._spare.pop()
        except IndexError:
            found: Any = client if client is not None else self._connections.sync()
            pool = found.connection_pool
            connection = pool.get_connection()
        try:
            if watch is not None and connection.epoch != watch.epoch:
                connection.disconnect()  # It leads to an old master.
                connection.connect()
            yield connection
        except redis.ResponseError:
            self._put_back(self._spare, pool, connection)
            raise
        except BaseException as error:
            # What may still come must not be taken for another call's answer.
            connection.disconnect()
            pool.release(connection)
            if isinstance(error, redis.ConnectionError):
                # The others are as dead, most likely: a pool looks at one before it gives it out.
                while self._spare:
                    spare_pool, spare = self._spare.pop()
                    spare_pool.release(spare)
            raise
        self._put_back(self._spare, pool, connection)

    def _put_back(self, spare: deque[tuple[Any, Any]], pool: Any, connection: Any) -> None:
        if len(spare) < AT_HAND:
            spare.append((pool, connection))
        else:
            pool.release(connection)

    async def aask(self, words: Words) -> Any:
        """One exchange, on this loop's own connections."""
        client: Any = self._connections.for_loop()
        if self._connections.is_cluster:
            return await client.execute_command(*words)
        [answer] = await self.aask_many([words])
        if isinstance(answer, redis.ResponseError):
            raise answer
        return answer

    async def aask_many(self, requests: Sequence[Words]) -> list[Any]:
        """Some requests in one exchange with the single server; an error is an answer, too."""
        client: Any = self._connections.for_loop()
        packed = b"".join([pack_command(tuple(words)) for words in requests])
        loop = asyncio.get_running_loop()
        spare = self._spare_of.get(loop)
        if spare is None:
            spare = self._spare_of[loop] = deque()
        try:
            # One time limit for all of it is cheaper than one for each part.
            steps = 1 if spare else TO_CONNECT
            async with asyncio.timeout(left := remaining(steps * self._timeout)):
                return await self._on_one(client.connection_pool, spare, packed, len(requests))
        except TimeoutError as error:
            raise errors.TimeoutError(f"no answer within {left:.3g} s") from error

    async def _on_one(self, pool: Any, spare: deque[tuple[Any, Any]], packed: bytes, count: int) -> list[Any]:
        watch = self._watch
        if watch is not None:
            watch.check()
        if spare:
            pool, connection = spare.pop()
        else:
            connection = await pool.get_connection()
            connection.socket_timeout = None
        try:
            if watch is not None and connection.epoch != watch.epoch:
                await connection.disconnect(nowait=True)  # See `connection`.
                await connection.connect()
            await connection.send_packed_command(packed, check_health=False)
            answers = [await self._read(connection) for _ in range(count)]
        except BaseException as error:
            await connection.disconnect(nowait=True)
            await pool.release(connection)
            if isinstance(error, redis.ConnectionError):
                while spare:
                    spare_pool, idle = spare.pop()
                    await spare_pool.release(idle)
            raise
        if len(spare) < AT_HAND:
            spare.append((pool, connection))
        else:
            await pool.release(connection)
        return answers

    @staticmethod
    async def _read(connection: Any) -> Any:
        try:
            return await connection.read_response(timeout=math.inf)
        except redis.ResponseError as error:
            return error


@contextmanager
def _from(pool: Any) -> Iterator[Any]:
    """A connection of a cluster's node, for one caller, who reads all that it asks for."""
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)
