"""The worker's side of its template process: start it, fork processes from it, replace it when it fails.

The program of that process is in `templatemain`.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple, Protocol

import msgpack

from djqueue.core import procfs
from djqueue.core.deadlines import GrowingPause
from djqueue.core.executors import JobLimits
from djqueue.core.threads import threads_of
from djqueue.runtime.events import RunEvents
from djqueue.runtime.executors.sandbox import SandboxError
from djqueue.runtime.executors.sandbox.broker import ConnectBroker, DeniedAccess, receive_listener
from djqueue.runtime.handlers import Handler
from djqueue.runtime.owntasks import own_task

from . import kernel, templatemain
from .sandboxplan import SandboxPlan, new_parent, remove_tree

LARGEST_STATUS = 0xFFFF
"""Highest status of `waitpid`."""
MAX_STRAYS = 1_000
"""Maximum of orphans that are killed in one pass."""
FIRST_RETRY, LAST_RETRY = 1.0, 30.0
"""Seconds until a template that failed is started again, doubled from the first to the last."""
ADDRESS_SPACE, MIN_ADDRESS_SPACE = 4, 32 * 2**30
"""Address space of a process, in multiples of its memory limit, and at least in bytes. This is a backstop
between two checks; runtimes such as Node reserve gigabytes that they never use."""
SLOW_START = 30.0
"""Seconds of importing the handlers after which the worker logs that it waits."""
LONGEST_START = 300.0
"""Seconds of importing the handlers after which the template is replaced."""
SLOW_FORK = 15.0
"""Seconds that a process has to start. After that, the template is replaced."""
SWEEP = 0.05
"""Seconds between two passes over the processes that a job has left behind."""
MAX_SWEEPS = 200
"""Maximum of such passes."""


class TemplateError(Exception):
    """The template process could not start, or has ended."""


class Template:
    """A template process, started for some modules. All methods are called on the worker's loop.

    modules: Modules that define the handlers.
    on_end: Called when the process has ended by itself.
    plan: Sandbox of the process; None for none.
    directory: Parent of the temporary directories of its processes, if they have some.
    on_denied: Called on the loop for each connection or name that is denied.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        modules: list[str],
        on_end: Callable[[], None],
        plan: SandboxPlan | None,
        directory: str,
        on_denied: Callable[[DeniedAccess], None],
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._statuses: dict[int, asyncio.Future[int]] = {}
        self._orphans: asyncio.Future[list[int]] = loop.create_future()
        self.ready: asyncio.Future[None] = loop.create_future()
        """Ends when processes can be forked. Raises TemplateError if they cannot."""
        self._failure = ""
        self._is_closed = False
        self._plan = plan
        self._on_denied = on_denied
        self.broker: ConnectBroker | None = None
        """Makes the connections of the processes, if their permissions list hosts."""
        self._channel, their_channel = socket.socketpair()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, their_channel, closing_on_error(self._control), closing_on_error(self._channel):
            # -P: modules in the working directory, which a job may be able to write, are not imported.
            # The jobs' own group of processes: a Ctrl-C in the terminal is for the worker alone.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", templatemain.BOOT, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *([their_channel.fileno()] if self._is_supervised else [])],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=None if plan is None else plan.environment(),
            )
            sandbox = None if plan is None else plan.as_dict(directory)
            if sandbox is not None:
                sandbox["channel"] = their_channel.fileno() if self._is_supervised else None
            start = {
                "path": [str(entry) for entry in sys.path],
                "argv": sys.argv,
                "modules": modules,
                "sandbox": sandbox,
            }
            self._control.sendall(json.dumps(start).encode())
        if self._is_supervised:
            loop.add_reader(self._channel.fileno(), self._take_listener)
        else:
            self._channel.close()
        self._control.setblocking(False)
        loop.add_reader(self._control.fileno(), self._read)

    @property
    def pid(self) -> int:
        """Process id, valid until `close`."""
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        """Whether the process has ended."""
        return self._is_closed

    def fork(self, request: templatemain.ForkRequest) -> tuple[socket.socket, int]:
        """Fork a process; return the socket to it, and the descriptor of what it writes to stdout and stderr.

        The process sends a byte when it is ready. If the socket ends before, it could not be started.
        """
        link, their_link = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with closing_on_error(link), closing_on_error(their_link):
            output, their_output = os.pipe2(os.O_CLOEXEC)
        try:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            link.setblocking(False)
            os.set_blocking(output, False)
            self._send([templatemain.FORK, *request], [their_link.fileno(), their_output])
        except BaseException:
            link.close()
            os.close(output)
            raise
        finally:
            their_link.close()
            os.close(their_output)
        return link, output

    def discard(self, serial: int) -> None:
        """Let the template kill and reap a process that has not become ready."""
        if not self._is_closed:
            with suppress(TemplateError):  # It ends its processes when it ends.
                self._send([templatemain.DISCARD, serial])

    async def status(self, pid: int) -> int:
        """Return the status of a forked process that has ended, as `waitpid` does; -1 if it is unknown."""
        if self._is_closed:
            return templatemain.UNKNOWN
        status = self._statuses.get(pid)
        if status is None:
            status = self._statuses[pid] = self._loop.create_future()
            try:
                self._send([templatemain.REAP, pid])
            except TemplateError:
                return templatemain.UNKNOWN
        return await status

    async def strays(self, known: set[int]) -> list[int]:
        """Return the processes that ended jobs have left behind: the orphans that the template adopted.

        known: Processes that it has forked. Others may just be starting, and only the template knows which.
        """
        candidates = {pid for pid in procfs.children(self.pid) if pid not in known}
        if not candidates or self._is_closed:
            return []
        self._orphans = self._loop.create_future()
        try:
            self._send([templatemain.ORPHANS, sorted(candidates)[:MAX_STRAYS]])
        except TemplateError:
            return []
        return [pid for pid in await self._orphans if pid in candidates]

    @property
    def _is_supervised(self) -> bool:
        return self._plan is not None and self._plan.is_supervised

    def _take_listener(self) -> None:
        assert self._plan is not None
        self._loop.remove_reader(self._channel.fileno())
        try:
            listener = receive_listener(self._channel)
            self.broker = ConnectBroker(listener, self._plan.permissions, on_denied=self._note_denied)
        except (SandboxError, OSError) as error:
            # Without a broker, its self-test fails, and the template says so.
            self._failure = str(error)
        finally:
            self._channel.close()

    def _note_denied(self, denied: DeniedAccess) -> None:
        with suppress(RuntimeError):  # The loop has ended, and the worker with it.
            self._loop.call_soon_threadsafe(self._on_denied, denied)

    def close(self) -> None:
        """Kill the process, and with it all processes forked from it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel.fileno())
            self._channel.close()
        self._process.kill()
        self._process.wait()
        if self.broker is not None:
            self.broker.close()
        for future in self._statuses.values():
            if not future.done():
                future.set_result(templatemain.UNKNOWN)
        if not self._orphans.done():
            self._orphans.set_result([])
        if not self.ready.done():
            self.ready.set_exception(TemplateError(self._failure or "the template process ended"))
            # It may be that no task waits for it any more.
            self.ready.exception()

    def _send(self, message: list[Any], descriptors: list[int] = []) -> None:  # noqa: B006 - never changed
        try:
            socket.send_fds(self._control, [msgpack.packb(message)], descriptors)
        except OSError as error:
            raise TemplateError(f"the template process does not answer: {error}") from error

    def _read(self) -> None:
        try:
            data = self._control.recv(templatemain.LARGEST)
            message = msgpack.unpackb(data, unicode_errors="surrogatepass") if data else None
            if message is not None:
                self._take(*message)
        except BlockingIOError:
            return
        except OSError:
            message = None
        except Exception as error:
            # Handlers' modules run code in it, so anything may arrive.
            self._end(f"the template process sent something that is not a message: {error}")
            return
        if message is None:
            self._end(self._failure or "the template process ended")

    def _take(self, kind: int, *values: Any) -> None:
        if kind == templatemain.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == templatemain.FAILED:
            self._failure = str(values[0])
        elif kind == templatemain.ORPHANED:
            if not self._orphans.done():
                self._orphans.set_result(list(values[0]))
        elif kind == templatemain.STATUS:
            pid, status = values
            future = self._statuses.pop(pid, None)
            if future is not None and not future.done():
                is_status = type(status) is int and 0 <= status <= LARGEST_STATUS
                future.set_result(status if is_status else templatemain.UNKNOWN)

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self._failure = reason
            self.close()
            self._on_end()


class Forked(NamedTuple):
    """A process that is starting."""

    template: Template
    serial: int
    """Number of the request."""
    directory: str
    """Temporary directory of its own; empty for none."""
    link: socket.socket
    output: int


class ForkedProcess(Protocol):
    """A process, as far as its template knows it."""

    pid: int
    """Process id; 0 until the process is ready."""
    root: int
    """Id of the process that the template has forked for it; 0 until then."""
    template: Template
    serial: int
    directory: str
    begun: float
    """Time of the loop at which it was forked."""

    def last_output(self) -> str:
        """Return the end of what it has written."""

    def abandon(self) -> None:
        """Give up a process that has not become ready."""


class TemplateUser(Protocol):
    """The executor, as far as its template knows it."""

    def all_processes(self) -> Sequence[ForkedProcess]:
        """Return the processes that run or start."""

    def fork_wanted(self) -> None:
        """Fork as many processes as there are runs that wait for one."""

    def release_waiting(self, delay: int = 0) -> None:
        """Return the jobs that wait for a process to their queues."""

    def end_idle_processes(self) -> None:
        """End the processes without a job."""

    def on_denied(self, denied: DeniedAccess) -> None:
        """Note a connection that was denied."""


class TemplateKeeper:
    """The template of an executor, and those that fork no more. All methods are called on the loop."""

    def __init__(
        self, user: TemplateUser, events: RunEvents, handlers: Iterable[Handler], plan: SandboxPlan | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._user = user
        self._modules = sorted({handler.function.__module__ for handler in handlers})
        self._plan = plan
        self._directory = ""
        """Parent of the temporary directories of its processes."""
        self._numbers = count(1)
        self.template: Template | None = None
        """The template that forks."""
        self._retired: list[Template] = []
        """Templates that fork no more, until the jobs of their processes have ended."""
        self._pause = GrowingPause(FIRST_RETRY, LAST_RETRY)
        self._wanted = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False
        # Started now, because its start takes longer than most jobs.
        self._starter = own_task(self._loop, self._start_processes())

    def want(self) -> None:
        """Let the executor fork the processes that it needs, as soon as that is possible."""
        self._wanted.set()

    @property
    def delay_of_waiting(self) -> int:
        """Milliseconds after which a template may be ready."""
        return int((self._pause.length or FIRST_RETRY) * 1_000)

    def fork(self, name: str, limits: JobLimits) -> Forked:
        """Fork a process from the template that is ready. Raises TemplateError, OSError."""
        assert self.template is not None
        space = None if limits.memory is None else max(limits.memory * ADDRESS_SPACE, MIN_ADDRESS_SPACE)
        directory = ""
        number = next(self._numbers)
        if self._directory:
            directory = os.path.join(self._directory, str(number))
            try:
                os.mkdir(directory, 0o700)
            except FileNotFoundError as error:
                # Only a new template can use another one.
                raise TemplateError(f"{self._directory} was removed") from error
        request = templatemain.ForkRequest(name, space, limits.files, limits.file_size, number, directory)
        return Forked(self.template, number, directory, *self.template.fork(request))

    def process_failed(self, process: ForkedProcess) -> None:
        """Clean up after a process that could not start, and log why."""
        process.template.discard(process.serial)
        if text := process.last_output():
            self._events.template_failed(TemplateError(f"a process could not start:\n{text}"), FIRST_RETRY)

    def process_ended(self, process: ForkedProcess) -> None:
        """Clean up after a process that has ended."""
        if process.directory:
            self._loop.run_in_executor(threads_of(self._loop), remove_tree, process.directory)
        self._close_if_unused(process.template)
        if self._sweeping is None and not self._is_closed:
            self._sweeping = own_task(self._loop, self._sweep(process.template))
        self._wanted.set()

    def stop(self) -> None:
        """Kill the templates, with the processes forked from them."""
        self._is_closed = True
        for task in (self._starter, self._sweeping):
            if task is not None:
                task.cancel()
        for template in self._retired:
            template.close()
        if self.template is not None:
            if not self.template.is_closed:
                kernel.kill_descendants(self.template.pid)
            self.template.close()

    def remove_directory(self) -> None:
        """Remove the temporary directories, after the last process has ended."""
        if self._directory:
            remove_tree(self._directory)

    async def _start_processes(self) -> None:
        """Start the template, and then as many processes as there are runs that wait for one."""
        while not self._is_closed:
            try:
                template = await self._started()
                self._wanted.clear()
                self._user.fork_wanted()
                self._pause.succeeded()
            except Exception as error:
                # Jobs must not wait without end, whatever it is. Only a TemplateError affects those that run.
                pause = self._pause.failed()
                self._events.template_failed(error, pause)
                self._user.release_waiting(self.delay_of_waiting)
                if isinstance(error, TemplateError) and self.template is not None:
                    self.template.close()
                await asyncio.sleep(pause)
                continue
            await self._until_wanted(template)

    async def _started(self) -> Template:
        if self.template is None or self.template.is_closed:
            self.template = self._new_template()
        begun = self._loop.time()
        while not self.template.ready.done():
            await asyncio.wait([self.template.ready], timeout=SLOW_START)
            if not self.template.ready.done():
                waited = self._loop.time() - begun
                if waited > LONGEST_START:
                    raise TemplateError(f"the import of the handlers did not end within {waited:.0f} s")
                # Jobs of other kinds need the slots.
                self._events.template_slow(waited)
                self._user.release_waiting(self.delay_of_waiting)
        self.template.ready.result()
        return self.template

    def _new_template(self) -> Template:
        plan = self._plan
        if plan is not None and plan.uses_directory and not os.path.isdir(self._directory):
            self._directory = new_parent()
        # Its processes end with it, and their own descriptors report that.
        return Template(
            self._loop, self._modules, self._wanted.set, plan, self._directory, self._user.on_denied
        )

    async def _until_wanted(self, template: Template) -> None:
        """Wait until runs need processes; retire a template that has forked nothing for too long."""
        while not self._wanted.is_set():
            try:
                async with asyncio.timeout(SLOW_FORK):
                    await self._wanted.wait()
            except TimeoutError:
                starting = [process for process in self._user.all_processes() if not process.pid]
                oldest = min((process.begun for process in starting), default=None)
                if oldest is not None and self._loop.time() - oldest > SLOW_FORK:
                    self._events.template_failed(TemplateError("the template process does not fork"), 0)
                    self._retire(template, starting)
                    return

    def _retire(self, template: Template, starting: list[ForkedProcess]) -> None:
        """Fork from another template, and let the jobs of this one end."""
        self.template = None
        self._retired.append(template)
        for process in starting:
            process.abandon()
        self._user.end_idle_processes()
        self._close_if_unused(template)

    def _close_if_unused(self, template: Template) -> None:
        """End a retired template when its last process has ended."""
        if template in self._retired and all(
            process.template is not template for process in self._user.all_processes()
        ):
            self._retired.remove(template)
            template.close()

    async def _sweep(self, template: Template) -> None:
        """Kill the processes that ended jobs have left behind, until none is left."""
        try:
            for _ in range(MAX_SWEEPS):
                strays = await template.strays({process.root for process in self._user.all_processes()})
                if not strays:
                    return
                for pid in strays:
                    kernel.kill(pid)
                    async with asyncio.timeout(SLOW_FORK):
                        await template.status(pid)
                await asyncio.sleep(SWEEP)
            self._events.strays_left(len(strays))
        except TimeoutError:
            self._events.strays_left(len(strays))  # The template is stuck, which is noticed elsewhere.
        finally:
            self._sweeping = None


@contextmanager
def closing_on_error(opened: socket.socket) -> Iterator[None]:
    """Close a socket if the block raises."""
    try:
        yield
    except BaseException:
        opened.close()
        raise
