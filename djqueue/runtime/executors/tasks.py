"""Async handlers: each a task on the worker's event loop, in a context of its own."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from djqueue.core.job import Outcome
from djqueue.runtime.connections import DatabaseThreads, ThreadBinding
from djqueue.runtime.context import CURRENT
from djqueue.runtime.execution import Execution
from djqueue.runtime.runs import Run
from djqueue.runtime.workercontext import WorkerContext

EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""A task's first step is taken at once, where Python can: a job that waits for nothing is over with it."""


class TaskExecutor:
    """Runs async handlers, and what other handlers turned out to leave to be awaited."""

    def __init__(
        self,
        worker_context: WorkerContext,
        execution: Execution,
        threads: DatabaseThreads | None,
    ) -> None:
        loop = self._loop = worker_context.loop
        self._runs = worker_context.runs
        self._wake_event = worker_context.wake_event
        self._tell = worker_context.tell
        self._execution = execution
        self._threads = threads
        # Without the detour over the loop, which only a loop with a factory of its own needs, and
        # without the name that would be made up, a task costs a third less.
        plain = loop.get_task_factory() is None and isinstance(loop, asyncio.BaseEventLoop)
        self._new_task: Callable[..., asyncio.Task[None]]
        self._new_task = partial(asyncio.Task, loop=loop, **EAGER) if plain else loop.create_task

    def start(self, run: Run) -> None:
        """Begin a run, which may have ended when this returns."""
        task = self._new_task(self._run(run), name=run.claimed.id)
        if not task.done():
            run.task = task

    def adopt(self, run: Run, awaitable: Awaitable[Any]) -> None:
        """Go on with a run whose handler returned, on a thread, what has to be awaited."""
        context = copy_context()
        try:
            self._loop.call_soon_threadsafe(self._continue, run, awaitable, context)
        except RuntimeError:
            # The worker has ended in the meantime, and with it the loop.
            self._tell.too_late("the result of a handler")

    async def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call an async function for several runs, as the async handler of one is called."""
        threads = self._threads
        place = None if threads is None else threads.take()
        interrupted = True
        try:
            value = await function(*args)
            interrupted = False
        except asyncio.CancelledError:
            raise
        except BaseException:
            interrupted = False
            raise
        finally:
            if place is not None and threads is not None:
                if place.executor.used:
                    await self._clean(None, threads, place, interrupted=interrupted)
                else:
                    threads.put_back(place)
        return value

    def interrupt(self, run: Run) -> None:
        """Cancel the run's task at its next `await`. Called by the loop, in its turn.

        That is never before the first step of the task, which was taken, or whose turn came up, when the
        task was made: cancelled earlier, it could not even end its run.
        """
        if run.task is not None:
            run.task.cancel()

    async def _run(self, run: Run) -> None:
        CURRENT.set(run)
        threads, place = self._threads, None
        outcome: Outcome | None
        try:
            outcome = self._execution.stopped(run) if run.stop else self._execution.begin(run)
            if outcome is None:
                place = None if threads is None else threads.take()
                outcome = self._execution.completed(run, await run.handler.call(run))
        except GeneratorExit:
            # The loop throws the task away: there is nobody left to be told.
            raise
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a handler concern its job, not this worker.
            outcome = self._execution.failed(run, error)
        if place is not None and threads is not None:
            if place.executor.used:
                await self._clean(run, threads, place, interrupted=bool(run.stop))
            else:
                threads.put_back(place)
        # The task holds the run: in a circle, both would live until the garbage collector comes.
        run.task = None
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended_here()
        else:
            self._tell.too_late("the result of a handler")

    def _continue(self, run: Run, awaitable: Awaitable[Any], context: Context) -> None:
        """Make a task of what a handler returned, as if it had been async from the start."""

        async def rest(_: Run) -> Any:
            return await awaitable

        if run.stop and isinstance(awaitable, Coroutine):
            awaitable.close()
        run.handler = run.handler.continued(rest)
        run.task = self._loop.create_task(self._run(run), context=context)

    async def _clean(
        self, run: Run | None, threads: DatabaseThreads, place: ThreadBinding, *, interrupted: bool
    ) -> None:
        try:
            await threads.clean(place, interrupted=interrupted)
        except (Exception, asyncio.CancelledError) as error:
            self._tell.cleanup_failed(run, error)
