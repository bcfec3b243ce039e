"""The scheduler's socket, simulated: requests and answers are packed as on the real one.

Messages may be lost (which breaks the connection), repeated, or late.
"""

import asyncio
import itertools
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import Any

from djqueue.core.errors import StorageUnavailableError, by_code
from djqueue.storage.base import Unsubscribe
from djqueue.storage.journaled.address import Address
from djqueue.storage.journaled.operations import DEADLINE, OPERATIONS
from djqueue.storage.journaled.remote import READ_TIMEOUT, RECONNECT_EVERY
from djqueue.storage.journaled.session import SUBSCRIPTIONS, _refusal
from djqueue.storage.wire import LENGTH, pack
from djqueue.storage.wire import unpack as unpack_body

from .loop import PROCESS, Crashed, Process
from .world import World

HOST = "simulated/host"
GONE = "the scheduler has hung up"


class SimulatedServer:
    """Stands for `djqueue.storage.journaled.server.SchedulerServer`."""

    def __init__(
        self,
        storage: Any,
        address: Address,
        token: str | None,
        inbox: Any,
        alias: str,
        *,
        holds: Callable[[], bool],
    ) -> None:
        process = PROCESS.get()
        assert process is not None
        self.storage = storage
        self.address = address
        self.process = process
        self.inbox = inbox
        self.holds = holds
        self.clients: list[SimulatedRemote] = []
        self.is_open = False
        self._subscriptions: dict[tuple[SimulatedRemote, int], Unsubscribe] = {}

    def start(self) -> None:
        """See `SchedulerServer.start`."""
        self.is_open = True
        World.current().servers[str(self.address)] = self

    def stop(self) -> None:
        """See `SchedulerServer.stop`."""
        self.is_open = False
        for leave in self._subscriptions.values():
            leave()
        self._subscriptions.clear()
        self.hang_up()

    close = stop

    def hang_up(self) -> None:
        """Tell the clients that the connection has ended, as the operating system does."""
        clients, self.clients = self.clients, []
        loop = World.current().loop
        for client in clients:
            loop.call_later(World.current().latency(), client.lose, self, context=client.context)

    def answer(self, data: bytes, client: "SimulatedRemote") -> bytes:
        """Answer a request that needs no event loop."""
        number, operation, args, kwargs = unpack(data)
        if operation == "inbox":
            self.inbox()
            return pack([number, "ok", None])
        if operation == "ping":
            return pack([number, *(("ok", None) if self.holds() else ("lost",))])
        if operation in SUBSCRIPTIONS:
            return pack([number, *self._subscribe(client, operation, args)])
        return pack([number, *self._do(operation, args, kwargs)])

    async def finish(self, data: bytes, client: "SimulatedRemote", reply: Callable[[bytes], None]) -> None:
        """Answer a request to finish and claim, as `Session` does."""
        number, _, (outcomes, then), _ = unpack(data)
        if then is not None:
            then = then._replace(process=f"{HOST}/{client.process.pid}")
        try:
            finished = await self.storage.finish_written(outcomes, then)
            if finished.claims.jobs and client not in self.clients:
                self.storage.unclaim(finished.claims.jobs)
            answer: tuple[Any, ...] = ("ok", finished)
        except Exception as error:
            answer = _refusal("finish", error)
        if client in self.clients:
            reply(pack([number, *answer]))

    def _do(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            return "ok", OPERATIONS[operation].served_from(self.storage)(*args, **kwargs)
        except Exception as error:
            return _refusal(operation, error)

    def _subscribe(self, client: "SimulatedRemote", operation: str, args: list[Any]) -> tuple[Any, ...]:
        key = (client, args[0])
        if (leave := self._subscriptions.pop(key, None)) is not None:
            leave()
        tell = partial(self._tell, client, args[0])
        if operation == "subscribe":
            self._subscriptions[key] = self.storage.events.subscribe(args[1], tell, args[2])
        elif operation == "on_command":
            self._subscriptions[key] = self.storage.workers.on_command(args[1], tell)
        elif operation == "listen":
            self._subscriptions[key] = self.storage.listen(args[1], tell)
        return "ok", None

    def _tell(self, client: "SimulatedRemote", number: int, event: Any = None) -> None:
        world = World.current()
        world.loop.call_later(world.latency(), client.hear, self, number, event, context=client.context)


class SimulatedRemote:
    """Stands for `djqueue.storage.journaled.remote.Remote`."""

    def __init__(self, address: Callable[[], Address | None], token: str | None, leave: Any) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._server: SimulatedServer | None = None
        self._subscriptions: dict[int, tuple[str, tuple[Any, ...], Callable[[Any], None]]] = {}
        self._futures: dict[asyncio.Future[bytes], None] = {}
        """In order: a set's is not the same in each run."""
        self._closed = False
        self._reconnecting = False
        process = PROCESS.get()
        assert process is not None
        self.process: Process = process
        self.context: Context = process.context()

    @property
    def connected(self) -> bool:
        """See `Remote.connected`."""
        return self._server is not None

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """See `Remote.call`. The answer comes at once, or never."""
        return self._value(self._request(pack([next(self._numbers), operation, list(args), kwargs])))

    def read(self, operation: str, *args: Any, timeout: float = READ_TIMEOUT) -> Any:
        """See `Remote.read`. The answer comes at once, or never."""
        return self.call(operation, *args)

    ask = read

    @property
    def outage(self) -> None:
        """See `Remote.outage`. There is no circuit breaker here: every call tries to connect."""

    def tell(self, operation: str) -> bool:
        """See `Remote.tell`."""
        try:
            self._request(pack([0, operation, [], {}]))
        except StorageUnavailableError:
            return False
        return True

    async def finish(self, *args: Any) -> Any:
        """Send a request to finish and claim, which travels, and wait for its answer."""
        world = World.current()
        server = self._connected()
        data = pack([next(self._numbers), "finish", list(args), {}])
        fate = world.message()
        future: asyncio.Future[bytes] = world.loop.create_future()
        self._futures[future] = None
        for _ in range(2 if fate == "repeated" else 1):
            if fate != "lost":
                late = 45.0 * world.random.random() if fate == "late" else world.latency()
                world.loop.call_later(
                    late, self._deliver, server, data, future, context=server.process.context()
                )
        if fate == "lost":
            world.loop.call_later(world.latency(), self.lose, server)
        try:
            async with asyncio.timeout(DEADLINE):
                return self._value(await future)
        except TimeoutError:
            raise StorageUnavailableError("the scheduler has not answered 'finish'") from None
        finally:
            self._futures.pop(future, None)

    def subscribe(self, operation: str, args: tuple[Any, ...], handler: Callable[[Any], None]) -> Unsubscribe:
        """See `Remote.subscribe`."""
        number = next(self._numbers)
        self._subscriptions[number] = (operation, args, handler)
        try:
            self.call(operation, number, *args)
        except StorageUnavailableError:
            self._reconnect_later()

        def unsubscribe() -> None:
            self._subscriptions.pop(number, None)
            if self._server is not None:
                try:
                    self.call("unsubscribe", number)
                except StorageUnavailableError:
                    pass  # The scheduler notices that by itself.

        return unsubscribe

    def close(self) -> None:
        """See `Remote.close`."""
        self._closed = True
        self._subscriptions.clear()
        if self._server is not None:
            self.lose(self._server)

    def lose(self, server: SimulatedServer) -> None:
        """The connection to a scheduler has ended."""
        if server is not self._server:
            return
        self._server = None
        if self in server.clients:
            server.clients.remove(self)
        for future in self._futures:
            if not future.done():
                future.set_exception(StorageUnavailableError(GONE))
        self._reconnect_later()

    def hear(self, server: SimulatedServer, number: int, event: Any) -> None:
        """An event of a subscription has come."""
        entry = self._subscriptions.get(number)
        if entry is not None and server is self._server:
            entry[2](event)

    def _request(self, data: bytes) -> bytes:
        world = World.current()
        server = self._connected()
        if server.process.frozen:
            # It will read what was sent when it goes on; nobody waits for its answer any more.
            world.loop.call_later(0, self._run_late, server, data, context=server.process.context())
            raise StorageUnavailableError("the scheduler has not answered in time")
        fate = world.message()
        if fate == "lost":
            self.lose(server)
            raise StorageUnavailableError(GONE)
        answer = self._run(server, data)
        if fate == "repeated":
            answer = self._run(server, data)
        if fate == "late":
            self.lose(server)
            raise StorageUnavailableError(GONE)
        return answer

    def _run(self, server: SimulatedServer, data: bytes) -> bytes:
        try:
            answer: bytes = server.process.call(server.answer, data, self)
        except Crashed:
            if not self.process.alive:
                raise
            raise StorageUnavailableError(GONE) from None
        return answer

    def _run_late(self, server: SimulatedServer, data: bytes) -> None:
        if server.is_open:
            server.answer(data, self)

    def _deliver(self, server: SimulatedServer, data: bytes, future: "asyncio.Future[bytes]") -> None:
        world = World.current()
        if not server.is_open:
            return
        world.loop.create_task(server.finish(data, self, partial(self._send_back, future)))

    def _send_back(self, future: "asyncio.Future[bytes]", answer: bytes) -> None:
        world = World.current()
        fate = world.message()
        if fate == "lost":
            world.loop.call_later(world.latency(), self._break, context=self.context)
            return
        late = 45.0 * world.random.random() if fate == "late" else world.latency()
        world.loop.call_later(late, _settle, future, answer, context=self.context)

    def _break(self) -> None:
        if self._server is not None:
            self.lose(self._server)

    def _value(self, data: bytes) -> Any:
        _, word, *rest = unpack(data)
        if word == "ok":
            return rest[0]
        if word == "lost":
            raise StorageUnavailableError(GONE)
        raise by_code(*rest)

    def _connected(self) -> SimulatedServer:
        if self._server is not None:
            return self._server
        if self._closed:
            raise StorageUnavailableError("the connection to the scheduler is closed")
        address = self._address()
        if address is None:
            raise StorageUnavailableError("no scheduler is running")
        server = World.current().servers.get(str(address))
        if server is None or not server.is_open or not server.process.alive:
            raise StorageUnavailableError(f"the scheduler cannot be reached at {address}")
        self._server = server
        server.clients.append(self)
        for number, (operation, args, handler) in list(self._subscriptions.items()):
            self._run(server, pack([0, operation, [number, *args], {}]))
            if operation in ("listen", "on_worker_command"):
                handler(None)
        return server

    def _reconnect_later(self) -> None:
        if not self._reconnecting and self._subscriptions and not self._closed:
            self._reconnecting = True
            World.current().loop.spawn(self.process, self._reconnect())

    async def _reconnect(self) -> None:
        while self._subscriptions and self._server is None and not self._closed:
            try:
                self._connected()
            except StorageUnavailableError:
                await asyncio.sleep(RECONNECT_EVERY)
        self._reconnecting = False


def unpack(data: bytes) -> Any:
    """Return the value of a whole frame."""
    return unpack_body(data[LENGTH.size :])


def _settle(future: "asyncio.Future[bytes]", answer: bytes) -> None:
    if not future.done():
        future.set_result(answer)
