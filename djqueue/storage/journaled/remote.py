"""A connection to the scheduler's socket, shared by the threads of a process."""

import asyncio
import contextlib
import itertools
import logging
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from time import monotonic
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.core.breaker import CircuitBreaker, Outage
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadline import remaining
from djqueue.core.errors import DjqueueError, SerializationError, StorageUnavailableError, by_code
from djqueue.core.forks import after_fork
from djqueue.storage.base import Unsubscribe
from djqueue.storage.wire import flat, pack

from .address import Address
from .connecting import connect_to
from .framing import frames, send_all, takes_at_once
from .operations import DEADLINE, OPERATIONS
from .probing import PROBE_TIMEOUT, Answer, LoopAnswer, SchedulerProbe, settle

logger = logging.getLogger("djqueue.remote")

SEND_TIMEOUT = 2.0
"""Seconds for which the scheduler may leave sent bytes unread."""
READ_TIMEOUT = 1.0
"""Seconds after which a read falls back to the tables."""
TICK = 0.5
"""Seconds without a frame after which a scheduler with unanswered requests is pinged."""
PING_TIMEOUT = 1.25
"""Seconds in which the scheduler must answer a ping; otherwise the connection is closed."""
IDLE_PING = 5.0
"""Seconds between pings of a connection that only carries subscriptions."""
COUNTED_FROM = 0.5
"""Minimum duration in seconds of a failed call that counts as a failure of the scheduler."""
RECONNECT_EVERY = 0.5
"""Seconds between attempts to restore subscriptions."""
CLOSE_TIMEOUT = 5.0


Event = tuple[Callable[[Any], None], Any]
"""A handler, and the event to pass to it."""


