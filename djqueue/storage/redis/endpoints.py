"""The kinds of servers, and the clients that each takes.

All clients behave alike: a command is sent once. redis-py by itself would send it again, ten times since
version 8, when the answer is lost, and so might run a script twice; the storage knows which of its calls
may be repeated. Replies come in the form of the older protocol: that saves round trips at the start of a
connection, and with the newer one redis-py's pools do not see that a connection still has an answer to be
read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import redis
import redis.asyncio as aredis
from redis import sentinel
from redis.asyncio import sentinel as asentinel
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import AbstractConnection
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from djqueue.core.deadline import remaining
from djqueue.core.errors import ConfigurationError, StorageUnavailableError

from .clusters import AsyncClusterClient, ClusterClient
from .failover import FailoverWatch

Client: TypeAlias = redis.Redis | ClusterClient
AsyncClient: TypeAlias = aredis.Redis | AsyncClusterClient
Connection: TypeAlias = AbstractConnection
Address: TypeAlias = tuple[str, int]

TIMEOUT = 2.0
"""Seconds that connecting may take, and an answer, unless TIMEOUT says otherwise."""
SHORTEST = 0.001
"""Seconds that a socket is given in any case: 0 would mean not to wait at all."""
ENOUGH = 0.9
"""Part of a timeout at which a deadline is not worth a call of the system for each answer."""
IDLE = 30
"""Seconds after which a connection is asked for a sign of life before it is used."""
MOST_CONNECTIONS = 100
"""Connections of a process, or of a loop, to a single server; who finds them all in use waits for one."""
NO_LIMIT = 10_000
"""The same where redis-py's pools do not wait: of threads behind sentinels, and for each cluster node."""

CLUSTER_ARGUMENTS = frozenset({"address_remap", "dynamic_startup_nodes", "require_full_coverage"})
"""What is said to the client of a cluster, and not to its connections."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(ABC):
    """Where the jobs are, and how to get there."""

    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of connections, as redis-py calls them; `ssl`: whether they are encrypted."""
    timeout: float = TIMEOUT
    watch: FailoverWatch | None = field(default=None, init=False, repr=False, compare=False)
    """What follows the failovers of a master behind sentinels."""

    @property
    def is_cluster(self) -> bool:
        """Whether keys are spread over servers."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Where that is, without anything that is secret."""

    @abstractmethod
    def client(self) -> Client:
        """A new client for threads. Raises StorageUnavailableError if a cluster cannot be reached."""

    @abstractmethod
    def async_client(self) -> AsyncClient:
        """A new client for one event loop."""

    def connection(self, address: Address) -> Connection:
        """A connection to one server that is not open yet."""
        kind = _SSLConnection if self._encrypted else _Connection
        return kind(host=address[0], port=address[1], **self._of_connections())

    def check(self) -> None:
        """Show the arguments to redis-py, which connects to nothing yet. Raises ConfigurationError."""
        try:
            self._check()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"CONNECTION: redis-py refuses it: {error}") from error

    def _check(self) -> None:
        clients: tuple[Any, ...] = (self.client(), self.async_client())
        for client in clients:
            client.connection_pool.make_connection()

    @property
    def _encrypted(self) -> bool:
        return bool(self.arguments.get("ssl"))

    def _of_connections(self) -> dict[str, Any]:
        of_others = {"ssl", "max_connections", *CLUSTER_ARGUMENTS}
        return {
            "client_name": "djqueue",
            "health_check_interval": IDLE,
            **{name: value for name, value in self.arguments.items() if name not in of_others},
            "decode_responses": False,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": self.timeout,
            "socket_timeout": self.timeout,
        }

    def _of_async_connections(self) -> dict[str, Any]:
        return {**self._of_connections(), "retry": AsyncRetry(NoBackoff(), 0)}

    def _of_waiting_pools(self) -> dict[str, Any]:
        most = self.arguments.get("max_connections") or MOST_CONNECTIONS
        return {"max_connections": most, "timeout": self.timeout}


@dataclass(frozen=True, kw_only=True)
class Single(Endpoint):
    """One server, at an address or a Unix domain socket."""

    address: Address = ("localhost", 6379)
    path: str = ""

    def describe(self) -> str:
        """See `Endpoint.describe`."""
        where = f"unix:{self.path}" if self.path else spelled(self.address)
        return f"redis {where}/{self.arguments.get('db') or 0}"

    def client(self) -> redis.Redis:
        """See `Endpoint.client`."""
        kinds = (_Connection, _SSLConnection, _LocalConnection)
        pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            **self._place(*kinds), **self._of_waiting_pools(), **self._of_connections()
        )
        return redis.Redis(connection_pool=pool)

    def async_client(self) -> aredis.Redis:
        """See `Endpoint.async_client`."""
        kinds = (aredis.Connection, aredis.SSLConnection, aredis.UnixDomainSocketConnection)
        pool = aredis.BlockingConnectionPool(
            **self._place(*kinds), **self._of_waiting_pools(), **self._of_async_connections()
        )
        return aredis.Redis.from_pool(pool)

    def connection(self, address: Address | None = None) -> Connection:
        """See `Endpoint.connection`."""
        if self.path:
            local: Any = _LocalConnection
            made: Connection = local(path=self.path, **self._of_connections())
            return made
        return super().connection(address or self.address)

    def _place(self, plain: Any, encrypted: Any, local: Any) -> dict[str, Any]:
        if self.path:
            return {"connection_class": local, "path": self.path}
        host, port = self.address
        return {"connection_class": encrypted if self._encrypted else plain, "host": host, "port": port}


