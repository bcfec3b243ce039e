"""The scheduler's socket: the storage contract for other processes of this database.

A request is [number, verb, positional arguments, keyword arguments]; its answer [number, "ok", value] or
[number, "error", code, message]. Number 0 asks for no answer. What a subscription brings comes as
[0, "event", its number, value].
"""

import asyncio
import contextlib
import hmac
import logging
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.errors import ConfigurationError, DjqueueError, SerializationError, StorageError
from djqueue.storage.base import Storage, Unsubscribe

from .address import Address
from .wire import LENGTH, MAX_FRAME, pack, unpack

T = TypeVar("T")

logger = logging.getLogger("djqueue.server")

VERBS = frozenset(
    {
        "enqueue",
        "finish",
        "renew",
        "report",
        "cancel",
        "promote",
        "reschedule",
        "retry",
        "remove",
        "queues",
        "pause",
        "resume",
        "is_paused",
        "set_limits",
        "clean",
        "obliterate",
        "jobs",
        "states",
        "counts",
        "waiting_names",
        "page",
        "dead_letters",
        "register_worker",
        "unregister_worker",
        "workers",
        "maintain",
    }
)
AT_ONCE = frozenset({"finish", "renew", "report", "register_worker", "unregister_worker"})
"""Verbs that touch no table: run on the server's own thread."""
THREADS = 4
"""For the other verbs."""
FIRST_FRAME = 5.0
"""Seconds within which a TCP client has to show its token."""


