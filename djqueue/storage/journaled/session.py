"""One client on the scheduler's socket.

A request is [number, operation, positional arguments, keyword arguments]. The response is [number, "ok",
value] or [number, "error", code, message]; a request with number 0 has no response. An event of a
subscription is [0, "event", number of the subscription, value]. A `ping` is answered at once: with "ok", or
with "lost" by a process that is no longer the scheduler. If a token is required, it is the first frame; the
response to a wrong one is [0, "refused", message].
"""

import asyncio
import contextlib
import hmac
import logging
import select
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from djqueue.core.errors import DjqueueError, SerializationError, StorageError
from djqueue.core.job import ClaimRequest, Finished, Lease, Outcome
from djqueue.core.throttle import ThrottledLog
from djqueue.storage.base import Unsubscribe
from djqueue.storage.wire import LENGTH, MAX_FRAME, flat, pack, unpack_frame

from .operations import OPERATIONS
from .processes import peer_process
from .unanswered import accepted_claims

if TYPE_CHECKING:
    from .server import SchedulerServer

logger = logging.getLogger("djqueue.server")
failures = ThrottledLog(logger, 10.0)

SUBSCRIPTIONS = frozenset({"subscribe", "listen", "on_command", "unsubscribe"})
FIRST_FRAME = 5.0
"""Seconds in which a client must send its token, or begin its first request."""
MAX_TOKEN_FRAME = 4_096
"""Maximum bytes of a frame from a client that has not sent the token."""
MAX_UNREAD = 32
"""Number of last responses to finished attempts that are checked when a client disconnects; a client has
fewer requests in flight.
"""
HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP
MAX_UNSENT = 16 * 1024 * 1024
"""Maximum bytes of unread events; a slower client is disconnected, and can reconnect."""


