"""Loops of a worker: its event loop, and threads that repeat an action."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from djqueue.conf import has_django
from djqueue.core.logs import Log
from djqueue.core.threads import add_threads, after_fork, start_daemon

from .executors.connections import close_connections, release_pooled
from .exits import end_copy
from .owntasks import all_tasks, hide_tasks_on, own_task

T = TypeVar("T")

logger = Log("djqueue.worker")
LEFTOVER_GRACE = 1.0
"""Seconds in which leftover tasks must end after they are cancelled."""


def run_loop(main: Coroutine[Any, Any, T], on_stray: Callable[[BaseException], object]) -> T:
    """Run a coroutine as `asyncio.run` does, but limit the wait for tasks and threads that do not end.

    Other tasks and callbacks cannot end the loop: it goes on after their SystemExit or KeyboardInterrupt, and
    after a call of `loop.stop()`. Errors of the loop itself are raised, such as one whose descriptors a
    handler has closed.

    on_stray: Called with the error after each such stop.
    """
    loop = new_loop()
    copy = LoopCopy(loop)
    after_fork(copy.forked)
    of_handlers = ThreadPoolExecutor(thread_name_prefix="djqueue-asyncio")
    loop.set_default_executor(of_handlers)
    executors = (of_handlers, add_threads(loop))
    is_broken = False
    try:
        asyncio.set_event_loop(loop)
        hide_tasks_on(loop)
        task = own_task(loop, main)
        while True:
            try:
                return loop.run_until_complete(task)
            except BaseException as error:
                if task.done():
                    raise
                # The loop catches all others of tasks and callbacks, and raises RuntimeError after a stop.
                is_stray = isinstance(error, RuntimeError) or not isinstance(error, Exception)
                if is_broken := loop.is_closed() or not is_stray:
                    raise
                on_stray(error)
    finally:
        try:
            if not is_broken:
                _cancel_leftovers(loop)
                loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            for executor in executors:
                executor.shutdown(wait=False, cancel_futures=True)
            loop.close()


class LoopCopy:
    """The copy of a worker's loop in a child that a handler has forked.

    A child that returns from the handler would go on as a second worker with the same id.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def forked(self) -> None:
        """End the child when its loop runs again. It does not if the child ends in the handler."""
        if not self._loop.is_closed():
            self._loop.call_soon(end_copy)


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: that of uvloop if it is installed, which takes less time for each event."""
    loop: asyncio.AbstractEventLoop
    if find_spec("uvloop") is None:
        loop = asyncio.new_event_loop()
        # It looks up `time.monotonic` for each timer, which a handler may have replaced.
        loop.time = monotonic  # type: ignore[method-assign]
        return loop
    loop = import_module("uvloop").new_event_loop()
    return loop


class Periodic:
    """Calls `action` every `interval()` seconds, in its own thread, until it is stopped; then `last`."""

    def __init__(
        self,
        name: str,
        interval: Callable[[], float],
        action: Callable[[], None],
        last: Callable[[], None] | None = None,
    ) -> None:
        self._interval = interval
        self._action = action
        self._last = last
        self._called = Event()
        self._stopped = False
        self._failing = False
        self._name = name
        self._thread: Thread | None = None

    def start(self) -> None:
        """Start the thread; the first call comes after one interval."""
        self._thread = start_daemon(self._name, self._serve)

    def hasten(self) -> None:
        """Call the action now, and then read the interval again."""
        self._called.set()

    def stop(self) -> None:
        """End the thread after the call in progress, if there is one."""
        self._stopped = True
        self._called.set()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until the thread has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _serve(self) -> None:
        try:
            while not self._stopped:
                self._act()
            if self._last is not None:
                self._last()
        finally:
            if has_django():
                close_connections()

    def _act(self) -> None:
        """Call the action when it is due; go on after an error, of which the first of a series is logged."""
        try:
            self._called.wait(self._interval())
            self._called.clear()
            if self._stopped:
                return
            self._action()
            if has_django():
                release_pooled()
        except BaseException:
            # SystemExit, too, which a handler may raise in any thread.
            if not self._failing:
                logger.error("The thread %s failed, and goes on.", self._name, exc_info=True)
            self._failing = True
        else:
            self._failing = False


def _cancel_leftovers(loop: asyncio.AbstractEventLoop) -> None:
    leftovers = all_tasks(loop)
    for task in leftovers:
        task.cancel()
    if leftovers:
        loop.run_until_complete(asyncio.wait(leftovers, timeout=LEFTOVER_GRACE))
