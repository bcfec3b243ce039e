"""The parts of one running worker, put together, started and ended in their order."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Protocol

from djqueue.conf import Settings
from djqueue.core.clock import Clock
from djqueue.core.job import WorkerInfo
from djqueue.storage.base import Storage, Unsubscribe

from .bell import Bell
from .cancellation import CancelWatch
from .claiming import ClaimLoop, ClaimRules
from .configuration import WorkerOptions
from .connections import close_connections, has_django
from .execution import Execution
from .executors import InlineExecutor
from .handlers import Handler
from .heartbeat import Heartbeat
from .maintenance import Maintenance
from .reports import Reports
from .runs import Run, Runs
from .shutdown import Shutdown
from .stopping import Stop
from .telling import Teller


class StopWorker(Protocol):
    """`Worker.stop`."""

    def __call__(self, *, hurry: bool = False) -> None: ...


class Assembly:
    """Made on the loop that the worker runs on."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        storage: Storage,
        handlers: dict[str, Handler],
        options: WorkerOptions,
        settings: Settings,
        clock: Clock,
        random: Random,
        tell: Teller,
        *,
        info: Callable[[], WorkerInfo],
        stop: StopWorker,
    ) -> None:
        self._storage = storage
        self._options = options
        self._tell = tell
        self._info = info
        django = has_django()
        on_exit = close_connections if django else None
        self.runs = Runs()
        self._bell = Bell(loop)
        execution = Execution(settings, random, tell)
        self._executor = InlineExecutor(
            loop, options.concurrency, execution, self.runs, self._bell, tell, clock, django=django
        )
        self._reports = Reports(storage, loop, clock, settings.max_payload, tell, self._on_refused)
        self._heartbeat = Heartbeat(
            storage,
            self.runs,
            options.heartbeat,
            clock,
            tell,
            info=info,
            stop_run=self._executor.stop,
            on_exit=on_exit,
        )
        self._watch = CancelWatch(loop, storage, self.runs, self._heartbeat, clock, tell, self._executor.stop)
        self._maintenance = Maintenance(storage, random, tell, on_exit) if options.maintain else None
        self.claims = ClaimLoop(
            storage,
            ClaimRules(
                worker_id=options.worker_id,
                queues=options.queues,
                concurrency=options.concurrency,
                until_empty=options.until_empty,
                max_jobs=options.max_jobs,
            ),
            handlers,
            self.runs,
            self._bell,
            self._executor,
            self._reports,
            self._heartbeat,
            self._watch,
            clock,
            random,
            tell,
            enough=stop,
        )
        self.shutdown = Shutdown(
            loop,
            options.shutdown_timeout,
            self.claims,
            self.runs,
            self._bell,
            self._executor,
            tell,
        )
        self._unlisten: Unsubscribe | None = None

    async def start(self) -> None:
        """Make the worker known and let its threads begin. Raises what the storage raises."""
        storage, queues = self._storage, self._options.queues
        await storage.acall(storage.register_worker, self._info())
        # Before the first claim, so that no job can come unnoticed between the two.
        self._unlisten = await storage.acall(storage.listen, queues, self._bell.jobs_came)
        self._heartbeat.start()
        if self._maintenance is not None:
            self._maintenance.start()
        self._tell.worker_started()

    async def close(self) -> None:
        """End threads and subscriptions, and make the worker's end known."""
        self.shutdown.close()
        await self._reports.close()
        await asyncio.to_thread(self._stop_threads)
        self._executor.close()
        if self.runs.untold or self.runs.ended:
            self._tell.undelivered(len(self.runs.untold) + len(self.runs.ended))
        try:
            await self._watch.close()
            if self._unlisten is not None:
                await self._storage.acall(self._unlisten)
            await self._storage.acall(self._storage.unregister_worker, self._options.worker_id)
        except Exception as error:
            # The storage forgets silent workers by itself.
            self._tell.away("unregister", error)
        self._tell.worker_stopped()

    def _stop_threads(self) -> None:
        if self._maintenance is not None:
            self._maintenance.stop()
        self._heartbeat.stop()

    def _on_refused(self, run: Run) -> None:
        if run.outcome is None:
            self._executor.stop(run, Stop.LOST)
