"""Calls of the scheduler from other processes.

Each call has a connection of its own, from a pool, and reads its answer itself. Subscriptions share one
connection with a thread. A ledger has the claims and outcomes that a new scheduler may not know.
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, NamedTuple

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import CircuitBreaker, Outage, remaining
from djqueue.core.errors import SerializationError, StorageUnavailableError, by_code
from djqueue.core.job import Batch, Claimed, ClaimRequest, EnqueueResult, Finished, Outcome
from djqueue.core.logs import Log
from djqueue.core.threads import on_thread, start_daemon
from djqueue.storage.base import Unsubscribe
from djqueue.storage.wire import pack

from .folder import PrivateFolder, client_name
from .protocol import (
    CHUNK,
    LONG,
    LONG_TIMEOUT,
    VALUE_ERROR,
    VERSION,
    fitting,
    frame_end,
    receive,
    take_frame,
    time_for,
)

HeldAttempt = tuple[str, Claimed, Outcome | None]


class AttemptLedger:
    """Attempts from their claim until their outcome is on disk, by token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[str, Claimed]] = {}
        self._kept: dict[int, tuple[str, Claimed, Outcome, int]] = {}
        """Ended attempts, with the generation of changes that their outcomes are in."""
        self._failed: list[int] = []
        self._number = 0
        self._is_new = False

    def begin(self) -> tuple[int, list[int]]:
        """Return the number of the next call, and the numbers of those that had no answer."""
        with self._lock:
            self._number += 1
            failed, self._failed = self._failed, []
            return self._number, failed

    def gave_up(self, number: int, failed: Sequence[int]) -> None:
        """Record that a call had no answer."""
        with self._lock:
            self._failed += [*failed, number]

    def answered(
        self,
        outcomes: Sequence[Outcome],
        then: ClaimRequest | None,
        finished: Finished,
        generation: int,
        written: int,
    ) -> None:
        """Record an answer: the outcomes that are kept until they are written, and the new claims."""
        with self._lock:
            if self._is_new:
                # The scheduler answers calls after it has applied what was announced.
                self._kept = {token: (*kept[:3], generation) for token, kept in self._kept.items()}
                self._is_new = False
            for token in [token for token, kept in self._kept.items() if kept[3] <= written]:
                del self._kept[token]
            for outcome, is_accepted in zip(outcomes, finished.accepted, strict=True):
                held = self._held.pop(outcome.token, None)
                if is_accepted and held is not None and generation > written:
                    self._kept[outcome.token] = (*held, outcome, generation)
            if then is not None:
                for claimed in finished.claims.jobs:
                    self._held[claimed.token] = then.worker, claimed

    def lost(self, tokens: Sequence[int]) -> None:
        """Forget claims that the scheduler has ended."""
        with self._lock:
            for token in tokens:
                self._held.pop(token, None)

    def all(self) -> list[HeldAttempt]:
        """Return the attempts that a new scheduler has to know."""
        with self._lock:
            running: list[HeldAttempt] = [(worker, claimed, None) for worker, claimed in self._held.values()]
            return running + [kept[:3] for kept in self._kept.values()]

    def restarted(self) -> None:
        """Expect answers of a new scheduler, whose generations begin anew."""
        with self._lock:
            self._is_new = True
            self._failed = []


logger = Log("djqueue.client")

MAX_IDLE = 8
"""Maximum number of idle connections."""
RESTART_TIMEOUT = 1.0
"""Seconds for which a call waits for a scheduler that is restarting."""
CONNECT_EVERY = 0.02
"""Seconds between two tries to connect."""
CLOSE_TIMEOUT = 5.0
"""Seconds for which closing waits for a handler of events."""
RECONNECT_EVERY = 0.1
"""Seconds between two tries to renew subscriptions."""


