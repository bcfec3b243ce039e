"""Reads that all viewers of a process share, so that fifty open pages cost one read a second."""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from threading import Lock, Thread, local
from typing import Any, Generic, NamedTuple, TypeVar

from django.core.signals import setting_changed
from django.db import connections

from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadline import remaining, within
from djqueue.core.errors import StorageError, StorageUnavailableError

from .watchdog import watchdog

T = TypeVar("T")

logger = logging.getLogger("djqueue.dashboard")

FRESH = 1_000
"""Milliseconds for which what was read is shown again."""
SHARE = 10
"""A read that took long is shown again for so many times as long: what is dear is had more seldom."""
LONGEST = 15_000
"""Milliseconds for which it is shown again at most."""
LONG_AGO = -(1 << 62)
WAIT = 10.0
"""Seconds for which somebody else's first read is waited for, where the caller has no deadline."""
SLOW = 500
"""Milliseconds of a failed read from which on the storage is slow, and a read without a page is worth it."""
ANSWERS_SLOWLY = "it has not answered in time; what it answers later is shown as soon as it is there"
BACKGROUND_LIMIT = 30.0
"""Seconds that such a read may take."""
MOST = 200
"""Different reads that are kept; the one that was asked for longest ago goes first."""


class Watch:
    """Which snapshots a thread reads, and until when what it was given cannot differ.

    since: monotonic milliseconds; what was read since then, and depends on the storage alone, has the version
        that was known then.
    covered: keys whose values are a part of the version.
    """

    def __init__(self, since: int, covered: Container[Hashable] = ()) -> None:
        self.keys: set[Hashable] = set()
        self.until: int | None = None
        """Monotonic milliseconds: when a snapshot that no version covers is read anew."""
        self._since = since
        self._covered = covered

    def note(self, key: Hashable, cached: "CachedRead[Any]", again: int, *, versioned: bool) -> None:
        """A snapshot, which is to be read again at some time, has been given out."""
        self.keys.add(key)
        if key in self._covered or (versioned and cached.began >= self._since):
            return
        self.until = again if self.until is None else min(self.until, again)


class CachedRead(NamedTuple, Generic[T]):
    """What was read, and when."""

    value: T
    at: int
    """UTC milliseconds."""
    error: str = ""
    """Why the value could not be refreshed; empty if the last read succeeded."""
    began: int = 0
    """When it was asked for, in monotonic milliseconds; `ended`: when it was answered."""
    ended: int = 0


class _CacheEntry:
    __slots__ = ("cached", "is_refreshing", "lock", "tick", "took")

    def __init__(self) -> None:
        self.lock = Lock()
        self.cached: CachedRead[Any] | None = None
        self.tick = 0
        self.took = 0
        self.is_refreshing = False
        """Whether it is read for later pages, as it took longer than a page may."""


class Snapshots:
    """Reads by key. One thread reads anew; the others meanwhile take what there was."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._watches = local()

    def read(
        self, key: Hashable, fetch: Callable[[], T], fresh: int = FRESH, *, versioned: bool = False
    ) -> CachedRead[T]:
        """What `fetch` answers, or answered a moment ago, or last if the storage is away.

        fresh: milliseconds that such a moment has.
        versioned: whether it depends on what `Storage.change_version` covers, and on nothing else.

        Raises StorageError if the storage is away and nothing was read before.
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
        """End that; what was seen."""
        watch: Watch | None = getattr(self._watches, "current", None)
        self._watches.current = None
        return watch

    def _read(self, entry: _CacheEntry, fetch: Callable[[], T], fresh: int) -> CachedRead[T]:
        cached = entry.cached
        if cached is not None and self._is_fresh(entry, fresh):
            return cached
        if entry.is_refreshing:
            # Read twice at once, it would take longer still.
            if cached is not None:
                return cached
            raise StorageUnavailableError(ANSWERS_SLOWLY)
        if not entry.lock.acquire(timeout=0 if cached is not None else remaining(WAIT)):
            if cached is not None:
                return cached  # somebody is at it
            raise StorageUnavailableError(ANSWERS_SLOWLY)
        try:
            if entry.cached is None or not self._is_fresh(entry, fresh):
                began = self._clock.monotonic()
                try:
                    entry.cached = self._fetch(entry.cached, fetch)
                finally:
                    entry.tick = self._clock.monotonic()
                    # One that failed is tried again soon, however long it took.
                    entry.took = 0 if entry.cached is None or entry.cached.error else entry.tick - began
                    if entry.took == 0 and entry.tick - began >= SLOW:
                        self._refresh_in_background(entry, fetch)
                if not entry.cached.error:
                    entry.cached = entry.cached._replace(began=began, ended=entry.tick)
            return entry.cached
        finally:
            entry.lock.release()

    def last(self, key: Hashable) -> CachedRead[Any] | None:
        """What was read last, however long ago."""
        with self._lock:
            entry = self._entries.get(key)
        return None if entry is None else entry.cached

    def forget(self) -> None:
        """Read everything anew: somebody has just changed something, and looks at what became of it."""
        with self._lock:
            for entry in self._entries.values():
                entry.tick = LONG_AGO

    def clear(self) -> None:
        """Know nothing."""
        with self._lock:
            self._entries.clear()

    def _fetch(self, last: CachedRead[T] | None, fetch: Callable[[], T]) -> CachedRead[T]:
        try:
            if watchdog.has_cut:
                raise StorageUnavailableError(ANSWERS_SLOWLY)  # to connect again would exceed the deadline
            return CachedRead(fetch(), self._clock.now())
        except StorageError as error:
            if last is None:
                raise
            return last._replace(error=str(error))

    def _refresh_in_background(self, entry: _CacheEntry, fetch: Callable[[], T]) -> None:
        """Read for later pages what took longer than the page could wait for."""
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
                logger.debug("A read that took too long for a page failed: %s", error)
            except Exception:
                logger.exception("A read that took too long for a page failed.")
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
                if len(self._entries) > MOST:
                    self._entries.popitem(last=False)
            else:
                self._entries.move_to_end(key)
            return entry


snapshots = Snapshots()
"""Those of this process."""


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting in ("DJQUEUE", "DATABASES"):
        snapshots.clear()


setting_changed.connect(_on_setting_changed)
