"""Interrupt a task that runs on a thread: at its time limits, or because it was revoked.

The exception is raised in the thread between two bytecodes of Python. A call that blocks outside of Python,
such as a query or `time.sleep`, ends first.
"""

import ctypes
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from celery.exceptions import SoftTimeLimitExceeded


class InterruptedTask(BaseException):
    """Ends a task that has exceeded its hard time limit, or was terminated.

    Not an Exception, so that a task that handles errors does not go on.
    """


class Interruptible:
    """A block of code on this thread that other threads may interrupt.

    Leaving the block waits for an interruption that has begun, and drops one that comes too late.

    Args:
        soft: Seconds after which SoftTimeLimitExceeded is raised; None: never.
        hard: Seconds after which InterruptedTask is raised; None: never.
        on_limit: Called from another thread before either, with True for the soft limit, and the seconds.
    """

    def __init__(
        self, soft: float | None, hard: float | None, on_limit: Callable[[bool, float], object]
    ) -> None:
        self._on_limit = on_limit
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.get_ident()
        self._timers = [
            threading.Timer(seconds, self._reach, (is_soft, seconds))
            for is_soft, seconds in ((True, soft), (False, hard))
            if seconds
        ]

    def __enter__(self) -> Self:
        for timer in self._timers:
            timer.daemon = True
            timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        while not self._is_over:
            try:
                with self._lock:
                    self._is_over = True
                    _raise_in(self._thread, None)
            except (SoftTimeLimitExceeded, InterruptedTask):
                continue  # arrived after the task had ended
        for timer in self._timers:
            timer.cancel()

    def interrupt(self) -> bool:
        """Raise InterruptedTask in the block; return False if it is over."""
        with self._lock:
            if not self._is_over:
                _raise_in(self._thread, InterruptedTask)
            return not self._is_over

    def _reach(self, is_soft: bool, seconds: float) -> None:
        with self._lock:
            if self._is_over:
                return
            self._on_limit(is_soft, seconds)
            _raise_in(self._thread, SoftTimeLimitExceeded if is_soft else InterruptedTask)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread; None removes one that has not been raised yet."""
    value = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)
