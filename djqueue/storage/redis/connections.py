"""The clients of this process: one for its threads, and one for each of its event loops."""

import asyncio
import atexit
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from djqueue.core.threads import after_fork

from . import requirements  # noqa: F401 - before redis-py is imported
from .client import (
    Address,
    AsyncClient,
    AsyncClusterClient,
    Client,
    ClusterClient,
    Connection,
    Single,
    node_of,
)
from .failover import FailoverWatch
from .location import locate


class Connections:
    """Clients for one Redis, Sentinel or Cluster, from a storage's OPTIONS.

    One of these says where the server is:

    CACHE: alias of a cache of django-redis or Django; its pools are not shared.
    URL: `redis://`, `rediss://` (encrypted), `unix://`, `redis+sentinel://host:port,host:port/master_name/0`
        or `redis+cluster://host:port,host:port`.
    SENTINELS: a list of (host, port). With them go MASTER_NAME, DB, USERNAME, PASSWORD and SENTINEL_KWARGS,
        a dict of arguments for connections to the sentinels.
    CLIENT: a function, or its dotted path, that returns a redis-py client with these settings.

    CONNECTION: a dict of further keyword arguments for redis-py's connections.
    TIMEOUT: seconds for connecting and the reply together: 2 by default, at most 60. In a cluster a command
        may take several times as long if other nodes have to be asked.
    SOCKET_TIMEOUT: seconds for connecting, and for a reply, after which another attempt is made: TIMEOUT by
        default, and at most.

    Methods may be called from any thread. A command is sent once, even if its reply is lost.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._endpoint = locate(options)
        self._begin()
        _everywhere.add(self)
        after_fork(self._forget)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop]
        self._of_loops = weakref.WeakKeyDictionary()

    @property
    def is_cluster(self) -> bool:
        """True for a Redis Cluster."""
        return self._endpoint.is_cluster

    @property
    def is_single(self) -> bool:
        """True for a single server, without failover."""
        return isinstance(self._endpoint, Single)

    @property
    def watch(self) -> FailoverWatch | None:
        """The watch over failovers, with sentinels."""
        return self._endpoint.watch

    @property
    def timeout(self) -> float:
        """Seconds for connecting and for a reply."""
        return self._endpoint.timeout

    def describe(self) -> str:
        """Return the address of the server, without secrets."""
        return self._endpoint.describe()

    def sync(self) -> Client:
        """Return the client that all threads share.

        Raises StorageUnavailableError if it has to be made and no node of a cluster can be reached.
        """
        client = self._client
        if client is None:
            with self._lock:
                client = self._client
                if client is None:
                    client = self._client = self._endpoint.client()
            self._watch_failovers()
        return client

    def for_loop(self) -> AsyncClient:
        """Return the running loop's client. It is closed when `asyncio.run` ends the loop."""
        loop = asyncio.get_running_loop()
        of_loop = self._of_loops.get(loop)
        if of_loop is None:
            client = self._endpoint.async_client()
            self._watch_failovers()
            of_loop = _OfLoop(client, self._close_at_end(client))
            try:
                of_loop.ending.__anext__().send(None)  # started, the loop closes it
            except StopIteration:
                pass
            with self._lock:
                for ended in [other for other in self._of_loops if other.is_closed()]:
                    del self._of_loops[ended]
                self._of_loops[loop] = of_loop
        return of_loop.client

    def node_of(self, key: str | bytes) -> str:
        """Return the name of the node of a cluster that has a key, '' if that is not known yet.

        Called on an event loop, it uses what the loop's client knows.
        """
        try:
            of_loop = self._of_loops.get(asyncio.get_running_loop())
        except RuntimeError:
            client: Any = self._client
        else:
            client = self._client if of_loop is None else of_loop.client
        return node_of(client, key)

    def dedicated(self, address: Address | None = None) -> Connection:
        """Return a new, unopened connection outside the pools: to the server, the master, or a cluster node.

        Raises a RedisError if the sentinels name no master.
        """
        if address is not None:
            return self._endpoint.connection(address)
        if isinstance(self._endpoint, Single):
            return self._endpoint.connection()
        client: Any = self.sync()
        return self._endpoint.connection(client.connection_pool.get_master_address())

    def close(self) -> None:
        """Close all connections. Later calls make new clients."""
        with self._lock:
            client, self._client = self._client, None
            of_loops = dict(self._of_loops)
            self._of_loops.clear()
        if self.watch is not None:
            self.watch.close()
        if client is not None:
            for pool in _pools(client):
                pool.disconnect()
        for loop, of_loop in of_loops.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(loop.create_task, of_loop.ending.aclose())

    def _watch_failovers(self) -> None:
        if self.watch is not None:
            self.watch.start()

    async def _close_at_end(self, client: AsyncClient) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            loop = asyncio.get_running_loop()
            with self._lock:
                of_loop = self._of_loops.get(loop)
                if of_loop is not None and of_loop.client is client:
                    del self._of_loops[loop]
            await _aclose(client)

    def _forget(self) -> None:
        """Drop the parent's clients in a forked child."""
        client, of_loops = self._client, self._of_loops
        self._begin()
        # Closing one of these would remove its socket from the parent's event loop.
        _parents.append(of_loops)
        if client is not None:
            _disown(client)


class _OfLoop(NamedTuple):
    """An event loop's client, and the generator that closes it."""

    client: AsyncClient
    ending: AsyncGenerator[None, None]


def _pools(client: Client) -> list[Any]:
    if isinstance(client, ClusterClient):
        manager = client.nodes_manager
        nodes = {**manager.startup_nodes, **manager.nodes_cache}.values()
        return [node.redis_connection.connection_pool for node in nodes if node.redis_connection is not None]
    pool: Any = client.connection_pool
    return [pool, *(watcher.connection_pool for watcher in _watchers(client))]


def _watchers(client: Any) -> list[Any]:
    """Return the clients of the sentinels of a client."""
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return manager.sentinels if manager is not None else []


async def _aclose(client: AsyncClient) -> None:
    await client.aclose()
    if isinstance(client, AsyncClusterClient):
        # After an error it counts as closed, even if it still has connections.
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")
    else:
        for watcher in _watchers(client):
            await watcher.aclose()


def _disown(client: Client) -> None:
    """Close a forked child's copies of the parent's sockets.

    Another thread of the parent may have held any lock, and can't release it here: locks are replaced.
    """
    pools = _pools(client)
    for owner in (client, getattr(client, "nodes_manager", None), *pools):
        for lock in ("_lock", "_fork_lock", "_initialization_lock"):
            if hasattr(owner, lock):
                setattr(owner, lock, threading.RLock())
    for pool in pools:
        pool.reset()


_everywhere: "weakref.WeakSet[Connections]" = weakref.WeakSet()
_parents: list[Any] = []
"""The parent's objects that a forked child keeps and does not use."""


def _at_exit() -> None:
    for connections in list(_everywhere):
        connections.close()


atexit.register(_at_exit)
