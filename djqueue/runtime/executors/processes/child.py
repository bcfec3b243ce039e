"""The process of a job: runs one job after another for its worker, and reports to it over a socket.

In a sandbox, the process has neither a name server nor a storage of its own: it resolves names and enqueues
jobs through the worker.
"""

import _thread
import asyncio
import errno
import faulthandler
import locale
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from random import Random
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from djqueue.client import registry
from djqueue.client.storages import use_storage
from djqueue.codecs import MSGPACK, get_encoder
from djqueue.conf import Settings, get_settings, has_django
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import JobInterrupted
from djqueue.core.job import (
    Batch,
    Claimed,
    ClaimRequest,
    Emission,
    EnqueueResult,
    Finished,
    Lease,
    Outcome,
    ProgressReport,
    Renewal,
    Swept,
)
from djqueue.middleware import layers_of
from djqueue.runtime.emitting import ItemEncoder
from djqueue.runtime.events import RunEvents
from djqueue.runtime.executors.connections import DatabaseThreads, clean_connections
from djqueue.runtime.executors.execution import Execution, wrap_in_middleware
from djqueue.runtime.executors.sandbox.addresses import use_supervisor
from djqueue.runtime.exits import end_copy, ignore, leave, let_forks_end
from djqueue.runtime.handlers import Handler, handler_of
from djqueue.runtime.reports import MAX_LINE
from djqueue.runtime.runs import CURRENT, Child, ItemSink, Records, Run, Stop, children
from djqueue.storage import wire
from djqueue.storage.base import P, Storage, T, Unsubscribe
from djqueue.storage.capabilities import Capabilities

from . import frames
from .enqueueing import frames_of, read_answer, requests_of
from .frames import BEGIN, HELLO

if TYPE_CHECKING:
    from djqueue.storage.facets import Events, Jobs, Limiters, Queues, Reads, Workers
    from djqueue.storage.snapshots import Snapshots

LEFTOVER_GRACE = 1.0
"""Seconds that tasks which a job has left behind have to end."""
ASK = {stop: signal.SIGRTMIN + stop for stop in Stop if stop} if sys.platform == "linux" else {}
"""Signal that asks a job to stop, by reason."""


def serve(opened: socket.socket, *, sandboxed: bool) -> None:
    """Run the jobs that come over a socket, until it ends.

    sandboxed: Let the worker resolve names and enqueue jobs: this process reaches neither a name server nor
        the storage.
    """
    faulthandler.enable()
    link = WorkerLink(opened)
    if sandboxed:
        use_supervisor(link.resolve)
        use_storage(partial(LinkStorage, link, get_settings().max_payload, os.getpid()))
    JobServer(link).serve()


