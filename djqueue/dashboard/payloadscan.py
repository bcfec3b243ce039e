"""Scans of rows that decode payloads: within a budget, and one at a time for each user."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

from django.db import Error, connections, transaction
from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.models import SchedulerLease
from djqueue.storage.tables.leaderlease import TTL, LeaderLease

from . import keyset
from .tables import alias_of

logger = logging.getLogger("djqueue.dashboard")

BYTES = 32 * 1024 * 1024
"""Maximum bytes of payloads that a scan reads. At least one payload is read, whatever its size."""
MILLISECONDS = 1_000
"""Milliseconds after which a scan ends, checked between parts."""
PART_ROWS = 100
"""Maximum rows of a part, which one query reads."""
PART_BYTES = 1024 * 1024
"""Bytes of payloads after which a part ends."""


class Scanned(NamedTuple):
    """The result of a scan."""

    rows: list[Any]
    """Matching rows, newest first."""
    older: str
    """Position of the next page; empty if there are no older matches."""
    is_cut: bool
    """Whether the budget ran out before all rows were searched."""


def scan(rows: "QuerySet[Any]", at: str, matches: Callable[[Any], bool], length: int) -> Scanned:
    """Return a page of matching rows.

    Where a scan stops depends only on the rows and on how long reading them takes, not on what they hide: a
    page starts after the last row shown, or after the last row read.

    Args:
        rows: Rows that the user can see, in any order.
        at: `<pk` for the rows before a row; anything else for the newest rows.
        matches: Whether a row, with its payload, matches.
        length: Rows per page.
    """
    deadline, left = SYSTEM_CLOCK.monotonic() + MILLISECONDS, BYTES
    found: list[Any] = []
    sign, key = keyset.position(at)
    last = key if sign == "<" else None
    while True:
        part = _part(rows if last is None else rows.filter(pk__lt=last), left)
        if not part:
            return Scanned(found, "", is_cut=False)
        for row in sorted(rows.filter(pk__in=part), key=lambda row: -row.pk):
            if not matches(row):
                continue
            if len(found) == length:
                return Scanned(found, f"<{found[-1].pk}", is_cut=False)
            found.append(row)
        last = min(part)
        left -= sum(part.values())
        if left <= 0 or SYSTEM_CLOCK.monotonic() >= deadline:
            more = rows.filter(pk__lt=last).exists()
            return Scanned(found, f"<{last}" if more else "", is_cut=more)


def _part(rows: "QuerySet[Any]", left: int) -> dict[int, int]:
    """Return the keys of the next rows, newest first, with the sizes of their payloads."""
    sizes = rows.order_by("-pk").annotate(size=Length("payload")).values_list("pk", "size")[:PART_ROWS]
    part: dict[int, int] = {}
    total = 0
    for key, size in sizes:
        total += size or 0
        if part and total > min(left, PART_BYTES):
            break
        part[key] = size or 0
    return part


class UserScans:
    """Limits each user to one scan at a time, in all processes that share the tables.

    A scan holds a lease under the user's name, which expires if its process dies. If the lease can't be
    written, or would block SQLite's other writers for a whole request, the limit applies to this process
    only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[Any] = set()

    @contextmanager
    def take(self, request: HttpRequest) -> Iterator[bool]:
        """Yield whether the user has no other scan running."""
        user: Any = request.user
        with self._lock:
            is_free = user.pk not in self._users
            self._users.add(user.pk)
        if not is_free:
            yield False
            return
        try:
            with _leased(user.pk) as is_free:
                yield is_free
        finally:
            with self._lock:
                self._users.discard(user.pk)


@contextmanager
def _leased(user: Any) -> Iterator[bool]:
    """Hold a user's lease; yield whether no other process holds it."""
    alias = alias_of(SchedulerLease)
    connection = connections[alias]
    if connection.in_atomic_block and connection.vendor != "postgresql":
        # The row would block every other writer until the request's transaction ends.
        yield True
        return
    name = f"search:{blake2b(str(user).encode(), digest_size=8).hexdigest()}"
    lease = LeaderLease(alias, SYSTEM_CLOCK, name)
    try:
        is_free = _claim(lease, alias, name)
    except Error as error:
        logger.warning("Could not write the search lease; the limit applies to this process only: %s", error)
        yield True
        return
    try:
        yield is_free
    finally:
        try:
            lease.delete()
        except Error as error:
            logger.warning("Could not delete the search lease; it expires after %s ms: %s", TTL, error)


def _claim(lease: LeaderLease, alias: str, name: str) -> bool:
    """Return whether the lease was free.

    With `ATOMIC_REQUESTS`, a row is committed after the search, and writing the same row would wait until
    then. On PostgreSQL, an advisory lock that ends with the transaction detects this.
    """
    if connections[alias].vendor != "postgresql":
        return lease.take()
    key = int.from_bytes(blake2b(f"djqueue:{name}".encode(), digest_size=8).digest(), signed=True)
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [key])
            is_free = bool(cursor.fetchone()[0])
        return is_free and lease.take()


user_scans = UserScans()
