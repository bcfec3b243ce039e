"""The scheduler's socket: the storage contract for other processes of this database."""

import asyncio
import contextlib
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.errors import ConfigurationError, StorageError
from djqueue.storage.base import Storage

from .address import Address
from .away import named
from .session import Session

T = TypeVar("T")

logger = logging.getLogger("djqueue.server")

THREADS = 4
"""For the verbs that may read tables."""
GRACE = 5.0
"""Seconds for which the end waits for answers that are being worked out, and for them to be sent."""


class Server:
    """Serves a storage on a socket, on a thread of its own.

    inbox: called when a producer says that it has written jobs.
    holds: whether this process is still the scheduler; it may have been frozen for longer than its lease.
    """

    def __init__(
        self,
        storage: Storage,
        address: Address,
        token: str | None,
        inbox: Callable[[], None],
        alias: str,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        if address.host and not token:
            raise ConfigurationError("ADDRESS: a TCP address needs a TOKEN")
        self.storage = storage
        self.token = token
        self.inbox = inbox
        self.holds = holds
        self.address = address
        """Where it listens in the end: TCP port 0 has become a real one."""
        self._alias = alias
        self._pool = ThreadPoolExecutor(THREADS, "djqueue-request")
        self._connections: set[BaseDatabaseWrapper] = set()
        """Of the pool's threads."""
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._inode = 0
        """Of the Unix domain socket: another scheduler's may be in its place by the end."""
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="djqueue-server", daemon=True)

    def start(self) -> None:
        """Listen. Raises StorageError if the address cannot be had, ConfigurationError if it is unsafe."""
        if self.address.path:
            own_folder(Path(self.address.path).parent)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise StorageError(f"cannot listen on {self.address}: {self._failure}") from self._failure

    def stop(self) -> None:
        """Begin to close, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Answer what has been asked, hang up on everybody, and take the socket away."""
        if self._thread.ident is not None:
            self.stop()
            self._thread.join()
        self._pool.shutdown()
        for connection in self._connections:
            connection.inc_thread_sharing()
            connection.close()

    async def in_thread(self, method: Callable[..., T], *args: Any) -> T:
        """Run a method that may read tables."""
        return await self._loop.run_in_executor(self._pool, self._with_connection, method, *args)

    def _with_connection(self, method: Callable[..., T], *args: Any) -> T:
        self._connections.add(connections[self._alias])
        return method(*args)

    def errors_named(self) -> AbstractContextManager[None]:
        """Where the database's errors become ones that a client understands."""
        return named(self._alias)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            server = await self._listen()
        except OSError as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        await self._stop.wait()
        # First the name: as long as the socket is open, no other one has its inode.
        self._remove_socket()
        server.close()
        await self._end_sessions()

    async def _listen(self) -> asyncio.Server:
        if self.address.host:
            server = await asyncio.start_server(self._connected, self.address.host, self.address.port)
            self.address = self.address._replace(port=server.sockets[0].getsockname()[1])
            return server
        listener = self._bind()
        try:
            return await asyncio.start_unix_server(self._connected, sock=listener)
        except OSError:
            listener.close()
            raise

    def _bind(self) -> socket.socket:
        path = Path(self.address.path)
        # The lease is ours: whoever left this socket is no scheduler any more.
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)  # before anybody can connect
            self._inode = path.stat().st_ino
        except OSError:
            listener.close()
            raise
        return listener

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(Session(self, reader, writer).run())
        self._sessions.add(task)
        task.add_done_callback(partial(self._ended, writer.transport))

    def _ended(self, transport: asyncio.WriteTransport, task: asyncio.Task[None]) -> None:
        self._sessions.discard(task)
        # Also of one that was cancelled before its first step, or twice: nothing of it stays open.
        transport.abort()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A session with another process failed.", exc_info=error)

    async def _end_sessions(self) -> None:
        sessions = set(self._sessions)
        for task in sessions:
            task.cancel()
        if sessions:
            await asyncio.wait(sessions, timeout=GRACE)

    def _remove_socket(self) -> None:
        if self._inode:
            path = Path(self.address.path)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == self._inode:
                    path.unlink()


def own_folder(folder: Path) -> None:
    """Make a folder that only this user enters. Raises ConfigurationError if others may write to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"ADDRESS: the folder {folder} is open to other users; set "
            "DJQUEUE['STORAGE']['OPTIONS']['ADDRESS'] to a socket in a folder of this one"
        )
