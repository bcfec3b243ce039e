"""The scheduler's socket: the storage contract for other processes of this database."""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.errors import ConfigurationError, StorageError
from djqueue.storage.tables.dberrors import named

from .accepting import BACKLOG, Limits, accept, bind_tcp, log
from .address import Address
from .folder import private_folder, remove_stale_socket
from .scheduler import SchedulerStorage
from .session import Session, abort

T = TypeVar("T")

THREADS = 4
"""Number of threads for operations that may read tables."""
GRACE = 5.0
"""Seconds for which closing waits for pending responses to be computed and sent."""


class SchedulerServer:
    """Serves a storage on a socket, in its own thread.

    inbox: called when a producer reports that it has written jobs.
    holds: returns whether this process is still the scheduler; it may have been suspended for longer than
    its lease.
    """

    def __init__(
        self,
        storage: SchedulerStorage,
        address: Address,
        token: str | None,
        inbox: Callable[[], None],
        alias: str,
        holds: Callable[[], bool] = lambda: True,
    ) -> None:
        if address.host and not token:
            raise ConfigurationError("ADDRESS: a TCP address requires a TOKEN")
        self.storage = storage
        storage.is_connected = self.is_connected
        self.token = token
        self.inbox = inbox
        self.holds = holds
        self.address = address
        """Address of the open socket; TCP port 0 has been replaced by the real one."""
        self._alias = alias
        self._pool = ThreadPoolExecutor(THREADS, "djqueue-request")
        self._connections: set[BaseDatabaseWrapper] = set()
        """Database connections of the threads in the pool."""
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._sessions: set[asyncio.Task[None]] = set()
        self._processes: Counter[str] = Counter()
        """Sessions by the client's process."""
        self._unauthenticated: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
        """Sessions that have not sent a valid request, oldest first."""
        self.limits = Limits.of_process()
        self._inode = 0
        """The inode of the Unix socket, because another scheduler may replace the file."""
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=self._run, name="djqueue-server", daemon=True)

    def start(self) -> None:
        """Listen. Raises StorageError if the address is not available, and ConfigurationError if it is
        unsafe.
        """
        if self.address.path:
            with private_folder(Path(self.address.path).parent, create=True):
                pass  # an unsafe folder is a wrong setting, not a failure of the thread
        self._thread.start()
        self._ready.wait()
        if isinstance(self._failure, ConfigurationError):
            raise self._failure
        if self._failure is not None:
            raise StorageError(f"cannot listen on {self.address}: {self._failure}") from self._failure

    def stop(self) -> None:
        """Begin closing, without waiting."""
        with contextlib.suppress(RuntimeError):  # the thread has already ended
            self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Answer pending requests, disconnect all clients, and remove the socket."""
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
        """Convert database errors to errors that are sent to clients."""
        return named(self._alias)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            listeners = await self._listen()
        except (OSError, ConfigurationError) as error:
            self._failure = error
            return
        finally:
            self._ready.set()
        accepting = [self._loop.create_task(accept(listener, self._connected)) for listener in listeners]
        await self._stop.wait()
        # Check the name first: while the socket is open, no other socket has its inode.
        self._remove_socket()
        for task in accepting:
            task.cancel()
        await asyncio.wait(accepting)
        for listener in listeners:
            listener.close()
        await self._end_sessions()

    async def _listen(self) -> list[socket.socket]:
        if self.address.host:
            listeners = await bind_tcp(self.address)
            self.address = self.address._replace(port=listeners[0].getsockname()[1])
        else:
            listeners = [self._bind()]
        for listener in listeners:
            listener.listen(BACKLOG)  # clients can connect from here on
        return listeners

    def _bind(self) -> socket.socket:
        path = Path(self.address.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with private_folder(path.parent) as folder:
                # This process holds the lease, so the process that left this socket is no longer the
                # scheduler.
                remove_stale_socket(path.name, folder)
                listener.bind(str(path))
                os.chmod(path.name, 0o600, dir_fd=folder)  # before any client can connect
                self._inode = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_ino
        except BaseException:
            listener.close()
            raise
        return listener

    def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: str | None
    ) -> None:
        session = Session(self, reader, writer, refusal)
        task = self._loop.create_task(session.run())
        self._sessions.add(task)
        self._processes[session.process] += 1
        task.add_done_callback(partial(self._ended, session.process, writer.transport))
        self._unauthenticated[task] = writer.transport
        if len(self._unauthenticated) > self.limits.unauthenticated:
            # The oldest one, because a real client sends its first request at once.
            oldest = next(iter(self._unauthenticated))
            abort(self._unauthenticated.pop(oldest))
            log.log(
                logging.WARNING,
                "unauthenticated",
                "Closed the oldest connection, because more than %d connections have not sent a request.",
                self.limits.unauthenticated,
            )

    def authenticated(self) -> str | None:
        """Count the current session as authenticated; return the reason if it is refused."""
        task = asyncio.current_task()
        assert task is not None
        self._unauthenticated.pop(task, None)
        if len(self._sessions) - len(self._unauthenticated) <= self.limits.total:
            return None
        log.log(
            logging.WARNING,
            "total",
            "Refused a client, because %d are connected, which is half of this process's file descriptor "
            "limit.",
            self.limits.total,
        )
        return (
            f"{self.limits.total} clients are connected to the scheduler, which is half of its file "
            "descriptor limit: raise the limit (ulimit -n, or LimitNOFILE= in systemd)"
        )

    def is_connected(self, process: str) -> bool:
        """Return whether a process is connected, or has requests that are still being answered."""
        return self._processes[process] > 0

    def _ended(self, process: str, transport: asyncio.WriteTransport, task: asyncio.Task[None]) -> None:
        self._sessions.discard(task)
        self._processes[process] -= 1
        if not self._processes[process]:
            del self._processes[process]
        self._unauthenticated.pop(task, None)
        # Also for a session that was cancelled twice, or before its first step: nothing stays open.
        abort(transport)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.log(
                logging.ERROR, "session", "The connection of a client failed and was closed.", exc_info=error
            )

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
                if path.lstat().st_ino == self._inode:
                    path.unlink()
