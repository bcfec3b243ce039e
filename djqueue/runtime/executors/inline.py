"""Handlers in the worker's own process: coroutines on its loop, plain functions on its threads."""

from collections.abc import Iterable

from djqueue.middleware import Layers
from djqueue.runtime.connections import DatabaseThreads
from djqueue.runtime.execution import Execution
from djqueue.runtime.handlers import Handler, Style
from djqueue.runtime.runs import Run
from djqueue.runtime.stopping import Stop
from djqueue.runtime.workercontext import WorkerContext

from .batching import Batcher
from .callback import as_coroutine_function
from .surrounding import surround
from .tasks import TaskExecutor
from .threads import ThreadExecutor


class InlineExecutor:
    """Starts runs, keeps their deadlines, and interrupts those that can be interrupted."""

    def __init__(
        self,
        worker_context: WorkerContext,
        execution: Execution,
        handlers: Iterable[Handler],
        concurrency: int,
        *,
        layers: Layers,
        django: bool,
    ) -> None:
        self._loop = worker_context.loop
        self._clock = worker_context.clock
        self._tell = worker_context.tell
        self._database = DatabaseThreads(worker_context.loop) if django else None
        self._tasks = TaskExecutor(worker_context, execution, self._database)
        self._threads = ThreadExecutor(
            worker_context, execution, concurrency, django=django, adopt=self._tasks.adopt
        )
        self._gatherers: list[Batcher] = []
        for handler in handlers:
            if handler.style is Style.CALLBACK:
                handler.call = as_coroutine_function(handler, self._threads.call, worker_context.tell)
            elif handler.batch is not None:
                batcher = Batcher(
                    handler, concurrency, self._tasks, self._threads, begin=self._set_deadline, stop=self.stop
                )
                self._gatherers.append(batcher)
                handler.call = batcher.join
            surround(handler, layers)

    def start(self, run: Run) -> None:
        """Begin a run, on the loop. The first step of an async handler may be taken before this returns."""
        if run.claimed.options.timeout is not None and run.handler.batch is None:
            self._set_deadline(run)
        if run.handler.on_loop:
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
            self._tell.too_late("a cancel request")

    def give_back_gathered(self) -> None:
        """The worker stops: members of batches whose call has not begun are given back."""
        for batcher in self._gatherers:
            batcher.close()

    def close(self) -> None:
        """Let threads and connections go."""
        self._threads.close()
        if self._database is not None:
            self._database.close()

    def _set_deadline(self, run: Run) -> None:
        timeout = run.claimed.options.timeout
        if timeout is not None:
            run.deadline = self._clock.now() + timeout
            run.timer = self._loop.call_later(timeout / 1_000, self._time_out, run)

    def _time_out(self, run: Run) -> None:
        self.stop(run, Stop.TIMEOUT)
        if run.task is None:
            self._tell.overran(run)
