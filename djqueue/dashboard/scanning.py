"""Scans of rows whose payloads are opened one by one: within a budget, and one at a time for each user."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from django.db.models import QuerySet
from django.db.models.functions import Length
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK

BYTES = 32 * 1024 * 1024
"""Bytes of payloads that one scan reads. It reads one payload at least, however large that is."""
MILLISECONDS = 1_000
"""Milliseconds after which a scan ends, between two parts."""
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


class Turns:
    """Who is scanning in this process now: each user one scan at a time."""

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
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._users.discard(user.pk)


turns = Turns()
