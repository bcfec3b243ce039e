"""The worker's view of one process that runs jobs: what it sends, what it uses, how it ends."""

import asyncio
import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from djqueue.core import procfs
from djqueue.core.errors import JobError, JobLimitError, JobMemoryLimitError, WorkerCrashedError
from djqueue.core.executors import ISOLATED, SUBPROCESS, JobLimits
from djqueue.core.job import Outcome
from djqueue.core.overview import Finding
from djqueue.core.workers import ProcessInfo
from djqueue.runtime.events import RunEvents
from djqueue.runtime.owntasks import own_task
from djqueue.runtime.runs import Run, Stop
from djqueue.storage import wire

from . import frames, kernel
from .child import ASK
from .frames import BEGIN, CHUNK, MAX_BYTES, FrameError, ProcessLink
from .messages import JobMessages, JobOutput, RequestHandler, inert, read_outcome
from .template import Forked

REAP_PAUSE = 0.005
"""Seconds between two passes over what a job has left behind."""
REAPING = 5.0
"""Seconds that the template has to tell how a process has ended."""
ENDING = 1_000
"""Milliseconds that a process has to end after its socket has ended."""
MAX_TARGET = 300
"""Maximum of characters of a host in the log."""
MAX_DENIED = 20
"""Maximum of log lines about denied accesses of one job."""
CHECKS_PER_LOOK = 10
"""Checks of memory of which one looks at that which is not resident, even if no address space was added."""
STOPPED_CHECK = 1.0
"""Seconds between two looks whether a signal has stopped the process."""
STOPPED_NOTED = 10.0
"""Seconds after which a stopped process is a problem of the worker."""
STOPPED_PATIENCE = 60.0
"""Seconds after which a stopped process is killed."""
FAST_STEP = 1_000
"""Milliseconds between the steps that end a job whose worker stops, or whose lease is lost."""


class ProcessOwner(RequestHandler, Protocol):
    """The executor of some processes, which learns what happens to them, and answers them."""

    events: RunEvents
    names: ThreadPoolExecutor
    """Threads that resolve host names."""

    def on_ready(self, process: "JobProcess") -> None:
        """Note that a process has started, or has ended its job, and waits for one."""

    def on_outcome(self, process: "JobProcess", run: Run, outcome: Outcome) -> None:
        """Note that a process has ended a job."""

    def on_ended(self, process: "JobProcess") -> None:
        """Note that a process has ended, perhaps with its job."""