class SchedulerConnection:
    """A connection to the scheduler, used by one call at a time."""

    def __init__(self, folder: PrivateFolder, client: str, until: float) -> None:
        self._buffer = bytearray()
        self.socket = folder.connect(until - monotonic())
        try:
            self.epoch: str = self.exchange(pack([VERSION, client]), until)
        except BaseException:
            self.close()
            raise

    def exchange(self, data: bytes, until: float) -> Any:
        """Send a request, and return the answer. Raises the error of the answer, OSError and EOFError."""
        self.send(data, until)
        return result_of(self.receive(until))

    def send(self, data: bytes, until: float) -> None:
        """Send a frame."""
        self.socket.settimeout(max(0.001, until - monotonic()))
        self.socket.sendall(data)

    def receive(self, until: float | None) -> list[Any]:
        """Return the next frame; None: wait without limit."""
        self.socket.settimeout(None if until is None else max(0.001, until - monotonic()))
        try:
            frame: list[Any] = receive(self.socket, self._buffer)
        except SerializationError as error:
            raise OSError(str(error)) from error
        return frame

    async def aexchange(self, data: bytes) -> Any:
        """Async version of `exchange`, without a deadline."""
        loop = asyncio.get_running_loop()
        self.socket.setblocking(False)
        await loop.sock_sendall(self.socket, data)
        try:
            while (end := frame_end(self._buffer)) is None or len(self._buffer) < end:
                received = await loop.sock_recv(self.socket, CHUNK)
                if not received:
                    raise EOFError("the connection was closed")
                self._buffer += received
            frame = take_frame(self._buffer, end)
        except SerializationError as error:
            raise OSError(str(error)) from error
        return result_of(frame)

    @property
    def is_stale(self) -> bool:
        """Whether the scheduler has closed the idle connection."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def shut(self) -> None:
        """End the connection, on which another thread may wait."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()


def result_of(frame: list[Any]) -> Any:
    """Return the value of an answer. Raises the error that it names."""
    word, *rest = frame
    if word == "error":
        code, text = rest
        raise ValueError(text) if code == VALUE_ERROR else by_code(code, text)
    return rest[0]


