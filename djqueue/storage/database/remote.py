"""A connection to the scheduler's socket, shared by the threads of a process."""

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from djqueue.core.errors import StorageUnavailableError, by_code
from djqueue.storage.base import Unsubscribe

from .address import Address
from .wire import LENGTH, MAX_FRAME, pack, unpack

logger = logging.getLogger("djqueue.remote")

CONNECT_TIMEOUT = 2.0
ANSWER_TIMEOUT = 30.0
RECONNECT_EVERY = 0.5
"""Seconds between tries to have subscriptions heard again."""


class Remote:
    """Requests to the scheduler, and what it says by itself.

    address: asked anew for each connection, since the scheduler may be another by then; None where there
        is no scheduler.
    """

    def __init__(self, address: Callable[[], Address | None], token: str | None) -> None:
        self._address = address
        self._token = token
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._subscriptions: dict[int, tuple[str, tuple[Any, ...], Callable[[Any], None]]] = {}
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._socket is not None

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Ask, and wait for the answer. Raises StorageUnavailableError if nobody answers."""
        number = next(self._numbers)
        answer: Future[Any] = Future()
        self._answers[number] = answer
        try:
            self._send([number, verb, list(args), kwargs])
            try:
                return answer.result(ANSWER_TIMEOUT)
            except TimeoutError:
                raise StorageUnavailableError(
                    f"the scheduler has not answered {verb!r} within {ANSWER_TIMEOUT:g} s"
                ) from None
        finally:
            self._answers.pop(number, None)

    def tell(self, verb: str) -> bool:
        """Say something that has no answer; False if nobody is there to hear it."""
        try:
            self._send([0, verb, [], {}])
        except StorageUnavailableError:
            return False
        return True

    def subscribe(self, verb: str, args: tuple[Any, ...], handler: Callable[[Any], None]) -> Unsubscribe:
        """Have `handler` called, on this connection's thread, with what a subscription brings.

        It is renewed whenever the connection has to be.
        """
        number = next(self._numbers)
        with self._lock:
            self._subscriptions[number] = (verb, args, handler)
        try:
            self.call(verb, number, *args)
        except StorageUnavailableError:
            self._reconnect_later()

        def unsubscribe() -> None:
            with self._lock:
                if self._subscriptions.pop(number, None) is None or self._socket is None:
                    return
            with contextlib.suppress(StorageUnavailableError):
                self._send([0, "unsubscribe", [number], {}])

        return unsubscribe

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._closed = True
            self._subscriptions.clear()
        self._hang_up(self._socket)

    def _send(self, frame: list[Any]) -> None:
        data = pack(frame)
        with self._lock:
            connection = self._connected()
            try:
                connection.sendall(data)
            except OSError as error:
                self._hang_up(connection)
                raise StorageUnavailableError(f"the scheduler has hung up: {error}") from error

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        if self._closed:
            raise StorageUnavailableError("the connection to the scheduler is closed")
        address = self._address()
        if address is None:
            raise StorageUnavailableError(
                "no scheduler is running for this database: start manage.py runworkers"
            )
        try:
            connection = connect(address)
        except OSError as error:
            raise StorageUnavailableError(
                f"the scheduler cannot be reached at {address}: {error}; is it on another machine? "
                "Then give it a tcp:// ADDRESS and a TOKEN in DJQUEUE['STORAGE']['OPTIONS']"
            ) from error
        if self._token is not None:
            connection.sendall(pack(self._token))
        self._socket = connection
        threading.Thread(target=self._read, args=(connection,), name="djqueue-remote", daemon=True).start()
        for number, (verb, args, _) in list(self._subscriptions.items()):
            connection.sendall(pack([0, verb, [number, *args], {}]))
        return connection

    def _read(self, connection: socket.socket) -> None:
        reader = connection.makefile("rb")
        try:
            while True:
                head = reader.read(LENGTH.size)
                if len(head) < LENGTH.size:
                    break
                (length,) = LENGTH.unpack(head)
                body = reader.read(length) if length <= MAX_FRAME else b""
                if len(body) < length or length > MAX_FRAME:
                    break
                self._heard(unpack(body))
        except OSError as error:
            logger.debug("The connection to the scheduler has ended: %s", error)
        finally:
            reader.close()
            self._hang_up(connection)
            self._reconnect_later()

    def _heard(self, frame: list[Any]) -> None:
        number, word, *rest = frame
        if word == "event":
            entry = self._subscriptions.get(rest[0])
            if entry is not None:
                try:
                    entry[2](rest[1])
                except Exception:
                    logger.exception("A subscriber failed.")
            return
        answer = self._answers.get(number)
        if answer is None:
            return
        if word == "ok":
            answer.set_result(rest[0])
        else:
            answer.set_exception(by_code(*rest))

    def _hang_up(self, connection: socket.socket | None) -> None:
        with self._lock:
            if connection is None or connection is not self._socket:
                return
            self._socket = None
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            waiting = list(self._answers.values())
        for answer in waiting:
            if not answer.done():
                answer.set_exception(StorageUnavailableError("the scheduler has hung up"))

    def _reconnect_later(self) -> None:
        with self._lock:
            if self._closed or not self._subscriptions:
                return
        threading.Thread(target=self._reconnect, name="djqueue-reconnect", daemon=True).start()

    def _reconnect(self) -> None:
        """Until somebody hears the subscriptions again; then tell the subscribers to look."""
        while True:
            with self._lock:
                if self._closed or not self._subscriptions or self._socket is not None:
                    return
                try:
                    self._connected()
                except StorageUnavailableError:
                    pass
                else:
                    handlers = [entry for entry in self._subscriptions.values() if entry[0] == "listen"]
                    break
            time.sleep(RECONNECT_EVERY)
        for _, _, handler in handlers:
            handler(None)


def connect(address: Address) -> socket.socket:
    """A connected socket. Raises OSError."""
    if address.host:
        connection = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_TIMEOUT)
        try:
            connection.connect(address.path)
        except OSError:
            connection.close()
            raise
    connection.settimeout(None)
    return connection
