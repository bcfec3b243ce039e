"""Everything that a job sends to its worker: reports, requests for an answer, its outcome, and its output.

Nothing in a message or an outcome is trusted before it is checked.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from djqueue.codecs import MSGPACK, decode
from djqueue.core.errors import DjqueueError, StorageError
from djqueue.core.job import EnqueueResult, JobFailure, Outcome
from djqueue.core.logs import MAX_TRACEBACK
from djqueue.core.units import MAX_DURATION
from djqueue.runtime.emitting import RunItems
from djqueue.runtime.owntasks import own_task
from djqueue.runtime.reports import MAX_LINE
from djqueue.runtime.runs import Records, Run, Stop
from djqueue.runtime.tracebacks import MAX_MESSAGE, clean
from djqueue.storage import wire

from . import frames
from .enqueueing import DENIED, largest_request, pack_answer, pack_refusal
from .frames import FrameError, ProcessLink, checked

MAX_LINES = 400
"""Maximum of log lines of one job's output: half from its beginning, half from its end."""
KEPT_AS_IS = frozenset("\t")
"""Control characters that cannot change how a terminal or a page shows the rest."""
OUTCOME_PARTS = ("kind", "result", "delay", "error", "reason")
OUTCOME_KINDS = frozenset({"complete", "retry", "release", "fail", "cancel"})
ENQUEUEING = "enqueue"
"""Name of the task that answers a request to enqueue jobs."""
LONGEST_NAME = 255
"""Maximum characters of a host name."""


