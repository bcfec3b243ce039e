"""Async handlers: each runs as a task on the worker's event loop, in its own context."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.codecs import PLAIN
from djqueue.core.job import Outcome
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.owntasks import hidden, own_task
from djqueue.runtime.runs import CURRENT, Run

from .connections import DatabaseThreads, ThreadBinding
from .execution import Execution, call_on_loop

EAGER: dict[str, Any] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Options that run a task's first step at once, where Python can. A job that never waits ends with it."""


class TaskExecutor:
    """Runs async handlers, and awaitables that sync handlers return."""

    def __init__(self, context: WorkerContext, execution: Execution, threads: DatabaseThreads | None) -> None:
        loop = self._loop = context.loop
        self._runs = context.runs
        self._wake_event = context.wake_event
        self._events = context.events
        self._execution = execution
        self._threads = threads
        # A task costs a third less when it is created directly, which a loop with a task factory rules out,
        # and with a given name.
        plain = loop.get_task_factory() is None
        self._new_task: Callable[..., asyncio.Task[None]]
        self._new_task = partial(asyncio.Task, loop=loop, **EAGER) if plain else loop.create_task

    def start(self, run: Run) -> None:
        """Start a run, which may have ended when this returns."""
        task = self._new_task(self._run(run), name=run.claimed.id)
        if not task.done():
            run.task = hidden(task)

    def adopt(self, run: Run, awaitable: Awaitable[Any]) -> None:
        """Continue a run whose handler returned an awaitable, on a thread."""
        context = copy_context()
        purpose = "the result of a handler"
        call_on_loop(self._loop, self._events, purpose, self._continue, run, awaitable, context)

    async def call(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call an async function for a batch, as an async handler is called for a run."""
        threads = self._threads
        binding = None if threads is None else threads.take()
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
            if binding is not None and threads is not None:
                if binding.executor.used:
                    await self._clean(None, threads, binding, interrupted=interrupted)
                else:
                    threads.put_back(binding)
        return value

    def interrupt(self, run: Run) -> None:
        """Cancel the run's task at its next `await`. Scheduled on the loop.

        Being scheduled, this comes after the first step of the task, which runs or is scheduled when the task
        is created. A task cancelled before that could not settle its run.
        """
        if run.task is not None:
            run.task.cancel()

    async def _run(self, run: Run) -> None:
        CURRENT.set(run)
        threads, binding = self._threads, None
        outcome: Outcome | None
        content_type = run.claimed.options.content_type
        try:
            if run.stop:
                outcome = self._execution.stopped(run)
            elif content_type in PLAIN:
                outcome = self._execution.begin(run)
                if outcome is None:
                    binding = None if threads is None else threads.take()
                    outcome = self._execution.completed(run, await run.handler.call(run))
            else:
                # A codec of the project may block or query the database.
                binding = None if threads is None else threads.take()
                outcome = await sync_to_async(self._execution.begin)(run)
                if outcome is None:
                    value = await run.handler.call(run)
                    outcome = await sync_to_async(self._execution.completed)(run, value)
        except BaseException as error:
            if is_discarded(error):
                raise
            # A handler's SystemExit or KeyboardInterrupt ends its job, not the worker.
            outcome = self._execution.failed(run, error)
        if binding is not None and threads is not None:
            if binding.executor.used:
                await self._clean(run, threads, binding, interrupted=bool(run.stop))
            else:
                threads.put_back(binding)
        # The task refers to the run: a cycle would keep both alive until the garbage collector runs.
        run.task = None
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended_here()
        else:
            self._events.ignored("the result of a handler")

    def _continue(self, run: Run, awaitable: Awaitable[Any], context: Context) -> None:
        """Await what a handler returned, as if the handler had been async."""

        async def rest(_: Run) -> Any:
            return await awaitable

        if run.stop and isinstance(awaitable, Coroutine):
            awaitable.close()
        run.handler = run.handler.continued(rest)
        run.task = own_task(self._loop, self._run(run), context)

    async def _clean(
        self, run: Run | None, threads: DatabaseThreads, binding: ThreadBinding, *, interrupted: bool
    ) -> None:
        try:
            await threads.clean(binding, interrupted=interrupted)
        except (Exception, asyncio.CancelledError) as error:
            self._events.cleanup_failed(run, error)


def is_discarded(error: BaseException) -> bool:
    """Return whether the current task is discarded, which raises GeneratorExit: nothing waits for its end."""
    # A handler may raise GeneratorExit, too, while its loop runs the task.
    return type(error) is GeneratorExit and asyncio._get_running_loop() is None
