"""A connection to the scheduler's socket, shared by the threads of a process."""

import contextlib
import itertools
import logging
import queue
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from time import monotonic
from typing import Any

from djqueue.core.errors import (
    ConfigurationError,
    DjqueueError,
    SerializationError,
    StorageUnavailableError,
    by_code,
)
from djqueue.core.forks import after_fork
from djqueue.core.throttle import ThrottledLog
from djqueue.storage.base import Unsubscribe

from .address import Address
from .folder import connect_privately
from .wire import LENGTH, MAX_FRAME, pack, unpack_frame

logger = logging.getLogger("djqueue.remote")
unsafe = ThrottledLog(logger, 60.0)

CONNECT_TIMEOUT = 2.0
SEND_TIMEOUT = 10
"""Seconds for which a scheduler may leave unread what it is sent."""
ANSWER_TIMEOUT = 30.0
LONG_ANSWER_TIMEOUT = 600.0
SHORT_ANSWER_TIMEOUT = 1.0
SILENCE = 5.0
"""Seconds for which one that has not answered `ask` in so short a time is not asked again."""
LONG_VERBS = frozenset({"clean", "obliterate"})
"""Verbs that concern any number of jobs."""
RECONNECT_EVERY = 0.5
"""Seconds between tries to have subscriptions heard again."""
CLOSE_TIMEOUT = 5.0


Event = tuple[Callable[[Any], None], Any]
"""A subscriber, and what it is to be told."""


