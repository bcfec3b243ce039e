"""The kinds of servers, and clients of redis-py for each.

All clients send a command once. redis-py would repeat it if the reply is lost, ten times since version 8,
and might run a script twice; the storage knows which of its calls may be repeated. RESP2 is used: that
saves round trips when a connection is opened, and with RESP3 the pools of redis-py do not notice an unread
reply.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import redis
import redis.asyncio as aredis
from redis import exceptions as errors
from redis import sentinel
from redis.asyncio import sentinel as asentinel
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.cluster import PipelineCommand
from redis.asyncio.cluster import RedisCluster as AsyncRedisCluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    RedisClusterException,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.retry import Retry

from djqueue.core.deadlines import remaining
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.core.messages import in_one_line

from .failover import FailoverWatch

REFUSALS = ("WRONGPASS", "NOAUTH", "AuthenticationError")
"""Errors for a wrong password and no password, as those of clusters and sentinels quote them."""
RIGHTS = (
    "NOPERM",
    "has no permissions to",
    "ACL failure in script",
    "The user executing the script can't",
)
"""Errors for missing permissions. Scripts report them in other words than commands."""
Client: TypeAlias = "redis.Redis | ClusterClient"
AsyncClient: TypeAlias = "aredis.Redis | AsyncClusterClient"
Connection: TypeAlias = AbstractConnection
Address: TypeAlias = tuple[str, int]
TIMEOUT = 2.0
"""Default of TIMEOUT: seconds for connecting and for a reply."""
MIN_TIMEOUT = 0.001
"""Minimum timeout of a socket in seconds: 0 would not wait at all."""
DEADLINE_SHARE = 0.9
"""Share of a timeout above which a deadline does not justify a system call for each reply."""
IDLE = 30
"""Idle seconds after which a connection is checked before it is used."""
MAX_CONNECTIONS = 100
"""Connections of a process or event loop to a single server; callers wait if all are in use."""
NO_LIMIT = 10_000
"""The same where redis-py's pools can't wait: for threads with sentinels, and for each cluster node."""
CLUSTER_ARGUMENTS = frozenset({"address_remap", "dynamic_startup_nodes", "require_full_coverage"})
"""Arguments of a cluster's client that its connections do not have."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(ABC):
    """The servers, and how to connect to them."""

    arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of redis-py's connections; `ssl`: whether they are encrypted."""
    timeout: float = TIMEOUT
    watch: FailoverWatch | None = field(default=None, init=False, repr=False, compare=False)
    """The watch over failovers, with sentinels."""

    @property
    def is_cluster(self) -> bool:
        """True if keys are spread over servers."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """Return the address, without secrets."""

    @abstractmethod
    def client(self) -> Client:
        """Return a new client for threads. Raises StorageUnavailableError if no cluster node replies."""

    @abstractmethod
    def async_client(self) -> AsyncClient:
        """Return a new client for one event loop."""

    def connection(self, address: Address) -> Connection:
        """Return a new, unopened connection to one server."""
        kind = _SSLConnection if self._encrypted else _Connection
        return kind(host=address[0], port=address[1], **self._of_connections())

    def check(self) -> None:
        """Check the arguments without connecting. Raises ConfigurationError."""
        try:
            self._check()
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"CONNECTION: redis-py rejects the arguments: {error}") from error

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
        limit = self.arguments.get("max_connections") or MAX_CONNECTIONS
        return {"max_connections": limit, "timeout": self.timeout}


@dataclass(frozen=True, kw_only=True)
class Single(Endpoint):
    """One server, at an address or a Unix domain socket."""

    address: Address = ("localhost", 6379)
    path: str = ""

    def describe(self) -> str:
        where = f"unix:{self.path}" if self.path else spelled(self.address)
        return f"redis {where}/{self.arguments.get('db') or 0}"

    def client(self) -> redis.Redis:
        kinds = (_Connection, _SSLConnection, _LocalConnection)
        pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            **self._place(*kinds), **self._of_waiting_pools(), **self._of_connections()
        )
        return redis.Redis(connection_pool=pool)

    def async_client(self) -> aredis.Redis:
        kinds = (aredis.Connection, aredis.SSLConnection, aredis.UnixDomainSocketConnection)
        pool = aredis.BlockingConnectionPool(
            **self._place(*kinds), **self._of_waiting_pools(), **self._of_async_connections()
        )
        return aredis.Redis.from_pool(pool)

    def connection(self, address: Address | None = None) -> Connection:
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
    """Addresses of the sentinels."""
    master: str
    sentinel_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of redis-py's connections to the sentinels."""

    def __post_init__(self) -> None:
        watch = FailoverWatch(self.master, self.addresses, self._of_sentinels(Retry(NoBackoff(), 0)))
        object.__setattr__(self, "watch", watch)

    def describe(self) -> str:
        return f"redis sentinel {self.master} at {', '.join(map(spelled, self.addresses))}"

    def client(self) -> redis.Redis:
        watchers = _Sentinels(self.addresses, self._of_sentinels(Retry(NoBackoff(), 0)))
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
        watchers = _AsyncSentinels(self.addresses, self._of_sentinels(AsyncRetry(NoBackoff(), 0)))
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
    """Addresses of nodes that know the others."""

    @property
    def is_cluster(self) -> bool:
        return True

    def describe(self) -> str:
        return f"redis cluster at {', '.join(map(spelled, self.addresses))}"

    def client(self) -> "ClusterClient":
        nodes = [ClusterNode(*address) for address in self.addresses]  # type: ignore[no-untyped-call]
        try:
            return ClusterClient(startup_nodes=nodes, **self._of_clients(Retry(NoBackoff(), 0)))
        except (RedisClusterException, redis.RedisError) as error:
            for cause in (error, error.__cause__):
                if cause is not None and is_refusal(cause):
                    raise refused(self.describe(), cause) from error
            raise StorageUnavailableError(f"{self.describe()} cannot be reached: {error}") from error

    def async_client(self) -> "AsyncClusterClient":
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
            "require_full_coverage": False,  # queues in other slots continue
            **given,
            "retry": retry,
            # Each MOVED corrects the node of one slot. Reading all slots again after some of them would
            # close connections that other coroutines use.
            "reinitialize_steps": 0,
        }