class SchedulerClient:
    """Calls of this process.

    Args:
        folder: The folder of the socket.
        timeout: Seconds until a call fails, unless its time depends on the number of jobs.
    """

    def __init__(self, folder: PrivateFolder, timeout: float) -> None:
        self._folder = folder
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.name = client_name(secrets.token_hex(4))
        self.attempts = AttemptLedger()
        self.breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._idle: list[SchedulerConnection] = []
        self._epoch = ""
        self._meeting = threading.Lock()
        self._has_joined = False
        self._closed = threading.Event()
        self._subscriptions = ClientSubscriptions(self)

    @property
    def subscriptions(self) -> "ClientSubscriptions":
        """The subscriptions of this process."""
        self._check_fork()
        return self._subscriptions

    @property
    def outage(self) -> Outage | None:
        """Since when the scheduler has not answered."""
        return self.breaker.outage

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        self._subscriptions.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self._has_joined and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._folder.leave(self.name)

    def join(self) -> None:
        """Let schedulers that start later wait for this process."""
        if not self._has_joined:
            try:
                self._folder.join(self.name)
            except OSError as error:
                raise StorageUnavailableError(f"no scheduler is running: {error}") from error
            self._has_joined = True

    # Calls.

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler's answer.

        Raises its error, and StorageUnavailableError if it does not answer in time.
        """
        self._check_fork()
        data = pack([operation, args_of(args), dict(kwargs)])
        until = self._until(operation)
        with self._using(operation, until) as connection:
            return connection.exchange(data, until)

    async def acall(self, operation: str, *args: Any) -> Any:
        """Async version of `call`."""
        return await self._aexchange(operation, [operation, args_of(args), {}], self._until(operation))

    async def _aexchange(self, operation: str, request: list[Any], until: float) -> Any:
        self._check_fork()
        data = pack(request)
        connection = self._take_idle()
        if connection is None:
            connection = await on_thread(self._connected, until)
        with self._answered(connection, operation):
            async with asyncio.timeout(max(0.001, until - monotonic())):
                return await connection.aexchange(data)

    def enqueue(self, batches: Sequence[Batch], *, written: bool) -> list[EnqueueResult]:
        """Add jobs."""
        self._check_fork()
        until = self._until("enqueue", time_for(batches))
        patience = until - monotonic()
        data = pack(["enqueue", [list(batches)], {"written": written, "patience": patience}])
        with self._using("enqueue", until) as connection:
            answers: list[EnqueueResult] = connection.exchange(data, until)
            return answers

    async def aenqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        """Async version of `enqueue`."""
        until = self._until("enqueue", time_for(batches))
        request = ["enqueue", [list(batches)], {"patience": until - monotonic()}]
        answers: list[EnqueueResult] = await self._aexchange("enqueue", request, until)
        return answers

    def _until(self, operation: str, more: float = 0.0) -> float:
        return monotonic() + remaining(LONG_TIMEOUT if operation in LONG else self._timeout + more)

    @contextlib.contextmanager
    def _using(self, operation: str, until: float) -> Iterator[SchedulerConnection]:
        connection = self._take_idle() or self._connected(until)
        with self._answered(connection, operation):
            yield connection

    @contextlib.contextmanager
    def _answered(self, connection: SchedulerConnection, operation: str) -> Iterator[None]:
        """Return a connection to the pool when its call has been answered, and close it otherwise."""
        is_usable = False
        try:
            yield
            is_usable = True
        except (OSError, EOFError) as error:
            reason = f"the scheduler did not answer {operation!r}: {str(error) or type(error).__name__}"
            if isinstance(error, TimeoutError):
                self.breaker.failed(reason)
            raise StorageUnavailableError(reason + "; the operation may still complete") from error
        except Exception:
            is_usable = True  # The answer was an error.
            raise
        finally:
            if is_usable:
                self.breaker.succeeded()
                self._give_back(connection)
            else:
                connection.close()

    def _check_fork(self) -> None:
        """Begin anew in a forked process: the connections and the attempts are its parent's."""
        if self._pid != os.getpid():
            for connection in self._idle:
                connection.close()
            self._begin()

    def _take_idle(self) -> SchedulerConnection | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if connection.epoch == self._epoch and not connection.is_stale:
                return connection
            connection.close()

    def _give_back(self, connection: SchedulerConnection) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE and not self._closed.is_set():
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self, until: float) -> SchedulerConnection:
        """Return a new connection. While the scheduler is away, only one call at a time waits for it."""
        if not self.breaker.enter():
            outage = self.breaker.outage
            raise StorageUnavailableError("no scheduler is running" if outage is None else away_for(outage))
        is_probe = self.breaker.outage is not None
        patience = min(until, monotonic() + (0 if is_probe else RESTART_TIMEOUT))
        while True:
            try:
                connection = self.connect(min(until, monotonic() + self._timeout))
                self.breaker.succeeded()
                return connection
            except (OSError, EOFError) as error:
                if monotonic() >= patience or self._closed.wait(CONNECT_EVERY):
                    reason = self._why_not(error)
                    self.breaker.failed(reason)
                    raise StorageUnavailableError(reason) from error
            except BaseException:
                self.breaker.gave_up()
                raise

    def _why_not(self, error: Exception) -> str:
        if isinstance(error, TimeoutError | BlockingIOError):
            return "the scheduler does not answer"
        return f"no scheduler is running at {self._folder.socket}: start one with `manage.py runworkers`"

    def connect(self, until: float) -> SchedulerConnection:
        """Connect; tell a new scheduler first which attempts run here."""
        connection = SchedulerConnection(self._folder, self.name, until)
        try:
            if connection.epoch != self._epoch:
                with self._meeting:
                    if connection.epoch != self._epoch:
                        self._meet(connection, until)
        except BaseException:
            connection.close()
            raise
        return connection

    def _meet(self, connection: SchedulerConnection, until: float) -> None:
        if self._has_joined:
            held = self.attempts.all()
            connection.exchange(pack(["announce", [held], {}]), until)
            if held:
                logger.info("Announced %d attempts to a new scheduler.", len(held))
            self.attempts.restarted()
        self._epoch = connection.epoch
        self._subscriptions.follow(connection.epoch)

    # Claims and outcomes.

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Finished:
        """End attempts and claim."""
        count = fitting(len(one.result or b"") for one in outcomes)
        if count < len(outcomes):
            first, rest = self.finish(outcomes[:count], None), self.finish(outcomes[count:], then)
            return rest._replace(accepted=[*first.accepted, *rest.accepted])
        until = self._until("finish")
        connection = self._joined(then) or self._connected(until)
        with self._answered(connection, "finish"), self._numbered(outcomes, then) as data:
            return self._note(connection.epoch, outcomes, then, connection.exchange(data, until))

    async def afinish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Finished:
        """Async version of `finish`."""
        count = fitting(len(one.result or b"") for one in outcomes)
        if count < len(outcomes):
            first = await self.afinish(outcomes[:count], None)
            rest = await self.afinish(outcomes[count:], then)
            return rest._replace(accepted=[*first.accepted, *rest.accepted])
        until = self._until("finish")
        connection = self._joined(then)
        if connection is None:
            connection = await on_thread(self._connected, until)
        with self._answered(connection, "finish"), self._numbered(outcomes, then) as data:
            async with asyncio.timeout(max(0.001, until - monotonic())):
                answer = await connection.aexchange(data)
            return self._note(connection.epoch, outcomes, then, answer)

    def _joined(self, then: ClaimRequest | None) -> SchedulerConnection | None:
        self._check_fork()
        if then is not None:
            self.join()
        return self._take_idle()

    @contextlib.contextmanager
    def _numbered(self, outcomes: Sequence[Outcome], then: ClaimRequest | None) -> Iterator[bytes]:
        """Yield the request, whose number the next one has if this one fails."""
        number, failed = self.attempts.begin()
        try:
            yield pack(["finish", args_of((number, failed, outcomes, then)), {}])
        except BaseException:
            self.attempts.gave_up(number, failed)
            raise

    def _note(
        self, epoch: str, outcomes: Sequence[Outcome], then: ClaimRequest | None, answer: list[Any]
    ) -> Finished:
        finished: Finished
        finished, generation, written = answer
        with self._meeting:
            if epoch != self._epoch:
                # The next scheduler was not told of these claims.
                raise OSError("the scheduler was restarted")
            self.attempts.answered(outcomes, then, finished, generation, written)
        return finished

    # Streams.

    @contextlib.contextmanager
    def stream(self, operation: str, *args: Any, **kwargs: Any) -> Iterator["FrameStream"]:
        """Send a request with frames of its own, on a connection that is closed afterwards."""
        self._check_fork()
        stream = FrameStream(self._connected(self._until(operation)))
        try:
            stream.send(pack([operation, args_of(args), dict(kwargs)]))
            yield stream
        finally:
            stream.close()


