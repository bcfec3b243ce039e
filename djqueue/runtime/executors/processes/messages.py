"""Messages of a running job to its worker: reports, and requests for an answer."""

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from djqueue.codecs import MSGPACK, decode
from djqueue.core.errors import DjqueueError, StorageError
from djqueue.runtime.runs import Run, Stop
from djqueue.runtime.tracebacks import clean
from djqueue.storage import wire

from . import frames
from .batches import DENIED, largest_request, pack_answer, pack_refusal
from .outcomes import checked

if TYPE_CHECKING:
    from djqueue.runtime.emitting import RunItems

    from .jobprocess import JobProcess
    from .links import ProcessLink
    from .owners import ProcessOwner

LONGEST_NAME = 255
"""Maximum characters of a host name."""


class JobMessages:
    """Takes the messages of one process about its current job. All methods are called on the worker's loop.

    One request at a time: the process waits for its answer.
    """

    def __init__(
        self, owner: "ProcessOwner", process: "JobProcess", link: "ProcessLink", max_payload: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._owner = owner
        self._process = process
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
            raise frames.FrameError(f"it sent a message of unknown kind {kind}")
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
            items = self._items = self._owner.open_items(run)
        items.take(checked(value, bytes))
        if items.is_full and not run.stop:
            self._link.hold()
            self._start(self._wait_for_room(items))

    async def _wait_for_room(self, items: "RunItems") -> None:
        await items.room()
        self._link.release()

    # Requests.

    def _read(self, run: Run) -> None:
        self._begin(partial(self._answer_records, run))

    async def _answer_records(self, run: Run) -> bytes:
        records = await self._owner.records(run)
        return frames.pack(frames.CHILDREN, wire.pack_body(records))

    def _resolve(self, run: Run, name: Any, port: Any) -> None:
        if len(checked(name, str)) > LONGEST_NAME:
            raise frames.FrameError("it asked for a name that is too long")
        number = None if port is None else checked(port, int)
        self._begin(partial(self._answer_addresses, name, number))

    async def _answer_addresses(self, name: str, port: int | None) -> bytes:
        try:
            found = await self._owner.resolve(self._process, name, port)
        except OSError as error:
            text, number = error.strerror or str(error), error.errno or socket.EAI_FAIL
            if isinstance(error, PermissionError):
                number = errno.EACCES
                self._owner.note_denied(self._process, name if port is None else f"{name}:{port}")
            return frames.pack(frames.ADDRESSES, None, number, text)
        return frames.pack(frames.ADDRESSES, found, 0, "")

    def _enqueue(self, run: Run, value: Any, is_last: Any) -> None:
        if not self._owner.enqueues:
            raise frames.FrameError("it asked to enqueue jobs, which it has to do itself")
        part = checked(value, bytes)
        if len(self._parts) + len(part) > self._largest_request:
            raise frames.FrameError(f"it sent a request of more than {self._largest_request:,} bytes")
        if not part:
            raise frames.FrameError("it sent an empty part of a request")
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
            results = await self._owner.enqueue(run, body)
        except PermissionError as error:
            self._owner.note_denied(self._process, str(error.filename))
            return pack_refusal(DENIED, error.strerror or "")
        except DjqueueError as error:
            return pack_refusal(error.code, clean(str(error), frames.SMALL))
        return pack_answer(results)

    def _begin(self, answer: Callable[[], Coroutine[Any, Any, bytes]], name: str = "request") -> None:
        """Answer a request. Raises FrameError if the last answer is still due, or has not been read."""
        if self.is_answering or self._link.has_unsent:
            raise frames.FrameError("it sent a request without reading the last answer")
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
            if not self._process.has_ended:
                self._link.send(frame)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, frames.FrameError):
            self._process.kill(f"violation: {error}")
        else:
            # The storage could not answer: without the answer, the job cannot continue.
            self._process.kill(f"storage: {error}")


ENQUEUEING = "enqueue"
"""Name of the task that answers a request to enqueue jobs."""


def _is_over(run: Run) -> bool:
    return run.stop is Stop.LOST or run.outcome is not None