def spelled(address: Address) -> str:
    """Return `host:port`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_refusal(error: BaseException) -> bool:
    """Return whether the server rejects the user, the password, or the user's permissions."""
    # To the client these are connection errors, which it would retry.
    kinds = (errors.AuthenticationError, errors.AuthorizationError)
    return _lacks_rights(error) or isinstance(error, kinds) or any(word in str(error) for word in REFUSALS)


def refused(where: str, error: BaseException) -> StorageUnavailableError:
    """Return the error for a server that rejects the user, the password, or the user's permissions."""
    reason = in_one_line(error).rstrip(".")
    return StorageUnavailableError(f"{where} refuses access: {reason}. {remedy_of_refusal(error)}")


def remedy_of_refusal(error: BaseException) -> str:
    """Return what to check after a refusal."""
    text = (
        "Check the user name and the password in the URL, in DJQUEUE['STORAGE'] or in the cache that it names"
    )
    if _lacks_rights(error):
        return f"{text}, and give this user the permissions (ACL) in the docs, under Redis: An access list."
    return f"{text}."


def _lacks_rights(error: BaseException) -> bool:
    return isinstance(error, errors.NoPermissionError) or any(words in str(error) for words in RIGHTS)


class _InTime:
    """Connections in which every step ends at the caller's deadline, if there is one."""

    def _connect(self) -> Any:
        this: Any = self
        usual = this.socket_connect_timeout
        this.socket_connect_timeout = max(remaining(usual), MIN_TIMEOUT)
        try:
            return super()._connect()  # type: ignore[misc]
        finally:
            this.socket_connect_timeout = usual

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        this: Any = self
        sock, usual = this._sock, this.socket_timeout
        if sock is not None and usual is not None:
            left = remaining(usual)
            if left < DEADLINE_SHARE * usual:
                sock.settimeout(max(left, MIN_TIMEOUT))
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
    """Sentinels; an announced master is used before all of them agree."""

    watch: FailoverWatch | None = None

    def __init__(self, addresses: tuple[Address, ...], arguments: Mapping[str, Any]) -> None:
        super().__init__((), sentinel_kwargs=arguments)  # type: ignore[no-untyped-call]
        # Errors quote the clients.
        self.sentinels = [_SentinelClient(host=host, port=port, **arguments) for host, port in addresses]

    def discover_master(self, service_name: str) -> Address:
        announced = self.watch.announced if self.watch is not None else None
        return announced or super().discover_master(service_name)  # type: ignore[no-untyped-call]


