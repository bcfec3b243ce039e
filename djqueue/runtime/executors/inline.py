"""The executor in the worker's own process: coroutines on its loop, plain functions on its threads.

A handler that continues after its timeout cannot be stopped here. A supervised worker finishes its other
jobs, reports the stuck ones as timed out, and ends its process, so that their threads end. Their jobs are
retried after that. Any other worker logs them.
"""

import asyncio
from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from typing import Any

from djqueue.conf import has_django
from djqueue.core.job import Outcome
from djqueue.core.workers import ProcessInfo
from djqueue.middleware import layers_of
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.events import RunEvents
from djqueue.runtime.handlers import Handler, Style
from djqueue.runtime.outcomes import release
from djqueue.runtime.runs import Run, Stop
from djqueue.runtime.tracebacks import message_of

from .batching import Batcher
from .connections import DatabaseThreads
from .execution import Execution, call_on_loop, wrap_in_middleware
from .tasks import TaskExecutor
from .threads import CallerThread, ThreadExecutor

OVERRUN_PATIENCE = 5.0
"""Seconds after its timeout in which a handler should stop."""
OVERRUN_LOG_INTERVAL = 60.0
"""Seconds between two log entries about a handler that does not."""
OVERRUN_RETRY_DELAY = 8_000
"""Minimum of milliseconds until the retry: the process ends before, even if the storage hangs."""


class CallbackError(Exception):
    """The error of a callback handler that was not an exception."""


class InlineExecutor:
    """Starts runs, watches their timeouts, and interrupts those that can be interrupted.

    With a `caller`, plain functions and Django's database calls run on the caller's thread.
    """

    def __init__(self, context: WorkerContext, caller: CallerThread | None = None) -> None:
        self._loop = context.loop
        self._clock = context.clock
        self._events = context.events
        self._control = context.control
        execution = self._execution = Execution(context.settings, context.random, context.events)
        self._database = DatabaseThreads(context.loop) if has_django() and caller is None else None
        self._tasks = TaskExecutor(context, execution, self._database)
        self._threads = ThreadExecutor(context, execution, adopt=self._tasks.adopt, pool=caller)
        self._batchers: list[Batcher] = []
        layers = layers_of(context.settings)
        for handler in context.handlers.values():
            self._prepare(handler, context.options.concurrency)
            wrap_in_middleware(handler, layers)

    def start(self, run: Run) -> None:
        """Start a run, on the loop. The first step of an async handler may run before this returns."""
        if run.claimed.options.timeout is not None and run.handler.batch is None:
            self._set_deadline(run)
        if run.handler.on_loop:
            self._tasks.start(run)
        else:
            self._threads.start(run)

    def stop(self, run: Run, reason: Stop) -> None:
        """Ask a run to stop: set its event at once, and cancel its task. From any thread."""
        if not run.ask_to_stop(reason):
            return
        self._events.stop_requested(run)
        call_on_loop(self._loop, self._events, "a cancel request", self._tasks.interrupt, run)

    def release_waiting(self) -> None:
        """Return the members of batches that have not been called to their queues."""
        for batcher in self._batchers:
            batcher.close()

    def kill(self) -> None:
        """Do nothing: threads cannot be killed, and tasks were cancelled."""

    def give_up(self, run: Run) -> Outcome:
        """Return the outcome of a run that has not stopped in time: timed out, or else released."""
        if run.overran:
            outcome = self._execution.failed(run, CancelledError("did not stop after its timeout"))
            if outcome.kind == "retry":
                return outcome._replace(delay=max(outcome.delay, OVERRUN_RETRY_DELAY))
            return outcome
        return release(run.claimed)

    def process_infos(self) -> tuple[ProcessInfo, ...]:
        """Return none: all jobs run in this process."""
        return ()

    def close(self) -> None:
        """Release threads and connections."""
        self._threads.close()
        if self._database is not None:
            self._database.close()

    def _set_deadline(self, run: Run) -> None:
        """Start the timeout of a run, if it has one."""
        timeout = run.claimed.options.timeout
        if timeout is not None:
            run.deadline = self._clock.now() + timeout
            run.timer = self._loop.call_later(timeout / 1_000, self._time_out, run)

    def _prepare(self, handler: Handler, concurrency: int) -> None:
        if handler.style is Style.CALLBACK:
            handler.call = _as_coroutine_function(handler, self._threads.call, self._events)
        elif handler.batch is not None:
            batcher = Batcher(
                handler,
                concurrency,
                self._tasks,
                self._threads,
                stop=self.stop,
                set_deadline=self._set_deadline,
            )
            self._batchers.append(batcher)
            handler.call = batcher.join

    def _time_out(self, run: Run) -> None:
        self.stop(run, Stop.TIMEOUT)
        if run.task is None:
            self._events.overran(run)
        self._loop.call_later(OVERRUN_PATIENCE, self._check_overrun, run)

    def _check_overrun(self, run: Run) -> None:
        """End the process if a supervisor starts another one, or else log that the handler still runs."""
        if run.outcome is not None or self._control.stopping:
            return
        late = run.overran_by(self._clock.monotonic()) / 1_000
        if self._control.is_replaceable:
            self._events.stuck(run, late)
            self._control.recycle()
            return
        self._events.overrunning(run, late)
        self._loop.call_later(OVERRUN_LOG_INTERVAL, self._check_overrun, run)


def _as_coroutine_function(
    handler: Handler, call_in_thread: Callable[..., Awaitable[Any]], events: RunEvents
) -> Callable[[Run], Awaitable[Any]]:
    """Return a callback handler as an async one, which returns or raises what `done` receives."""

    async def call(run: Run) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def end(error: Any, result: Any) -> None:
            if not future.done():
                _resolve(future, error, result)
            elif not future.cancelled():
                events.called_twice(run)

        def done(error: Any = None, result: Any = None) -> None:
            """End the job with an error (an exception or text) or a result. From any thread."""
            call_on_loop(loop, events, "the result of a handler", end, error, result)

        if handler.is_async:
            await handler.function(run.context, done)
        else:
            await call_in_thread(run, handler.function, run.context, done)
        return await future

    return call


def _resolve(future: "asyncio.Future[Any]", error: Any, result: Any) -> None:
    if error is None:
        future.set_result(result)
    elif issubclass(type(error), BaseException) and not issubclass(type(error), StopIteration):
        future.set_exception(error)
    else:
        # A future does not accept StopIteration.
        future.set_exception(CallbackError(message_of(error)))
