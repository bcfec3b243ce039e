"""A cache of reads that all users of a process share: fifty open pages cost one read per second."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from threading import Lock, Thread, local
from typing import Any, Generic, NamedTuple, TypeVar

from django.core.signals import setting_changed
from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import remaining, within
from djqueue.core.errors import StorageError, StorageUnavailableError

from .watchdog import watchdog

T = TypeVar("T")

logger = logging.getLogger("djqueue.dashboard")

FRESH = 1_000
"""Milliseconds before a value is read again."""
SHARE = 10
"""A slow read is repeated after this multiple of its duration."""
LONGEST = 15_000
"""Maximum milliseconds for which a slow read is reused."""
LONG_AGO = -(1 << 62)
WAIT = 10.0
"""Seconds to wait for the first read of another thread, if the caller has no deadline."""
SLOW = 500
"""Milliseconds after which a failed read is repeated in the background."""
ANSWERS_SLOWLY = "no response in time; a late response is shown when it arrives"
BACKGROUND_LIMIT = 30.0
"""Seconds that a read in the background may take."""
MAX_ENTRIES = 200
"""Maximum cached reads; the least recently used one is dropped first."""


class Watch:
    """The snapshots that a thread has used, and until when they are valid.

    Attributes:
        since: Monotonic milliseconds. A value read since then, and determined by the storage alone, has the
        version that was known then.
        covered: Keys whose values are part of the version.
    """

    def __init__(self, since: int, covered: Container[Hashable] = ()) -> None:
        self.keys: set[Hashable] = set()
        self.until: int | None = None
        """Monotonic milliseconds at which the first value that no version covers is read again."""
        self._since = since
        self._covered = covered

    def note(self, key: Hashable, cached: "CachedRead[Any]", again: int, *, versioned: bool) -> None:
        """Note that a snapshot was used, and when it is read again."""
        self.keys.add(key)
        if key in self._covered or (versioned and cached.began >= self._since):
            return
        self.until = again if self.until is None else min(self.until, again)


class CachedRead(NamedTuple, Generic[T]):
    """A value, and when it was read."""

    value: T
    at: int
    """UTC milliseconds."""
    error: str = ""
    """Why the value could not be refreshed; empty if the last read succeeded."""
    began: int = 0
    """Start of the read, in monotonic milliseconds; `ended` is its end."""
    ended: int = 0


class _CacheEntry:
    __slots__ = ("cached", "is_refreshing", "lock", "tick", "took")

    def __init__(self) -> None:
        self.lock = Lock()
        self.cached: CachedRead[Any] | None = None
        self.tick = 0
        self.took = 0
        self.is_refreshing = False
        """Whether the value is being read in the background."""


class ReadCache:
    """Cached reads by key. While one thread reads a value, the others get the previous one."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._watches = local()

    def read(
        self, key: Hashable, fetch: Callable[[], T], fresh: int = FRESH, *, versioned: bool = False
    ) -> CachedRead[T]:
        """Return the value of `fetch`, cached; the last value if the storage is unreachable.

        Args:
            fresh: Milliseconds before the value is read again.
            versioned: Whether the value depends only on what `Reads.change_version` covers.

        Raises:
            StorageError: The storage is unreachable, and nothing is cached.
        """
        entry = self._entry(key)
        cached = self._read(entry, fetch, fresh)
        watch: Watch | None = getattr(self._watches, "current", None)
        if watch is not None:
            watch.note(
                key,
                cached,
                cached.ended + max(fresh, SHARE * (cached.ended - cached.began)),
                versioned=versioned,
            )
        return cached

    def watch(self, since: int, covered: Container[Hashable] = ()) -> None:
        """Watch what this thread reads from now on. See `Watch`."""
        self._watches.current = Watch(since, covered)

    def unwatch(self) -> Watch | None:
        """Stop watching, and return the watch."""
        watch: Watch | None = getattr(self._watches, "current", None)
        self._watches.current = None
        return watch

    def _read(self, entry: _CacheEntry, fetch: Callable[[], T], fresh: int) -> CachedRead[T]:
        cached = entry.cached
        if cached is not None and self._is_fresh(entry, fresh):
            return cached
        if entry.is_refreshing:
            # A second read at the same time would make both slower.
            if cached is not None:
                return cached
            raise StorageUnavailableError(ANSWERS_SLOWLY)
        if not entry.lock.acquire(timeout=0 if cached is not None else remaining(WAIT)):
            if cached is not None:
                return cached  # another thread is reading
            raise StorageUnavailableError(ANSWERS_SLOWLY)
        try:
            if entry.cached is None or not self._is_fresh(entry, fresh):
                began = self._clock.monotonic()
                try:
                    entry.cached = self._fetch(entry.cached, fetch)
                finally:
                    entry.tick = self._clock.monotonic()
                    # A failed read is repeated soon, however long it took.
                    entry.took = 0 if entry.cached is None or entry.cached.error else entry.tick - began
                    if entry.took == 0 and entry.tick - began >= SLOW:
                        self._refresh_in_background(entry, fetch)
                if not entry.cached.error:
                    entry.cached = entry.cached._replace(began=began, ended=entry.tick)
            return entry.cached
        finally:
            entry.lock.release()

    def last(self, key: Hashable) -> CachedRead[Any] | None:
        """Return the cached value, however old."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry.cached

    def forget(self) -> None:
        """Read everything anew, because a user has just changed something."""
        with self._lock:
            for entry in self._entries.values():
                entry.tick = LONG_AGO

    def clear(self) -> None:
        """Empty the cache."""
        with self._lock:
            self._entries.clear()

    def _fetch(self, last: CachedRead[T] | None, fetch: Callable[[], T]) -> CachedRead[T]:
        try:
            if watchdog.has_cut:
                raise StorageUnavailableError(ANSWERS_SLOWLY)  # reconnecting would exceed the deadline
            return CachedRead(fetch(), self._clock.now())
        except StorageError as error:
            if last is None:
                raise
            return last._replace(error=str(error))

    def _refresh_in_background(self, entry: _CacheEntry, fetch: Callable[[], T]) -> None:
        """Repeat a read that took longer than the page could wait."""
        if entry.is_refreshing or remaining(math.inf) == math.inf:
            return
        entry.is_refreshing = True

        def read() -> None:
            try:
                with within(BACKGROUND_LIMIT), watchdog.within(BACKGROUND_LIMIT):
                    began = self._clock.monotonic()
                    cached = CachedRead(fetch(), self._clock.now())
                with entry.lock:
                    entry.tick = self._clock.monotonic()
                    entry.cached = cached._replace(began=began, ended=entry.tick)
                    entry.took = entry.tick - began
            except StorageError as error:
                logger.debug("A slow read that continued in the background failed: %s", error)
            except Exception:
                logger.exception("A slow read that continued in the background failed.")
            finally:
                entry.is_refreshing = False
                connections.close_all()

        Thread(target=read, name="djqueue-dashboard-read", daemon=True).start()

    def _is_fresh(self, entry: _CacheEntry, fresh: int) -> bool:
        return self._clock.monotonic() - entry.tick < max(fresh, min(SHARE * entry.took, LONGEST))

    def _entry(self, key: Hashable) -> _CacheEntry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _CacheEntry()
                if len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(key)
            return entry


snapshots = ReadCache()
"""The cache of this process."""


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting in ("DJQUEUE", "DATABASES"):
        snapshots.clear()


setting_changed.connect(_on_setting_changed)
