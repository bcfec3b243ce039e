"""A pool of daemon threads that wakes as few of them as possible."""

import threading
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.threads import start_daemon

IDLE = 60.0
"""Seconds after which an idle thread ends."""


class Start:
    """The start of one thread, which is to take the next call."""

    __slots__ = ("has_served", "thread")

    def __init__(self) -> None:
        self.thread: Thread | None = None
        self.has_served = False
        """Whether it has begun to take calls."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended before."""
        return not self.has_served and self.thread is not None and not self.thread.is_alive()


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
        on_starved: Callable[[Exception], None] | None = None,
    ) -> None:
        self._limit = limit
        self._name = name
        self._on_wake = on_wake
        """Called on a thread that was idle, before its next call."""
        self._on_exit = on_exit
        """Called on a thread at its end."""
        self._on_starved = on_starved
        """Called if the system has no further thread at the moment. Calls may wait until `wake` is called."""
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._lock = Lock()
        self._idle: list[Lock] = []
        """Locks that idle threads wait for. The pool wakes the thread that came last."""
        self._threads = 0
        self._waking = False
        """Whether a thread has been woken and has not taken a call yet."""
        self._start = Start()
        """The start of the last thread."""
        self._closed = False

    def submit(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function(argument)`, which must not raise, on a thread."""
        self._calls.append((function, argument))
        if not self._waking or self._start.is_lost:
            self.wake()

    def close(self) -> None:
        """End the threads: idle ones now, the others after their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for gate in idle:
            gate.release()

    def wake(self) -> None:
        """Wake or start a thread if calls wait that no thread is about to take."""
        with self._lock:
            if self._start.is_lost:
                # What a handler has set for all threads ends them before their first call.
                threading.settrace(None)
                threading.setprofile(None)
                self._waking, self._start = False, Start()
                self._threads -= 1
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
            number, self._start = self._threads, (start := Start())
        # Daemon threads, because a thread may be stuck in a handler when the process should end.
        try:
            start.thread = start_daemon(f"{self._name}-{number}", self._serve, start)
        except StorageUnavailableError as error:
            with self._lock:
                self._waking = False
                self._threads -= 1
            if self._on_starved is not None:
                self._on_starved(error)

    def _serve(self, start: "Start") -> None:
        gate = Lock()
        gate.acquire()
        start.has_served = True
        self._waking = False
        try:
            while self._take_calls() and self._wait(gate):
                self._waking = False
        except BaseException:
            # Another thread takes the calls for which this one was woken.
            self._waking = False
            raise
        finally:
            with self._lock:
                self._threads -= 1
            try:
                if self._on_exit is not None:
                    self._on_exit()
            finally:
                self.wake()

    def _take_calls(self) -> bool:
        calls = self._calls
        while True:
            try:
                function, argument = calls.popleft()
            except IndexError:
                return True
            if calls and not self._waking:
                self.wake()
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
