"""The worker's side of its template process: start it, fork processes from it, learn how they ended."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack

from djqueue.runtime.executors.sandbox import SandboxError
from djqueue.runtime.executors.sandbox.broker import ConnectBroker, DeniedAccess, receive_listener

from . import kernel, template
from .sandboxing import SandboxPlan

LARGEST_STATUS = 0xFFFF
MOST_STRAYS = 1_000
"""Maximum of orphans that are killed in one pass."""


class TemplateError(Exception):
    """The template process could not start, or has ended."""


@contextmanager
def closing_on_error(opened: socket.socket) -> Iterator[None]:
    """Close a socket if the block raises."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


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
        plan: SandboxPlan | None = None,
        directory: str = "",
        on_denied: Callable[[DeniedAccess], None] | None = None,
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
                [sys.executable, "-P", "-c", template.BOOT, str(theirs.fileno()), str(os.getpid())],
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

    def fork(self, request: template.ForkRequest) -> tuple[socket.socket, int]:
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
            self._send([template.FORK, *request], [their_link.fileno(), their_output])
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
            try:
                self._send([template.DISCARD, serial])
            except TemplateError:
                return  # It ends its processes when it ends.

    async def status(self, pid: int) -> int:
        """Return the status of a forked process that has ended, as `waitpid` does; -1 if it is unknown."""
        if self._is_closed:
            return template.UNKNOWN
        found = self._statuses.get(pid)
        if found is None:
            found = self._statuses[pid] = self._loop.create_future()
            try:
                self._send([template.REAP, pid])
            except TemplateError:
                return template.UNKNOWN
        return await found

    async def strays(self, known: set[int]) -> list[int]:
        """Return the processes that ended jobs have left behind: the orphans that the template adopted.

        known: Processes of jobs. Others may just be starting, and only the template knows which.
        """
        found = {pid for pid in kernel.children(self.pid) if pid not in known}
        if not found or self._is_closed:
            return []
        self._orphans = self._loop.create_future()
        try:
            self._send([template.ORPHANS, sorted(found)[:MOST_STRAYS]])
        except TemplateError:
            return []
        return [pid for pid in await self._orphans if pid in found]

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
        if self._on_denied is not None:
            try:
                self._loop.call_soon_threadsafe(self._on_denied, denied)
            except RuntimeError:
                return  # The loop has ended, and the worker with it.

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
                future.set_result(template.UNKNOWN)
        if not self._orphans.done():
            self._orphans.set_result([])
        if not self.ready.done():
            self.ready.set_exception(TemplateError(self._failure or "the template process ended"))
            # Nobody may be waiting for it any more.
            self.ready.exception()

    def _send(self, message: list[Any], descriptors: list[int] = []) -> None:  # noqa: B006 - never changed
        try:
            socket.send_fds(self._control, [msgpack.packb(message)], descriptors)
        except OSError as error:
            raise TemplateError(f"the template process does not answer: {error}") from error

    def _read(self) -> None:
        try:
            data = self._control.recv(template.LARGEST)
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
        if kind == template.READY:
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == template.FAILED:
            self._failure = str(values[0])
        elif kind == template.ORPHANED:
            if not self._orphans.done():
                self._orphans.set_result(list(values[0]))
        elif kind == template.STATUS:
            pid, status = values
            future = self._statuses.pop(pid, None)
            if future is not None and not future.done():
                is_status = type(status) is int and 0 <= status <= LARGEST_STATUS
                future.set_result(status if is_status else template.UNKNOWN)

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            self._failure = reason
            self.close()
            self._on_end()