class FrameStream:
    """A connection for the frames of one call."""

    def __init__(self, connection: SchedulerConnection) -> None:
        self._connection = connection
        self.close = connection.close

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        with self._named():
            self._connection.send(frame, monotonic() + LONG_TIMEOUT)

    def receive(self) -> list[Any]:
        """Return the next frame."""
        with self._named():
            return self._connection.receive(monotonic() + LONG_TIMEOUT)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as error:
            raise StorageUnavailableError(f"the scheduler closed the connection: {error}") from error


def args_of(args: Sequence[Any]) -> list[Any]:
    """Return arguments as a list; sequences are lists on the wire."""
    return [list(one) if type(one) in (set, range) else one for one in args]


def away_for(outage: Outage) -> str:
    """Return since when the scheduler has been away, and why."""
    seconds = (SYSTEM_CLOCK.now() - outage.since) / 1_000
    return f"the scheduler has been unavailable for {max(0.0, seconds):.1f} s: {outage.reason}"


class ClientSubscription(NamedTuple):
    """One subscription."""

    operation: str
    args: tuple[Any, ...]
    handler: Callable[[Any], None]
    begun: threading.Event


class ClientSubscriptions:
    """Subscriptions of this process: one connection, with a thread that calls the handlers."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._entries: dict[int, ClientSubscription] = {}
        self._pending: deque[threading.Event] = deque()
        """Set when the answers arrive, in order."""
        self._connection: SchedulerConnection | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def subscribe(
        self, operation: str, args: tuple[Any, ...], handler: Callable[[Any], None], timeout: float
    ) -> Unsubscribe:
        """Call `handler` with each event, on the thread.

        While the scheduler is away, the subscription begins when it is back.
        """
        number = next(self._numbers)
        begun = threading.Event()
        with self._lock:
            if self._thread is None:
                self._thread = start_daemon("djqueue-subscriptions", self._run)
            self._entries[number] = ClientSubscription(operation, args, handler, begun)
            self._send([operation, [number, *args], {}], begun)
        if not self._has_waited(begun, timeout):
            logger.debug("The scheduler has not confirmed a subscription yet.")
        return lambda: self._unsubscribe(number, timeout)

    def _unsubscribe(self, number: int, timeout: float) -> None:
        ended = threading.Event()
        with self._lock:
            is_sent = self._entries.pop(number, None) is not None
            is_sent = is_sent and self._send(["unsubscribe", [number], {}], ended)
        if is_sent:
            self._has_waited(ended, timeout)

    def _has_waited(self, answered: threading.Event, timeout: float) -> bool:
        # A handler runs on the thread that reads the answers.
        return threading.current_thread() is self._thread or answered.wait(timeout)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with self._lock:
            self._entries.clear()
            if self._connection is not None:
                self._connection.shut()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT)

    def follow(self, epoch: str) -> None:
        """Leave an earlier scheduler, which may hang, for the one of this run."""
        connection = self._connection
        if connection is not None and connection.epoch != epoch:
            connection.shut()

    def _send(self, request: list[Any], answered: threading.Event) -> bool:
        """Send a request; return whether there is a connection. The caller has the lock."""
        connection = self._connection
        if connection is None:
            return False
        self._pending.append(answered)
        try:
            connection.socket.sendall(pack(request))
        except OSError:
            connection.shut()
        return True

    def _run(self) -> None:
        is_first = True
        while not self._closed.is_set():
            try:
                connection = self._client.connect(monotonic() + CLOSE_TIMEOUT)
            except Exception as error:
                logger.debug("No scheduler for the subscriptions yet: %s", error)
                self._closed.wait(RECONNECT_EVERY)
                is_first = False
                continue
            try:
                self._renew(connection, is_first=is_first)
                while not self._closed.is_set():
                    self._hear(connection.receive(None))
            except Exception as error:
                logger.debug("The connection for subscriptions was closed: %s", error)
            finally:
                with self._lock:
                    self._connection = None
                    for answered in self._pending:
                        answered.set()
                    self._pending.clear()
                connection.close()
            is_first = False

    def _renew(self, connection: SchedulerConnection, *, is_first: bool) -> None:
        # Other threads send on the socket while this one reads.
        connection.socket.settimeout(None)
        self._client.breaker.succeeded()
        with self._lock:
            self._connection = connection
            entries = list(self._entries.items())
            for number, entry in entries:
                self._send([entry.operation, [number, *entry.args], {}], entry.begun)
        while self._pending:
            self._hear(connection.receive(None))
        for _, entry in entries:
            # Something may have been missed until the subscription began.
            if not is_first and entry.operation != "events.subscribe":
                _tell(entry.handler, None)

    def _hear(self, frame: list[Any]) -> None:
        word, *rest = frame
        if word == "event":
            entry = self._entries.get(rest[0])
            if entry is not None:
                _tell(entry.handler, rest[1])
            return
        if word == "error":
            logger.warning("The scheduler refused a subscription: %s", rest[1])
        self._pending.popleft().set()


def _tell(handler: Callable[[Any], None], value: Any) -> None:
    try:
        handler(value)
    except Exception:
        logger.exception("A subscriber raised an exception; the other subscribers are not affected.")
