"""Threads for short jobs and long ones: as few are woken as the jobs keep busy."""

from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

IDLE = 60.0
"""Seconds after which an idle thread ends."""


class ThreadPool:
    """Runs calls on up to `limit` threads.

    One idle thread at a time is called; on its arrival it takes a call, and calls the next thread if
    there are more. While a call runs to its end without letting go of the interpreter, nobody else
    arrives, and one thread does all: waking a thread for every job costs several times as much as a
    short job does. A call that waits for something lets the next thread in at once.
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
        """Called on a thread that has been idle, before its next call."""
        self._on_exit = on_exit
        """Called on a thread at its end."""
        self._calls: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._lock = Lock()
        self._idle: list[Lock] = []
        """What idle threads wait at, the last one to come in front."""
        self._threads = 0
        self._calling = False
        """Whether a thread is on its way to take a call."""
        self._closed = False

    def submit(self, function: Callable[[Any], None], argument: Any) -> None:
        """Have `function(argument)` called; it must not raise."""
        self._calls.append((function, argument))
        if not self._calling:
            self._call_one()

    def close(self) -> None:
        """Let the threads end: the idle ones now, the others after their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for gate in idle:
            gate.release()

    def _call_one(self) -> None:
        with self._lock:
            if self._calling or not self._calls:
                return
            if self._idle:
                self._calling = True
                self._idle.pop().release()
                return
            if self._threads >= self._limit:
                # All are at work, and look for more when they are done.
                return
            self._calling = True
            self._threads += 1
            number = self._threads
        # Their threads may be stuck in a handler for ever: the process can end all the same.
        Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()

    def _serve(self) -> None:
        gate = Lock()
        gate.acquire()
        self._calling = False
        try:
            while self._work_off() and self._wait(gate):
                self._calling = False
        finally:
            with self._lock:
                self._threads -= 1
            if self._on_exit is not None:
                self._on_exit()

    def _work_off(self) -> bool:
        calls = self._calls
        while True:
            try:
                function, argument = calls.popleft()
            except IndexError:
                return True
            if calls and not self._calling:
                self._call_one()
            function(argument)

    def _wait(self, gate: Lock) -> bool:
        """Wait to be called; False if the thread is to end."""
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
            # Called in the very moment in which it gave up.
            gate.acquire()
        if self._on_wake is not None and self._calls:
            self._on_wake()
        return bool(self._calls) or not self._closed