class _AsyncSentinels(asentinel.Sentinel):
    """Async version of `_Sentinels`."""

    watch: FailoverWatch | None = None

    def __init__(self, addresses: tuple[Address, ...], arguments: Mapping[str, Any]) -> None:
        super().__init__((), sentinel_kwargs=arguments)  # type: ignore[no-untyped-call]
        self.sentinels = [_AsyncSentinelClient(host=host, port=port, **arguments) for host, port in addresses]

    async def discover_master(self, service_name: str) -> Address:
        announced = self.watch.announced if self.watch is not None else None
        return announced or await super().discover_master(service_name)


class _NamedByAddress:
    """Clients whose representation is only their address: that of some redis-py versions has the password."""

    def __repr__(self) -> str:
        this: Any = self
        arguments = this.connection_pool.connection_kwargs
        return spelled((arguments["host"], arguments["port"]))


class _SentinelClient(_NamedByAddress, redis.Redis):
    pass


class _AsyncSentinelClient(_NamedByAddress, aredis.Redis):  # type: ignore[misc]  # redis-py's own bases
    pass


class _MasterConnection(_InTime, sentinel.SentinelManagedConnection):
    """A connection to a server that reports to be the master.

    It is closed when reading is interrupted. redis-py would return it to the pool with an unread reply, which
    the next command would read.
    """

    epoch = -1
    """The epoch of `FailoverWatch` in which it was opened."""

    def _connect_retry(self) -> None:
        this: Any = self
        # Set before a sentinel is asked, so that a failover before the connection is open is noticed.
        self.epoch = this.connection_pool.sentinel_manager.watch.epoch
        super()._connect_retry()  # type: ignore[no-untyped-call]

    def connect_to(self, address: Address) -> None:
        this: Any = self
        super().connect_to(address)  # type: ignore[no-untyped-call]
        try:
            this.send_command("ROLE", check_health=False)
            role = self.read_response()
        except redis.ResponseError:
            return  # This user may not ask; a replica rejects writes anyway.
        except BaseException:
            this.disconnect()
            raise
        if role[0] != b"master":
            this.disconnect()
            raise redis.ConnectionError(_not_master(address, role))
        if self.epoch != this.connection_pool.sentinel_manager.watch.epoch:
            this.disconnect()
            raise redis.ConnectionError(f"{spelled(address)} was replaced as the master")

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("disconnect_on_error", True)
        return super().read_response(*args, **kwargs)


class _MasterSSLConnection(_MasterConnection, redis.SSLConnection):
    pass


class _AsyncMasterConnection(asentinel.SentinelManagedConnection):
    """Async version of `_MasterConnection`."""

    epoch = -1
    """The epoch of `FailoverWatch` in which it was opened."""

    async def _connect_retry(self) -> None:
        self.epoch = self.connection_pool.sentinel_manager.watch.epoch  # see `_MasterConnection`
        await super()._connect_retry()  # type: ignore[no-untyped-call]

    async def connect_to(self, address: Address) -> None:
        await super().connect_to(address)  # type: ignore[no-untyped-call]
        try:
            await self.send_command("ROLE", check_health=False)
            role = await self.read_response()
        except redis.ResponseError:
            return  # see `_MasterConnection`
        except BaseException:
            await self.disconnect(nowait=True)
            raise
        if role[0] != b"master":
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(_not_master(address, role))
        if self.epoch != self.connection_pool.sentinel_manager.watch.epoch:
            await self.disconnect(nowait=True)
            raise redis.ConnectionError(f"{spelled(address)} was replaced as the master")