@dataclass(frozen=True, kw_only=True)
class Sentinel(Endpoint):
    """The master that sentinels name."""

    addresses: tuple[Address, ...]
    """Of the sentinels."""
    master: str
    sentinel_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of connections to the sentinels, as redis-py calls them."""

    def __post_init__(self) -> None:
        watch = FailoverWatch(self.master, self.addresses, self._of_sentinels(Retry(NoBackoff(), 0)))
        object.__setattr__(self, "watch", watch)

    def describe(self) -> str:
        """See `Endpoint.describe`."""
        return f"redis sentinel {self.master} at {', '.join(map(spelled, self.addresses))}"

    def client(self) -> redis.Redis:
        """See `Endpoint.client`."""
        watchers = _Sentinels(  # type: ignore[no-untyped-call]
            self.addresses, sentinel_kwargs=self._of_sentinels(Retry(NoBackoff(), 0))
        )
        for watcher in watchers.sentinels:
            watcher.connection_pool.connection_class = _SSLConnection if _is_ssl(watcher) else _Connection
        watchers.watch = self.watch
        pool = sentinel.SentinelConnectionPool(  # type: ignore[no-untyped-call]
            self.master,
            watchers,
            connection_class=_MasterSSLConnection if self._encrypted else _MasterConnection,
            max_connections=self.arguments.get("max_connections") or NO_LIMIT,
            **self._of_connections(),
        )
        return redis.Redis(connection_pool=pool)

    def async_client(self) -> aredis.Redis:
        """See `Endpoint.async_client`."""
        watchers = _AsyncSentinels(  # type: ignore[no-untyped-call]
            self.addresses, sentinel_kwargs=self._of_sentinels(AsyncRetry(NoBackoff(), 0))
        )
        watchers.watch = self.watch
        kinds = (_AsyncMasterConnection, _AsyncMasterSSLConnection)
        pool = _AsyncMasterPool(  # type: ignore[no-untyped-call]
            self.master,
            watchers,
            connection_class=kinds[self._encrypted],
            **self._of_waiting_pools(),
            **self._of_async_connections(),
        )
        return aredis.Redis.from_pool(pool)

    def _of_sentinels(self, retry: Any) -> dict[str, Any]:
        return {
            "client_name": "djqueue",
            **self.sentinel_arguments,
            "protocol": 2,
            "retry": retry,
            "socket_connect_timeout": self.timeout,
            "socket_timeout": self.timeout,
        }


@dataclass(frozen=True, kw_only=True)
class Cluster(Endpoint):
    """The masters of a Redis Cluster."""

    addresses: tuple[Address, ...]
    """Of nodes that know the others."""

    @property
    def is_cluster(self) -> bool:
        """See `Endpoint.is_cluster`."""
        return True

    def describe(self) -> str:
        """See `Endpoint.describe`."""
        return f"redis cluster at {', '.join(map(spelled, self.addresses))}"

    def client(self) -> ClusterClient:
        """See `Endpoint.client`."""
        nodes = [ClusterNode(*address) for address in self.addresses]  # type: ignore[no-untyped-call]
        try:
            return ClusterClient(startup_nodes=nodes, **self._of_clients(Retry(NoBackoff(), 0)))
        except (RedisClusterException, redis.RedisError) as error:
            raise StorageUnavailableError(f"{self.describe()} cannot be reached: {error}") from error

    def async_client(self) -> AsyncClusterClient:
        """See `Endpoint.async_client`."""
        nodes = [AsyncClusterNode(*address) for address in self.addresses]
        return AsyncClusterClient(startup_nodes=nodes, **self._of_clients(AsyncRetry(NoBackoff(), 0)))

    def _check(self) -> None:
        self.connection(self.addresses[0])
        node = next(iter(self.async_client().nodes_manager.startup_nodes.values()))
        node.acquire_connection()

    def _of_clients(self, retry: Any) -> dict[str, Any]:
        given = {**self.arguments, **self._of_connections()}
        given.pop("db", None)
        return {
            "max_connections": NO_LIMIT,
            "require_full_coverage": False,  # queues in the slots that are served go on
            **given,
            "retry": retry,
            # Each refusal with MOVED corrects the place of one slot. All places asked for anew, every so
            # many refusals, would close connections that other coroutines use.
            "reinitialize_steps": 0,
        }


class _InTime:
    """Connections whose every step ends at the caller's deadline, if there is one."""

    def _connect(self) -> Any:
        this: Any = self
        usual = this.socket_connect_timeout
        this.socket_connect_timeout = max(remaining(usual), SHORTEST)
        try:
            return super()._connect()  # type: ignore[misc]
        finally:
            this.socket_connect_timeout = usual

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """See redis-py."""
        this: Any = self
        sock, usual = this._sock, this.socket_timeout
        if sock is not None and usual is not None:
            left = remaining(usual)
            if left < ENOUGH * usual:
                sock.settimeout(max(left, SHORTEST))
            elif sock.gettimeout() != usual:
                sock.settimeout(usual)
        return super().read_response(*args, **kwargs)  # type: ignore[misc]


