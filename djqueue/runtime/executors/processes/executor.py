"""The executor of jobs in processes of their own: pools by job name, limits, and the end of processes."""

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from djqueue.core.executors import limits_of
from djqueue.core.job import EnqueueResult, Outcome
from djqueue.runtime import problems
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.emitting import RunItems
from djqueue.runtime.executors.execution import Execution, call_on_loop
from djqueue.runtime.executors.sandbox.broker import DeniedAccess
from djqueue.runtime.handlers import Handler
from djqueue.runtime.outcomes import release
from djqueue.runtime.reports import Reports
from djqueue.runtime.runs import Records, Run, Stop, aread

from .enqueueing import JobEnqueuer
from .jobprocess import JobProcess
from .sandboxplan import SandboxPlan
from .template import FIRST_RETRY, TemplateKeeper

TICK = 0.05
"""Seconds between two checks of memory."""
IDLE = 60.0
"""Seconds after which an idle process ends."""
NAME_THREADS = 4
"""Host names that are resolved at once."""
AT_ONCE = 4
"""Processes that may be starting at once. The template forks one at a time."""
PROCESSES = "job processes"
"""The part of the worker that has the problems of stopped processes."""
ENDING = 1.0
"""Seconds for which the end of a worker waits for the end of the processes that it has killed."""
MAX_RESTARTS = 3
"""Maximum of processes that may end before they have begun a run; the next one counts as an attempt."""