class MessageSender(Protocol):
    """The process whose messages are taken."""

    has_ended: bool

    def kill(self, why: str) -> None:
        """Kill it."""

    async def resolve(self, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name that its permissions list. Raises OSError."""

    def note_denied(self, target: str) -> None:
        """Note an access that the permissions of its job do not allow."""


class RequestHandler(Protocol):
    """Answers the requests of running jobs."""

    @property
    def enqueues(self) -> bool:
        """Whether it enqueues jobs for its processes, because they cannot reach the storage."""

    async def records(self, run: Run) -> Records:
        """Return the records of the jobs that a job depends on."""

    def open_items(self, run: Run) -> RunItems:
        """Begin the stream of a run that yields items."""

    async def enqueue(self, run: Run, request: bytes) -> list[EnqueueResult]:
        """Enqueue the jobs of a request.

        Raises FrameError if it is none, PermissionError with the object as `filename` if the permissions do
        not list it, DjqueueError if the jobs cannot be enqueued.
        """


class JobMessages:
    """Takes the messages of one process about its current job. All methods are called on the worker's loop.

    One request at a time: the process waits for its answer.
    """

    def __init__(
        self, handler: RequestHandler, sender: MessageSender, link: ProcessLink, max_payload: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._sender = sender
        self._link = link
        self._items: RunItems | None = None
        self._request: asyncio.Task[None] | None = None
        """The request that is being answered."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._largest_request = largest_request(max_payload)
        self._parts = bytearray()
        """The beginning of a request to enqueue jobs."""
        self._by_kind: dict[int, Callable[..., None]] = {
            frames.PROGRESS: self._progress,
            frames.LOG: self._log,
            frames.ITEM: self._item,
            frames.READ: self._read,
            frames.RESOLVE: self._resolve,
            frames.ENQUEUE: self._enqueue,
        }

    @property
    def is_answering(self) -> bool:
        """Whether the process waits for an answer, or is in the middle of a request."""
        return self._request is not None or bool(self._parts)

    def begin(self) -> None:
        """Note that the process has been given another job."""
        self._items = None

    def take(self, run: Run, kind: int, *values: Any) -> None:
        """Take a message about a job. Raises FrameError if it is none."""
        take = self._by_kind.get(kind)
        if take is None:
            raise FrameError(f"it sent a message of unknown kind {kind}")
        take(run, *values)

    def interrupt(self) -> None:
        """Answer a request to enqueue jobs now: an interrupted job must not wait for a full queue."""
        request = self._request
        if request is not None and request.get_name() == ENQUEUEING:
            request.cancel()
            error = StorageError("the job was interrupted before it was known whether its jobs were enqueued")
            self._answer(request, pack_refusal(error.code, str(error)))

    def close(self) -> None:
        """Stop answering."""
        for task in self._tasks:
            task.cancel()

    # Reports.

    def _progress(self, run: Run, value: Any) -> None:
        if not _is_over(run):
            run.reports.progress(run, decode(checked(value, bytes), MSGPACK, accept=(MSGPACK,)))

    def _log(self, run: Run, value: Any) -> None:
        if not _is_over(run):
            run.reports.log(run, clean(checked(value, str), frames.SMALL))

    def _item(self, run: Run, value: Any) -> None:
        if _is_over(run):
            return
        items = self._items
        if items is None:
            items = self._items = self._handler.open_items(run)
        items.take(checked(value, bytes))
        if items.is_full and not run.stop:
            self._link.hold()
            self._start(self._wait_for_room(items))

    async def _wait_for_room(self, items: RunItems) -> None:
        await items.room()
        self._link.release()

    # Requests.

    def _read(self, run: Run) -> None:
        self._begin(partial(self._answer_records, run))

    async def _answer_records(self, run: Run) -> bytes:
        records = await self._handler.records(run)
        return frames.pack(frames.CHILDREN, wire.pack_body(records))

    def _resolve(self, run: Run, name: Any, port: Any) -> None:
        if len(checked(name, str)) > LONGEST_NAME:
            raise FrameError("it asked for a name that is too long")
        number = None if port is None else checked(port, int)
        self._begin(partial(self._answer_addresses, name, number))

    async def _answer_addresses(self, name: str, port: int | None) -> bytes:
        try:
            addresses = await self._sender.resolve(name, port)
        except OSError as error:
            text, number = error.strerror or str(error), error.errno or socket.EAI_FAIL
            if isinstance(error, PermissionError):
                number = errno.EACCES
                self._sender.note_denied(name if port is None else f"{name}:{port}")
            return frames.pack(frames.ADDRESSES, None, number, text)
        return frames.pack(frames.ADDRESSES, addresses, 0, "")

    def _enqueue(self, run: Run, value: Any, is_last: Any) -> None:
        if not self._handler.enqueues:
            raise FrameError("it asked to enqueue jobs, which it has to do itself")
        part = checked(value, bytes)
        if len(self._parts) + len(part) > self._largest_request:
            raise FrameError(f"it sent a request of more than {self._largest_request:,} bytes")
        if not part:
            raise FrameError("it sent an empty part of a request")
        self._parts += part
        if checked(is_last, bool):
            body = bytes(self._parts)
            self._parts.clear()
            self._begin(partial(self._answer_enqueue, run, body), ENQUEUEING)

    async def _answer_enqueue(self, run: Run, body: bytes) -> bytes:
        if _is_over(run):
            error = StorageError("the lease of this job was lost, so it can enqueue no more jobs")
            return pack_refusal(error.code, str(error))
        try:
            results = await self._handler.enqueue(run, body)
        except PermissionError as error:
            self._sender.note_denied(str(error.filename))
            return pack_refusal(DENIED, error.strerror or "")
        except DjqueueError as error:
            return pack_refusal(error.code, clean(str(error), frames.SMALL))
        return pack_answer(results)

    def _begin(self, answer: Callable[[], Coroutine[Any, Any, bytes]], name: str = "request") -> None:
        """Answer a request. Raises FrameError if the last answer is still due, or has not been read."""
        if self.is_answering or self._link.has_unsent:
            raise FrameError("it sent a request without reading the last answer")
        self._request = self._start(self._send_answer(answer))
        self._request.set_name(name)

    async def _send_answer(self, answer: Callable[[], Coroutine[Any, Any, bytes]]) -> None:
        frame = await answer()
        task = asyncio.current_task()
        assert task is not None
        self._answer(task, frame)

    def _answer(self, request: "asyncio.Task[None]", frame: bytes) -> None:
        if self._request is request:
            self._request = None
            if not self._sender.has_ended:
                self._link.send(frame)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = own_task(self._loop, coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, FrameError):
            self._sender.kill(f"violation: {error}")
        else:
            # The storage could not answer: without the answer, the job cannot continue.
            self._sender.kill(f"storage: {error}")


def read_outcome(run: Run, largest: int, *sent: Any) -> Outcome:
    """Return the outcome that a process sent for its job. Raises FrameError if it is none.

    largest: Maximum bytes of a result.
    """
    if len(sent) != len(OUTCOME_PARTS):
        raise FrameError("it sent an outcome with missing parts")
    kind, result, delay, error, reason = sent
    if kind not in OUTCOME_KINDS:
        raise FrameError("it sent an unknown outcome")
    if kind == "complete":
        if len(checked(result, bytes)) > largest:
            raise FrameError(f"it sent a result of more than {largest:,} bytes")
    elif result is not None:
        raise FrameError("it sent a result of a job that did not complete")
    if not 0 <= checked(delay, int) <= MAX_DURATION:
        raise FrameError("it sent a delay that is out of range")
    failure = None
    if error is not None:
        name, message, traceback = (checked(text, str) for text in error)
        failure = JobFailure(
            clean(name, MAX_MESSAGE), clean(message, MAX_MESSAGE), clean(traceback, MAX_TRACEBACK)
        )
    claimed = run.claimed
    text = clean(checked(reason, str), 100)
    return Outcome(claimed.queue, claimed.id, claimed.token, kind, result, delay, failure, text)


class JobOutput:
    """Collects the bytes of one job, of which it keeps the first and the last.

    limit: Bytes to keep.
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        """Add what was written."""
        self._total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half:
                del self._tail[: len(self._tail) - self._half]

    def lines(self) -> list[str]:
        """Return the output as lines; one of them says how much is left out."""
        tail = self._tail[max(0, len(self._tail) - self._half) :]
        dropped = self._total - len(self._head) - len(tail)
        half = MAX_LINES // 2
        if not dropped:
            lines = _lines(self._head + tail)
            cut = len(lines) - MAX_LINES
            if cut <= 0:
                return lines
            return [*lines[:half], f"... {cut:,} lines left out ...", *lines[-half:]]
        return [*_lines(self._head)[:half], f"... {dropped:,} bytes left out ...", *_lines(tail)[-half:]]

    def text(self) -> str:
        """Return the end of the output, for the error of a job whose process died."""
        return "\n".join(self.lines()[-MAX_LINES // 2 :])


def inert(text: str) -> str:
    """Return text whose control characters, such as those of terminal escapes, are visible."""
    if text.isprintable():
        return text
    return "".join(
        c if c in KEPT_AS_IS or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def _is_over(run: Run) -> bool:
    return run.stop is Stop.LOST or run.outcome is not None


def _lines(data: bytearray) -> list[str]:
    text = data.decode("utf-8", "backslashreplace")
    return [inert(line)[:MAX_LINE] for line in text.replace("\r\n", "\n").split("\n") if line]
