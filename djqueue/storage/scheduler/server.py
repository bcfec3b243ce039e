"""The scheduler's socket: a thread for each connection."""

import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

from django.db import connections

from djqueue.core.errors import DjqueueError, SerializationError, StorageError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.messages import ThrottledLog
from djqueue.core.threads import start_daemon
from djqueue.storage.base import Unsubscribe
from djqueue.storage.snapshots import Part
from djqueue.storage.wire import pack

from .folder import PrivateFolder, other_user
from .protocol import MAX_GREETING, SUBSCRIPTIONS, VALUE_ERROR, VERSION, frames_of, receive
from .scheduler import JobScheduler

logger = Log("djqueue.scheduler")
failures = ThrottledLog(logger, 10.0)

MAX_SESSIONS = 1_000
"""Maximum number of connections."""
BACKLOG = 256
MAX_EVENTS = 100_000
"""Maximum number of events that a client has not read; a slower one is disconnected."""
GREETING_TIMEOUT = 5.0
"""Seconds in which a client must send its greeting."""
AFTER_ERROR = 0.1
"""Seconds until the next connection is accepted after one failed: the process may have too many files."""
CLOSE_TIMEOUT = 5.0
"""Seconds for which closing waits for calls in progress."""


class SocketServer:
    """Accepts connections of this user's processes."""

    def __init__(self, scheduler: JobScheduler, folder: PrivateFolder, epoch: str) -> None:
        self.scheduler = scheduler
        self.epoch = epoch
        self._folder = folder
        self._listener = folder.listen(BACKLOG)
        self._lock = threading.Lock()
        self._sessions: set[ClientSession] = set()
        self._is_closed = False
        self._pause = threading.Event()
        try:
            self._thread = start_daemon("djqueue-socket", self._accept)
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Refuse new connections, and end the others after their calls."""
        with self._lock:
            self._is_closed = True
            sessions = list(self._sessions)
        _shut(self._listener)
        self._thread.join()
        self._listener.close()
        for session in sessions:
            session.end()
        until = monotonic() + CLOSE_TIMEOUT
        for session in sessions:
            session.thread.join(max(0.0, until - monotonic()))

    def leave_to_parent(self) -> None:
        """Close a forked child's copies of the sockets, so that clients notice the end of its parent."""
        self._listener.close()
        for session in self._sessions:
            session.connection.close()

    def restore(self) -> None:
        """Make the socket anew, if a program that cleans up has removed it."""
        with self._lock:
            if not self._is_closed and not self._folder.has_socket:
                listener, self._listener = self._listener, self._folder.listen(BACKLOG)
                _shut(listener)
                logger.warning("The socket %s was removed, and has been made again.", self._folder.socket)

    def _accept(self) -> None:
        while True:
            listener = self._listener
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if listener is not self._listener:
                    listener.close()
                    continue
                if self._is_closed:
                    return
                failures.log(logging.ERROR, "accept", "Could not accept a connection: %s", error)
                self._pause.wait(AFTER_ERROR)
                continue
            session = ClientSession(self, connection)
            with self._lock:
                if self._is_closed:
                    session.refusal = StorageUnavailableError("the scheduler is stopping")
                elif len(self._sessions) >= MAX_SESSIONS:
                    session.refusal = StorageUnavailableError(
                        f"the scheduler has {MAX_SESSIONS} connections, the maximum"
                    )
                try:
                    session.thread = start_daemon("djqueue-session", session.run)
                    self._sessions.add(session)
                except StorageUnavailableError as error:
                    failures.log(logging.ERROR, "thread", "Could not serve a connection: %s", error)
                    connection.close()

    def forget(self, session: "ClientSession") -> None:
        """Remove a session that has ended."""
        with self._lock:
            self._sessions.discard(session)