class ProcessExecutor:
    """Runs jobs in processes forked from one template. All methods but `stop` are called on the loop."""

    def __init__(
        self, context: WorkerContext, reports: Reports, handlers: Iterable[Handler], plan: SandboxPlan | None
    ) -> None:
        self._loop = context.loop
        self._clock = context.clock
        self._runs = context.runs
        self.events = context.events
        self._wake_event = context.wake_event
        self._storage = context.storage
        self._settings = context.settings
        self._concurrency = context.options.concurrency
        self._execution = Execution(context.settings, context.random, context.events)
        self._plan = plan
        self.names = ThreadPoolExecutor(NAME_THREADS, thread_name_prefix="djqueue-names")
        self._waiting: dict[str, deque[Run]] = {}
        """Runs that wait for a process, by job name."""
        self._fresh: set[Run] = set()
        """Runs that need a new process of their own."""
        self._restarts: dict[Run, int] = {}
        """Number of processes that ended before they had begun a run."""
        self._idle: dict[str, list[JobProcess]] = {}
        self._starting: dict[str, int] = {}
        """Processes that are starting, by job name."""
        self._processes: set[JobProcess] = set()
        self._by_run: dict[Run, JobProcess] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._has_problems = False
        self._idler: asyncio.TimerHandle | None = None
        """Ends processes that have been idle for long."""
        self._enqueuer = (
            None if plan is None else JobEnqueuer(self._storage, self._settings, plan.permissions)
        )
        self._reports = reports
        self.templates = TemplateKeeper(self, self.events, handlers, plan)

    @property
    def processes(self) -> list[JobProcess]:
        """The running processes."""
        # A copy in one step: the heartbeat reads it, too, on its own thread.
        return [process for process in list(self._processes) if process.pid]

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
        self.templates.want()

    def stop(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop, then interrupt it, then kill its process. From any thread."""
        if not run.ask_to_stop(reason):
            return
        self.events.stop_requested(run)
        call_on_loop(self._loop, self.events, "a cancel request", self._stop, run)

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
        for timer in (self._ticker, self._idler):
            if timer is not None:
                timer.cancel()
        self.names.shutdown(wait=False, cancel_futures=True)
        self.templates.stop()
        until = self._loop.time() + ENDING
        for process in list(self._processes):
            process.wait(until - self._loop.time())
            process.close()
        self._processes.clear()
        self.templates.remove_directory()

    # What a process does.

    def on_ready(self, process: JobProcess) -> None:
        """Give a process its first job; keep it if the job has ended meanwhile."""
        self._starting[process.name] -= 1
        self.templates.want()
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
            self.templates.process_failed(process)
            self._release_waiting_for(process.name)
        run, process.run = process.run, None
        if run is not None:
            self._by_run.pop(run, None)
            self._end_run(run, process)
        self.templates.process_ended(process)

    def _end_run(self, run: Run, process: JobProcess) -> None:
        try:
            if self._restart(run, process):
                return
            outcome = self._crashed(run, process)
            process.report_output(run)
        except Exception as error:
            # The run must end, whatever could not be read or described.
            outcome = self._execution.crashed(run, error, "worker_crashed")
        self._settle(run, outcome)

    async def records(self, run: Run) -> Records:
        """Return the records of the jobs that a job depends on.

        Without their payloads and logs if the process has permissions: their results are meant for it.
        """
        records = await aread(self._storage, run.claimed.options.depends_on)
        if self._plan is None:
            return records
        return [
            None if record is None else record._replace(payload=b"", logs=(), progress=None, history=())
            for record in records
        ]

    @property
    def enqueues(self) -> bool:
        """Whether it enqueues jobs for its processes, because they cannot reach the storage."""
        return self._enqueuer is not None

    async def enqueue(self, run: Run, request: bytes) -> list[EnqueueResult]:
        """Enqueue the jobs of a request. Raises the errors of `JobEnqueuer.enqueue`."""
        assert self._enqueuer is not None
        return await self._enqueuer.enqueue(run.claimed, request)

    def open_items(self, run: Run) -> RunItems:
        """Begin the stream of a run that yields items."""
        return self._reports.open(run)

    def on_denied(self, denied: DeniedAccess) -> None:
        """Note a connection that was denied to one of the processes."""
        for process in self.processes:
            if process.pid == denied.pid:
                process.note_denied(denied.target)

    # Starting processes.

    def all_processes(self) -> list[JobProcess]:
        """Return the processes that run or start."""
        return list(self._processes)

    def end_idle_processes(self) -> None:
        """End the processes without a job."""
        for idle in self._idle.values():
            while idle:
                self._end(idle.pop())

    def fork_wanted(self) -> None:
        """Fork as many processes as there are runs that wait for one. Raises TemplateError, OSError."""
        for name, runs in self._waiting.items():
            while self._starting.get(name, 0) < len(runs):
                if sum(self._starting.values()) >= AT_ONCE:
                    return
                self._make_room()
                self._fork(name, runs[0].handler)

    def _make_room(self) -> None:
        """End the process that has been idle longest if there are more processes than slots."""
        if len(self._processes) < self._concurrency:
            return
        idle = [process for processes in self._idle.values() for process in processes]
        if idle:
            oldest = min(idle, key=lambda process: process.idle_since)
            self._idle[oldest.name].remove(oldest)
            self._end(oldest)

    def _fork(self, name: str, handler: Handler) -> None:
        limits = limits_of(self._settings.limits, handler.limits)
        forked = self.templates.fork(name, limits)
        self._starting[name] = self._starting.get(name, 0) + 1
        self._processes.add(JobProcess(self, forked, name, limits, self._settings.max_payload))

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
        self._restarts.pop(run, None)
        run.items = None
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended_here()
        else:
            self.events.ignored("the result of a handler")

    def _end(self, process: JobProcess) -> None:
        process.kill("done")

    def _restart(self, run: Run, process: JobProcess) -> bool:
        """Give a run that its process had not begun to another one; return False if it may have begun.

        Such a run uses no attempt. `MAX_RESTARTS` limits how often this happens.
        """
        restarts = self._restarts.get(run, 0)
        if process.killed_for or process.has_begun or run.stop or restarts >= MAX_RESTARTS:
            return False
        self._restarts[run] = restarts + 1
        if run.timer is not None:
            run.timer.cancel()
        self.start(run, fresh=process.is_fresh)
        return True

    def _crashed(self, run: Run, process: JobProcess) -> Outcome:
        """Return the outcome of a run whose process has ended without one."""
        if process.killed_for == "shutdown":
            return release(run.claimed)
        error, reason = process.ending()
        if text := process.last_output():
            error.add_note(f"The last output of the job:\n{text}")
        run.error = error
        if run.stop in (Stop.SHUTDOWN, Stop.TIMEOUT, Stop.REQUESTED) and reason == "worker_crashed":
            return self._execution.failed(run, error)
        return self._execution.crashed(run, error, reason)

    def _release_waiting_for(self, name: str) -> None:
        """Return a run to its queue whose process could not be started."""
        runs = self._waiting.get(name)
        if runs:
            run = runs.popleft()
            self._settle(run, release(run.claimed, delay=int(FIRST_RETRY * 1_000)))

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
        found = [finding for process in self._by_run.values() if (finding := process.problem()) is not None]
        if found or self._has_problems:
            problems.note(PROCESSES, found)
            self._has_problems = bool(found)

    def _end_idle(self) -> None:
        self._idler = None
        now = self._loop.time()
        for idle in self._idle.values():
            while idle and now - idle[0].idle_since > IDLE:
                self._end(idle.pop(0))
        if any(self._idle.values()):
            self._idler = self._loop.call_later(IDLE / 2, self._end_idle)
