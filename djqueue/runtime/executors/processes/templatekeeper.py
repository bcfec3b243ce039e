"""Keeps a template running for the processes of one executor: starts, replaces and cleans up after it."""

import asyncio
import os
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from djqueue.core.executors import JobLimits
from djqueue.runtime.executors.sandbox.broker import DeniedAccess
from djqueue.runtime.handlers import Handler

from . import kernel
from .sandboxing import SandboxPlan, new_parent
from .template import ForkRequest
from .templates import Template, TemplateError

if TYPE_CHECKING:
    import socket

    from djqueue.runtime.worker import Worker

    from .jobprocess import JobProcess

FIRST_RETRY, LAST_RETRY = 1.0, 30.0
"""Seconds until a template that failed is started again, doubled from the first to the last."""
ADDRESS_SPACE, LEAST_ADDRESS_SPACE = 4, 32 * 2**30
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
MOST_SWEEPS = 200


class Forked(NamedTuple):
    """A process that is starting."""

    template: Template
    serial: int
    """Number of the request."""
    directory: str
    """Temporary directory of its own; empty for none."""
    link: "socket.socket"
    output: int


class TemplateUser(Protocol):
    """The executor, as far as its template knows it."""

    def all_processes(self) -> "list[JobProcess]":
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
        self, worker: "Worker", user: TemplateUser, handlers: Iterable[Handler], plan: SandboxPlan | None
    ) -> None:
        self._loop = worker.loop
        self._events = worker.events
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
        self._retry = 0.0
        self._wanted = asyncio.Event()
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False
        # Started now, because its start takes longer than most jobs.
        self._starter = self._loop.create_task(self._start_processes())

    def want(self) -> None:
        """Let the executor fork the processes that it needs, as soon as that is possible."""
        self._wanted.set()

    @property
    def delay_of_waiting(self) -> int:
        """Milliseconds after which a template may be ready."""
        return int(max(self._retry, FIRST_RETRY) * 1_000)

    def fork(self, name: str, limits: JobLimits) -> Forked:
        """Fork a process from the template that is ready. Raises TemplateError, OSError."""
        assert self.template is not None
        space = None if limits.memory is None else max(limits.memory * ADDRESS_SPACE, LEAST_ADDRESS_SPACE)
        directory = ""
        number = next(self._numbers)
        if self._directory:
            directory = os.path.join(self._directory, str(number))
            try:
                os.mkdir(directory, 0o700)
            except FileNotFoundError as error:
                # Only a new template can use another one.
                raise TemplateError(f"{self._directory} was removed") from error
        request = ForkRequest(name, space, limits.files, limits.file_size, number, directory)
        return Forked(self.template, number, directory, *self.template.fork(request))

    def process_failed(self, process: "JobProcess") -> None:
        """Clean up after a process that could not start, and log why."""
        process.template.discard(process.serial)
        if text := process.last_output():
            self._events.template_failed(TemplateError(f"a process could not start:\n{text}"), FIRST_RETRY)

    def process_ended(self, process: "JobProcess") -> None:
        """Clean up after a process that has ended."""
        if process.directory:
            self._loop.run_in_executor(None, partial(shutil.rmtree, process.directory, ignore_errors=True))
        self._close_if_unused(process.template)
        if self._sweeping is None and not self._is_closed:
            self._sweeping = self._loop.create_task(self._sweep(process.template))
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
            for pid in kernel.descendants(self.template.pid) if not self.template.is_closed else ():
                kernel.kill(pid)
            self.template.close()

    def remove_directory(self) -> None:
        """Remove the temporary directories, after the last process has ended."""
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _start_processes(self) -> None:
        """Start the template, and then as many processes as there are runs that wait for one."""
        while not self._is_closed:
            try:
                template = await self._started()
                self._wanted.clear()
                self._user.fork_wanted()
                self._retry = 0.0
            except Exception as error:
                # Jobs must not wait for ever, whatever it is. Only a TemplateError concerns those that run.
                self._retry = min(max(FIRST_RETRY, 2 * self._retry), LAST_RETRY)
                self._events.template_failed(error, self._retry)
                self._user.release_waiting(self.delay_of_waiting)
                if isinstance(error, TemplateError) and self.template is not None:
                    self.template.close()
                await asyncio.sleep(self._retry)
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
        # Its processes end with it, and their own descriptors tell so.
        on_denied: Callable[[DeniedAccess], None] = self._user.on_denied
        return Template(self._loop, self._modules, self._wanted.set, plan, self._directory, on_denied)

    async def _until_wanted(self, template: Template) -> None:
        """Wait until runs need processes; retire a template that has forked nothing for too long."""
        while not self._wanted.is_set():
            try:
                async with asyncio.timeout(SLOW_FORK):
                    await self._wanted.wait()
            except TimeoutError:
                starting = [one for one in self._user.all_processes() if not one.pid]
                oldest = min((one.begun for one in starting), default=None)
                if oldest is not None and self._loop.time() - oldest > SLOW_FORK:
                    self._events.template_failed(TemplateError("the template process does not fork"), 0)
                    self._retire(template, starting)
                    return

    def _retire(self, template: Template, starting: "list[JobProcess]") -> None:
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
            one.template is not template for one in self._user.all_processes()
        ):
            self._retired.remove(template)
            template.close()

    async def _sweep(self, template: Template) -> None:
        """Kill the processes that ended jobs have left behind, until none is left."""
        try:
            for _ in range(MOST_SWEEPS):
                strays = await template.strays({process.pid for process in self._user.all_processes()})
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
