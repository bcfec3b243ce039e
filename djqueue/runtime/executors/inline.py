"""Handlers in the worker's own process: coroutines on its loop, plain functions on its threads."""

import asyncio

from djqueue.core.clock import Clock
from djqueue.runtime.bell import Bell
from djqueue.runtime.connections import DatabaseThreads
from djqueue.runtime.execution import Execution
from djqueue.runtime.handlers import Style
from djqueue.runtime.runs import Run, Runs
from djqueue.runtime.stopping import Stop
from djqueue.runtime.telling import Teller

from .tasks import TaskExecutor
from .threads import ThreadExecutor


class InlineExecutor:
    """Starts runs, keeps their deadlines, and interrupts those that can be interrupted."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        concurrency: int,
        execution: Execution,
        runs: Runs,
        bell: Bell,
        tell: Teller,
        clock: Clock,
        *,
        django: bool,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._tell = tell
        self._database = DatabaseThreads(loop) if django else None
        self._threads = ThreadExecutor(
            concurrency, execution, runs, bell, tell, django=django, adopt=self._adopt
        )
        self._tasks = TaskExecutor(loop, execution, runs, bell, tell, self._database, self._threads.call)

    def start(self, run: Run) -> None:
        """Begin a run. Called on the loop; no code of the handler runs before this returns."""
        timeout = run.claimed.options.timeout
        if timeout is not None:
            run.deadline = self._clock.now() + timeout
            run.timer = self._loop.call_later(timeout / 1_000, self._time_out, run)
        handler = run.handler
        if handler.is_async or handler.style is Style.CALLBACK:
            self._tasks.start(run)
        else:
            self._threads.start(run)

    def stop(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop: its event is set at once, its task cancelled. From any thread."""
        if not run.ask_to_stop(reason):
            return
        self._tell.stop_asked(run)
        try:
            self._loop.call_soon_threadsafe(self._tasks.interrupt, run)
        except RuntimeError:
            # The loop has ended, and with it the task.
            self._tell.too_late("a request to stop")

    def close(self) -> None:
        """Let threads and connections go."""
        self._threads.close()
        if self._database is not None:
            self._database.close()

    def _adopt(self, run: Run, awaitable: object) -> None:
        self._tasks.adopt(run, awaitable)  # type: ignore[arg-type]

    def _time_out(self, run: Run) -> None:
        self.stop(run, Stop.TIMEOUT)
        if run.task is None:
            self._tell.overran(run)
