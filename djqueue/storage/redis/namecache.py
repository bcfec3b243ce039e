"""The names of all queues, remembered while messages announce new ones: each claim would list them again."""

import threading
import time

from djqueue.core.threads import after_fork

FRESH = 5.0
"""Seconds after which the names are listed again, in case that a message was lost."""


class NameCache:
    """The names of all queues, as last listed."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] | None = None
        self._until = 0.0
        self._followers = 0
        self.changes = 0
        """Number of times that the names may have changed."""

    def follow(self) -> None:
        """Note that messages about new queues arrive from now on."""
        with self._lock:
            self._followers += 1
            self._drop()

    def unfollow(self) -> None:
        """Note that a subscriber no longer gets these messages."""
        with self._lock:
            self._followers -= 1

    def forget(self) -> None:
        """Drop the names: there is a new queue, or a message about one may have been missed."""
        with self._lock:
            self._drop()

    def get(self) -> list[str] | None:
        """Return the names; None if they have to be listed."""
        if self._followers <= 0 or time.monotonic() >= self._until:
            return None
        return self._names

    def put(self, names: list[str], changes: int) -> None:
        """Remember names.

        changes: `changes` before they were listed. If there were more since, a new queue may be missing.
        """
        with self._lock:
            if changes == self.changes:
                self._names, self._until = names, time.monotonic() + FRESH

    def _drop(self) -> None:
        self.changes += 1
        self._names = None