class Remote:
    """Requests to the scheduler, and what it says by itself.

    address: asked anew for each connection, since the scheduler may be another by then; None where there
        is no scheduler. Raises StorageUnavailableError.
    leave: called on a thread of this object's own before it ends.
    """

    def __init__(
        self, address: Callable[[], Address | None], token: str | None, leave: Callable[[], None]
    ) -> None:
        self._address = address
        self._token = token
        self._leave = leave
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._begin()
        after_fork(self.forget)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._socket: socket.socket | None = None
        self._answers: dict[int, tuple[socket.socket, Future[Any]]] = {}
        self._subscriptions: dict[int, tuple[str, tuple[Any, ...], Callable[[Any], None]]] = {}
        self._refusal = ""
        """Why the scheduler hung up, as it said itself."""
        self._silent_until = 0.0
        """Until then (monotonic seconds) those who can do without an answer ask for none."""
        self._deaf_until = 0.0
        """Nobody was there lately: until then (monotonic seconds) wake-ups are not tried again."""
        self._reconnecting = False
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """What subscribers are still to be told; None: nothing more."""
        self._telling = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection at this moment."""
        return self._socket is not None

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Ask, and wait for the answer. Raises StorageUnavailableError if nobody answers."""
        timeout = LONG_ANSWER_TIMEOUT if verb in LONG_VERBS else ANSWER_TIMEOUT
        return self._call(timeout, verb, args, kwargs)

    def ask(self, verb: str, *args: Any) -> Any:
        """As `call`, by one who cannot wait for long, and can do without the answer.

        Raises StorageUnavailableError at once if there was none a moment ago.
        """
        if monotonic() < self._silent_until:
            raise StorageUnavailableError("the scheduler did not answer a moment ago")
        try:
            return self._call(SHORT_ANSWER_TIMEOUT, verb, args, {})
        except StorageUnavailableError:
            self._silent_until = monotonic() + (SILENCE if self.connected else RECONNECT_EVERY)
            raise

    def _call(self, timeout: float, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = next(self._numbers)
        data = pack([number, verb, list(args), kwargs])
        answer: Future[Any] = Future()
        try:
            with self._lock:
                connection = self._connected()
                self._answers[number] = connection, answer
                self._send(connection, data)
            return answer.result(timeout)
        except TimeoutError as error:
            if isinstance(error, DjqueueError):
                raise  # this is the answer
            raise StorageUnavailableError(
                f"the scheduler has not answered {verb!r} within {timeout:g} s"
            ) from None
        finally:
            self._answers.pop(number, None)

    def tell(self, verb: str) -> bool:
        """Say something that has no answer; False if nobody is there to hear it."""
        if self._socket is None and monotonic() < self._deaf_until:
            return False
        try:
            with self._lock:
                self._send(self._connected(), pack([0, verb, [], {}]))
        except StorageUnavailableError:
            self._deaf_until = monotonic() + RECONNECT_EVERY
            return False
        return True

    def subscribe(self, verb: str, args: tuple[Any, ...], handler: Callable[[Any], None]) -> Unsubscribe:
        """Have `handler` called, on a thread for that, with what a subscription brings.

        It is renewed whenever the connection has to be.
        """
        number = next(self._numbers)
        with self._lock:
            self._subscriptions[number] = (verb, args, handler)
            if not self._telling:
                self._telling = True
                self._start("djqueue-events", self._tell_subscribers)
        try:
            self.call(verb, number, *args)
        except StorageUnavailableError as error:
            logger.debug("A subscription is not heard yet: %s", error)
            self._reconnect_later()
        except BaseException:
            self._subscriptions.pop(number, None)
            raise

        def unsubscribe() -> None:
            with self._lock:
                if self._subscriptions.pop(number, None) is None or self._socket is None:
                    return
                with contextlib.suppress(StorageUnavailableError):
                    self._send(self._socket, pack([0, "unsubscribe", [number], {}]))

        return unsubscribe

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        with self._lock:
            self._subscriptions.clear()
            self._events.put(None)
            self._hang_up(self._socket)
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT)

    # The connection. The caller has the lock.

    def _send(self, connection: socket.socket, data: bytes) -> None:
        try:
            connection.sendall(data)
        except OSError as error:
            self._hang_up(connection)
            raise StorageUnavailableError(f"the scheduler has hung up: {error}") from error

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        if self._closed.is_set():
            raise StorageUnavailableError("the connection to the scheduler is closed")
        connection = self._connect()
        self._socket, self._refusal = connection, ""
        renewed = list(self._subscriptions.items())
        if self._token is not None:
            self._send(connection, pack(self._token))
        for number, (verb, args, _) in renewed:
            self._send(connection, pack([0, verb, [number, *args], {}]))
        self._start("djqueue-remote", lambda: self._read(connection, [number for number, _ in renewed]))
        return connection

    def _connect(self) -> socket.socket:
        address = self._address()
        if address is None:
            raise StorageUnavailableError(
                "no scheduler is running for this database: start manage.py runworkers"
            )
        try:
            return connect(address)
        except ConfigurationError as error:
            # Enqueues go by the tables; without this line nobody would know why the scheduler is not asked.
            unsafe.log(logging.WARNING, str(address), "The scheduler's socket is not used: %s", error)
            raise StorageUnavailableError(str(error)) from error
        except OSError as error:
            raise StorageUnavailableError(
                f"the scheduler cannot be reached at {address}: {error}; is it on another machine, or in a "
                "systemd unit with PrivateTmp=yes? Then give it a socket in its RuntimeDirectory=, or a "
                "tcp:// ADDRESS and a TOKEN, in DJQUEUE['STORAGE']['OPTIONS']"
            ) from error

    def _hang_up(self, connection: socket.socket | None) -> None:
        if connection is None or connection is not self._socket:
            return
        self._socket = None
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
        why = f": {self._refusal}" if self._refusal else ""
        for asked, answer in list(self._answers.values()):
            if asked is connection:
                _settle(answer, error=StorageUnavailableError(f"the scheduler has hung up{why}"))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._leave()

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # Threads.

    def _read(self, connection: socket.socket, renewed: list[int]) -> None:
        """Hear what the scheduler says; first tell listeners of what may have happened meanwhile."""
        for number in renewed:
            entry = self._subscriptions.get(number)
            if entry is not None and entry[0] in ("listen", "follow_worker"):
                self._events.put((entry[2], None))
        try:
            with connection.makefile("rb") as reader:
                while True:
                    head = reader.read(LENGTH.size)
                    if len(head) < LENGTH.size:
                        break
                    (length,) = LENGTH.unpack(head)
                    if length > MAX_FRAME:
                        raise SerializationError(f"a frame of {length} bytes")
                    body = reader.read(length)
                    if len(body) < length:
                        break
                    self._hear(unpack_frame(body))
        except (OSError, ValueError, SerializationError) as error:
            logger.debug("The connection to the scheduler has ended: %s", error)
        finally:
            with self._lock:
                self._hang_up(connection)
            self._reconnect_later()

    def _hear(self, frame: list[Any]) -> None:
        number, word, *rest = frame
        if word == "event":
            entry = self._subscriptions.get(rest[0])
            if entry is not None:
                self._events.put((entry[2], rest[1]))
        elif word == "refused":
            self._refusal = rest[0]
        elif (asked := self._answers.get(number)) is not None:
            if word == "ok":
                _settle(asked[1], rest[0])
            else:
                _settle(asked[1], error=by_code(*rest))

    def _tell_subscribers(self) -> None:
        # Not on the reading thread: a subscriber may ask the scheduler something.
        while (event := self._events.get()) is not None:
            handler, value = event
            try:
                handler(value)
            except Exception:
                logger.exception("A subscriber failed.")

    def _reconnect_later(self) -> None:
        with self._lock:
            if self._reconnecting or not self._is_missed():
                return
            self._reconnecting = True
            self._start("djqueue-reconnect", self._reconnect)

    def _reconnect(self) -> None:
        while True:
            with self._lock:
                if self._is_missed():
                    with contextlib.suppress(StorageUnavailableError):
                        self._connected()
                if not self._is_missed():
                    self._reconnecting = False
                    return
            self._closed.wait(RECONNECT_EVERY)

    def _is_missed(self) -> bool:
        """Whether there are subscriptions that nobody hears."""
        return bool(self._subscriptions) and self._socket is None and not self._closed.is_set()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's."""
        mine = self._socket
        self._begin()
        if mine is not None:
            mine.close()


def connect(address: Address) -> socket.socket:
    """A connected socket. Raises OSError, and ConfigurationError for a socket that is not this user's."""
    if address.host:
        connection = socket.create_connection((address.host, address.port), CONNECT_TIMEOUT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = connect_privately(address.path, CONNECT_TIMEOUT)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT, 0))
    return connection


def _settle(answer: "Future[Any]", value: Any = None, error: BaseException | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # its caller has been told something already
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