class Session:
    """One client on the scheduler's socket; the module describes the protocol."""

    def __init__(
        self,
        server: "SchedulerServer",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        refusal: str | None,
    ) -> None:
        self._server = server
        self._refusal = refusal
        """Reason for refusing the client, whatever it sends; None if it is accepted."""
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._head = b""
        """Length of the first frame, which the handshake has read."""
        self._subscriptions: dict[int, Unsubscribe] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._woken: set[int] = set()
        self._answered: deque[set[Lease]] = deque(maxlen=MAX_UNREAD)
        """Claims of the last finished attempts: the client may not have read these responses."""
        self.process = peer_process(writer.get_extra_info("socket"))

    async def run(self) -> None:
        """Answer requests until either side closes the connection."""
        try:
            refusal = self._refusal or await self._handshake() or self._server.authenticated()
            if refusal is None:
                await self._serve()
            else:
                await self._refuse(refusal)
        except (EOFError, OSError, TimeoutError, SerializationError) as error:
            logger.debug("A client disconnected: %s", error)
        finally:
            # Also when the server stops: requests that have arrived are still answered.
            await self._leave()

    async def _handshake(self) -> str | None:
        """Wait for the token, or the beginning of a request; return the reason if the client is refused."""
        token = self._server.token
        if token is None:
            async with asyncio.timeout(FIRST_FRAME):
                self._head = await self._reader.readexactly(LENGTH.size)
            return None
        if await self._shows(token):
            return None
        return "the TOKEN in DJQUEUE['STORAGE']['OPTIONS'] does not match the scheduler's"

    async def _shows(self, token: str) -> bool:
        async with asyncio.timeout(FIRST_FRAME):
            frame = await self._frame(MAX_TOKEN_FRAME)
        shown = frame.encode(errors="surrogatepass") if isinstance(frame, str) else b""
        return hmac.compare_digest(shown, token.encode())

    async def _refuse(self, refusal: str) -> None:
        self._write([0, "refused", refusal])
        # The client disconnects when it has read this. If this side closed first, requests of the client
        # would fail without a reason.
        self._writer.write_eof()
        async with asyncio.timeout(FIRST_FRAME):
            while await self._reader.read(MAX_TOKEN_FRAME):
                pass

    async def _serve(self) -> None:
        while True:
            # While a client does not read its responses, no more requests are read from it.
            await self._writer.drain()
            frame = await self._frame(MAX_FRAME)
            if not _is_request(frame):
                raise SerializationError("the frame is not a request")
            number, operation, args, kwargs = frame
            if operation == "inbox":
                self._server.inbox()
            elif operation == "ping":
                self._reply(number, *(("ok", None) if self._server.holds() else ("lost",)))
            elif operation in OPERATIONS and OPERATIONS[operation].is_instant:
                self._reply(number, *self._do(operation, args, kwargs))
            elif operation in SUBSCRIPTIONS:
                self._reply(number, *self._subscribe(operation, args))
            else:
                self._start(self._answer(number, operation, args, kwargs))

    async def _frame(self, limit: int) -> Any:
        head, self._head = self._head, b""
        (length,) = LENGTH.unpack(head or await self._reader.readexactly(LENGTH.size))
        if length > limit:
            raise SerializationError(f"a frame of {length} bytes exceeds the limit of {limit}")
        return unpack_frame(await self._reader.readexactly(length))

    def _start(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, operation: str, args: list[Any], kwargs: dict[str, Any]) -> None:
        if operation == "finish":
            self._reply(number, *await self._finish(args, kwargs))
        else:
            self._reply(number, *await self._server.in_thread(self._do, operation, args, kwargs))

    async def _finish(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            with self._server.errors_named():
                finished = await self._finish_written(*args, **kwargs)
            outcomes = args[0] if args else kwargs["outcomes"]
            # Without their results: an idle session would keep these in memory.
            accepted = accepted_claims(outcomes, finished)
            if self._has_hung_up():
                self._server.storage.unanswered.note(accepted)
                if finished.claims.jobs:
                    # No client receives these claims.
                    self._server.storage.unclaim(finished.claims.jobs)
            elif accepted:
                self._answered.append(accepted)
            return "ok", finished
        except Exception as error:
            return _refusal("finish", error)

    def _has_hung_up(self) -> bool:
        """Return whether the client has closed its connection, even if the loop has not noticed yet.

        After a pause of this process, pending responses are written before the loop reads again.
        """
        if self._reader.at_eof() or self._writer.is_closing():
            return True
        poll = select.poll()
        poll.register(self._writer.get_extra_info("socket"), HUNG_UP)
        return bool(poll.poll(0))

    async def _finish_written(
        self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None
    ) -> Finished:
        if then is not None:
            then = then._replace(process=self.process)
        return await self._server.storage.finish_written(outcomes, then)

    def _do(self, operation: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        try:
            found = OPERATIONS.get(operation)
            if found is None:
                raise StorageError(f"{operation!r} is not an operation of the storage")
            with self._server.errors_named():
                return "ok", found.served_from(self._server.storage)(*args, **kwargs)
        except Exception as error:
            return _refusal(operation, error)

    def _subscribe(self, operation: str, args: list[Any]) -> tuple[Any, ...]:
        try:
            number = args[0]
            # Also for a renewed subscription: otherwise each event would arrive twice.
            if (unsubscribe := self._subscriptions.pop(number, None)) is not None:
                unsubscribe()
            storage = self._server.storage
            if operation == "listen":
                self._subscriptions[number] = storage.listen(args[1], lambda: self._wake(number))
            elif operation == "on_command":
                wake = partial(self._wake, number)
                self._subscriptions[number] = storage.workers.on_command(args[1], wake)
            elif operation == "subscribe":
                _, queue, job_id = args
                self._subscriptions[number] = storage.events.subscribe(
                    queue, lambda event: self._send_soon([0, "event", number, event]), job_id
                )
        except Exception as error:
            return _refusal(operation, error)
        return "ok", None

    def _wake(self, number: int) -> None:
        # Called from any thread. Wake-ups that arrive before the frame is sent share it.
        if number not in self._woken:
            self._woken.add(number)
            self._send_soon([0, "event", number, None])

    def _send_soon(self, frame: list[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the server's loop has ended
            self._loop.call_soon_threadsafe(self._send, frame)

    def _send(self, frame: list[Any]) -> None:
        self._woken.discard(frame[2])
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            logger.warning("Disconnected a client that stopped reading its subscription.")
            self._writer.transport.abort()
        else:
            self._write(frame)

    def _reply(self, number: int, *answer: Any) -> None:
        if not number:
            return
        try:
            self._write([number, *map(flat, answer)])
        except SerializationError as error:
            self._write([number, "error", error.code, str(error)])

    def _write(self, frame: list[Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(pack(frame))

    async def _leave(self) -> None:
        for unsubscribe in self._subscriptions.values():
            unsubscribe()
        self._subscriptions.clear()
        if self._reader.at_eof():
            self._writer.close()
        if self._tasks:
            # Also for a client that has disconnected: it counts as connected while its outcomes are
            # recorded.
            await asyncio.wait(self._tasks)
        for accepted in self._answered:
            # The client may have disconnected before it read the response.
            self._server.storage.unanswered.note(accepted)
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
        except asyncio.CancelledError:
            # The client does not read the events that it has subscribed to.
            abort(self._writer.transport)
            raise


def abort(transport: asyncio.WriteTransport) -> None:
    """Close a connection without sending the rest, unless it is already closed.

    An asyncio transport that was closed with unsent bytes, and has sent them since, raises AttributeError
    when it is aborted.
    """
    if transport.get_protocol() is not None:
        transport.abort()


def _is_request(frame: Any) -> bool:
    return (
        isinstance(frame, list)
        and [type(part) for part in frame] == [int, str, list, dict]
        and all(isinstance(name, str) for name in frame[3])
    )


def _refusal(operation: str, error: Exception) -> tuple[Any, ...]:
    if isinstance(error, DjqueueError):
        return "error", error.code, str(error)
    kind = operation, type(error)
    failures.log(logging.ERROR, kind, "A client's request failed: %s", operation, exc_info=error)
    return "error", StorageError.code, f"{type(error).__name__}: {error}"
