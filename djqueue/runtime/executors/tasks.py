"""Async handlers: each a task on the worker's event loop, in a context of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

from djqueue.core.job import Outcome
from djqueue.runtime.bell import Bell
from djqueue.runtime.connections import DatabaseThreads
from djqueue.runtime.context import CURRENT
from djqueue.runtime.execution import Execution
from djqueue.runtime.handlers import Style
from djqueue.runtime.runs import Run, Runs
from djqueue.runtime.telling import Teller

from .callback import call_with_done
from .threads import call_handler

CallInThread = Callable[..., Awaitable[Any]]


class TaskExecutor:
    """Runs async handlers, and callback handlers, which end when they say so."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        execution: Execution,
        runs: Runs,
        bell: Bell,
        tell: Teller,
        threads: DatabaseThreads | None,
        call_in_thread: CallInThread,
    ) -> None:
        self._loop = loop
        self._execution = execution
        self._runs = runs
        self._bell = bell
        self._tell = tell
        self._threads = threads
        self._call_in_thread = call_in_thread

    def start(self, run: Run) -> None:
        """Begin a run."""
        run.task = self._loop.create_task(self._run(run))

    def adopt(self, run: Run, awaitable: Awaitable[Any]) -> None:
        """Go on with a run whose handler returned, on a thread, what has to be awaited."""
        context = copy_context()
        try:
            self._loop.call_soon_threadsafe(self._continue, run, awaitable, context)
        except RuntimeError:
            # The worker has ended in the meantime, and with it the loop.
            self._tell.too_late("the end of a handler")

    def interrupt(self, run: Run) -> None:
        """Cancel the run's task at its next `await`. Called on the loop."""
        # One that has not begun finds out by itself: cancelled now, it could not even end its run.
        if run.task is not None and run.begun:
            run.task.cancel()

    def _continue(self, run: Run, awaitable: Awaitable[Any], context: Context) -> None:
        if run.stop:
            self._settle(run, self._execution.failed(run, asyncio.CancelledError()))
            if isinstance(awaitable, Coroutine):
                awaitable.close()
            return
        run.task = self._loop.create_task(self._await(run, awaitable), context=context)

    async def _run(self, run: Run) -> None:
        CURRENT.set(run)
        if run.stop:
            error = asyncio.CancelledError("stopped before it began")
            self._settle(run, self._execution.failed(run, error))
            return
        outcome = self._execution.begin(run)
        if outcome is not None:
            self._settle(run, outcome)
            return
        if run.handler.style is Style.CALLBACK:
            await self._await(run, call_with_done(run, self._call_in_thread, self._tell))
        else:
            await self._await(run, None)

    async def _await(self, run: Run, awaitable: Awaitable[Any] | None) -> None:
        place = None if self._threads is None else self._threads.take()
        try:
            if awaitable is None:
                awaitable = call_handler(run.handler, run)
            outcome = self._execution.completed(run, await awaitable)
        except GeneratorExit:
            # The loop throws the task away: there is nobody left to be told.
            raise
        except BaseException as error:
            # SystemExit and KeyboardInterrupt of a handler concern its job, not this worker.
            outcome = self._execution.failed(run, error)
        if place is not None and self._threads is not None:
            await self._clean(run, place)
        self._settle(run, outcome)

    async def _clean(self, run: Run, place: Any) -> None:
        assert self._threads is not None
        try:
            await self._threads.give_back(place, interrupted=bool(run.stop))
        except (Exception, asyncio.CancelledError) as error:
            self._tell.cleanup_failed(run, error)

    def _settle(self, run: Run, outcome: Outcome) -> None:
        if self._runs.settle(run, outcome):
            self._bell.run_ended_here()
        else:
            self._tell.too_late("the end of a handler")
