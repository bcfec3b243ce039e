"""Whether what a browser shows is still what it would get now, without reading or rendering it again.

A live part carries a tag of three parts: a hash of its HTML, the version of what it was made from, and a
time. A request that shows a tag with the present version before that time is answered with 304 at once. With
another version, the part is rendered and its hash is compared.

The version is read before the data, so that data which is newer than its version costs one more answer and
hides no change. What the version says nothing about has to end the tag's time: see `Watch` and `limit`.
"""

from collections.abc import Callable, Hashable
from hashlib import blake2b, sha256
from typing import Any, NamedTuple

from django.conf import settings
from django.http import HttpRequest
from django.utils import timezone
from django.utils.encoding import force_bytes
from django.utils.translation import get_language

from djqueue._version import __version__
from djqueue.client import get_storage, registry
from djqueue.conf import get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import DjqueueError

from . import rights
from .snapshot import snapshots

MINUTE = 60_000
ATTRIBUTE = "_djqueue_freshness"
ALL_RIGHTS = tuple(value for name, value in vars(rights).items() if name.isupper() and isinstance(value, str))

Parts = Callable[[HttpRequest], Hashable]
"""What a page shows that is not the storage's: read for each request, so it has to be cheap."""


def no_parts(_request: HttpRequest) -> Hashable:
    """Of a page that shows nothing but what the storage's version covers."""
    return ()


class Tag(NamedTuple):
    """What a browser shows."""

    html: str
    version: str
    until: int
    """UTC milliseconds."""

    def __str__(self) -> str:
        return f"{self.html}.{self.version}.{self.until}" if self.version else self.html


class Fresh:
    """The freshness of one request's live part."""

    def __init__(self, version: str, at: int) -> None:
        self.version = version
        self.at = at
        """UTC milliseconds of the version."""
        self.until = (at // MINUTE + 1) * MINUTE  # charts and rates move with the minute

    def limit(self, until: int) -> None:
        """What the page shows may change at that time without a change of the version."""
        self.until = min(self.until, until)


def begin(request: HttpRequest, parts: Parts) -> Fresh | None:
    """Read the version of what a page shows, and watch its snapshots; None if there is no version."""
    try:
        cached = snapshots.read("version", lambda: get_storage().reads.change_version())
    except DjqueueError:
        return None
    if cached.value is None or cached.away:
        return None
    snapshots.watch(since=cached.ended)
    own = parts(request)
    watch = snapshots.unwatch()
    fresh = Fresh(_digest(request, cached.value, own), SYSTEM_CLOCK.now())
    setattr(request, ATTRIBUTE, fresh)
    snapshots.watch(since=cached.ended, covered=watch.keys if watch is not None else ())
    return fresh


def limit(request: HttpRequest, until: int) -> None:
    """A part of the page may change at that time, in UTC milliseconds, without a change of the version."""
    fresh: Fresh | None = getattr(request, ATTRIBUTE, None)
    if fresh is not None:
        fresh.limit(until)


def is_same(fresh: Fresh, shown: str) -> bool:
    """Whether a browser that shows a tag shows what it would get now."""
    tag = read(shown)
    return bool(tag.version) and tag.version == fresh.version and fresh.at < tag.until


def tag_of(request: HttpRequest, html: str) -> Tag:
    """The tag of a live part that was just rendered."""
    hashed = blake2b(html.encode(), digest_size=12).hexdigest()
    fresh: Fresh | None = getattr(request, ATTRIBUTE, None)
    if fresh is None:
        return Tag(hashed, "", 0)
    watch = snapshots.unwatch()
    until = fresh.until
    if watch is not None and watch.until is not None:
        until = min(until, SYSTEM_CLOCK.now() + watch.until - SYSTEM_CLOCK.monotonic())
    return Tag(hashed, fresh.version if until > fresh.at else "", until)


def read(shown: str) -> Tag:
    """The tag that a browser has sent; one that cannot be read matches no version."""
    parts = shown.split(".")
    if len(parts) != 3 or not parts[2].isdecimal() or len(parts[2]) > 15:
        return Tag(parts[0], "", 0)
    return Tag(parts[0], parts[1], int(parts[2]))


def _digest(request: HttpRequest, version: str, own: Hashable) -> str:
    """Of everything that a live part depends on: what is there, who asks for what, and how it is written.

    It has a key, so that nobody can compute the digest of something that they guess.
    """
    user: Any = request.user
    board = snapshots.last("board")
    chosen = get_settings().dashboard.queue_filter
    names = () if board is None or chosen is None else tuple(line.name for line in board.value.lines)
    seen = (
        version,
        own,
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
    return blake2b(repr(seen).encode(errors="surrogatepass"), digest_size=12, key=key).hexdigest()
