"""Cached reads that all users of a process share, and the freshness of the pages made from them.

Fifty open pages cost one read per second. The live part of a page carries a tag of three parts: a hash of its
HTML, the version of the data that it was made from, and an expiry time. A request that sends a tag with the
current version before that time gets status 304 at once. With another version, the part is rendered and its
hash is compared.

The version is read before the data. Data newer than its version therefore costs one more response, but no
change is missed. Whatever the version doesn't cover must limit the expiry time: see `Watch` and `expire_at`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable
from hashlib import blake2b, sha256
from threading import Lock, Thread, local
from typing import Any, Generic, NamedTuple, TypeVar

from django.conf import settings
from django.core.signals import setting_changed
from django.db import connections
from django.http import HttpRequest
from django.utils import timezone
from django.utils.encoding import force_bytes
from django.utils.translation import get_language

from djqueue._version import __version__
from djqueue.client import get_storage, registry
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK, Clock
from djqueue.core.deadlines import remaining, within
from djqueue.core.errors import DjqueueError, StorageError, StorageUnavailableError
from djqueue.core.logs import Log
from djqueue.core.metrics import MINUTE
from djqueue.core.threads import start_daemon
from djqueue.dashboard import rights
from djqueue.dashboard.outages import watchdog

logger = Log("djqueue.dashboard")
T = TypeVar("T")
FRESH_TIME = 1_000
"""Milliseconds before a value is read again."""
SLOW_READ_FACTOR = 10
"""A slow read is repeated after this multiple of its duration."""
MAX_REUSE = 15_000
"""Maximum milliseconds for which a slow read is reused."""
LONG_AGO = -(1 << 62)
FIRST_READ_TIMEOUT = 10.0
"""Seconds to wait for the first read of another thread, if the caller has no deadline."""
SLOW_READ = 500
"""Milliseconds after which a failed read is repeated in the background."""
ANSWERS_SLOWLY = "no response in time; a late response is shown when it arrives"
BACKGROUND_LIMIT = 30.0
"""Seconds that a read in the background may take."""
MAX_ENTRIES = 200
"""Maximum cached reads; the least recently used one is dropped first."""
REQUEST_ATTRIBUTE = "_djqueue_cache"
FRESHNESS_ATTRIBUTE = "_djqueue_freshness"
ALL_RIGHTS = tuple(value for name, value in vars(rights).items() if name.isupper() and isinstance(value, str))
Parts = Callable[[HttpRequest], Hashable]
"""Returns what a page shows beyond the storage's data. Called for each request, so it must be cheap."""


