"""Sync handlers: each runs on a thread, in its own context, and Django's connections are cleaned after it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.conf import has_django
from djqueue.core.job import Outcome
from djqueue.core.threads import after_fork
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.exits import end_copy
from djqueue.runtime.runs import CURRENT, Run

from .connections import clean_connections, close_connections
from .execution import Execution, call_on_loop
from .threadpool import ThreadPool

RETRY = 1.0
"""Seconds until another try to start a thread, after the system had none."""
Adopt = Callable[[Run, Awaitable[Any]], None]
"""Continues a run whose handler has returned an awaitable."""


class ThreadExecutor:
    """Runs sync handlers, up to one per slot at once."""

    def __init__(
        self,
        context: WorkerContext,
        execution: Execution,
        *,
        adopt: Adopt,
        pool: "CallerThread | None" = None,
    ) -> None:
        self._runs = context.runs
        self._wake_event = context.wake_event
        self._events = context.events
        self._execution = execution
        self._adopt = adopt
        # The thread of a caller, and its connections, remain the caller's.
        self._cleans = has_django() and pool is None
        self._is_copy = False
        """Whether this is a child that a handler has forked."""
        if pool is None:
            after_fork(self._forked)
        self._loop = context.loop
        # Handlers see the context of the worker's caller; their own changes stay in their copy.
        self._context: Context = copy_context()
        self._pool = pool or ThreadPool(
            context.options.concurrency,
            "djqueue-job",
            on_wake=self._clean if self._cleans else None,
            on_exit=close_connections if self._cleans else None,
            on_starved=self._wake_later,
        )
        self._run_one = self._run_in_context if pool is None else self._run

    def start(self, run: Run) -> None:
        """Start a run."""
        self._pool.submit(self._run_one, run)

    async def call(self, run: Run | None, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function for a run (None: for a batch) on a thread, as a sync handler is called."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = copy_context()

        def work(_: None) -> None:
            value, error = None, None
            try:
                value = context.run(self._call, run, partial(function, *args))
            except BaseException as raised:
                error = raised
            call_on_loop(loop, self._events, "the result of a handler", _resolve, future, value, error)

        self._pool.submit(work, None)
        return await future

    def close(self) -> None:
        """End the threads, each after its current call."""
        self._pool.close()

    def _forked(self) -> None:
        self._is_copy = True

    def _wake_later(self, error: Exception) -> None:
        self._events.no_thread(error, RETRY)
        purpose = "a job that waits for a thread"
        call_on_loop(self._loop, self._events, purpose, self._loop.call_later, RETRY, self._pool.wake)

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
            # A handler's SystemExit or KeyboardInterrupt ends its job, not the worker.
            outcome = self._execution.failed(run, error)
        if outcome is None:
            # The awaitable that the handler returned determines the outcome.
            return
        if self._runs.settle(run, outcome):
            self._wake_event.run_ended()
        else:
            self._events.ignored("the result of a handler")

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
            if self._is_copy:
                end_copy()  # The connections are the parent's.
            if self._cleans:
                # After an idle time, the pool cleans them again before the next call.
                self._clean(run)

    def _clean(self, run: Run | None = None) -> None:
        try:
            clean_connections()
        except Exception as error:
            self._events.cleanup_failed(run, error)


class CallerThread:
    """Runs calls one at a time on the thread that waits for the worker, with its database connections.

    That is the thread on which `sync_to_async` runs Django's queries: the one that has called
    `async_to_sync`, or the one that serves the coroutine which runs the worker.
    """

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()

    def submit(self, function: Callable[[Any], Any], argument: Any) -> None:
        """Call `function(argument)`, which must not raise. Called on the worker's loop."""
        call = asyncio.ensure_future(sync_to_async(function, thread_sensitive=True)(argument))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def join(self) -> None:
        """Wait until all calls have returned."""
        if self._calls:
            await asyncio.wait(self._calls)

    def wake(self) -> None:
        """Do nothing: the thread belongs to the caller."""

    close = wake


def _resolve(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif issubclass(type(error), StopIteration):
        # A future does not accept StopIteration.
        future.set_exception(RuntimeError("the handler raised StopIteration"))
    else:
        future.set_exception(error)
