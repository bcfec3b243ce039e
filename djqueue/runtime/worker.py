"""The worker: claims jobs from a storage and runs their handlers, in any process that embeds it."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from random import Random
from types import TracebackType
from typing import Self

from djqueue.client import get_storage
from djqueue.client.announcing import announce_incidents, announcer, clean_thread, close_thread
from djqueue.conf import get_settings, has_django
from djqueue.core import logs
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.threads import on_thread, start_daemon
from djqueue.storage.base import Storage, Unsubscribe

from .claiming import ClaimLoop
from .context import Seconds, WorkerContext, read_options
from .emitting import Emitter
from .events import Counters, RunEvents
from .executors import Executor, InlineExecutor
from .executors.connections import close_connections
from .executors.router import ExecutorRouter, handlers_for_processes
from .handlers import Handlers, read_handlers
from .leases import LeaseTable
from .loops import run_loop
from .maintenance import Maintenance, UnhandledWatch
from .owntasks import own_task
from .reports import Meter, Reports
from .runs import AttemptCount, Run, Runs, Stop
from .shutdown import Shutdown
from .wakeevent import WakeEvent
from .watching import CancelWatch, Heartbeat

RUNWORKERS, EMBEDDED = "runworkers", "embedded"
SIGNAL_TIMEOUT = 5.0
"""Seconds that signal receivers have to process the last signals."""
UNREGISTER_TIMEOUT = 5.0
"""Seconds that the storage has to unregister the worker."""


class Worker:
    """Runs jobs until it is stopped, or until `until_empty` or `max_jobs` ends it. It can run only once.

    Args:
        storage: Storage with the jobs; the one in the settings unless given.
        queues: Names of the queues to serve, or one name; None serves all queues.
        handlers: Functions by job name; None serves every `@job` function. A function takes the job, or the
            job and `done(error=None, result=None)`, and may be async. Only jobs with these names are claimed.
        concurrency: Number of jobs that run at once.
        worker_id: Name of the worker; host, process ID and a random part unless given.
        shutdown_timeout: Seconds that running jobs have to finish after `stop`.
        heartbeat: Seconds between heartbeats, which renew the leases of running jobs.
        until_empty: Stop when no job that this worker could run is waiting, active anywhere, or due within a
            minute, and no job that failed here is due for a retry.
        max_jobs: Stop after this many attempts.
        maintain: Also run the storage's periodic maintenance.
        connect: Connect the storage; False if the caller has connected it.
        inline: Run all jobs in this process, whatever executor is chosen for them. For tests.

    In a coroutine, use `await worker.run()` or `async with worker:`. Elsewhere, `worker.start()` runs the
    worker in a thread, and `worker.stop()` and `worker.join()` end it; `with worker:` does all three.
    """

    def __init__(
        self,
        storage: Storage | None = None,
        queues: Iterable[str] | str | None = None,
        handlers: Handlers | None = None,
        *,
        concurrency: int | None = None,
        worker_id: str | None = None,
        shutdown_timeout: Seconds | None = None,
        heartbeat: Seconds | None = None,
        until_empty: bool = False,
        max_jobs: int | None = None,
        maintain: bool = True,
        connect: bool = True,
        inline: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self.settings = get_settings()
        self.options = read_options(
            self.settings,
            queues=queues,
            concurrency=concurrency,
            worker_id=worker_id,
            shutdown_timeout=shutdown_timeout,
            heartbeat=heartbeat,
            until_empty=until_empty,
            max_jobs=max_jobs,
            maintain=maintain,
            connect=connect,
        )
        self.storage = storage if storage is not None else get_storage()
        self.storage.has_worker = True
        if self.storage.on_incidents is None:
            self.storage.on_incidents = announce_incidents
        self.handlers = read_handlers(handlers)
        self._process_handlers = [] if inline else handlers_for_processes(self.handlers, self.settings)
        self.on_started: Callable[[], None] | None = None
        """Called on the worker's loop when it claims jobs."""
        self.kind = EMBEDDED
        """Purpose of its process, as in `WorkerInfo.kind`."""
        self.clock = clock
        self.random = random or Random()
        self.runs = Runs()
        self.events = RunEvents(self.options.worker_id, clock)
        self.lease_table: LeaseTable | None = None
        """Leases in memory shared with the lease keeper, if there is one."""
        self.attempt_count: AttemptCount | None = None
        """Attempts of this worker and of those that it replaces, if they count toward one `max_jobs`."""
        self.is_replaceable = False
        """Whether a supervisor starts another process when this one ends."""
        self.was_recycled = False
        """Whether the worker has ended because a handler could not be stopped."""
        self.abandoned = 0
        """Number of handlers and storage calls that did not end in time; their threads may still run."""
        self.started_at = clock.now()
        self.stopping = False
        self.paused = False
        self._hurrying = False
        self._was_run = False
        self._is_claiming = False
        self.parts: WorkerParts | None = None
        """The parts of the worker, while it runs and after that."""
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        """Set when the worker claims jobs, or has failed to start."""
        self._opened: asyncio.Event | None = None
        """The same for `async with`."""
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.id}>"

    @property
    def id(self) -> str:
        """Name of the worker in the storage's list of workers."""
        return self.options.worker_id

    @property
    def counters(self) -> Counters:
        """Number of attempts so far, by outcome."""
        return self.events.counters

    @property
    def running(self) -> int:
        """Number of jobs that are running now."""
        return len(self.runs.executing)

    # In a coroutine.

    async def run(self) -> None:
        """Run jobs until `stop` is called, or `until_empty` or `max_jobs` ends the worker.

        Cancelling this coroutine calls `stop(hurry=True)`. Raises what connecting the storage raises.
        """
        if self._was_run:
            raise RuntimeError("A Worker can't be restarted; create a new one.")
        self._was_run = True
        loop = asyncio.get_running_loop()
        if self.options.connect:
            # Connecting may wait for another process to stop; a thread keeps the loop running.
            await on_thread(self._connect)
        parts = WorkerParts(self._context(loop), self._make_executor, self.attempt_count)
        self.parts = parts
        with logs.handled_apart(clean_thread, close_thread):
            try:
                await parts.start()
                self._begin(parts)
                await parts.claim_until_done()
            finally:
                self.abandoned = parts.shutdown.abandoned
                await parts.close()
                await on_thread(announcer.flush, SIGNAL_TIMEOUT)
                await on_thread(logs.flush)

    def stop(self, *, hurry: bool = False) -> None:
        """Stop claiming, and end when the running jobs have finished or `shutdown_timeout` has passed.

        Returns at once. May be called more than once, from any thread, and in a signal handler.

        Args:
            hurry: Ask running jobs to stop at once, and release those that do not.
        """
        self.stopping = True
        self._hurrying = self._hurrying or hurry
        self._call("a stop request", lambda parts: parts.shutdown.begin(hurry=self._hurrying))

    def quiet(self) -> None:
        """Stop claiming until `resume`, and finish the running jobs. From any thread, like `stop`."""
        self._pause(True)

    def resume(self) -> None:
        """Claim again after `quiet`."""
        self._pause(False)

    async def astop(self, *, hurry: bool = False) -> None:
        """Stop the worker as `stop` does, and wait until it has ended."""
        self.stop(hurry=hurry)
        if self._task is not None:
            await asyncio.shield(self._task)
        elif self._thread is not None:
            await on_thread(self.join)

    async def __aenter__(self) -> Self:
        self._opened = asyncio.Event()
        opened = asyncio.ensure_future(self._opened.wait())
        self._task = asyncio.ensure_future(self.run())
        await asyncio.wait([self._task, opened], return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if not self._opened.is_set():
            await self._task
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        await self.astop()

    # In a thread.

    def start(self) -> None:
        """Run the worker in a thread of its own, and return when it claims jobs.

        Raises what connecting the storage raises.
        """
        if self._thread is not None:
            raise RuntimeError("The worker is already running.")
        self._thread = start_daemon("djqueue-worker", self._run_in_thread)
        self._ready.wait()
        if not self._is_claiming:
            self.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until a started worker has ended; return False if it has not after `timeout` seconds.

        Raises the error that ended the worker, if one did.
        """
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.stop()
        self.join()

    # For the parts of the worker.

    def lose(self, run: Run) -> None:
        """Stop a run whose lease the storage no longer accepts. From any thread."""
        # If the run has ended, the storage's answer to its outcome counts.
        if run.outcome is None and self.parts is not None:
            self.parts.executor.stop(run, Stop.LOST)

    def fail(self, error: Exception) -> None:
        """End with an error, after which no job can be run or reported. From any thread."""
        self._call("an error that ends the worker", lambda parts: parts.claim_loop.fail(error))

    def recycle(self) -> None:
        """Finish the jobs that can finish, and end. Called on the loop, because a handler is stuck."""
        self.stopping = self.was_recycled = True
        if self.parts is not None:
            self.parts.shutdown.recycle()

    def _connect(self) -> None:
        try:
            self.storage.connect()
        finally:
            if has_django():
                close_connections()

    def _make_executor(self, context: WorkerContext, reports: Reports) -> Executor:
        if self._process_handlers:
            return ExecutorRouter(context, reports, self._process_handlers)
        return InlineExecutor(context)

    def _context(self, loop: asyncio.AbstractEventLoop) -> WorkerContext:
        return WorkerContext(
            storage=self.storage,
            settings=self.settings,
            options=self.options,
            handlers=self.handlers,
            runs=self.runs,
            events=self.events,
            clock=self.clock,
            random=self.random,
            loop=loop,
            wake_event=WakeEvent(loop),
            control=self,
            lease_table=self.lease_table,
            kind=self.kind,
            started_at=self.started_at,
        )

    def _begin(self, parts: "WorkerParts") -> None:
        """Announce that the worker claims jobs, and apply what was called before it could."""
        self._is_claiming = True
        self._ready.set()
        if self.on_started is not None:
            self.on_started()
        if self._opened is not None:
            self._opened.set()
        if self.paused:
            parts.claim_loop.pause(True)
        if self.stopping:
            parts.shutdown.begin(hurry=self._hurrying)

    def _pause(self, paused: bool) -> None:
        self.paused = paused
        self._call("a pause or resume request", lambda parts: parts.claim_loop.pause(paused))

    def _call(self, request: str, call: "Callable[[WorkerParts], None]") -> None:
        """Call the parts on their loop, from any thread; before they exist, `_begin` applies the request."""
        parts = self.parts
        if parts is None:
            return
        try:
            parts.loop.call_soon_threadsafe(call, parts)
        except RuntimeError:
            # The loop is closed: the worker has already ended.
            self.events.ignored(request)

    def _run_in_thread(self) -> None:
        try:
            run_loop(self.run(), self.events.loop_stopped)
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()


class WorkerParts:
    """The parts of a worker, created on the loop that they run on; how they start and end together.

    Args:
        context: Objects that the parts share.
        make_executor: Creates the executor from the context and the worker's reports.
        attempt_count: Counter of the attempts of several workers, if they count toward one `max_jobs`.
    """

    def __init__(
        self,
        context: WorkerContext,
        make_executor: Callable[[WorkerContext, Reports], Executor],
        attempt_count: AttemptCount | None,
    ) -> None:
        self.loop = context.loop
        self._storage = context.storage
        self._options = context.options
        self._runs = context.runs
        self._events = context.events
        self._wake_event = context.wake_event
        self._control = context.control
        self._unsubscribe: list[Unsubscribe] = []
        # A part may use those above it.
        self._reports = Reports(context, Emitter(context))
        self.executor = make_executor(context, self._reports)
        self.heartbeat = Heartbeat(context, self.executor)
        self._cancel_watch = CancelWatch(context, self.executor, self.heartbeat)
        self._maintenance = None
        if self._options.maintain:
            watch = UnhandledWatch(
                self._storage,
                self._events,
                context.clock,
                self._options.queues,
                looks_at_end=self._options.until_empty,
            )
            self._maintenance = Maintenance(
                self._storage, self._events, context.random, watch, self.heartbeat.renew_held
            )
        self._meter = Meter(context)
        self.claim_loop = ClaimLoop(
            context,
            self.executor,
            self._reports,
            self.heartbeat,
            self._cancel_watch,
            self._meter,
            attempt_count,
        )
        self.shutdown = Shutdown(context, self.claim_loop, self.executor)

    async def start(self) -> None:
        """Register the worker, and start its threads.

        If the storage has become unavailable since it was connected, the heartbeat registers the worker
        later. Raises any other error of the storage.
        """
        storage = self._storage
        try:
            await storage.acall(storage.workers.register, self.heartbeat.info())
        except StorageUnavailableError as error:
            self.heartbeat.note_unavailable(error)
        # Subscribing before the first claim ensures that no job arrives unnoticed in between.
        self._unsubscribe.append(
            await storage.acall(storage.listen, self._options.queues, self._wake_event.jobs_came)
        )
        self._unsubscribe.append(
            await storage.acall(storage.workers.on_command, self._options.worker_id, self.heartbeat.hasten)
        )
        self.heartbeat.start()
        if self._maintenance is not None:
            self._maintenance.start()
        self._events.worker_started()

    async def claim_until_done(self) -> None:
        """Claim and run jobs until the worker stops; cancelling this stops it in a hurry."""
        # A task of its own, so that cancelling the worker does not cancel calls of the storage.
        claiming = own_task(asyncio.get_running_loop(), self.claim_loop.run())
        self.shutdown.cancel_claiming = claiming.cancel
        try:
            await asyncio.shield(claiming)
        except asyncio.CancelledError:
            if claiming.cancelled():
                # The shutdown cancelled it because the storage does not answer; `close` logs that.
                return
            self._control.stop(hurry=True)
            await asyncio.wait([claiming])
            if not claiming.cancelled():
                claiming.result()
            raise

    async def close(self) -> None:
        """Stop the threads, cancel the subscriptions, and unregister the worker."""
        self.shutdown.close()
        await self._reports.close()
        await on_thread(self._stop_threads)
        self.executor.close()
        if unreported := len(self._runs.unreported) + len(self._runs.ended):
            self._events.undelivered(unreported)
        try:
            async with asyncio.timeout(UNREGISTER_TIMEOUT):
                await self._unregister()
        except Exception as error:
            # The storage removes workers without heartbeats.
            self._events.storage_failed("unregister", error)
        self._events.worker_stopped()

    async def _unregister(self) -> None:
        await self._cancel_watch.close()
        await self._meter.close()
        for unsubscribe in self._unsubscribe:
            await self._storage.acall(unsubscribe)
        await self._storage.acall(self._storage.workers.unregister, self._options.worker_id)

    def _stop_threads(self) -> None:
        if self._maintenance is not None:
            self._maintenance.stop()
        self.heartbeat.stop()
