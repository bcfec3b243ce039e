"""Sync handlers: each runs on a thread, in its own context, and Django's connections are cleaned after it."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from functools import partial
from threading import Lock, Thread
from typing import Any

from asgiref.sync import sync_to_async

from djqueue.conf import has_django
from djqueue.core.job import Outcome
from djqueue.runtime.context import WorkerContext
from djqueue.runtime.runs import CURRENT, Run

from .connections import clean_connections, close_connections
from .execution import Execution

Adopt = Callable[[Run, Awaitable[Any]], None]
"""Continues a run whose handler has returned an awaitable."""
IDLE = 60.0
"""Seconds after which an idle thread ends."""


class ThreadExecutor:
    """Runs sync handlers, up to one per slot at once."""

    def __init__(
        self,
        worker: WorkerContext,
        execution: Execution,
        *,
        adopt: Adopt,
        pool: "CallerThread | None" = None,
    ) -> None:
        self._runs = worker.runs
        self._wake_event = worker.wake_event
        self._events = worker.events
        self._execution = execution
        self._adopt = adopt
        # The thread of a caller, and its connections, remain the caller's.
        self._cleans = has_django() and pool is None
        # Handlers see the context of the worker's caller; their own changes stay in their copy.
        self._context: Context = copy_context()
        self._pool = pool or ThreadPool(
            worker.options.concurrency,
            "djqueue-job",
            on_wake=self._clean if self._cleans else None,
            on_exit=close_connections if self._cleans else None,
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
            try:
                loop.call_soon_threadsafe(_resolve, future, value, error)
            except RuntimeError:
                # The worker has ended in the meantime, and its loop with it.
                self._events.ignored("the result of a handler")

        self._pool.submit(work, None)
        return await future

    def close(self) -> None:
        """End the threads, each after its current call."""
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

    def close(self) -> None:
        """Do nothing: the thread belongs to the caller."""


class ThreadPool:
    """Runs calls on up to `limit` threads, and wakes as few of them as possible.

    The pool wakes one idle thread at a time. When that thread takes a call, it wakes the next one if there
    are more calls. While a call runs to its end without releasing the GIL, no other thread can start, so one
    thread makes all the calls: waking a thread per job costs several times as much as a short job. A call
    that waits for I/O lets the next thread start at once.
    """

    def __init__(
        self,
        limit: int,
        name: str,
        *,
        on_wake: Callable[[], None] | None = None,
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        self._limit = limit
        self._name = name
        self._on_wake = on_wake
        """Called on a thread that was idle, before its next call."""
        self._on_exit = on_exit
        """Called on a thread at its end."""
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._lock = Lock()
        self._idle: list[Lock] = []
        """Locks that idle threads wait for. The pool wakes the thread that came last."""
        self._threads = 0
        self._waking = False
        """Whether a thread has been woken and has not taken a call yet."""
        self._closed = False

    def submit(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function(argument)`, which must not raise, on a thread."""
        self._calls.append((function, argument))
        if not self._waking:
            self._wake_one()

    def close(self) -> None:
        """End the threads: idle ones now, the others after their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for gate in idle:
            gate.release()

    def _wake_one(self) -> None:
        with self._lock:
            if self._waking or not self._calls:
                return
            if self._idle:
                self._waking = True
                self._idle.pop().release()
                return
            if self._threads >= self._limit:
                # Every thread is busy, and takes the next call when it has finished.
                return
            self._waking = True
            self._threads += 1
            number = self._threads
        # Daemon threads, because a thread may be stuck in a handler when the process should end.
        Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()

    def _serve(self) -> None:
        gate = Lock()
        gate.acquire()
        self._waking = False
        try:
            while self._take_calls() and self._wait(gate):
                self._waking = False
        finally:
            with self._lock:
                self._threads -= 1
            if self._on_exit is not None:
                self._on_exit()

    def _take_calls(self) -> bool:
        calls = self._calls
        while True:
            try:
                function, argument = calls.popleft()
            except IndexError:
                return True
            if calls and not self._waking:
                self._wake_one()
            function(argument)

    def _wait(self, gate: Lock) -> bool:
        """Wait to be woken; return False if the thread should end."""
        with self._lock:
            if self._calls:
                return True
            if self._closed:
                return False
            self._idle.append(gate)
        if not gate.acquire(timeout=IDLE):
            with self._lock:
                if gate in self._idle:
                    self._idle.remove(gate)
                    return False
            # The thread was woken at the moment of its timeout.
            gate.acquire()
        if self._on_wake is not None and self._calls:
            self._on_wake()
        return bool(self._calls) or not self._closed


def _resolve(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):
        # A future does not accept StopIteration.
        future.set_exception(RuntimeError(f"the handler raised {error!r}"))
    else:
        future.set_exception(error)
