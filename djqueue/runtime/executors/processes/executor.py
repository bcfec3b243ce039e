"""The executor of jobs in processes of their own: pools by job name, limits, and the end of processes."""

import asyncio
import errno
import os
import shutil
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from djqueue.core.executors import limits_of
from djqueue.core.job import Outcome, ProcessInfo
from djqueue.runtime.dependencies import Records, aread
from djqueue.runtime.executors.execution import Execution
from djqueue.runtime.executors.sandbox.supervise import DeniedAccess
from djqueue.runtime.handlers import Handler
from djqueue.runtime.outcomes import failure, next_delay, release
from djqueue.runtime.runs import Run
from djqueue.runtime.stopping import Stop

from . import kernel
from .endings import ending
from .jobprocess import JobProcess
from .output import inert
from .sandboxing import SandboxPlan, new_parent
from .template import ForkRequest
from .templates import Template, TemplateError

if TYPE_CHECKING:
    from djqueue.runtime.worker import Worker

TICK = 0.05
"""Seconds between two checks of memory."""
IDLE = 60.0
"""Seconds after which an idle process ends."""
NAME_THREADS = 4
"""Host names that are resolved at once."""
AT_ONCE = 4
"""Processes that may be starting at once. The template forks one at a time."""
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
ENDING = 1.0
"""Seconds for which the end of a worker waits for the end of the processes that it has killed."""
SWEEP = 0.05
"""Seconds between two passes over the processes that a job has left behind."""
MOST_SWEEPS = 200
MAX_TARGET = 300
"""Maximum of characters of a host in the log."""
MAX_DENIED = 20
"""Maximum of log lines about denied accesses of one job."""
MAX_LISTED = 20
"""Maximum of processes in a worker's entry."""


