"""Work that a process does a moment later, in a thread that lives as long as there is some."""

import logging
import threading
import time
from collections.abc import Callable, Hashable

from django.db import connections

from djqueue.core.forks import after_fork

logger = logging.getLogger("djqueue.storage")

LINGER = 5.0
"""Seconds for which the thread waits for more work before it ends."""


class Background:
    """Calls functions at given times, one after the other."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def at(self, when: float, key: Hashable, call: Callable[[], object]) -> None:
        """Call a function at a time in monotonic seconds, unless one with this key waits already."""
        with self._changed:
            if key in self._due:
                return
            self._due[key] = (when, call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="djqueue-background", daemon=True)
                self._thread.start()
            else:
                self._changed.notify()

    def close(self) -> None:
        """Call at once what waits, and end the thread."""
        with self._changed:
            thread, self._is_closing = self._thread, True
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._changed:
            self._is_closing = False

    def _run(self) -> None:
        try:
            while (call := self._next()) is not None:
                try:
                    call()
                except Exception:
                    logger.exception("A background task of the storage failed; it is not repeated.")
        finally:
            connections[self._alias].close()

    def _next(self) -> Callable[[], object] | None:
        """Return the next function when its time has come; None ends the thread."""
        until = time.monotonic() + LINGER
        with self._changed:
            while True:
                key = min(self._due, key=lambda key: self._due[key][0], default=None)
                now = time.monotonic()
                when = until if key is None else self._due[key][0]
                if key is not None and (when <= now or self._is_closing):
                    return self._due.pop(key)[1]
                if key is None and (now >= until or self._is_closing):
                    self._thread = None
                    return None
                self._changed.wait(when - now)
