"""Tells whether an open page is still current, without reading or rendering it again.

The live part of a page carries a tag of three parts: a hash of its HTML, the version of the data that it was
made from, and an expiry time. A request that sends a tag with the current version before that time gets
status 304 at once. With another version, the part is rendered and its hash is compared.

The version is read before the data. Data newer than its version therefore costs one more response, but no
change is missed. Whatever the version doesn't cover must limit the expiry time: see `Watch` and `limit`.
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
"""Returns what a page shows beyond the storage's data. Called for each request, so it must be cheap."""


def no_parts(_request: HttpRequest) -> Hashable:
    """Return nothing, for pages that the storage's version covers completely."""
    return ()


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


def begin(request: HttpRequest, parts: Parts) -> Fresh | None:
    """Read the version of a page and watch its snapshots; None if the storage has no version."""
    try:
        cached = snapshots.read("version", lambda: get_storage().reads.change_version())
    except DjqueueError:
        return None
    if cached.value is None or cached.error:
        return None
    snapshots.watch(since=cached.ended)
    own = parts(request)
    watch = snapshots.unwatch()
    fresh = Fresh(_digest(request, cached.value, own), SYSTEM_CLOCK.now())
    setattr(request, ATTRIBUTE, fresh)
    snapshots.watch(since=cached.ended, covered=watch.keys if watch is not None else ())
    return fresh


def limit(request: HttpRequest, until: int) -> None:
    """Let the page expire at a time, in UTC milliseconds, at which it may change without a new version."""
    fresh: Fresh | None = getattr(request, ATTRIBUTE, None)
    if fresh is not None:
        fresh.limit(until)


def is_same(fresh: Fresh, shown: str) -> bool:
    """Return whether a page with this tag is still current."""
    tag = read(shown)
    return bool(tag.version) and tag.version == fresh.version and fresh.at < tag.until


def tag_of(request: HttpRequest, html: str) -> Tag:
    """Return the tag of a live part that was just rendered."""
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
    """Parse the tag sent by a browser. A malformed one matches no version."""
    parts = shown.split(".")
    if len(parts) != 3 or not parts[2].isdecimal() or len(parts[2]) > 15:
        return Tag(parts[0], "", 0)
    return Tag(parts[0], parts[1], int(parts[2]))


def _digest(request: HttpRequest, version: str, own: Hashable) -> str:
    """Return a digest of everything that a live part depends on: data, user, request and language.

    The digest is keyed, so that users can't compute it for data that they guess.
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
