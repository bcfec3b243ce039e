"""The worker's view of one process that runs jobs: what it sends, what it uses, how it ends."""

import asyncio
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from djqueue.codecs import MSGPACK, decode
from djqueue.core.executors import ISOLATED, SUBPROCESS, JobLimits
from djqueue.core.job import ProcessInfo
from djqueue.runtime.runs import Run
from djqueue.runtime.stopping import Stop
from djqueue.runtime.tracebacks import clean
from djqueue.storage import wire

from . import frames, kernel
from .child import ASK, CHUNK, HELLO
from .outcomes import checked, read_outcome
from .output import JobOutput
from .owners import ProcessOwner
from .templates import Template

if TYPE_CHECKING:
    from djqueue.runtime.emitting import RunItems
    from djqueue.runtime.reports import Reports

CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid, as the kernel adds them to a message (unix(7), SCM_CREDENTIALS)."""
MOST_MESSAGES = 1_000
"""Maximum of messages that are read from a process per tick; the rest waits in its socket."""
MOST_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a process's messages and of its output that are read at once."""
LONGEST_NAME = 255
"""Maximum characters of a host name."""
REAPING = 5.0
"""Seconds that the template has to tell how a process has ended."""
ENDING = 1_000
"""Milliseconds that a process has to end after its socket has ended."""
HURRY = 1_000
"""Milliseconds between the steps that end a job whose worker stops, or whose lease is lost."""


