"""The parts of one running worker, put together, started and ended in their order."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from djqueue.conf import Settings, has_django
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import WorkerInfo
from djqueue.middleware import layers_of
from djqueue.storage.base import Unsubscribe

from .cancellation import CancelWatch
from .claiming import ClaimLoop
from .configuration import WorkerOptions
from .connections import close_connections
from .control import WorkerControl
from .execution import Execution
from .executors import InlineExecutor
from .handlers import Handler
from .heartbeat import Heartbeat
from .maintenance import Maintenance
from .metering import Meter
from .reports import Reports
from .runs import Run
from .shutdown import Shutdown
from .stopping import Stop
from .workercontext import WorkerContext

GOODBYE = 5.0
"""Seconds that the storage has to take note of the worker's end."""


class StopWorker(Protocol):
    """`Worker.stop`."""

    def __call__(self, *, hurry: bool = False) -> None: ...


class Assembly:
    """Made on the loop that the worker runs on."""

    def __init__(
        self,
        worker_context: WorkerContext,
        handlers: dict[str, Handler],
        options: WorkerOptions,
        settings: Settings,
        *,
        info: Callable[[], WorkerInfo],
        rest: Callable[[bool], None],
        stop: StopWorker,
    ) -> None:
        self.runs = worker_context.runs
        self._storage = worker_context.storage
        self._tell = worker_context.tell
        self._jobs_came = worker_context.wake_event.jobs_came
        self._options = options
        self._info = info
        django = has_django()
        on_exit = close_connections if django else None
        execution = Execution(settings, worker_context.random, worker_context.tell)
        executor = self._executor = InlineExecutor(
            worker_context,
            execution,
            handlers.values(),
            options.concurrency,
            layers=layers_of(settings),
            django=django,
        )
        self._reports = Reports(worker_context, settings, self._on_refused)
        steering = WorkerControl(worker_context, info=info, rest=rest, stop=stop)
        self._heartbeat = Heartbeat(
            worker_context,
            options.heartbeat,
            info=info,
            obey=steering.obey,
            stop_run=executor.stop,
            on_exit=on_exit,
        )
        self._watch = CancelWatch(worker_context, self._heartbeat, executor.stop)
        self._maintenance = Maintenance(worker_context, options.queues, on_exit) if options.maintain else None
        self._meter = Meter(worker_context)
        self.claims = ClaimLoop(
            worker_context,
            options,
            handlers,
            executor,
            self._reports,
            self._heartbeat,
            self._watch,
            self._meter,
            enough=stop,
        )
        self.shutdown = Shutdown(worker_context, options.shutdown_timeout, self.claims, executor)
        self._unlisten: Unsubscribe | None = None
        self._unfollow: Unsubscribe | None = None

    async def start(self) -> None:
        """Register the worker and start its threads.

        A storage that has become unavailable since it was connected does not end the worker: the heartbeat
        registers it later. Raises any other error of the storage.
        """
        storage, queues = self._storage, self._options.queues
        try:
            await storage.acall(storage.workers.register, self._info())
        except StorageUnavailableError as error:
            self._heartbeat.note_unavailable(error)
        # Before the first claim, so that no job can come unnoticed between the two.
        self._unlisten = await storage.acall(storage.listen, queues, self._jobs_came)
        worker_id = self._options.worker_id
        self._unfollow = await storage.acall(storage.workers.on_command, worker_id, self._heartbeat.hasten)
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
            async with asyncio.timeout(GOODBYE):
                await self._say_goodbye()
        except Exception as error:
            # The storage forgets silent workers by itself.
            self._tell.away("unregister", error)
        self._tell.worker_stopped()

    async def _say_goodbye(self) -> None:
        await self._watch.close()
        await self._meter.close()
        for leave in (self._unlisten, self._unfollow):
            if leave is not None:
                await self._storage.acall(leave)
        await self._storage.acall(self._storage.workers.unregister, self._options.worker_id)

    def _stop_threads(self) -> None:
        if self._maintenance is not None:
            self._maintenance.stop()
        self._heartbeat.stop()

    def _on_refused(self, run: Run) -> None:
        if run.outcome is None:
            self._executor.stop(run, Stop.LOST)