class ProcessExecutor:
    """Runs jobs in processes forked from one template. All methods but `stop` are called on the loop."""

    def __init__(
        self, worker: "Worker", handlers: Iterable[Handler], plan: SandboxPlan | None = None
    ) -> None:
        self._loop = worker.loop
        self._clock = worker.clock
        self._random = worker.random
        self._runs = worker.runs
        self._events = worker.events
        self._wake_event = worker.wake_event
        self._storage = worker.storage
        self._settings = worker.settings
        self._concurrency = worker.options.concurrency
        self._execution = Execution(worker.settings, worker.random, worker.events)
        self._modules = sorted({handler.function.__module__ for handler in handlers})
        self._plan = plan
        self._directory = ""
        """Parent of the temporary directories of its processes."""
        self._numbers = count(1)
        self._names = ThreadPoolExecutor(NAME_THREADS, thread_name_prefix="djqueue-names")
        self._retired: list[Template] = []
        """Templates that fork no more, until the jobs of their processes have ended."""
        self._waiting: dict[str, deque[Run]] = {}
        """Runs that wait for a process, by job name."""
        self._fresh: set[Run] = set()
        """Runs that need a new process of their own."""
        self._idle: dict[str, list[JobProcess]] = {}
        self._starting: dict[str, int] = {}
        """Processes that are starting, by job name."""
        self._processes: set[JobProcess] = set()
        self._by_run: dict[Run, JobProcess] = {}
        self._template: Template | None = None
        self._retry = 0.0
        self._starter: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._ticker: asyncio.TimerHandle | None = None
        self._idler: asyncio.TimerHandle | None = None
        """Ends processes that have been idle for long."""
        self._sweeping: asyncio.Task[None] | None = None
        self._is_closed = False
        # Started now, because its start takes longer than most jobs.
        self._starter = self._loop.create_task(self._start_processes())

    @property
    def processes(self) -> list[JobProcess]:
        """The running processes."""
        # A copy in one step: the heartbeat, on its own thread, asks for it, too.
        return [process for process in list(self._processes) if process.pid]

    def infos(self) -> tuple[ProcessInfo, ...]:
        """Describe some of the processes, those with a job first. From any thread."""
        processes = sorted(self.processes, key=lambda process: process.run is None)[:MAX_LISTED]
        return tuple(process.info() for process in processes)

    def start(self, run: Run, *, fresh: bool) -> None:
        """Start a run, in a new process if `fresh`."""
        name = run.claimed.name
        if fresh:
            self._fresh.add(run)
        else:
            idle = self._idle.get(name)
            while idle:
                process = idle.pop()
                # One that is being killed has not ended yet.
                if not process.is_retired:
                    self._assign(process, run)
                    return
        self._waiting.setdefault(name, deque()).append(run)
        self._wanted.set()

    def stop(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop, then interrupt it, then kill its process. From any thread."""
        if not run.ask_to_stop(reason):
            return
        self._events.stop_requested(run)
        try:
            self._loop.call_soon_threadsafe(self._stop, run)
        except RuntimeError:
            self._events.ignored("a cancel request")

    def release_waiting(self, delay: int = 0) -> None:
        """Return the jobs that wait for a process to their queues, for some milliseconds at least."""
        for runs in self._waiting.values():
            while runs:
                run = runs.popleft()
                self._settle(run, release(run.claimed, delay=delay))

    def kill(self) -> None:
        """Kill all processes with jobs: their jobs return to their queues."""
        for process in self._by_run.values():
            process.kill("shutdown")

    def close(self) -> None:
        """Kill all processes."""
        self._is_closed = True
        for task in (self._starter, self._sweeping):
            if task is not None:
                task.cancel()
        for timer in (self._ticker, self._idler):
            if timer is not None:
                timer.cancel()
        self._names.shutdown(wait=False, cancel_futures=True)
        for template in self._retired:
            template.close()
        if self._template is not None:
            for pid in kernel.descendants(self._template.pid) if not self._template.is_closed else ():
                kernel.kill(pid)
            self._template.close()
        until = self._loop.time() + ENDING
        for process in list(self._processes):
            process.wait(until - self._loop.time())
            process.close()
        self._processes.clear()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    # What a process does.

    def on_ready(self, process: JobProcess) -> None:
        """Give a process its first job; keep it if the job has ended meanwhile."""
        self._starting[process.name] -= 1
        self._wanted.set()
        self._take_next(process)

    def on_outcome(self, process: JobProcess, run: Run, outcome: Outcome) -> None:
        """End a run, and give its process the next one."""
        del self._by_run[run]
        self._settle(run, outcome)
        if process.is_retired or not process.is_clean():
            # The job has left something behind, or the process has run enough jobs.
            self._end(process)
        else:
            self._take_next(process)

    def on_ended(self, process: JobProcess) -> None:
        """End the run of a process that has ended, and kill what it has left behind."""
        self._processes.discard(process)
        idle = self._idle.get(process.name)
        if idle is not None and process in idle:
            idle.remove(process)
        if not process.pid:
            self._starting[process.name] -= 1
            process.template.discard(process.serial)
            if text := process.last_output():
                self._events.template_failed(
                    TemplateError(f"a process could not start:\n{text}"), FIRST_RETRY
                )
            self._release_waiting_for(process.name)
        if process.directory:
            self._loop.run_in_executor(None, partial(shutil.rmtree, process.directory, ignore_errors=True))
        run, process.run = process.run, None
        if run is not None:
            self._by_run.pop(run, None)
            try:
                outcome = self._crashed(run, process)
                process.report_output(run)
            except Exception as error:
                # The run must end, whatever could not be read or described.
                outcome = failure(run.claimed, error, "worker_crashed", partial(self._delay, run))
            self._settle(run, outcome)
        self._close_if_unused(process.template)
        if self._sweeping is None and not self._is_closed:
            self._sweeping = self._loop.create_task(self._sweep(process.template))
        self._wanted.set()

    async def records(self, run: Run) -> Records:
        """Return the records of the jobs that a job depends on."""
        return await aread(self._storage, run.claimed.options.depends_on)

    async def resolve(self, process: JobProcess, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name that the permissions list. Raises OSError."""
        # The broker of its own template, which also makes its connections.
        broker = process.template.broker
        if broker is None:
            raise PermissionError(errno.EACCES, "the permissions of the job list no hosts")
        # A slow name server must not hold up the threads that the storage uses.
        return await self._loop.run_in_executor(self._names, broker.resolve, name, port)

    def _on_denied(self, denied: DeniedAccess) -> None:
        for process in self.processes:
            if process.pid == denied.pid:
                self.note_denied(process, denied.target)

    def note_denied(self, process: JobProcess, target: str) -> None:
        """Add a denied access to the log of the process's job."""
        run = process.run
        if run is not None and process.denied < MAX_DENIED:
            process.denied += 1
            run.reports.log(run, f"Denied access: {inert(target)[:MAX_TARGET]}")
            self._events.denied(run, inert(target)[:MAX_TARGET])

    # Starting processes.

    async def _start_processes(self) -> None:
        """Start the template, and then as many processes as there are runs that wait for one."""
        while not self._is_closed:
            try:
                template = await self._started()
                self._wanted.clear()
                self._fork_wanted(template)
                self._retry = 0.0
            except Exception as error:
                # Jobs must not wait for ever, whatever it is. Only a TemplateError concerns those that run.
                self._retry = min(max(FIRST_RETRY, 2 * self._retry), LAST_RETRY)
                self._events.template_failed(error, self._retry)
                self.release_waiting(self._delay_of_waiting())
                if isinstance(error, TemplateError) and self._template is not None:
                    self._template.close()
                await asyncio.sleep(self._retry)
                continue
            await self._until_wanted(template)

    async def _started(self) -> Template:
        if self._template is None or self._template.is_closed:
            self._template = self._new_template()
        begun = self._loop.time()
        while not self._template.ready.done():
            await asyncio.wait([self._template.ready], timeout=SLOW_START)
            if not self._template.ready.done():
                waited = self._loop.time() - begun
                if waited > LONGEST_START:
                    raise TemplateError(f"the import of the handlers did not end within {waited:.0f} s")
                # Jobs of other kinds need the slots.
                self._events.template_slow(waited)
                self.release_waiting(self._delay_of_waiting())
        self._template.ready.result()
        return self._template

    def _new_template(self) -> Template:
        plan = self._plan
        if plan is not None and plan.uses_directory and not os.path.isdir(self._directory):
            self._directory = new_parent()
        # Its processes end with it, and their own descriptors tell so.
        return Template(self._loop, self._modules, self._wanted.set, plan, self._directory, self._on_denied)

    async def _until_wanted(self, template: Template) -> None:
        """Wait until runs need processes; end a template that has forked nothing for too long."""
        while not self._wanted.is_set():
            try:
                async with asyncio.timeout(SLOW_FORK):
                    await self._wanted.wait()
            except TimeoutError:
                starting = [one for one in self._processes if not one.pid]
                oldest = min((one.begun for one in starting), default=None)
                if oldest is not None and self._loop.time() - oldest > SLOW_FORK:
                    self._events.template_failed(TemplateError("the template process does not fork"), 0)
                    self._retire(template, starting)
                    return

    def _retire(self, template: Template, starting: list[JobProcess]) -> None:
        """Fork from another template, and let the jobs of this one end."""
        self._template = None
        self._retired.append(template)
        for process in starting:
            process.abandon()
        for idle in list(self._idle.values()):
            while idle:
                self._end(idle.pop())
        self._close_if_unused(template)

    def _close_if_unused(self, template: Template) -> None:
        """End a retired template when its last process has ended."""
        if template in self._retired and all(one.template is not template for one in self._processes):
            self._retired.remove(template)
            template.close()

    def _fork_wanted(self, template: Template) -> None:
        for name, runs in self._waiting.items():
            while self._starting.get(name, 0) < len(runs):
                if sum(self._starting.values()) >= AT_ONCE:
                    return
                self._make_room()
                self._fork(template, name, runs[0].handler)

    def _make_room(self) -> None:
        """End the process that has been idle longest if there are more processes than slots."""
        if len(self._processes) < self._concurrency:
            return
        idle = [process for some in self._idle.values() for process in some]
        if idle:
            oldest = min(idle, key=lambda process: process.idle_since)
            self._idle[oldest.name].remove(oldest)
            self._end(oldest)

    def _fork(self, template: Template, name: str, handler: Handler) -> None:
        limits = limits_of(self._settings.limits, handler.limits)
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
        link, output = template.fork(request)
        self._starting[name] = self._starting.get(name, 0) + 1
        process = JobProcess(self, template, name, limits, self._settings.max_payload, link, output)
        process.serial, process.directory = number, directory
        self._processes.add(process)

    def _take_next(self, process: JobProcess) -> None:
        """Give a process a run that waits for one of its name; keep it idle if there is none."""
        runs = self._waiting.get(process.name)
        is_new = process.started == 0
        for run in runs or ():
            if is_new or run not in self._fresh:
                assert runs is not None
                runs.remove(run)
                self._assign(process, run)
                return
        process.idle_since = self._loop.time()
        self._idle.setdefault(process.name, []).append(process)
        if self._idler is None:
            self._idler = self._loop.call_later(IDLE, self._end_idle)

    def _assign(self, process: JobProcess, run: Run) -> None:
        self._by_run[run] = process
        if self._plan is not None and self._plan.missing:
            run.reports.log(run, f"Not guaranteed on this system: {', '.join(self._plan.missing)}")
        deadline = None
        timeout = run.claimed.options.timeout
        if timeout is not None:
            deadline = run.deadline = self._clock.now() + timeout
            run.timer = self._loop.call_later(timeout / 1_000, self.stop, run, Stop.TIMEOUT)
        try:
            process.assign(run, deadline)
        except Exception as error:
            # The job's options have a value that cannot be sent, or the system refuses a limit.
            process.run = None
            del self._by_run[run]
            self._settle(run, self._execution.failed(run, error))
            self._end(process)
            return
        if run in self._fresh:
            self._fresh.discard(run)
            process.is_retired = process.is_fresh = True
        self._start_ticking()

    # Ending runs and processes.

    def _stop(self, run: Run) -> None:
        process = self._by_run.get(run)
        if process is not None:
            process.ask(run.stop)
        elif run.outcome is None and run in self._waiting.get(run.claimed.name, ()):
            self._waiting[run.claimed.name].remove(run)
            self._settle(run, self._execution.stopped(run))

    def _settle(self, run: Run, outcome: Outcome) -> None:
        self._fresh.discard(run)
        run.items = None
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended_here()
        else:
            self._events.ignored("the result of a handler")

    def _end(self, process: JobProcess) -> None:
        for pid in kernel.descendants(process.pid):
            kernel.kill(pid)
        process.kill("done")

    def _crashed(self, run: Run, process: JobProcess) -> Outcome:
        """Return the outcome of a run whose process has ended without one."""
        if process.killed_for == "shutdown":
            return release(run.claimed)
        error, reason = ending(process)
        if text := process.last_output():
            error.add_note(f"The last output of the job:\n{text}")
        run.error = error
        if run.stop in (Stop.SHUTDOWN, Stop.TIMEOUT, Stop.REQUESTED) and reason == "worker_crashed":
            return self._execution.failed(run, error)
        return failure(run.claimed, error, reason, partial(self._delay, run))

    def _delay(self, run: Run, error: BaseException) -> int:
        on_bad = partial(self._events.backoff_failed, run)
        return next_delay(run.claimed, run.handler, error, self._random, on_bad)

    def _release_waiting_for(self, name: str) -> None:
        """Return a run to its queue whose process could not be started."""
        runs = self._waiting.get(name)
        if runs:
            run = runs.popleft()
            self._settle(run, release(run.claimed, delay=int(FIRST_RETRY * 1_000)))

    def _delay_of_waiting(self) -> int:
        """Return the milliseconds after which a template may be ready."""
        return int(max(self._retry, FIRST_RETRY) * 1_000)

    async def _sweep(self, template: Template) -> None:
        """Kill the processes that ended jobs have left behind, until none is left."""
        try:
            for _ in range(MOST_SWEEPS):
                strays = await template.strays({process.pid for process in self._processes})
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

    # Ticks.

    def _start_ticking(self) -> None:
        if self._ticker is None:
            self._ticker = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        if self._by_run:
            self._start_ticking()
        for process in list(self._by_run.values()):
            process.tick()

    def _end_idle(self) -> None:
        self._idler = None
        now = self._loop.time()
        for idle in self._idle.values():
            while idle and now - idle[0].idle_since > IDLE:
                self._end(idle.pop(0))
        if any(self._idle.values()):
            self._idler = self._loop.call_later(IDLE / 2, self._end_idle)
