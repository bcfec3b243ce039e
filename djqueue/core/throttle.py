"""Log lines about events that may come by the thousand."""

import logging
from collections.abc import Callable, Hashable
from threading import Lock
from time import monotonic
from typing import Any


class ThrottledLog:
    """Logs each kind of event at most once in `interval` seconds, and counts the events in between.

    Kinds must be few: one entry is kept for each.
    """

    def __init__(
        self, logger: logging.Logger, interval: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """When the last line was logged, and how many events came since."""

    def log(
        self, level: int, kind: Hashable, message: str, *args: Any, exc_info: BaseException | None = None
    ) -> bool:
        """Log an event, unless a line about its kind was logged a moment ago; return whether it was."""
        now = self._clock()
        with self._lock:
            last, skipped = self._kinds.get(kind, (None, 0))
            if last is not None and now - last < self._interval:
                self._kinds[kind] = last, skipped + 1
                return False
            self._kinds[kind] = now, 0
        if skipped:
            message += " (%d similar events since the last line)"
            args = (*args, skipped)
        self._logger.log(level, message, *args, exc_info=exc_info)
        return True
