"""Sync handlers: each on a thread, in a context of its own, with Django's connections cleaned."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from djqueue.core.job import Outcome
from djqueue.runtime.connections import clean_connections, close_connections
from djqueue.runtime.context import CURRENT
from djqueue.runtime.execution import Execution
from djqueue.runtime.runs import Run
from djqueue.runtime.workercontext import WorkerContext

from .pool import ThreadPool

Adopt = Callable[[Run, Awaitable[Any]], None]
"""Takes over a run whose handler turned out to return something to be awaited."""


class ThreadExecutor:
    """Runs sync handlers, as many at once as there are slots."""

    def __init__(
        self,
        worker_context: WorkerContext,
        execution: Execution,
        concurrency: int,
        *,
        django: bool,
        adopt: Adopt,
    ) -> None:
        self._runs = worker_context.runs
        self._wake_event = worker_context.wake_event
        self._tell = worker_context.tell
        self._execution = execution
        self._django = django
        self._adopt = adopt
        # What the worker's caller has set is seen by its handlers; what they set, by nobody else.
        self._context: Context = copy_context()
        self._pool = ThreadPool(
            concurrency,
            "djqueue-job",
            on_wake=self._clean if django else None,
            on_exit=close_connections if django else None,
        )

    def start(self, run: Run) -> None:
        """Begin a run."""
        self._pool.submit(self._run_in_context, run)

    async def call(self, run: Run | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function for a run (None: for several), on a thread, as a sync handler is called."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()

        def work(_: None) -> None:
            value, error = None, None
            try:
                value = context.run(self._call, run, partial(function, *args))
            except BaseException as raised:
                error = raised
            try:
                loop.call_soon_threadsafe(_resolve, future, value, error)
            except RuntimeError:
                # The worker has ended in the meantime, and with it the loop.
                self._tell.too_late("the result of a handler")

        self._pool.submit(work, None)
        return await future

    def close(self) -> None:
        """Let the threads go."""
        self._pool.close()

    def _run_in_context(self, run: Run) -> None:
        self._context.copy().run(self._run, run)

    def _run(self, run: Run) -> None:
        CURRENT.set(run)
        outcome: Outcome | None
        try:
            if run.stop:
                outcome = self._execution.stopped(run)
            else:
                outcome = self._execution.begin(run) or self._outcome(run)
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a handler concern its job, not this worker.
            outcome = self._execution.failed(run, error)
        if outcome is None:
            # It comes with what the handler turned out to leave to be awaited.
            return
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended()
        else:
            self._tell.too_late("the result of a handler")

    def _outcome(self, run: Run) -> Outcome | None:
        value = self._call(run, partial(run.handler.call, run))
        if value is not None and hasattr(value, "__await__"):
            self._adopt(run, value)
            return None
        return self._execution.completed(run, value)

    def _call(self, run: Run | None, call: Callable[[], Any]) -> Any:
        try:
            return call()
        finally:
            if self._django:
                # Before its next call it is done again only if the thread has been idle.
                self._clean(run)

    def _clean(self, run: Run | None = None) -> None:
        try:
            clean_connections()
        except Exception as error:
            self._tell.cleanup_failed(run, error)


def _resolve(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):
        # No future takes one.
        future.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        future.set_exception(error)
