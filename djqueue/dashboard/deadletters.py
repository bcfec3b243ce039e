"""Dead letters grouped by what went wrong, and the ones that are meant by a filter."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.http import HttpRequest

from djqueue.client import get_storage
from djqueue.client.deadletters import DeadLetterFilter, fingerprint, letters, read_filter
from djqueue.core.job import DeadLetterRecord
from djqueue.core.states import State

from . import queries
from .snapshot import CachedRead, snapshots

COUNTED = 10_000
"""Dead letters that are looked at: as many as one queue keeps unless it is told otherwise."""
FRESH = 5_000
"""Milliseconds for which they are shown again."""
LENGTH = 50
"""Dead letters of a page."""
FILTERS = ("reason", "name", "error_type", "fingerprint")
"""Filters that an address has, as `Queue.retry_dead` takes them."""
DAYS = 14
"""Days of a group's small chart."""
DAY = 86_400_000


class FailureGroup(NamedTuple):
    """Dead letters of one error, whichever numbers its message has."""

    fingerprint: str
    error_type: str
    error_message: str
    """Of the newest."""
    size: int
    first: int
    """UTC milliseconds of the oldest, as `last` of the newest."""
    last: int
    queues: list[str]
    names: list[str]
    days: list[int]
    """Dead letters of each of the last days, oldest first."""


class DeadLetterSample(NamedTuple):
    """Dead letters, newest first."""

    dead_letters: tuple[DeadLetterRecord, ...]
    at: int
    capped: bool
    """Whether there are more than were looked at."""

    def matching(self, wanted: DeadLetterFilter) -> Iterator[DeadLetterRecord]:
        """Those that are meant."""
        return (dead_letter for dead_letter in self.dead_letters if wanted.matches(dead_letter, self.at))


def read(request: HttpRequest, queue: str = "", fresh: int = FRESH) -> CachedRead[DeadLetterSample]:
    """The dead letters of a queue, or of all that the user sees.

    fresh: milliseconds for which what was read is shown again.
    """
    board = queries.board(request).value
    names = board.names_with(State.FAILED, queue)
    key = ("failures", *names)
    return snapshots.read(key, lambda: _read(names, board.at), fresh=fresh, versioned=True)


def read_query(given: Mapping[str, str]) -> dict[str, str]:
    """The filters that an address has. Raises OptionError for a word that there is not."""
    query = {name: given[name] for name in FILTERS if given.get(name)}
    read_filter(**query)  # type: ignore[arg-type]
    return query


def grouped(found: Sequence[DeadLetterRecord], at: int) -> list[FailureGroup]:
    """By fingerprint, the largest first; each newest first, as they come."""
    newest: dict[str, DeadLetterRecord] = {}
    oldest: dict[str, DeadLetterRecord] = {}
    counts: Counter[str] = Counter()
    queues: dict[str, Counter[str]] = {}
    names: dict[str, Counter[str]] = {}
    days: dict[str, list[int]] = {}
    for dead_letter in found:
        key = fingerprint(dead_letter)
        newest.setdefault(key, dead_letter)
        oldest[key] = dead_letter
        counts[key] += 1
        queues.setdefault(key, Counter())[dead_letter.queue] += 1
        names.setdefault(key, Counter())[dead_letter.name] += 1
        day = (at - dead_letter.entered_at) // DAY
        row = days.setdefault(key, [0] * DAYS)
        if 0 <= day < DAYS:
            row[DAYS - 1 - day] += 1
    return [
        FailureGroup(
            key,
            newest[key].error_type,
            newest[key].error_message,
            count,
            oldest[key].entered_at,
            newest[key].entered_at,
            [name for name, _ in queues[key].most_common()],
            [name for name, _ in names[key].most_common()],
            days[key],
        )
        for key, count in counts.most_common()
    ]


def page(found: Sequence[DeadLetterRecord], after: str) -> tuple[list[DeadLetterRecord], str]:
    """Those of a page, behind a letter, and what names the last if there are more."""
    start = 0
    if after:
        start = next((at for at, dead_letter in enumerate(found, 1) if cursor_of(dead_letter) == after), 0)
    shown = list(found[start : start + LENGTH])
    return shown, cursor_of(shown[-1]) if len(found) > start + LENGTH else ""


def cursor_of(dead_letter: DeadLetterRecord) -> str:
    """What names a dead letter in an address."""
    return f"{dead_letter.entered_at}:{dead_letter.queue}:{dead_letter.id}"


def _read(names: Sequence[str], at: int) -> DeadLetterSample:
    found: list[DeadLetterRecord] = []
    capped = False
    everything: Any = read_filter()
    for name in names:
        for dead_letter in letters(get_storage(), name, everything):
            if len(found) == COUNTED:
                capped = True
                break
            found.append(dead_letter)
    found.sort(key=lambda dead_letter: (-dead_letter.entered_at, dead_letter.queue, dead_letter.id))
    return DeadLetterSample(tuple(found), at, capped)