class ClientSession:
    """One connection, served by a thread of its own; a second one sends events."""

    def __init__(self, server: SocketServer, connection: socket.socket) -> None:
        self.refusal: StorageError | None = None
        """Reason for refusing the client; None if it is accepted."""
        self.thread: threading.Thread
        self._server = server
        self._scheduler = server.scheduler
        self.connection = connection
        self._buffer = bytearray()
        self._client = ""
        self._subscriptions: dict[int, Unsubscribe] = {}
        self._outgoing: queue.Queue[bytes | None] | None = None
        self._woken: set[int] = set()
        self._is_streaming = False
        """Whether the client is sending parts of a snapshot."""

    def end(self) -> None:
        """End the connection after the call in progress."""
        _shut(self.connection, socket.SHUT_RD)

    def run(self) -> None:
        try:
            self._greet()
            while True:
                self._answer(self._receive())
        except (EOFError, OSError, SerializationError) as error:
            logger.debug("A client disconnected: %s", error)
        finally:
            for unsubscribe in self._subscriptions.values():
                unsubscribe()
            if self._outgoing is not None:
                self._outgoing.put(None)
            _shut(self.connection)
            self.connection.close()
            connections.close_all()
            self._server.forget(self)

    def _greet(self) -> None:
        if (other := other_user(self.connection)) is not None:
            self.refusal = StorageError(other)
        self.connection.settimeout(GREETING_TIMEOUT)
        greeting = receive(self.connection, self._buffer, MAX_GREETING)
        self.connection.settimeout(None)
        if not (isinstance(greeting, list) and [type(part) for part in greeting] == [int, str]):
            raise SerializationError("the first frame is not a greeting")
        version, self._client = greeting
        if self.refusal is None and version != VERSION:
            self.refusal = StorageError(
                f"the scheduler speaks version {VERSION} of the protocol, this process version {version}: "
                "restart runworkers, so that both have the same version of djqueue"
            )
        if self.refusal is not None:
            self._send(["error", self.refusal.code, str(self.refusal)])
            raise EOFError(str(self.refusal))
        self._send(["ok", self._server.epoch])

    def _receive(self) -> tuple[str, list[Any], dict[str, Any]]:
        frame = receive(self.connection, self._buffer)
        if not (isinstance(frame, list) and [type(part) for part in frame] == [str, list, dict]):
            raise SerializationError("the frame is not a request")
        operation, args, kwargs = frame
        return operation, args, kwargs

    def _answer(self, request: tuple[str, list[Any], dict[str, Any]]) -> None:
        operation, args, kwargs = request
        try:
            found = self._do(operation)(*args, **kwargs)
        except (EOFError, OSError):
            raise  # of a stream of frames
        except Exception as error:
            code, text = _described(operation, error)
            self._send(["error", code, text])
            return
        try:
            self._send(["ok", found])
        except SerializationError as error:
            self._send(["error", error.code, str(error)])

    def _do(self, operation: str) -> Callable[..., Any]:
        """Return the function that carries out an operation."""
        scheduler = self._scheduler
        if operation == "finish":
            return partial(scheduler.finish, self._client)
        if operation in ("enqueue", "emit"):
            found: Callable[..., Any] = getattr(scheduler, operation)
            return found
        if operation == "announce":
            return partial(scheduler.announce, self._client)
        if operation in SUBSCRIPTIONS:
            return partial(self._subscribe, operation)
        if operation == "unsubscribe":
            return self._unsubscribe
        if operation == "snapshots.read":
            return self._read_snapshot
        if operation == "snapshots.write":
            return self._write_snapshot
        return lambda *args, **kwargs: scheduler.call(operation, args, kwargs)

    def _send(self, frame: list[Any]) -> None:
        data = pack(frame)
        if self._outgoing is not None:
            self._outgoing.put(data)
        else:
            self.connection.sendall(data)

    # Subscriptions.

    def _subscribe(self, operation: str, number: int, *args: Any) -> None:
        if self._outgoing is None:
            outgoing: queue.Queue[bytes | None] = queue.Queue()
            start_daemon("djqueue-events", self._send_events, outgoing)
            self._outgoing = outgoing
        self._unsubscribe(number)
        handler = partial(self._tell if operation == "events.subscribe" else self._wake, number)
        self._subscriptions[number] = self._scheduler.subscribe(operation, args, handler)

    def _unsubscribe(self, number: int) -> None:
        if (unsubscribe := self._subscriptions.pop(number, None)) is not None:
            unsubscribe()

    def _wake(self, number: int) -> None:
        # Wake-ups that come before the frame is sent share it.
        if number not in self._woken:
            self._woken.add(number)
            self._tell(number, None)

    def _tell(self, number: int, event: Any) -> None:
        assert self._outgoing is not None
        if self._outgoing.qsize() > MAX_EVENTS:
            failures.log(
                logging.WARNING, "slow", "Disconnected a client that stopped reading its subscription."
            )
            _shut(self.connection)
            return
        self._outgoing.put(pack(["event", number, event]))

    def _send_events(self, outgoing: "queue.Queue[bytes | None]") -> None:
        try:
            while (data := outgoing.get()) is not None:
                self._woken.clear()
                self.connection.sendall(data)
        except OSError as error:
            logger.debug("A client disconnected: %s", error)
            _shut(self.connection)

    # Streams.

    def _read_snapshot(self, page: int) -> None:
        with self._scheduler.snapshots.read(page) as parts:
            for part in parts:
                for frame in frames_of(part):
                    self.connection.sendall(frame)

    def _write_snapshot(self, *, replace: bool) -> list[int]:
        self._is_streaming = True
        try:
            return list(self._scheduler.snapshots.write(self._parts(), replace=replace))
        except (EOFError, OSError):
            raise
        except Exception:
            for _ in self._parts():
                pass  # The client reads the answer when it has sent everything.
            raise

    def _parts(self) -> Iterator[Part]:
        while self._is_streaming:
            word, *part = receive(self.connection, self._buffer)
            if word == "part":
                yield Part(*part)
            else:
                self._is_streaming = False


def _described(operation: str, error: Exception) -> tuple[str, str]:
    """Return the code and the text of an error, and log one that is unexpected."""
    if isinstance(error, DjqueueError):
        return error.code, str(error)
    if isinstance(error, ValueError):
        return VALUE_ERROR, str(error)
    kind = operation, type(error)
    failures.log(logging.ERROR, kind, "A call of %s failed", operation, exc_info=error)
    return StorageError.code, f"{type(error).__name__}: {error}"


def _shut(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a connection on which another thread may wait."""
    try:
        connection.shutdown(how)
    except OSError:
        pass  # It has ended already.