class Server:
    """Serves a storage on a socket, on a thread of its own."""

    def __init__(
        self,
        storage: Storage,
        address: Address,
        token: str | None,
        inbox: Callable[[], None],
        alias: str,
    ) -> None:
        if address.host and not token:
            raise ConfigurationError("ADDRESS: a TCP address needs a TOKEN")
        self._storage = storage
        self._address = address
        self._token = token
        self._inbox = inbox
        self._pool = ThreadPoolExecutor(THREADS, "djqueue-request")
        self._alias = alias
        self._connections: set[BaseDatabaseWrapper] = set()
        """Of the pool's threads."""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._clients: set[_Client] = set()
        self._thread = threading.Thread(target=self._run, name="djqueue-server", daemon=True)
        self.address = address
        """Where it listens in the end: TCP port 0 has become a real one."""

    def start(self) -> None:
        """Listen. Raises StorageError if the address cannot be had."""
        if self._address.path:
            path = Path(self._address.path)
            own_folder(path.parent)
            # The lease is ours: whoever left this socket is no scheduler any more.
            path.unlink(missing_ok=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise StorageError(f"cannot listen on {self._address}: {self._failure}") from self._failure

    def close(self) -> None:
        """Hang up on everybody, and take the socket away."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        self._pool.shutdown()
        for connection in self._connections:
            connection.inc_thread_sharing()
            connection.close()

    def run(self, method: Callable[..., T], *args: Any) -> T:
        """Run a method that may read tables, on a thread whose connection is closed with the server."""
        try:
            return method(*args)
        finally:
            self._connections.add(connections[self._alias])

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        try:
            server = await self._listen()
        except (OSError, ConfigurationError) as error:
            self._failure = error
            self._ready.set()
            return
        self._ready.set()
        await self._stop.wait()
        server.close()
        for client in list(self._clients):
            client.hang_up()
        for _ in range(200):
            if not self._clients:
                break
            await asyncio.sleep(0.01)
        if self._address.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address.path)

    async def _listen(self) -> asyncio.Server:
        if self._address.host:
            server = await asyncio.start_server(self._connected, self._address.host, self._address.port)
            port = server.sockets[0].getsockname()[1]
            self.address = self._address._replace(port=port)
            return server
        umask = os.umask(0o177)
        try:
            return await asyncio.start_unix_server(self._connected, self._address.path)
        finally:
            os.umask(umask)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = _Client(self, reader, writer)
        self._clients.add(client)
        try:
            if self._token is not None and not await client.shows(self._token):
                return
            await client.serve()
        except (asyncio.IncompleteReadError, ConnectionError, SerializationError) as error:
            logger.debug("A client has gone: %s", error)
        finally:
            client.leave()
            self._clients.discard(client)
            writer.close()


class _Client:
    """One connection."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._subscriptions: dict[int, Unsubscribe] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken: set[int] = set()

    async def shows(self, token: str) -> bool:
        """Whether the first frame is the token."""
        frame = await asyncio.wait_for(self._frame(), FIRST_FRAME)
        return isinstance(frame, str) and hmac.compare_digest(frame.encode(), token.encode())

    async def serve(self) -> None:
        """Answer requests until the other side hangs up."""
        while True:
            number, verb, args, kwargs = await self._frame()
            if verb == "inbox":
                self._server._inbox()
            elif verb in AT_ONCE:
                self._answer(number, verb, args, kwargs)
            else:
                task = asyncio.create_task(self._answer_later(number, verb, args, kwargs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def hang_up(self) -> None:
        """End the connection from this side."""
        self._writer.close()

    def leave(self) -> None:
        """The connection has ended: so do its subscriptions."""
        for unsubscribe in self._subscriptions.values():
            unsubscribe()
        self._subscriptions.clear()

    async def _frame(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if length > MAX_FRAME:
            raise SerializationError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
        return unpack(await self._reader.readexactly(length))

    def _answer(self, number: int, verb: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._reply(number, *self._do(verb, args, kwargs))

    async def _answer_later(self, number: int, verb: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        if verb in ("subscribe", "listen", "unsubscribe"):
            answer = self._subscribe(verb, args)
        else:
            loop, pool = self._server._loop, self._server._pool
            answer = await loop.run_in_executor(pool, self._server.run, self._do, verb, args, kwargs)
        self._reply(number, *answer)

    def _do(self, verb: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            if verb not in VERBS:
                raise StorageError(f"{verb!r} is no verb of the storage")
            return "ok", getattr(self._server._storage, verb)(*args, **kwargs)
        except DjqueueError as error:
            return "error", error.code, str(error)
        except Exception as error:
            logger.exception("A request of another process failed: %s", verb)
            return "error", "storage", f"{type(error).__name__}: {error}"

    def _subscribe(self, verb: str, args: list[Any]) -> tuple[Any, ...]:
        number = args[0]
        if verb == "unsubscribe":
            unsubscribe = self._subscriptions.pop(number, None)
            if unsubscribe is not None:
                unsubscribe()
            return "ok", None
        storage = self._server._storage
        if number in self._subscriptions:  # renewed, after the connection was
            self._subscriptions.pop(number)()
        if verb == "listen":
            self._subscriptions[number] = storage.listen(args[1], lambda: self._wake(number))
        else:
            queue, job_id = args[1:]
            handler = lambda event: self._send_soon([0, "event", number, event])  # noqa: E731
            self._subscriptions[number] = storage.subscribe(queue, handler, job_id)
        return "ok", None

    def _wake(self, number: int) -> None:
        # Called from any thread: one frame for all wake-ups until it is sent.
        if number not in self._woken:
            self._woken.add(number)
            self._send_soon([0, "event", number, None])

    def _send_soon(self, frame: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self._server._loop.call_soon_threadsafe(self._send, frame)

    def _send(self, frame: list[Any]) -> None:
        self._woken.discard(frame[2])
        if not self._writer.is_closing():
            self._writer.write(pack(frame))

    def _reply(self, number: int, *answer: Any) -> None:
        if number and not self._writer.is_closing():
            self._writer.write(pack([number, *answer]))


def own_folder(folder: Path) -> None:
    """Make a folder that only this user enters. Raises ConfigurationError if others enter it, too."""
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"ADDRESS: the folder {folder} is open to other users; set "
            "DJQUEUE['STORAGE']['OPTIONS']['ADDRESS'] to a socket in a folder of this one"
        )