class _Connection(_InTime, redis.Connection):
    pass


class _SSLConnection(_InTime, redis.SSLConnection):
    pass


class _LocalConnection(_InTime, redis.UnixDomainSocketConnection):
    pass


def _is_ssl(client: Any) -> bool:
    return issubclass(client.connection_pool.connection_class, redis.SSLConnection)


class _Sentinels(sentinel.Sentinel):
    """Sentinels; an announced master is believed before all of them agree."""

    watch: FailoverWatch | None = None

    def discover_master(self, service_name: str) -> Address:
        """See redis-py."""
        announced = self.watch.announced if self.watch is not None else None
        return announced or super().discover_master(service_name)  # type: ignore[no-untyped-call]


class _AsyncSentinels(asentinel.Sentinel):
    """See `_Sentinels`."""

    watch: FailoverWatch | None = None

    async def discover_master(self, service_name: str) -> Address:
        """See redis-py."""
        announced = self.watch.announced if self.watch is not None else None
        return announced or await super().discover_master(service_name)


class _MasterConnection(_InTime, sentinel.SentinelManagedConnection):
    """A connection to a server that calls itself the master.

    Unlike redis-py's, it does not go back to its pool with an answer still to come: redis-py leaves this
    kind open when reading is cut off, by an exception raised in the thread, say; the next command would be
    given the answer to this one.
    """

    epoch = -1
    """That of `FailoverWatch` in which it was opened."""

    def _connect_retry(self) -> None:
        this: Any = self
        # Before a sentinel is asked: a failover that comes between its answer and the connection is noticed.
        self.epoch = this.connection_pool.sentinel_manager.watch.epoch
        super()._connect_retry()  # type: ignore[no-untyped-call]

    def connect_to(self, address: Address) -> None:
        """See redis-py."""
        this: Any = self
        super().connect_to(address)  # type: ignore[no-untyped-call]
        try:
            this.send_command("ROLE", check_health=False)
            role = self.read_response()
        except redis.ResponseError:
            return  # This user may not ask: a write to a replica is refused all the same.
        except BaseException:
            this.disconnect()
            raise
        if role[0] != b"master":
            this.disconnect()
            raise redis.ConnectionError(not_master(address, role))
        if self.epoch != this.connection_pool.sentinel_manager.watch.epoch:
            this.disconnect()
            raise redis.ConnectionError(f"{spelled(address)} was replaced as the master")

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """See redis-py."""
        kwargs.setdefault("disconnect_on_error", True)
        return super().read_response(*args, **kwargs)


class _MasterSSLConnection(_MasterConnection, redis.SSLConnection):
    pass


class _AsyncMasterConnection(asentinel.SentinelManagedConnection):
    """A connection to a server that calls itself the master."""

    epoch = -1
    """See `_MasterConnection`."""

    async def _connect_retry(self) -> None:
        self.epoch = self.connection_pool.sentinel_manager.watch.epoch  # See `_MasterConnection`.
        await super()._connect_retry()  # type: ignore[no-untyped-call]

    async def connect_to(self, address: Address) -> None:
        """See redis-py."""
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        try:
            await self.send_command("ROLE", check_health=False)
            role = await self.read_response()
        except redis.ResponseError:
            return  # See `_MasterConnection`.
        except BaseException:
            await self.disconnect(nowait=True)
            raise
        if role[0] != b"master":
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(not_master(address, role))
        if self.epoch != self.connection_pool.sentinel_manager.watch.epoch:
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(f"{spelled(address)} was replaced as the master")


class _AsyncMasterSSLConnection(_AsyncMasterConnection, aredis.SSLConnection):
    pass


class _AsyncMasterPool(asentinel.SentinelConnectionPool, aredis.BlockingConnectionPool):
    """Connections to the master; who finds them all in use waits for one."""


def spelled(address: Address) -> str:
    """`host:port`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def not_master(address: Address, role: Any) -> str:
    """What is wrong with a server that the sentinels call the master."""
    return f"{spelled(address)} is not the master yet, or no longer: its role is {role[0].decode()}"
