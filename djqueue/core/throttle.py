"""Log lines about events that may occur by the thousand."""

import logging
from collections.abc import Callable, Hashable
from threading import Lock
from time import monotonic
from typing import Any


class ThrottledLog:
    """A log that shows each kind of event at most once in `interval` seconds, and counts the events in
    between.

    One entry is kept for each kind, so there must be few.
    """

    def __init__(
        self, logger: logging.Logger, interval: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._logger = logger
        self._interval = interval
        self._clock = clock
        self._lock = Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}
        """Time of the last line and number of events since, by kind."""

    def log(
        self, level: int, kind: Hashable, message: str, *args: Any, exc_info: BaseException | None = None
    ) -> bool:
        """Log an event unless a line about its kind was logged a moment ago; return whether it was logged."""
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
