"""An event loop with simulated time, whose callbacks belong to simulated processes."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any

START = 1_800_000_000_000
"""UTC milliseconds at which a simulation begins."""


class Crashed(BaseException):
    """Raised inside a process that has just been killed: nothing of it goes on."""


class Process:
    """A simulated operating system process."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.alive = True
        self.frozen = False
        self.deferred: deque[asyncio.Handle] = deque()
        """Callbacks whose turn came while the process was frozen."""

    def __repr__(self) -> str:
        return self.name

    @property
    def is_running(self) -> bool:
        """Whether the process is neither dead nor frozen."""
        return self.alive and not self.frozen

    def context(self) -> Context:
        """A context in which callbacks belong to this process."""
        context = copy_context()
        context.run(PROCESS.set, self)
        return context

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as this process, at once."""
        return self.context().run(function, *args)


PROCESS: ContextVar[Process | None] = ContextVar("PROCESS", default=None)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Runs one callback per `step`; time passes only when nothing is ready.

    The order of one process's callbacks is kept. Which process goes next is random. Callbacks of dead
    processes are dropped, and those of frozen ones are deferred.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._now = 0.0
        self._queue: list[asyncio.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """Kept, because a task of a dead process that was thrown away would run its `finally` blocks."""
        self.failed: Callable[[str], None] = lambda message: None
        """Called with each unhandled exception of a process that is alive."""
        self.set_task_factory(self._new_task)

    def time(self) -> float:
        """See `asyncio.BaseEventLoop.time`."""
        return self._now

    def step(self) -> bool:
        """Run one callback; returns False if none is left."""
        while True:
            self._collect()
            if not self._queue:
                if not self._scheduled:  # type: ignore[attr-defined]
                    return False
                self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
                continue
            handle = self._choose()
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if handle._cancelled or (process is not None and not process.alive):
                continue
            if process is not None and process.frozen:
                process.deferred.append(handle)
                continue
            handle._run()
            return True

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on, with all that it has missed."""
        process.frozen = False
        self._queue[:0] = process.deferred
        process.deferred.clear()

    def spawn(self, process: Process, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task of a process."""
        task = self.create_task(coroutine, context=process.context())
        task.add_done_callback(self._ended, context=process.context())
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        # Nobody awaits it, and it is kept: its exception would be reported only after the simulation.
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"message": "a task ended", "exception": error})

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """See `asyncio.BaseEventLoop.call_exception_handler`: what nobody handles is a finding."""
        error = context.get("exception")
        process = PROCESS.get()
        if isinstance(error, Crashed) or (process is not None and not process.alive) or error is None:
            return
        self.failed(f"unhandled exception in {process}: {context['message']}: {error!r}")

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """See `asyncio.BaseEventLoop.run_in_executor`: the call is a step of its own on this thread."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                value = func(*args)
            except BaseException as error:
                if not future.cancelled():
                    future.set_exception(error)
                if isinstance(error, Crashed):
                    future.exception()
            else:
                if not future.cancelled():
                    future.set_result(value)

        self.call_soon(run)
        return future

    def _new_task(self, loop: Any, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._tasks.append(task)
        if len(self._tasks) % 1_000 == 0:
            self._tasks = [one for one in self._tasks if not one.done()]
        return task

    def _collect(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        self._queue += ready
        ready.clear()
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._queue.append(handle)

    def _choose(self) -> asyncio.Handle:
        queue = self._queue
        if len(queue) == 1:
            return queue.pop()
        heads: dict[Any, int] = {}
        for at, handle in enumerate(queue):
            heads.setdefault(handle._context.get(PROCESS), at)  # type: ignore[attr-defined]
        return queue.pop(self._random.choice(list(heads.values())))

    def _write_to_self(self) -> None:
        """Nothing sleeps in a selector."""


class SimulatedClock:
    """The machine's clock: `now` may be set, `monotonic` follows the loop."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.offset = START

    def now(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return self.monotonic() + self.offset

    def monotonic(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return int(self._loop.time() * 1_000)

    def elapsed(self) -> int:
        """See `djqueue.core.clock.Clock`."""
        return self.monotonic()
