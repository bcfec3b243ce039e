"""Wake kombu's event loop from other threads."""

import os
from collections.abc import Callable
from threading import Lock
from typing import Any

MANY = 4096


class Waker:
    """A pipe that an event loop of kombu reads; `wake` lets the loop call a function soon."""

    def __init__(self, loop: Any, woken: Callable[[], None]) -> None:
        self._loop = loop
        self._woken = woken
        self._lock = Lock()
        self._is_pending = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        loop.add_reader(self._read, self._readable)

    def wake(self) -> None:
        """Let the loop call the function. May be called from any thread."""
        with self._lock:
            # One byte at a time is enough, and the pipe never fills up.
            if self._is_pending or self._write < 0:
                return
            self._is_pending = True
            os.write(self._write, b"!")

    def _readable(self) -> None:
        with self._lock:
            if self._read < 0:
                return
            self._is_pending = False
            os.read(self._read, MANY)
        self._woken()

    def close(self) -> None:
        """Stop, and close the pipe."""
        with self._lock:
            read, write = self._read, self._write
            self._read = self._write = -1
        if read >= 0:
            self._loop.remove_reader(read)
            os.close(read)
            os.close(write)