class WorkerLink:
    """The socket to the worker. Any thread may send; one at a time may ask for something."""

    def __init__(self, link: socket.socket) -> None:
        self._socket = link
        self._sending = threading.Lock()
        self._asking = threading.Lock()
        self._main = threading.get_ident()
        self._shielded = False
        """Whether the main thread is using the socket: an exception would leave half a message behind."""
        self._is_interrupted = False

    def send(self, *message: Any) -> None:
        """Send a message. Raises JobInterrupted if that was due meanwhile."""
        self._shield(self._send, frames.pack(*message))

    def ask(self, *message: Any) -> list[Any]:
        """Send a message, and return the worker's answer."""
        return self.request(frames.pack(*message))

    def request(self, data: bytes) -> list[Any]:
        """Send the frames of a request, and return the worker's answer."""
        with self._asking:
            answer: list[Any] = self._shield(self._ask, data)
            return answer

    def resolve(self, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name, if the permissions list it.

        Raises PermissionError or socket.gaierror.
        """
        _, addresses, number, text = self.ask(frames.RESOLVE, name, port)
        if addresses is not None:
            return [(family, address) for family, address in addresses]
        raise PermissionError(errno.EACCES, text) if number == errno.EACCES else socket.gaierror(number, text)

    def receive(self) -> list[Any] | None:
        """Return the next message of the worker; None if it has ended."""
        header = self._read(frames.LENGTH.size)
        if header is None:
            return None
        # Not one byte more, because a job is followed by the byte of its begin.
        body = self._read(frames.LENGTH.unpack(header)[0])
        return None if body is None else frames.unpack(body)

    def begin(self) -> None:
        """Tell the worker that the job begins, by reading the byte behind it."""
        if self._read(len(BEGIN)) is None:
            leave(0)

    def interrupt(self) -> None:
        """Raise JobInterrupted now, or after the message that the main thread is sending."""
        if self._shielded:
            self._is_interrupted = True
            return
        raise JobInterrupted

    def _shield(self, call: Callable[[bytes], Any], frame: bytes) -> Any:
        if threading.get_ident() != self._main:
            return call(frame)
        self._shielded = True
        try:
            value = call(frame)
        finally:
            self._shielded = False
        if self._is_interrupted:
            self._is_interrupted = False
            raise JobInterrupted
        return value

    def _send(self, frame: bytes) -> None:
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError:
            leave(0)  # The worker has ended.

    def _read(self, size: int) -> bytes | None:
        """Return the next bytes from the worker; None if it has ended."""
        data = self._socket.recv(size, socket.MSG_WAITALL)
        while len(data) < size:
            # A signal may end it early.
            more = self._socket.recv(size - len(data), socket.MSG_WAITALL)
            if not more:
                return None
            data += more
        return data

    def _ask(self, frame: bytes) -> list[Any]:
        self._send(frame)
        answer = self.receive()
        if answer is None:
            leave(0)
        return answer


class LinkReports:
    """Reports of the current job, sent to the worker."""

    def __init__(self, link: WorkerLink, settings: Settings) -> None:
        self.worker_id = ""
        self._link = link
        self._settings = settings
        self._encode = get_encoder(MSGPACK, settings.max_payload, "progress")

    def progress(self, run: Run, value: Any) -> None:
        """Report a job's progress."""
        data = self._encode(value)
        if run.outcome is None:
            self._link.send(frames.PROGRESS, data)

    def log(self, run: Run, line: object) -> None:
        """Add a log line to a job."""
        text = str(line)[:MAX_LINE]
        if run.outcome is None:
            self._link.send(frames.LOG, text)

    def open(self, run: Run) -> ItemSink:
        """Begin the stream of a run that yields items."""
        encode = get_encoder(run.claimed.options.content_type, self._settings.max_payload, "item")
        run.items = LinkItems(self._link, ItemEncoder(self._settings, encode))
        return run.items

    def children(self, run: Run) -> list[Child]:
        """Read the jobs that a job depends on, through the worker."""
        keys = run.claimed.options.depends_on
        answer = self._link.ask(frames.READ)
        records: Records = wire.unpack(answer[1])
        return children(keys, records)

    async def achildren(self, run: Run) -> list[Child]:
        """Async version of `children`. The loop waits: it runs nothing but this job."""
        return self.children(run)


class LinkItems:
    """The items of the current job. The socket is full while too many of them wait in the worker."""

    def __init__(self, link: WorkerLink, encoder: ItemEncoder) -> None:
        self._link = link
        self._encoder = encoder

    def put(self, value: Any) -> None:
        """Send an item."""
        self._link.send(frames.ITEM, self._encoder.encoded(value))

    async def aput(self, value: Any) -> None:
        """Send an item; the loop, which runs nothing but this job, waits for room."""
        self.put(value)
        # A generator that never waits could not be cancelled.
        await asyncio.sleep(0)

    def wake(self) -> None:
        """Do nothing: a worker that stops a job drops its items, so no item waits for long."""


class JobServer:
    """Runs jobs on the main thread: sync handlers directly, async ones on a loop."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        settings = get_settings()
        self._reports = LinkReports(link, settings)
        self._events = RunEvents(f"process {os.getpid()}")
        self._pid = os.getpid()
        self._execution = Execution(settings, Random(), self._events)
        self._layers = layers_of(settings)
        self._handlers: dict[str, Handler] = {}
        self._has_django = has_django()
        self._runner: asyncio.Runner | None = None
        self._run: Run | None = None
        self._handlers_of_signals: dict[int, Callable[..., None]] = {}
        self._stop = Stop.NO
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop while it runs a job."""

    def serve(self) -> None:
        """Run jobs until the worker ends."""
        self._handlers_of_signals = {
            signal.SIGINT: ignore,
            signal.SIGHUP: ignore,
            signal.SIGTERM: self._on_terminate,
            **{number: self._on_ask(stop) for stop, number in ASK.items()},
        }
        for number, handle in self._handlers_of_signals.items():
            signal.signal(number, handle)
        let_forks_end()
        self._folder = os.getcwd()
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._locale = locale.setlocale(locale.LC_ALL)
        self._link._send(HELLO)
        while (message := self._link.receive()) is not None:
            _, number, body, deadline, self._reports.worker_id = message
            self._serve_job(number, wire.unpack(body), deadline)

    def _serve_job(self, number: int, claimed: Claimed, deadline: int | None) -> None:
        run = Run(claimed, self._handler(claimed.name), self._reports, SYSTEM_CLOCK.monotonic())
        run.deadline = deadline
        self._run = run
        if self._stop:
            run.ask_to_stop(self._stop)
        self._link.begin()
        with warnings.catch_warnings():
            outcome = copy_context().run(self._outcome, run)
        if os.getpid() != self._pid:
            end_copy()  # The outcome is the parent's.
        self._run = None
        self._restore()
        run.outcome = outcome
        _reap()
        for stream in (sys.stdout, sys.stderr):
            # The handler may have closed or replaced it.
            with suppress(Exception):
                stream.flush()
        error = None if outcome.error is None else tuple(outcome.error)
        self._link._send(
            frames.pack(
                frames.RESULT, number, outcome.kind, outcome.result, outcome.delay, error, outcome.reason
            )
        )

    def _restore(self) -> None:
        """Undo what would disturb the next job, such as timers, tasks, signal handlers and the locale."""
        os.umask(self._umask)
        if locale.setlocale(locale.LC_ALL) != self._locale:
            locale.setlocale(locale.LC_ALL, self._locale)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handle in self._handlers_of_signals.items():
            if signal.getsignal(number) is not handle:
                signal.signal(number, handle)
        if self._runner is not None and (left := asyncio.all_tasks(self._runner.get_loop())):
            for task in left:
                task.cancel()
            with suppress(Exception, SystemExit, KeyboardInterrupt):  # The outcome of the job is known.
                self._runner.run(_until_done(left))
        with suppress(OSError):
            os.chdir(self._folder)

    def _handler(self, name: str) -> Handler:
        handler = self._handlers.get(name)
        if handler is None:
            handler = self._handlers[name] = handler_of(registry.get(name))
            wrap_in_middleware(handler, self._layers)
        return handler

    def _outcome(self, run: Run) -> Outcome:
        CURRENT.set(run)
        try:
            if run.stop:
                return self._execution.stopped(run)
            refused = self._execution.begin(run)
            if refused is not None:
                return refused
            value = self._call(run)
            return self._execution.completed(run, value)
        except BaseException as error:
            # A handler's SystemExit or KeyboardInterrupt ends its job, not the process.
            run.ask_to_stop(self._stop)  # the thread that does so may not have run yet
            return self._execution.failed(run, error)

    def _call(self, run: Run) -> Any:
        if run.handler.on_loop:
            return self._on_loop(run, run.handler.call)
        try:
            value = run.handler.call(run)
        finally:
            if self._has_django:
                try:
                    clean_connections()
                except Exception as error:
                    self._events.cleanup_failed(run, error)
        if value is not None and hasattr(value, "__await__"):

            async def rest(_: Run) -> Any:
                return await value

            return self._on_loop(run, rest)
        return value

    def _on_loop(self, run: Run, call: Callable[[Run], Any]) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        value, error = self._runner.run(self._acall(run, call), context=copy_context())
        if error is not None:
            raise error
        return value

    async def _acall(self, run: Run, call: Callable[[Run], Any]) -> tuple[Any, BaseException | None]:
        """Return what the handler returns, or raises, which asyncio might never pass on if it runs code."""
        self._loop = loop = asyncio.get_running_loop()
        run.task = asyncio.current_task()
        threads = DatabaseThreads(loop) if self._has_django else None
        binding = None if threads is None else threads.take()
        try:
            return await call(run), None
        except BaseException as error:
            return None, error
        finally:
            self._loop = run.task = None
            if binding is not None and binding.executor.used:
                # No thread may outlive the job. The loop runs nothing else that this could delay.
                binding.retire()
                binding.executor.shutdown()

    # Signals.

    def _on_ask(self, stop: Stop) -> Callable[[int, FrameType | None], None]:
        def on_signal(_: int, __: FrameType | None) -> None:
            # The process ends after this job, so a signal that comes too late stops no other job.
            self._stop = max(self._stop, stop)
            if self._run is not None:
                # Events have locks, which the main thread may hold at this moment.
                _thread.start_new_thread(self._ask_to_stop, (self._run, stop))

        return on_signal

    def _ask_to_stop(self, run: Run, stop: Stop) -> None:
        run.ask_to_stop(stop)
        loop, task = self._loop, run.task
        if loop is not None and task is not None:
            try:
                loop.call_soon_threadsafe(task.cancel)
            except RuntimeError:
                return  # The job has ended.

    def _on_terminate(self, _: int, __: FrameType | None) -> None:
        # A signal without a request to stop was meant for the worker.
        if not self._stop or self._run is None:
            return
        loop, task = self._loop, self._run.task
        if loop is not None and task is not None and asyncio.current_task(loop) is None:
            # The task waits: its handler is reached by another cancellation only.
            loop.call_soon_threadsafe(task.cancel)
        else:
            self._link.interrupt()


class LinkStorage(Storage):
    """The storage that handlers get in a process with permissions.

    max_payload: Maximum bytes of a job's payload.
    pid: Id of the process that the worker talks to; processes forked from it share its socket.
    """

    jobs: "Jobs"
    queues: "Queues"
    limiters: "Limiters"
    workers: "Workers"
    reads: "Reads"
    events: "Events"
    snapshots: "Snapshots"

    capabilities = Capabilities(relayed=True)

    def __init__(self, link: WorkerLink, max_payload: int, pid: int) -> None:
        self._link = link
        self._max_payload = max_payload
        self._pid = pid
        for facet in ("jobs", "queues", "limiters", "workers", "reads", "events", "snapshots"):
            setattr(self, facet, RefusingFacet(facet))

    def describe(self) -> str:
        return "the worker, for a job with permissions"

    async def acall(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # A thread would outlive the job, and every method either refuses or only waits for the worker.
        return method(*args, **kwargs)

    def enqueue(self, batches: Sequence[Batch]) -> list[EnqueueResult]:
        if os.getpid() != self._pid:
            raise PermissionError(
                errno.EACCES, "a process that a job with permissions has started cannot enqueue jobs"
            )
        results: list[EnqueueResult] = []
        for request in requests_of(batches, self._max_payload) if batches else ():
            _, code, text, answers = self._link.request(frames_of(request))
            results += read_answer(code, text, answers)
        return results

    def finish(self, outcomes: Sequence[Outcome], then: ClaimRequest | None = None) -> Finished:
        _refuse("finish")

    def renew(self, leases: Sequence[Lease]) -> list[Renewal]:
        _refuse("renew")

    def report(self, reports: Sequence[ProgressReport]) -> Sequence[bool | None]:
        _refuse("report")

    def emit(self, emissions: Sequence[Emission]) -> Sequence[bool | None]:
        _refuse("emit")

    def listen(self, queues: Iterable[str] | None, wake: Callable[[], None]) -> Unsubscribe:
        _refuse("listen")

    def sweep(self) -> Swept:
        _refuse("sweep")


class RefusingFacet:
    """A facet of the storage whose operations all raise PermissionError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, operation: str) -> Any:
        if operation.startswith("__"):
            raise AttributeError(operation)

        def refuse(*_: object, **__: object) -> NoReturn:
            _refuse(f"{self._name}.{operation}")

        return refuse


async def _until_done(tasks: set[Any]) -> None:
    await asyncio.wait(tasks, timeout=LEFTOVER_GRACE)


def _reap() -> None:
    """Collect the children that the job has left behind and that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _refuse(operation: str) -> NoReturn:
    raise PermissionError(
        errno.EACCES,
        f"the permissions of this job do not include {operation}: a job with permissions can enqueue jobs, "
        "but not wait for them, read them or change them. See Permissions(enqueue=...)",
    )
