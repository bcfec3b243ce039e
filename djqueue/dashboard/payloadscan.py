"""Scans of rows whose payloads are opened one by one: within a budget, and one at a time for each user."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from secrets import token_hex
from typing import Any, NamedTuple

from django.db import Error, IntegrityError, connections, router, transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.models import SchedulerLease

logger = logging.getLogger("djqueue.dashboard")

BYTES = 32 * 1024 * 1024
"""Bytes of payloads that one scan reads. It reads one payload at least, however large that is."""
MILLISECONDS = 1_000
"""Milliseconds after which a scan ends, between two parts."""
HELD = 10_000
"""Milliseconds after which the row of a scan whose process died holds nobody back."""
PART_ROWS = 100
"""Rows of a part, which is read by one query."""
PART_BYTES = 1024 * 1024
"""Bytes of payloads after which a part ends."""


class Scanned(NamedTuple):
    """What a scan found."""

    rows: list[Any]
    """The rows that match, newest first."""
    older: str
    """Where the next page begins; empty: nothing older matches."""
    is_cut: bool
    """Whether the budget ran out, so that older rows have not been looked at."""


def scan(rows: "QuerySet[Any]", at: str, matches: Callable[[Any], bool], length: int) -> Scanned:
    """Return a page of the rows that match.

    Where a scan stops depends on the rows alone and on how long reading them took, not on what is hidden in
    them: a page begins behind the last row that is shown, or behind the last one that was read.

    Args:
        rows: The rows that the user may see, in any order.
        at: `<pk` for the rows before one; anything else for the newest.
        matches: Whether a row, with its payload, is wanted.
        length: Rows of a page.
    """
    deadline, left = SYSTEM_CLOCK.monotonic() + MILLISECONDS, BYTES
    found: list[Any] = []
    last = _key(at)
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


def _key(at: str) -> int | None:
    number = at[1:]
    return int(number) if at[:1] == "<" and number.isdecimal() and len(number) < 19 else None


class UserScans:
    """Who is scanning now: each user one scan at a time, in all processes that share the tables.

    A scan holds a row under the user's name, which expires if its process dies. Where that row cannot be
    written, or would keep SQLite's other writers waiting for a whole request, the turn holds for this process
    alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[Any] = set()

    @contextmanager
    def take(self, request: HttpRequest) -> Iterator[bool]:
        """Take the user's turn; yields whether it was free."""
        user: Any = request.user
        with self._lock:
            is_free = user.pk not in self._users
            self._users.add(user.pk)
        if not is_free:
            yield False
            return
        try:
            with _held(user.pk) as is_free:
                yield is_free
        finally:
            with self._lock:
                self._users.discard(user.pk)


@contextmanager
def _held(user: Any) -> Iterator[bool]:
    """Hold a user's row; yields whether no other process holds it."""
    rows = SchedulerLease.objects.using(router.db_for_write(SchedulerLease))
    connection = connections[rows.db]
    if connection.in_atomic_block and connection.vendor != "postgresql":
        # The row would keep every other writer waiting until the request's transaction ends.
        yield True
        return
    name = f"search:{blake2b(str(user).encode(), digest_size=8).hexdigest()}"
    holder = token_hex(8)
    try:
        is_free = _claim(rows, name, holder)
    except Error as error:
        logger.warning("A search holds for this process alone; its row could not be written: %s", error)
        yield True
        return
    try:
        yield is_free
    finally:
        if is_free:
            try:
                rows.filter(name=name, holder=holder).delete()
            except Error as error:
                logger.warning("The row of a search stays for up to %s ms: %s", HELD, error)


def _claim(rows: "QuerySet[SchedulerLease]", name: str, holder: str) -> bool:
    with transaction.atomic(using=rows.db):
        return _lock(rows.db, name) and _write(rows, name, holder)


def _lock(alias: str, name: str) -> bool:
    """Return whether no other transaction holds the row.

    With `ATOMIC_REQUESTS` a row is committed after the search, and to write the same row would wait until
    then. PostgreSQL tells of such a transaction by a lock that ends with it.
    """
    if connections[alias].vendor != "postgresql":
        return True
    key = int.from_bytes(blake2b(f"djqueue:{name}".encode(), digest_size=8).digest(), signed=True)
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [key])
        return bool(cursor.fetchone()[0])


def _write(rows: "QuerySet[SchedulerLease]", name: str, holder: str) -> bool:
    now = SYSTEM_CLOCK.now()
    values: dict[str, Any] = {
        "holder": holder,
        "host": "",
        "pid": os.getpid(),
        "address": "",
        "renewed_at": now,
        "expires_at": now + HELD,
    }
    try:
        with transaction.atomic(using=rows.db):
            rows.create(name=name, **values)
        return True
    except IntegrityError:
        pass  # somebody has made the row
    # A row that ends later than any that is written now is from before the clock was set back.
    is_over = Q(expires_at__lte=to_datetime(now)) | Q(expires_at__gt=to_datetime(now + HELD))
    return bool(rows.filter(is_over, name=name).update(**values))


user_scans = UserScans()