class JobProcess:
    """A process forked from the template. All methods are called on the worker's loop.

    name: Name of the jobs that it runs.
    limits: Limits of each job.
    result: Maximum bytes of a result.
    """

    def __init__(
        self, owner: ProcessOwner, forked: Forked, name: str, limits: JobLimits, result: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.limits = limits
        self.template = forked.template
        self.pid = 0
        """Process id, as the kernel reports it; 0 until the process is ready."""
        self.root = 0
        """Id of the process that the template forked: this one, or its parent, which adopts its programs."""
        self.run: Run | None = None
        self.started = 0
        """Number of jobs that it has been given."""
        self.is_retired = False
        """Whether it runs no further job."""
        self.is_fresh = False
        """Whether it was forked for one job."""
        self.serial = forked.serial
        """Number of the request that forked it."""
        self.directory = forked.directory
        """Temporary directory of its own; empty for none."""
        self.killed_for = ""
        """Why the worker killed it."""
        self.begun = self._loop.time()
        self.idle_since = 0.0
        self.has_ended = False
        self._owner = owner
        self._stopped_at: float | None = None
        self._look_at = 0.0
        """Time of the next look whether it is stopped."""
        self._peak = 0
        """Bytes of the most memory seen during the current job."""
        self._ticks = 0
        self._mapped = -1
        """Bytes of address space when the memory was last looked at that is not resident."""
        self._denied = 0
        """Number of accesses denied to the current job."""
        self._status = -1
        """Status of `waitpid`, when it has ended; -1: unknown."""
        self._output = forked.output
        self._pidfd = self._rootfd = -1
        """Descriptors of the process, and of its root, whose ids others may have after they were reaped."""
        self._used_before = 0.0
        """Seconds of processor time that the process had used before its job."""
        self._children = self._siblings = -1
        """Descriptors of the kernel's lists of the children of its main thread, and of its parent."""
        self._largest_result = result
        self._captured = JobOutput(limits.output)
        self._was_heard = False
        """Whether the current job has sent a message."""
        self._step: asyncio.TimerHandle | None = None
        """The next step that ends the job."""
        self._link = ProcessLink(forked.link, max(result, frames.SMALL) + frames.SMALL, self)
        self._messages = JobMessages(owner, self, self._link, result)
        self._reaper: asyncio.Task[None] | None = None
        self._loop.add_reader(forked.output, self._read_output)

    def __repr__(self) -> str:
        return f"<JobProcess {self.pid} {self.name}>"

    def assign(self, run: Run, deadline: int | None) -> None:
        """Give it a job. `deadline`: UTC milliseconds."""
        self.run = run
        self.started += 1
        self._peak = self._denied = 0
        self._stopped_at = None
        self._was_heard = False
        self._messages.begin()
        limits = self.limits
        if limits.jobs is not None and self.started >= limits.jobs:
            self.is_retired = True
        if limits.cpu is not None:
            self._used_before = procfs.processor_time(self.pid)
        # The fencing token stays here: a job needs none to report to this worker.
        body = wire.pack_body(run.claimed._replace(token=0))
        self._link.send(frames.pack(frames.JOB, self.started, body, deadline, run.reports.worker_id) + BEGIN)

    def tick(self) -> None:
        """Check what the job uses, and read on if the process has sent too much before."""
        self._link.tick()
        if self.run is None or self.has_ended:
            return
        self._look_whether_stopped()
        cpu = self.limits.cpu
        if cpu is not None and procfs.processor_time(self.pid) - self._used_before > cpu / 1_000:
            self.kill("cpu")
        pids = procfs.descendants(self.root)
        if self.root == self.pid:
            pids.insert(0, self.pid)
        processes = self.limits.processes
        if processes is not None and sum(map(procfs.threads, pids)) > processes:
            self.kill("processes")
        if self.limits.memory is not None:
            used = self._memory_of(pids, self.limits.memory)
            self._peak = max(self._peak, used)
            if used > self.limits.memory:
                self.kill("memory")

    def _look_whether_stopped(self) -> None:
        now = self._loop.time()
        if now < self._look_at:
            return
        self._look_at = now + STOPPED_CHECK
        found = procfs.stat(self.pid)
        if found is None or found.state != "T":
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at >= STOPPED_PATIENCE:
            self.kill("stopped")

    def problem(self) -> Finding | None:
        """Return the problem that a signal has stopped it within its job; None if it runs."""
        run, since = self.run, self._stopped_at
        if run is None or since is None or (seconds := self._loop.time() - since) < STOPPED_NOTED:
            return None
        job = f"{run.claimed.name} [{run.claimed.id}]"
        text = f"a signal stopped the process {self.pid} of {job} {seconds:.0f} s ago"
        remedy = (
            f"Let it go on: kill -CONT {self.pid}. It is killed {STOPPED_PATIENCE:.0f} s after the signal, "
            "which counts as a crash."
        )
        return Finding("worker.process", "error", text, remedy)

    def _memory_of(self, pids: list[int], limit: int) -> int:
        """Return the bytes that some processes use, exactly if they exceed the limit."""
        sizes = [procfs.mapped_and_resident(pid) for pid in pids]
        mapped, used = sum(size for size, _ in sizes), sum(resident for _, resident in sizes)
        if used > limit:
            # Forked processes share memory, which counts once.
            return used if len(pids) == 1 else procfs.exact_memory(pids)
        self._ticks += 1
        if mapped != self._mapped or self._ticks % CHECKS_PER_LOOK == 0:
            self._mapped = mapped
            if used + procfs.unmapped_memory(pids) > limit:
                return procfs.exact_memory(pids)
        return used

    def ask(self, stop: Stop) -> None:
        """Ask the job to stop; then interrupt it, and then kill the process."""
        self.is_retired = True
        self._link.release()
        self._signal(ASK[stop])
        if stop is Stop.LOST:
            # Another attempt may run already: what this one asked for is no longer wanted.
            self._messages.interrupt()
        if self._step is None:
            grace = self.limits.grace if stop in (Stop.TIMEOUT, Stop.REQUESTED) else FAST_STEP
            self._step = self._loop.call_later(grace / 1_000, self._interrupt, grace)
        elif stop is Stop.LOST:
            self._after(FAST_STEP, lambda: self.kill("stop"))

    def kill(self, why: str) -> None:
        """Kill the process; the owner learns when it has ended."""
        self.is_retired = True
        if self.has_ended:
            return
        self.killed_for = self.killed_for or why
        if self._pidfd >= 0:
            # First the programs that it has started: without it, it would be unknown whose they were.
            kernel.kill_descendants(self.root)
            self._signal(signal.SIGKILL)

    def is_clean(self) -> bool:
        """Return whether the last job left no thread, process or temporary file behind."""
        try:
            if self.directory and os.listdir(self.directory):
                return False
            if self.root != self.pid and os.pread(self._siblings, 64, 0).split() != [str(self.pid).encode()]:
                return False
            return procfs.threads(self.pid) == 1 and not os.pread(self._children, 1, 0)
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

    @property
    def has_begun(self) -> bool:
        """Whether the process began its job, as far as the kernel can tell after its end."""
        return self._was_heard or not self._link.left_unread

    def info(self) -> ProcessInfo:
        """Describe it. From any thread."""
        run = self.run
        queue, job = ("", "") if run is None else (run.claimed.queue, run.claimed.id)
        executor = SUBPROCESS if self.is_fresh else ISOLATED
        return ProcessInfo(self.pid, self.name, executor, self.started, procfs.memory(self.pid), queue, job)

    def wait(self, seconds: float) -> None:
        """Wait until it has ended."""
        if self._pidfd >= 0:
            kernel.wait(self._pidfd, seconds)

    def close(self) -> None:
        """Release the descriptors."""
        self._messages.close()
        if self._reaper is not None and self._reaper is not asyncio.current_task():
            self._reaper.cancel()
        self._cancel_step()
        self._link.close()
        for descriptor in (self._output, self._pidfd):
            if descriptor >= 0:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
        for descriptor in (self._rootfd, self._children, self._siblings):
            if descriptor >= 0:
                os.close(descriptor)
        self._output = self._pidfd = self._rootfd = self._children = self._siblings = -1

    def ending(self) -> tuple[JobError, str]:
        """Return the error of its job, which has ended with it, and the reason of the job's dead letter."""
        limits, killed = self.limits, self.killed_for
        if killed == "memory" and limits.memory is not None:
            used, limit = (f"{size / 2**20:,.0f} MiB" for size in (self._peak, limits.memory))
            return JobMemoryLimitError(f"used {used} of memory; its limit is {limit}"), "memory_limit"
        if killed == "cpu" and limits.cpu is not None:
            seconds = limits.cpu / 1_000
            return JobLimitError(f"used more than its limit of {seconds:g} s of processor time"), "cpu_limit"
        if killed == "processes":
            text = f"had too many processes and threads; its limit is {limits.processes:,}"
            return JobLimitError(text), "process_limit"
        if killed.startswith("storage"):
            text = f"its process could not read from the storage ({killed[9:]})"
        elif killed.startswith("violation"):
            text = f"its process broke the protocol and was killed: {killed[11:]}"
        elif killed == "stopped":
            text = f"its process was stopped by a signal for {STOPPED_PATIENCE:.0f} s, and was killed"
        elif killed:
            text = "its process did not stop in time and was killed"
        else:
            text = f"its process {_described(self._status)}"
        return WorkerCrashedError(text), "worker_crashed"

    # Starting.

    def abandon(self) -> None:
        """Give up a process that has not become ready."""
        self.has_ended = True
        self._read_output()
        self.close()
        self._owner.on_ended(self)

    def on_hello(self, pid: int) -> None:
        """Be ready: the kernel has named the process."""
        try:
            if not pid:
                raise OSError("the process ended before it was ready")
            self._pidfd = os.pidfd_open(pid)
            self._children = _open_children(pid)
            parent = procfs.parent(pid)
            self.root = pid if parent == self.template.pid else parent
            self._rootfd = os.pidfd_open(self.root)
            self._siblings = _open_children(self.root)
        except OSError:
            self.abandon()
            return
        self.pid = pid
        self._link.open()
        self._loop.add_reader(self._pidfd, self._on_exit)
        if self.killed_for:
            self.kill(self.killed_for)
        else:
            self._owner.on_ready(self)

    # Messages.

    def on_message(self, kind: int, *values: Any) -> None:
        """Take a message of the current job. Raises FrameError for any other."""
        run = self.run
        if run is None:
            raise FrameError("it sent a message without having a job")
        self._was_heard = True
        if kind == frames.RESULT:
            self._take_result(run, *values)
        else:
            self._messages.take(run, kind, *values)

    def on_violation(self, error: Exception) -> None:
        """Kill a process that broke the protocol."""
        self.kill(f"violation: {error}")

    def on_link_end(self) -> None:
        """Kill the process soon: it is ending, as its descriptor reports, or has only closed its socket."""
        self._after(ENDING, lambda: self.kill("violation: it closed its socket"))

    async def resolve(self, name: str, port: int | None) -> list[tuple[int, str]]:
        """Return the addresses of a name that the permissions list. Raises OSError."""
        # The broker of its own template, which also makes its connections.
        broker = self.template.broker
        if broker is None:
            raise PermissionError(errno.EACCES, "the permissions of the job list no hosts")
        # A slow name server must not hold up the threads that the storage uses.
        return await self._loop.run_in_executor(self._owner.names, broker.resolve, name, port)

    def note_denied(self, target: str) -> None:
        """Add an access that the permissions do not allow to the log of the current job."""
        run = self.run
        if run is not None and self._denied < MAX_DENIED:
            self._denied += 1
            text = inert(target)[:MAX_TARGET]
            run.reports.log(run, f"Denied access: {text}")
            self._owner.events.denied(run, text)

    def _take_result(self, run: Run, *values: Any) -> None:
        number, *sent = values or (0,)
        if number != self.started:
            raise FrameError("it sent the outcome of another job")
        outcome = read_outcome(run, self._largest_result, *sent)
        self.run = None
        self._cancel_step()
        if not self._link.is_empty or self._messages.is_answering:
            # What follows a result, and an answer that is still due, cannot belong to the next job.
            self.is_retired = True
        self.report_output(run)
        self._owner.on_outcome(self, run, outcome)

    def _read_output(self) -> None:
        left = MAX_BYTES
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
        kernel.kill_descendants(self.pid, signal.SIGTERM)
        self._signal(signal.SIGTERM)
        self._messages.interrupt()
        self._after(grace, lambda: self.kill("stop"))

    def _after(self, milliseconds: int, step: Callable[[], None]) -> None:
        self._cancel_step()
        self._step = self._loop.call_later(milliseconds / 1_000, step)

    def _cancel_step(self) -> None:
        if self._step is not None:
            self._step.cancel()
            self._step = None

    def _signal(self, number: int) -> None:
        if self._pidfd >= 0:
            kernel.signal_to(self._pidfd, number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self.is_retired = True
        self._reaper = own_task(self._loop, self._end())

    async def _end_of_programs(self) -> None:
        """Kill what the job has left behind, until its parent has reaped everything and has ended."""
        # Stopped first, they cannot start others faster than these are found.
        number = signal.SIGSTOP
        while not kernel.wait(self._rootfd, 0):
            kernel.kill_descendants(self.root, number)
            number = signal.SIGKILL
            await asyncio.sleep(REAP_PAUSE)

    async def _end(self) -> None:
        if not self.killed_for:
            self._link.read_rest()
        try:
            async with asyncio.timeout(REAPING):
                await self._end_of_programs()
                self._status = await self.template.status(self.root)
        except Exception as error:
            # The template is stuck or closed: it is unknown how the process has ended.
            self._owner.events.status_unknown(self.pid, error)
            self._status = -1
            kernel.signal_to(self._rootfd, signal.SIGKILL)
        self.has_ended = True
        try:
            self._read_output()
            self._owner.on_ended(self)
        finally:
            self.close()


def _open_children(pid: int) -> int:
    return os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY)


def _described(status: int) -> str:
    """Return how a process ended, from a status of `waitpid`, as the end of a sentence."""
    if status < 0:
        return "ended together with the template process that it was forked from"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        ran_out = "; the system may have run out of memory" if number == signal.SIGKILL else ""
        return f"was killed by {name}{ran_out}"
    return f"ended with exit code {os.waitstatus_to_exitcode(status)} before the job had ended"
