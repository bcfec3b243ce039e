"""A queue of calls with a thread of its own, for code of the project that may raise or block."""

import os
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread

from .errors import StorageUnavailableError
from .threads import fork_lock, start_daemon

IDLE = 10.0
"""Seconds after which the idle thread of a `CallQueue` ends."""


class CallQueue:
    """Calls functions one after the other on a daemon thread, which ends when it is idle.

    A function that raises does not affect those after it. A fork waits a moment for the end of a function,
    which may hold locks. Queues last as long as their process.

    Args:
        name: Name of the thread.
        limit: Maximum number of waiting functions; those that come then are dropped.
        on_error: Called with what a function raises.
        on_drop: Called with the number of dropped functions, before the next one that was not.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        on_error: Callable[[BaseException], object],
        on_drop: Callable[[int], object],
    ) -> None:
        self._name = name
        self._limit = limit
        self._on_error = on_error
        self._on_drop = on_drop
        self.before: Callable[[], object] = _nothing
        """Called before each function."""
        self.idle: Callable[[], object] = _nothing
        """Called when no function waits any more, and at the end of the thread."""
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | Event] = SimpleQueue()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._dropped = 0
        self._busy = fork_lock()

    def __len__(self) -> int:
        return self._waiting.qsize()

    def put(self, function: Callable[[], object]) -> bool:
        """Call a function later; return False if it was dropped. May be called from any thread."""
        with self._lock:
            is_full = len(self) >= self._limit
            if is_full:
                self._dropped += 1
            else:
                self._waiting.put(function)
            if self._thread is None:
                self._start()
        return not is_full

    def resume(self) -> None:
        """Call the functions that wait because no thread could be started."""
        with self._lock:
            if self._thread is None and not self._waiting.empty():
                self._start()

    def flush(self, timeout: float) -> bool:
        """Wait, up to `timeout` seconds, until all functions have returned; return whether they have."""
        done = Event()
        with self._lock:
            if self._thread is None:
                return self._waiting.empty()
            self._waiting.put(done)
        return done.wait(timeout)

    def _start(self) -> None:
        try:
            self._thread = start_daemon(self._name, self._run)
        except StorageUnavailableError as error:
            self._on_error(error)

    def _run(self) -> None:
        while True:
            try:
                found = self._waiting.get(timeout=IDLE)
            except Empty:
                found = None
            if found is None or isinstance(found, Event):
                if self._ends(found):
                    return
                continue
            dropped, self._dropped = self._dropped, 0
            if dropped:
                self._call(partial(self._on_drop, dropped))
            self._call(self.before)
            self._call(found)

    def _ends(self, done: Event | None) -> bool:
        """Release what the functions have used; return whether the thread ends, because none waits."""
        self._call(self.idle)
        with self._lock:
            is_over = self._waiting.empty()
            if is_over:
                self._thread = None
        if done is not None:
            done.set()
        return is_over

    def _call(self, function: Callable[[], object]) -> None:
        try:
            with self._busy:
                function()
        except BaseException as error:
            # SystemExit, too: the functions after it would wait for ever.
            self._on_error(error)


def _nothing() -> None:
    """Do nothing."""