class JobProcess:
    """A process forked from the template. All methods are called on the worker's loop.

    name: Name of the jobs that it runs.
    limits: Limits of each job.
    result: Maximum bytes of a result.
    """

    def __init__(
        self, owner: ProcessOwner, template: Template, name: str, limits: JobLimits, result: int,
        link: socket.socket, output: int,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.limits = limits
        self.template = template
        self.pid = 0
        """Process id, as the kernel tells it; 0 until the process is ready."""
        self.run: Run | None = None
        self.started = 0
        """Number of jobs that it has been given."""
        self.peak = 0
        """Bytes of the most memory seen during the current job."""
        self.is_retired = False
        """Whether it runs no further job."""
        self.is_fresh = False
        """Whether it was forked for one job."""
        self.serial = 0
        """Number of the request that forked it."""
        self.directory = ""
        """Temporary directory of its own; empty for none."""
        self.denied = 0
        """Number of accesses denied to the current job."""
        self.killed_for = ""
        """Why the worker killed it."""
        self.begun = self._loop.time()
        self.idle_since = 0.0
        self.status = -1
        """Status of `waitpid`, when it has ended; -1: unknown."""
        self.has_ended = False
        self._owner = owner
        self._link = link
        self._output = output
        self._pidfd = -1
        self._used_before = 0.0
        """Seconds of processor time that the process had used before its job."""
        self._children = -1
        """Descriptor of the kernel's list of the children of its main thread."""
        self._tasks_path = ""
        self._largest_result = result
        self._frames = frames.FrameReader(max(result, frames.SMALL) + frames.SMALL)
        self._unsent = bytearray()
        self._captured = JobOutput(limits.output)
        self._messages = 0
        """Messages read since the last tick."""
        self._received = 0
        """Bytes read since the last tick."""
        self._is_reading = True
        self._waits_for_room = False
        self._is_answering = False
        """Whether the process waits for an answer."""
        self._is_at_end = False
        """Whether its socket has ended."""
        self._step: asyncio.TimerHandle | None = None
        """The next step that ends the job."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop.add_reader(link.fileno(), self._read_hello)
        self._loop.add_reader(output, self._read_output)

    def __repr__(self) -> str:
        return f"<JobProcess {self.pid} {self.name}>"

    def assign(self, run: Run, deadline: int | None) -> None:
        """Give it a job. `deadline`: UTC milliseconds."""
        self.run = run
        self.started += 1
        self.peak = self.denied = 0
        limits = self.limits
        if limits.jobs is not None and self.started >= limits.jobs:
            self.is_retired = True
        if limits.cpu is not None:
            self._used_before = kernel.processor_time(self.pid)
        # The fencing token stays here: a job needs none to report to this worker.
        body = wire.pack_body(run.claimed._replace(token=0))
        self._send(frames.pack(frames.JOB, self.started, body, deadline))

    def tick(self) -> None:
        """Check what the job uses, and read on if the process has sent too much before."""
        self._messages = self._received = 0
        self._read_on()
        if self.run is None or self.has_ended:
            return
        cpu = self.limits.cpu
        if cpu is not None and kernel.processor_time(self.pid) - self._used_before > cpu / 1_000:
            self.kill("cpu")
        if self.limits.memory is None:
            return
        used = kernel.memory_of_all(self.pid, self.limits.memory)
        self.peak = max(self.peak, used)
        if used > self.limits.memory:
            self.kill("memory")

    def ask(self, stop: Stop) -> None:
        """Ask the job to stop; then interrupt it, and then kill the process."""
        self.is_retired = True
        self._waits_for_room = False
        self._read_on()
        self._signal(ASK[stop])
        if self._step is None:
            grace = self.limits.grace if stop in (Stop.TIMEOUT, Stop.REQUESTED) else HURRY
            self._step = self._loop.call_later(grace / 1_000, self._interrupt, grace)
        elif stop is Stop.LOST:
            self._after(HURRY, lambda: self.kill("stop"))

    def kill(self, why: str) -> None:
        """Kill the process; the owner learns when it has ended."""
        self.is_retired = True
        if self.has_ended:
            return
        self.killed_for = self.killed_for or why
        if self._pidfd >= 0:
            # First the programs that it has started: without it, nobody could tell whose they were.
            for pid in kernel.descendants(self.pid):
                kernel.kill(pid)
            self._signal(signal.SIGKILL)

    def is_clean(self) -> bool:
        """Return whether the last job left no thread, process or temporary file behind."""
        try:
            # A directory has a link for each directory in it, and two more.
            threads = os.stat(self._tasks_path).st_nlink - 2
            if self.directory and os.listdir(self.directory):
                return False
            return threads == 1 and not os.pread(self._children, 1, 0)
        except OSError:
            return False

    def last_output(self) -> str:
        """Return the end of what the current job has written."""
        return self._captured.text()

    def report_output(self, run: Run) -> None:
        """Add what the job has written to its log."""
        self._read_output()
        captured, self._captured = self._captured, JobOutput(self.limits.output)
        for line in captured.lines():
            run.reports.log(run, line)

    def info(self) -> ProcessInfo:
        """Describe it. From any thread."""
        run = self.run
        queue, job = ("", "") if run is None else (run.claimed.queue, run.claimed.id)
        executor = SUBPROCESS if self.is_fresh else ISOLATED
        return ProcessInfo(self.pid, self.name, executor, self.started, kernel.memory(self.pid), queue, job)

    def wait(self, seconds: float) -> None:
        """Wait until it has ended."""
        if self._pidfd >= 0:
            kernel.wait(self._pidfd, seconds)

    def close(self) -> None:
        """Release the descriptors."""
        for task in self._tasks:
            task.cancel()
        if self._step is not None:
            self._step.cancel()
            self._step = None
        if self._link.fileno() >= 0:
            self._loop.remove_reader(self._link.fileno())
            self._loop.remove_writer(self._link.fileno())
            self._link.close()
        for descriptor in (self._output, self._pidfd):
            if descriptor >= 0:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
        if self._children >= 0:
            os.close(self._children)
        self._output = self._pidfd = self._children = -1

    # Starting.

    def abandon(self) -> None:
        """Give up a process that has not become ready."""
        self.has_ended = True
        self._read_output()
        self.close()
        self._owner.on_ended(self)

    def _read_hello(self) -> None:
        try:
            data, extra, _, _ = self._link.recvmsg(len(HELLO), socket.CMSG_SPACE(CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, extra = b"", []
        pid = 0
        for level, kind, value in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = CREDENTIALS.unpack(value[: CREDENTIALS.size])
        try:
            if data != HELLO or not pid:
                raise OSError("the process ended before it was ready")
            self._pidfd = os.pidfd_open(pid)
            self._tasks_path = f"/proc/{pid}/task"
            self._children = os.open(f"{self._tasks_path}/{pid}/children", os.O_RDONLY)
        except OSError:
            self.abandon()
            return
        self.pid = pid
        self._loop.remove_reader(self._link.fileno())
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
        self._loop.add_reader(self._link.fileno(), self._read)
        self._loop.add_reader(self._pidfd, self._on_exit)
        if self.killed_for:
            self.kill(self.killed_for)
        else:
            self._owner.on_ready(self)

    # Messages.

    def _send(self, frame: bytes) -> None:
        if not self._unsent:
            try:
                frame = frame[self._link.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # The process is ending, which its descriptor tells next.
        if frame:
            self._unsent += frame
            self._loop.add_writer(self._link.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._link.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._link.fileno())

    def _read(self) -> None:
        try:
            data = self._link.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            # It is ending, which its descriptor tells, or it has only closed its socket.
            self._pause()
            self._is_at_end = True
            self._after(ENDING, lambda: self.kill("violation: it closed its socket"))
            return
        self._frames.feed(data)
        self._received += len(data)
        self._take_frames()

    def _take_frames(self) -> None:
        try:
            for message in self._frames:
                self._take(*message)
                self._messages += 1
                if self._waits_for_room or self._messages >= MOST_MESSAGES:
                    self._pause()
                    return
            if self._received >= MOST_BYTES:
                self._pause()
        except Exception as error:
            # Whatever the process has sent, it must not disturb the worker.
            self._pause()
            self.kill(f"violation: {error}")

    def _take(self, kind: int, *values: Any) -> None:
        run = self.run
        if run is None:
            raise frames.FrameError("it sent a message without having a job")
        if kind == frames.RESULT:
            number, *sent = values
            if number != self.started:
                raise frames.FrameError("it sent the outcome of another job")
            outcome = read_outcome(run, self._largest_result, *sent)
            self.run = None
            if self._step is not None:
                self._step.cancel()
                self._step = None
            if not self._frames.is_empty:
                # What follows a result cannot belong to the next job.
                self.is_retired = True
            self.report_output(run)
            self._owner.on_outcome(self, run, outcome)
            return
        if kind == frames.RESOLVE:
            name, port = values
            self._begin_answer()
            if len(checked(name, str)) > LONGEST_NAME:
                raise frames.FrameError("it asked for a name that is too long")
            self._start(self._resolve(checked(name, str), None if port is None else checked(port, int)))
            return
        (value,) = values or (None,)
        if run.stop is Stop.LOST or run.outcome is not None:
            return
        if kind == frames.PROGRESS:
            run.reports.progress(run, decode(checked(value, bytes), MSGPACK, accept=(MSGPACK,)))
        elif kind == frames.LOG:
            run.reports.log(run, clean(checked(value, str), frames.SMALL))
        elif kind == frames.ITEM:
            self._take_item(run, checked(value, bytes))
        elif kind == frames.READ:
            self._begin_answer()
            self._start(self._answer(run))
        else:
            raise frames.FrameError(f"it sent a message of unknown kind {kind}")

    def _take_item(self, run: Run, data: bytes) -> None:
        items: RunItems | None = run.items  # type: ignore[assignment]
        if items is None:
            reports: Reports = run.reports  # type: ignore[assignment]
            items = reports.open(run)
        items.take(data)
        if items.is_full and not run.stop:
            self._waits_for_room = True
            self._start(self._wait_for_room(items))

    async def _wait_for_room(self, items: "RunItems") -> None:
        await items.room()
        self._waits_for_room = False
        self._read_on()

    def _begin_answer(self) -> None:
        """Raise FrameError if the process asks again before it has read its last answer."""
        if self._is_answering or self._unsent:
            raise frames.FrameError("it sent a request without reading the last answer")
        self._is_answering = True

    async def _answer(self, run: Run) -> None:
        records = await self._owner.records(run)
        self._is_answering = False
        if not self.has_ended:
            self._send(frames.pack(frames.CHILDREN, wire.pack_body(records)))

    async def _resolve(self, name: str, port: int | None) -> None:
        try:
            found = await self._owner.resolve(self, name, port)
        except OSError as error:
            text, number = error.strerror or str(error), error.errno or socket.EAI_FAIL
            if isinstance(error, PermissionError):
                number = errno.EACCES
                self._owner.note_denied(self, name if port is None else f"{name}:{port}")
            answer = frames.pack(frames.ADDRESSES, None, number, text)
        else:
            answer = frames.pack(frames.ADDRESSES, found, 0, "")
        self._is_answering = False
        if not self.has_ended:
            self._send(answer)

    def _start(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # The storage could not answer: without the records, the job cannot continue.
            self.kill(f"storage: {error}")

    def _pause(self) -> None:
        if self._is_reading and self._link.fileno() >= 0:
            self._is_reading = False
            self._loop.remove_reader(self._link.fileno())

    def _read_on(self) -> None:
        if self._is_reading or self._waits_for_room or self._is_at_end or self.has_ended:
            return
        if self._pidfd < 0 or self.killed_for.startswith("violation"):
            return
        self._is_reading = True
        self._loop.add_reader(self._link.fileno(), self._read)
        self._take_frames()

    def _read_output(self) -> None:
        left = MOST_BYTES
        while self._output >= 0 and left > 0:
            try:
                data = os.read(self._output, CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                os.close(self._output)
                self._output = -1
                return
            self._captured.add(data)
            left -= len(data)

    # Ending.

    def _interrupt(self, grace: int) -> None:
        for pid in kernel.descendants(self.pid):
            kernel.terminate(pid)
        self._signal(signal.SIGTERM)
        self._after(grace, lambda: self.kill("stop"))

    def _after(self, milliseconds: int, step: Callable[[], None]) -> None:
        if self._step is not None:
            self._step.cancel()
        self._step = self._loop.call_later(milliseconds / 1_000, step)

    def _signal(self, number: int) -> None:
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.is_retired = True
        self._start(self._end())

    async def _end(self) -> None:
        if not self.killed_for:
            self._read_rest()
        try:
            async with asyncio.timeout(REAPING):
                self.status = await self.template.status(self.pid)
        except Exception:
            # The template is stuck or closed, and nobody knows how the process has ended.
            self.status = -1
        self.has_ended = True
        self._read_output()
        self._tasks.discard(asyncio.current_task())
        self._owner.on_ended(self)
        self.close()

    def _read_rest(self) -> None:
        """Take the messages that a process sent before it ended by itself."""
        left = MOST_BYTES
        while left > 0 and not self.killed_for:
            try:
                data = self._link.recv(CHUNK)
            except OSError:
                break
            if not data:
                break
            left -= len(data)
            self._frames.feed(data)
            self._take_frames()
        self._pause()