class Watch:
    """The cached reads that a thread has used, and until when they are valid.

    Args:
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
        """Note that a read was used, and when it is read again."""
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
    __slots__ = ("cached", "lock", "refresh", "tick", "took")

    def __init__(self) -> None:
        self.lock = Lock()
        self.cached: CachedRead[Any] | None = None
        self.tick = 0
        self.took = 0
        self.refresh: Thread | None = None
        """The thread that has read the value in the background, or does."""

    @property
    def is_refreshing(self) -> bool:
        """Whether the value is being read in the background."""
        return self.refresh is not None and self.refresh.is_alive()


class ReadCache:
    """Cached reads by key. While one thread reads a value, the others get the previous one."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = Lock()
        self._entries: OrderedDict[Hashable, _CacheEntry] = OrderedDict()
        self._watches = local()

    def read(
        self, key: Hashable, fetch: Callable[[], T], fresh: int = FRESH_TIME, *, versioned: bool = False
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
                cached.ended + max(fresh, SLOW_READ_FACTOR * (cached.ended - cached.began)),
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

    def _read(self, entry: _CacheEntry, fetch: Callable[[], T], fresh: int) -> CachedRead[T]:
        cached = entry.cached
        if cached is not None and self._is_fresh(entry, fresh):
            return cached
        if entry.is_refreshing:
            # A second read at the same time would make both slower.
            if cached is not None:
                return cached
            raise StorageUnavailableError(ANSWERS_SLOWLY)
        if not entry.lock.acquire(timeout=0 if cached is not None else remaining(FIRST_READ_TIMEOUT)):
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
                    if entry.took == 0 and entry.tick - began >= SLOW_READ:
                        self._refresh_in_background(entry, fetch)
                if not entry.cached.error:
                    entry.cached = entry.cached._replace(began=began, ended=entry.tick)
            return entry.cached
        finally:
            entry.lock.release()

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
                connections.close_all()

        try:
            entry.refresh = start_daemon("djqueue-dashboard-read", read)
        except StorageUnavailableError as error:
            logger.warning("A slow read does not continue in the background: %s", error)

    def _is_fresh(self, entry: _CacheEntry, fresh: int) -> bool:
        return self._clock.monotonic() - entry.tick < max(
            fresh, min(SLOW_READ_FACTOR * entry.took, MAX_REUSE)
        )

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


class Tag(NamedTuple):
    """The tag of a live part."""

    html: str
    version: str
    until: int
    """Expiry time, in UTC milliseconds."""

    def __str__(self) -> str:
        return f"{self.html}.{self.version}.{self.until}" if self.version else self.html


class Fresh:
    """The freshness of the live part of one request."""

    def __init__(self, version: str, at: int) -> None:
        self.version = version
        self.at = at
        """Time at which the version was read, in UTC milliseconds."""
        self.until = (at // MINUTE + 1) * MINUTE  # charts and rates change with the minute

    def limit(self, until: int) -> None:
        """Let the page expire at a time at which it may change without a change of the version."""
        self.until = min(self.until, until)


read_cache = ReadCache()
"""The cache of this process."""


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting in ("DJQUEUE", "DATABASES"):
        read_cache.clear()


setting_changed.connect(_on_setting_changed)


def once_per_request(request: HttpRequest, key: Hashable, read: Callable[[], T]) -> T:
    """Return the value of a key, calling `read` the first time only."""
    values: dict[Hashable, T] = request.__dict__.setdefault(REQUEST_ATTRIBUTE, {})
    if key not in values:
        values[key] = read()
    return values[key]


def set_for_request(request: HttpRequest, key: Hashable, value: object) -> None:
    """Set the value of a key for the rest of the request."""
    request.__dict__.setdefault(REQUEST_ATTRIBUTE, {})[key] = value


def no_parts(_request: HttpRequest) -> Hashable:
    """Return nothing, for pages that the storage's version covers completely."""
    return ()


def watch_page(request: HttpRequest, parts: Parts) -> Fresh | None:
    """Read the version of a page and watch its reads; None if the storage has no version."""
    try:
        cached = read_cache.read("version", lambda: get_storage().reads.change_version())
    except DjqueueError:
        return None
    if cached.value is None or cached.error:
        return None
    read_cache.watch(since=cached.ended)
    page_parts = parts(request)
    watch = read_cache.unwatch()
    fresh = Fresh(_digest(request, cached.value, page_parts), SYSTEM_CLOCK.now())
    setattr(request, FRESHNESS_ATTRIBUTE, fresh)
    read_cache.watch(since=cached.ended, covered=watch.keys if watch is not None else ())
    return fresh


def expire_at(request: HttpRequest, until: int) -> None:
    """Let the page expire at a time, in UTC milliseconds, at which it may change without a new version."""
    fresh: Fresh | None = getattr(request, FRESHNESS_ATTRIBUTE, None)
    if fresh is not None:
        fresh.limit(until)


def is_current(fresh: Fresh, shown: str) -> bool:
    """Return whether a page with this tag is still current."""
    tag = parse_tag(shown)
    return bool(tag.version) and tag.version == fresh.version and fresh.at < tag.until


def tag_of(request: HttpRequest, html: str) -> Tag:
    """Return the tag of a live part that was just rendered."""
    hashed = blake2b(html.encode(), digest_size=12).hexdigest()
    fresh: Fresh | None = getattr(request, FRESHNESS_ATTRIBUTE, None)
    if fresh is None:
        return Tag(hashed, "", 0)
    watch = read_cache.unwatch()
    until = fresh.until
    if watch is not None and watch.until is not None:
        until = min(until, SYSTEM_CLOCK.now() + watch.until - SYSTEM_CLOCK.monotonic())
    return Tag(hashed, fresh.version if until > fresh.at else "", until)


def parse_tag(shown: str) -> Tag:
    """Parse the tag sent by a browser. A malformed one matches no version."""
    parts = shown.split(".")
    if len(parts) != 3 or not parts[2].isdecimal() or len(parts[2]) > 15:
        return Tag(parts[0], "", 0)
    return Tag(parts[0], parts[1], int(parts[2]))


def _digest(request: HttpRequest, version: str, parts: Hashable) -> str:
    """Return a digest of everything that a live part depends on: data, user, request and language.

    The digest is keyed, so that users can't compute it for data that they guess.
    """
    user: Any = request.user
    board = read_cache.last("board")
    chosen = get_settings().dashboard.queue_filter
    names = () if board is None or chosen is None else tuple(line.name for line in board.value.lines)
    inputs = (
        version,
        parts,
        __version__,
        registry.names(),
        request.get_full_path(),
        user.pk,
        [rights.may(request, one) for one in ALL_RIGHTS],
        [name for name in names if rights.sees(request, name)],
        chosen is None or board is not None or id(request),
        get_settings().dashboard.read_only,
        get_language(),
        timezone.get_current_timezone_name(),
    )
    key = sha256(b"djqueue.dashboard.freshness:" + force_bytes(settings.SECRET_KEY)).digest()
    return blake2b(repr(inputs).encode(errors="surrogatepass"), digest_size=12, key=key).hexdigest()