class Remote:
    """Requests to the scheduler, their responses, and the events that it sends.

    address: called before each connection, because another process may be the scheduler by then. Returns
    None if no scheduler is running; raises StorageUnavailableError.
    leave: called by each thread of this object before it ends.
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
        self._answers: dict[int, tuple[socket.socket, Answer]] = {}
        self._subscriptions: dict[int, tuple[str, tuple[Any, ...], Callable[[Any], None]]] = {}
        self._unconfirmed: set[int] = set()
        """Subscriptions whose first request has not been answered: they cannot have missed events yet."""
        self._refusal = ""
        """The reason that the scheduler gave for closing the connection."""
        self._silent_until = 0.0
        """Monotonic time in seconds until which `ask` does not look for a scheduler, because none was
        running.
        """
        self._breaker = CircuitBreaker()
        self._probe = SchedulerProbe(
            self._breaker, lambda timeout: self._call(timeout, "ping", (), {}), self._start
        )
        self._ping_number = -1
        """Number of the connection's last ping."""
        self._deaf_until = 0.0
        """Monotonic time in seconds until which no wake-up is sent, because no scheduler responded."""
        self._reconnecting = False
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        """Events to deliver; None ends the thread."""
        self._telling = False

    @property
    def connected(self) -> bool:
        """Whether the scheduler is connected now."""
        return self._socket is not None

    @property
    def outage(self) -> Outage | None:
        """The current outage of the scheduler, if any."""
        return self._breaker.outage

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Send a request and return the response. Raises StorageUnavailableError if none arrives.

        A call waits for a busy scheduler, but not for one that does not answer pings.
        """
        timeout = remaining(OPERATIONS[operation].deadline if operation in OPERATIONS else DEADLINE)
        if self._breaker.outage is not None:
            self._probe.wait(min(timeout, PROBE_TIMEOUT))
        return self._call(remaining(timeout), operation, args, kwargs)

    def read(self, operation: str, *args: Any, timeout: float = READ_TIMEOUT) -> Any:
        """Send a request whose caller has a fallback, and wait at most `timeout` seconds for the response.

        Raises StorageUnavailableError at once during an outage of the scheduler.
        """
        if (outage := self._breaker.outage) is not None:
            self._probe.start(at_once=False)
            raise StorageUnavailableError(_away_for(outage))
        return self._call(remaining(timeout), operation, args, {})

    def ask(self, operation: str, *args: Any) -> Any:
        """Like `read`, but if no scheduler was found, do not look for one again for half a second."""
        if monotonic() < self._silent_until:
            raise StorageUnavailableError(
                "no scheduler is running: the last attempt to connect failed a moment ago"
            )
        try:
            return self.read(operation, *args)
        except StorageUnavailableError:
            self._silent_until = monotonic() + RECONNECT_EVERY
            raise

    def _call(self, timeout: float, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if timeout <= 0:
            raise StorageUnavailableError("no request was sent to the scheduler: the time limit has passed")
        until = monotonic() + timeout
        number, data = self._request(operation, args, kwargs)
        answer: Future[Any] = Future()
        try:
            with self._locked(timeout):
                connection = self._connected()
                self._answers[number] = connection, answer
                self._send(connection, data, until)
            found = answer.result(max(0.0, until - monotonic()))
        except TimeoutError as error:
            if isinstance(error, DjqueueError):
                raise  # this is the answer
            raise self._unanswered(connection, operation, timeout) from None
        finally:
            self._answers.pop(number, None)
        self._breaker.succeeded()
        return found

    def _request(self, operation: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> tuple[int, bytes]:
        number = next(self._numbers)
        return number, pack([number, operation, [*map(flat, args)], dict(kwargs)])

    def _unanswered(self, connection: socket.socket, operation: str, timeout: float) -> Exception:
        reason = (
            f"the scheduler did not answer {operation!r} within {timeout:.3g} s; the operation may "
            "still complete"
        )
        if timeout >= COUNTED_FROM:
            self._breaker.failed(reason)
        self._leave_claims(connection, operation, reason)
        return StorageUnavailableError(reason)

    def _leave_claims(self, connection: socket.socket, operation: str, reason: str) -> None:
        """Disconnect if a claim's answer goes unread: the scheduler releases its jobs then."""
        if operation in OPERATIONS and OPERATIONS[operation].claims:
            with self._lock:
                self._hang_up(connection, reason)

    async def acall(self, operation: str, *args: Any) -> Any:
        """Async version of `call`. The loop itself sends the request, unless that would take time."""
        timeout = remaining(OPERATIONS[operation].deadline if operation in OPERATIONS else DEADLINE)
        number, data = self._request(operation, args, {})
        answer = LoopAnswer()
        connection = self._send_now(number, data, answer)
        if connection is None:
            return await sync_to_async(self.call, thread_sensitive=False)(operation, *args)
        try:
            async with asyncio.timeout(timeout):
                found = await answer.future
        except TimeoutError as error:
            if isinstance(error, DjqueueError):
                raise
            raise self._unanswered(connection, operation, timeout) from None
        except asyncio.CancelledError:
            self._leave_claims(connection, operation, f"the caller of {operation!r} was cancelled")
            raise
        finally:
            self._answers.pop(number, None)
        self._breaker.succeeded()
        return found

    def _send_now(self, number: int, data: bytes, answer: LoopAnswer) -> socket.socket | None:
        """Send a request if that takes no time, and return the connection; None if nothing was sent."""
        if self._breaker.outage is not None or not self._lock.acquire(blocking=False):
            return None
        try:
            connection = self._socket
            if connection is None or not takes_at_once(connection, data):
                return None
            self._answers[number] = connection, answer
            self._send(connection, data)
            return connection
        except StorageUnavailableError:
            self._answers.pop(number, None)
            raise
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _locked(self, timeout: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, timeout)):
            raise StorageUnavailableError(f"could not connect to the scheduler within {timeout:.3g} s")
        try:
            yield
        finally:
            self._lock.release()

    def tell(self, operation: str) -> bool:
        """Send a message that has no response; return whether it was sent."""
        if self._socket is None and monotonic() < self._deaf_until:
            return False
        if self._breaker.outage is not None:
            with contextlib.suppress(StorageUnavailableError):
                self._probe.start(at_once=False)
            return False
        try:
            with self._locked(remaining(READ_TIMEOUT)):
                self._send(
                    self._connected(), pack([0, operation, [], {}]), monotonic() + remaining(READ_TIMEOUT)
                )
        except StorageUnavailableError:
            self._deaf_until = monotonic() + RECONNECT_EVERY
            return False
        return True

    def subscribe(self, operation: str, args: tuple[Any, ...], handler: Callable[[Any], None]) -> Unsubscribe:
        """Subscribe; call `handler` with each event, on the thread for events.

        The subscription is renewed with each new connection.
        """
        number = next(self._numbers)
        with self._lock:
            self._unconfirmed.add(number)
            self._subscriptions[number] = (operation, args, handler)
            if not self._telling:
                self._telling = True
                self._start("djqueue-events", self._tell_subscribers)
        try:
            self.read(operation, number, *args)
        except StorageUnavailableError as error:
            logger.debug("The scheduler has not confirmed a subscription yet: %s", error)
            self._unconfirmed.discard(number)
            self._subscribe_unconfirmed(number, operation, args)
        except BaseException:
            self._subscriptions.pop(number, None)
            raise
        finally:
            self._unconfirmed.discard(number)

        def unsubscribe() -> None:
            if self._subscriptions.pop(number, None) is None or self._socket is None:
                return
            # If the scheduler does not receive this, its further events are dropped here.
            with contextlib.suppress(StorageUnavailableError), self._locked(remaining(READ_TIMEOUT)):
                if self._socket is not None:
                    self._send(self._socket, pack([0, "unsubscribe", [number], {}]))

        return unsubscribe

    def _subscribe_unconfirmed(self, number: int, operation: str, args: tuple[Any, ...]) -> None:
        """Subscribe on this connection, or on the next one."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(StorageUnavailableError):
                    self._send(self._socket, pack([0, operation, [number, *args], {}]))
        self._reconnect_later()

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        threads: list[threading.Thread] = []
        # A thread that is asking a frozen database for the scheduler's address has the lock until then.
        with contextlib.suppress(StorageUnavailableError), self._locked(READ_TIMEOUT):
            self._subscriptions.clear()
            self._events.put(None)
            self._hang_up(self._socket)
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_TIMEOUT)

    # The connection. The caller has the lock.

    def _send(self, connection: socket.socket, data: bytes, until: float | None = None) -> None:
        """Send a frame before a deadline in monotonic seconds; close the connection if only part was sent."""
        limit = monotonic() + SEND_TIMEOUT
        try:
            send_all(connection, data, limit if until is None else min(limit, until))
        except OSError as error:
            if isinstance(error, TimeoutError):
                self._breaker.failed("the scheduler is not reading its socket")
            self._hang_up(connection)
            raise StorageUnavailableError(
                f"sending to the scheduler failed, and the connection was closed: {error}"
            ) from error

    def _connected(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        address = None if self._closed.is_set() else self._address()
        if self._closed.is_set():
            raise StorageUnavailableError("the connection to the scheduler is closed")
        connection = connect_to(address, self._breaker)
        self._socket, self._refusal = connection, ""
        renewed = list(self._subscriptions.items())
        try:
            if self._token is not None:
                self._send(connection, pack(self._token))
            for number, (operation, args, _) in renewed:
                self._send(connection, pack([0, operation, [number, *args], {}]))
        except BaseException:
            connection.close()
            raise
        again = [number for number, _ in renewed if number not in self._unconfirmed]
        self._start("djqueue-remote", lambda: self._read(connection, again))
        return connection

    def _hang_up(
        self, connection: socket.socket | None, reason: str = "the scheduler closed the connection"
    ) -> None:
        if connection is None or connection is not self._socket:
            return
        self._socket = None
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # its reader closes it
        why = f": {self._refusal}" if self._refusal else ""
        for asked, answer in list(self._answers.values()):
            if asked is connection:
                settle(answer, error=StorageUnavailableError(reason + why))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._leave()

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    # Threads.

    def _read(self, connection: socket.socket, renewed: list[int]) -> None:
        """Read frames from the scheduler; first notify listeners, which may have missed events."""
        for number in renewed:
            entry = self._subscriptions.get(number)
            if entry is not None and entry[0] in ("listen", "on_command"):
                self._events.put((entry[2], None))
        reason = "the scheduler closed the connection"
        try:
            self._hear_all(connection)
        except SilentError as error:
            reason = str(error)
            # Before the lock: the thread that has it may be blocked while sending.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            self._breaker.failed(reason)
        except (OSError, ValueError, SerializationError) as error:
            logger.debug("The connection to the scheduler was closed: %s", error)
        finally:
            with self._lock:
                self._hang_up(connection, reason)
                connection.close()
            self._reconnect_later()

    def _hear_all(self, connection: socket.socket) -> None:
        """Read frames until the connection ends. Raises SilentError if the scheduler does not respond."""
        incoming = select.poll()
        incoming.register(connection, select.POLLIN)
        buffer = bytearray()
        heard, pinged = monotonic() - IDLE_PING, 0.0
        while True:
            if incoming.poll(TICK * 1_000):
                data = connection.recv(1 << 16)
                if not data:
                    return
                heard, pinged = monotonic(), 0.0
                buffer += data
                for frame in frames(buffer):
                    self._hear(frame)
            elif pinged:
                if monotonic() - pinged >= PING_TIMEOUT:
                    raise SilentError(
                        "the scheduler did not answer a ping: it is hanging, or the network is down"
                    )
            elif self._is_owed(connection, monotonic() - heard):
                pinged = monotonic()
                self._ping(connection)

    def _is_owed(self, connection: socket.socket, quiet: float) -> bool:
        """Return whether the scheduler should be pinged."""
        if self._subscriptions and quiet >= IDLE_PING:
            return True
        return any(asked is connection for asked, _ in list(self._answers.values()))

    def _ping(self, connection: socket.socket) -> None:
        if not self._lock.acquire(timeout=TICK):
            return  # a scheduler that blocks senders for so long does not respond either
        try:
            if connection is self._socket:
                self._ping_number = next(self._numbers)
                self._send(connection, pack([self._ping_number, "ping", [], {}]))
        except StorageUnavailableError as error:
            raise SilentError(str(error)) from error
        finally:
            self._lock.release()

    def _hear(self, frame: list[Any]) -> None:
        number, word, *rest = frame
        if word == "event":
            entry = self._subscriptions.get(rest[0])
            if entry is not None:
                self._events.put((entry[2], rest[1]))
        elif word == "refused":
            self._refusal = rest[0]
        elif word == "lost":
            raise SilentError("the process at the scheduler's address is no longer the scheduler")
        elif number == self._ping_number:
            self._breaker.succeeded()
        elif (asked := self._answers.get(number)) is not None:
            if word == "ok":
                settle(asked[1], rest[0])
            else:
                settle(asked[1], error=by_code(*rest))

    def _tell_subscribers(self) -> None:
        # Not on the reading thread: a handler may send requests to the scheduler.
        while (event := self._events.get()) is not None:
            handler, value = event
            try:
                handler(value)
            except Exception:
                logger.exception("A subscriber raised an exception; the other subscribers are not affected.")

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
        """Return whether subscriptions exist without a connection."""
        return bool(self._subscriptions) and self._socket is None and not self._closed.is_set()

    def forget(self) -> None:
        """Forget the connection in a forked child: it belongs to the parent."""
        mine = self._socket
        self._begin()
        if mine is not None:
            mine.close()


class SilentError(Exception):
    """The scheduler is connected but does not respond."""


def _away_for(outage: Outage) -> str:
    seconds = (SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"the scheduler has been unavailable for {max(0.0, seconds):.1f} s: {outage.reason}"
