"""`Worker`: takes jobs from a storage and runs their handlers, in any process that embeds it."""

import asyncio
import socket
import threading
from collections.abc import Iterable
from os import getpid
from random import Random
from types import TracebackType
from typing import Self

from djqueue._version import __version__
from djqueue.client import get_storage
from djqueue.client.announcing import announcer, told
from djqueue.conf import get_settings, has_django
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.job import WorkerInfo
from djqueue.storage.base import Storage

from .assembly import Assembly
from .configuration import Seconds, read_options
from .connections import close_connections
from .events import Counters, RunEvents
from .handlers import Handlers, read_handlers
from .leasetable import LeaseTable
from .loops import run_loop
from .runs import Runs
from .vitals import memory, running_jobs
from .wakeevent import WakeEvent
from .workercontext import WorkerContext

RUNWORKERS, EMBEDDED = "runworkers", "embedded"
FLUSH = 5.0
"""Seconds that the receivers of signals have to take the last of them."""


class Worker:
    """Runs jobs until it is stopped, or has done what it was to do. A worker runs once.

    storage: where the jobs are; else the one that the settings name.
    queues: names of the queues to serve, or one name; None is all queues.
    handlers: functions by job name; None is every function under `@job`. A function takes the job, or
        the job and `done(error=None, result=None)`, and may be async. Only their names are claimed.
    concurrency: jobs that run at once.
    worker_id: else host, process and a random part.
    shutdown_timeout: seconds that running jobs have after `stop`.
    heartbeat: seconds between renewals of the leases of running jobs.
    until_empty: end when no job that it could run waits, is running anywhere, or is due within a minute,
        and none that failed here is to come back.
    max_jobs: end after so many runs.
    maintain: whether to do the storage's upkeep, too.
    connect: whether to connect the storage; False if the caller has done so.

    In a coroutine: `await worker.run()`, or `async with worker:`. Elsewhere: `worker.start()` runs it in
    a thread, `worker.stop()` and `worker.join()` end it; `with worker:` does all three.
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
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self._settings = get_settings()
        self.options = read_options(
            self._settings,
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
        if self.storage.on_incidents is None:
            self.storage.on_incidents = told
        self.handlers = read_handlers(handlers)
        self.abandoned = 0
        """Handlers, and calls of the storage, that did not end in time; their threads may still be at it."""
        self._clock = clock
        self._random = random or Random()
        self._tell = RunEvents(self.options.worker_id, clock)
        self._started_at = clock.now()
        self._begun = False
        self._stopping = False
        self._hurrying = False
        self._resting = False
        self.leases: LeaseTable | None = None
        """What its lease keeper reads, where there is one."""
        self.kind = EMBEDDED
        """What its process is for: see `WorkerInfo.kind`."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._assembly: Assembly | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._is_open = False
        """Whether it has come so far as to claim jobs."""
        self._ready = threading.Event()
        """Set when it has, or has failed."""
        self._opened: asyncio.Event | None = None
        """What `async with` waits for, as `start` does for `_ready`."""
        self._failure: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Worker {self.id}>"

    @property
    def id(self) -> str:
        """Its name in the storage's list of workers."""
        return self.options.worker_id

    @property
    def counters(self) -> Counters:
        """What became of its runs so far."""
        return self._tell.counters

    @property
    def running(self) -> int:
        """Jobs that it runs at the moment."""
        return 0 if self._assembly is None else len(self._assembly.runs.executing)

    # In a coroutine.

    async def run(self) -> None:
        """Run jobs until `stop` is called or the worker has done what it was to do.

        Cancelling this is a `stop(hurry=True)`. Raises what connecting the storage raises.
        """
        if self._begun:
            raise RuntimeError("A Worker can't be restarted; create a new one.")
        self._begun = True
        loop = self._loop = asyncio.get_running_loop()
        if self.options.connect:
            # It may wait, for another process to make room say; a thread lets the loop go on.
            await asyncio.to_thread(self._connect)
        worker_context = WorkerContext(
            storage=self.storage,
            loop=loop,
            clock=self._clock,
            random=self._random,
            runs=Runs(),
            wake_event=WakeEvent(loop),
            tell=self._tell,
            leases=self.leases,
        )
        assembly = self._assembly = Assembly(
            worker_context,
            self.handlers,
            self.options,
            self._settings,
            info=self.info,
            rest=self._rest,
            stop=self.stop,
        )
        try:
            await assembly.start()
            self._is_open = True
            self._ready.set()
            if self._opened is not None:
                self._opened.set()
            if self._resting:
                assembly.claims.rest(True)
            if self._stopping:
                assembly.shutdown.begin(hurry=self._hurrying)
            await self._until_done(assembly)
        finally:
            self.abandoned = assembly.shutdown.abandoned
            await assembly.close()
            await asyncio.to_thread(announcer.flush, FLUSH)

    def stop(self, *, hurry: bool = False) -> None:
        """Claim no more, and end when the running jobs have, or `shutdown_timeout` is over.

        Returns at once; may be called again, from any thread, and in a signal handler.

        hurry: give running jobs no time: ask them to stop, and give back those that do not.
        """
        self._stopping = True
        self._hurrying = self._hurrying or hurry
        loop = self._loop
        if loop is None or self._assembly is None:
            return
        try:
            loop.call_soon_threadsafe(self._begin_shutdown)
        except RuntimeError:
            # The loop is closed: the worker has ended already.
            self._tell.too_late("a stop request")

    def quiet(self) -> None:
        """Claim no more, and go on with the running jobs, until `resume`. As `stop`, from anywhere."""
        self._rest(True)

    def resume(self) -> None:
        """Claim again after `quiet`."""
        self._rest(False)

    async def astop(self, *, hurry: bool = False) -> None:
        """See `stop`; returns when the worker has ended."""
        self.stop(hurry=hurry)
        if self._task is not None:
            await asyncio.shield(self._task)
        elif self._thread is not None:
            await asyncio.to_thread(self.join)

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

    # Elsewhere.

    def start(self) -> None:
        """Run in a thread of its own. Returns when jobs are being claimed.

        Raises what connecting the storage raises.
        """
        if self._thread is not None:
            raise RuntimeError("the worker is already running")
        self._thread = threading.Thread(target=self._run_in_thread, name="djqueue-worker", daemon=True)
        self._thread.start()
        self._ready.wait()
        if not self._is_open:
            self.join()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until a worker that was started has ended; False if `timeout` seconds were not enough.

        Raises what ended the worker, if that was an error.
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

    # Inside.

    def info(self) -> WorkerInfo:
        """The worker as it describes itself to the storage."""
        options = self.options
        resting = "quiet" if self._resting else "running"
        runs = None if self._assembly is None else self._assembly.runs
        now, tick = self._clock.now(), self._clock.monotonic()
        return WorkerInfo(
            options.worker_id,
            socket.gethostname(),
            getpid(),
            options.queues,
            tuple(sorted(self.handlers)),
            options.concurrency,
            self._started_at,
            active=self.running,
            state="stopping" if self._stopping else resting,
            kind=self.kind,
            heartbeat=options.heartbeat,
            rss=memory(),
            version=__version__,
            project=self._settings.version,
            jobs=() if runs is None else running_jobs(runs, now, tick),
        )

    async def _until_done(self, assembly: Assembly) -> None:
        # A task of its own: what is on its way to the storage is not to be cut off.
        claims = asyncio.ensure_future(assembly.claims.run())
        assembly.shutdown.cut_off = claims.cancel
        try:
            await asyncio.shield(claims)
        except asyncio.CancelledError:
            if claims.cancelled():
                # Cut off, because the storage does not answer: told below.
                return
            self.stop(hurry=True)
            await asyncio.wait([claims])
            if not claims.cancelled():
                claims.result()
            raise

    def _connect(self) -> None:
        try:
            self.storage.connect()
        finally:
            if has_django():
                close_connections()

    def _rest(self, resting: bool) -> None:
        self._resting = resting
        loop, assembly = self._loop, self._assembly
        if loop is None or assembly is None:
            return
        try:
            loop.call_soon_threadsafe(assembly.claims.rest, resting)
        except RuntimeError:
            self._tell.too_late("a pause or resume request")

    def _begin_shutdown(self) -> None:
        if self._assembly is not None:
            self._assembly.shutdown.begin(hurry=self._hurrying)

    def _run_in_thread(self) -> None:
        try:
            run_loop(self.run())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()