class _AsyncMasterSSLConnection(_AsyncMasterConnection, aredis.SSLConnection):
    pass


class _AsyncMasterPool(asentinel.SentinelConnectionPool, aredis.BlockingConnectionPool):
    """Connections to the master; callers wait if all are in use."""


def _not_master(address: Address, role: Any) -> str:
    """Return the error for a server that is not the master, although the sentinels name it."""
    return f"{spelled(address)} is not the master: its role is {role[0].decode()}"


class ClusterClient(RedisCluster):
    """A client with redis-py's usual errors for temporary failures, which takes command names as bytes.

    Without retries it still follows MOVED, ASK and TRYAGAIN, up to 16 times for a command. No option changes
    two things (redis-py 8.1): a pipeline of the synchronous client repeats commands without a reply, and one
    of the asynchronous client never reads the nodes again when one is gone. Single commands do neither.
    """

    def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().execute_command(  # type: ignore[no-untyped-call]
                _text(args[0]), *args[1:], **kwargs
            )
        except (RedisClusterException, ClusterError) as error:
            raise (_temporary_error(error) or error) from error.__cause__


class AsyncClusterClient(AsyncRedisCluster):
    """The same for asyncio. Commands for a slot that is moving reach the node that ASK names."""

    _last_failed: Mapping[str, Any] = {}
    """The argument of `initialize` that names the node which failed last, to be asked last."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._initialize:
                # Without the slots, redis-py sends the command to any node, perhaps the one that is away.
                await self.initialize(**self._last_failed)
            return await super().execute_command(_text(args[0]), *args[1:], **kwargs)
        except (errors.ConnectionError, errors.TimeoutError) as error:
            self._last_failed = {
                name: value for name, value in vars(error).items() if name == "last_failed_node_name"
            }
            raise
        except (RedisClusterException, ClusterError) as error:
            raise (_temporary_error(error) or error) from error.__cause__

    async def _execute_command(self, target_node: Any, *args: Any, **kwargs: Any) -> Any:
        node: Any = _AskedNode(self, target_node)
        return await super()._execute_command(node, *args, **kwargs)


class _AskedNode:
    """A node that follows ASK.

    redis-py sends ASKING and the command one after the other, each on the connection that has been free
    for longest. These are two connections if several are free, and the command is refused.
    """

    def __init__(self, client: AsyncClusterClient, node: Any) -> None:
        self._client = client
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await self._node.execute_command(*args, **kwargs)
        except MovedError:  # a kind of AskError
            raise
        except AskError as error:
            target = self._client.get_node(*error.node_addr)
            if target is None:
                raise
        commands = [PipelineCommand(0, "ASKING"), PipelineCommand(1, *args)]
        await target.execute_pipeline(commands)
        answer = commands[1].result
        if isinstance(answer, Exception):
            raise answer
        return answer


def node_of(client: Any, key: str | bytes) -> str:
    """Return the name of the node of a cluster that has a key, '' if the client does not know it yet."""
    try:
        node = None if client is None else client.get_node_from_key(key)
    except SlotNotCoveredError:
        return ""
    return "" if node is None else str(node.name)


def _text(command: Any) -> Any:
    return command.decode() if isinstance(command, bytes) else command


def _temporary_error(error: Exception) -> redis.RedisError | None:
    """Return the usual error for a temporary one; None if something is wrong with the command."""
    if isinstance(error, SlotNotCoveredError):
        return redis.ConnectionError(str(error))
    if isinstance(error, RedisClusterException) and error.__cause__ is not None:
        return redis.ConnectionError(str(error))  # no node could be reached
    if type(error) is ClusterError:
        return TryAgainError("the cluster slot is being moved")  # the command was redirected too often
    return None
