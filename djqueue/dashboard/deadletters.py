"""Dead letters, grouped by error and selected by a filter."""

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
"""Maximum dead letters examined: the default limit of one queue."""
FRESH = 5_000
"""Milliseconds before dead letters are read again."""
LENGTH = 50
"""Dead letters per page."""
FILTERS = ("reason", "name", "error_type", "fingerprint")
"""Filters in query strings, named like the arguments of `Queue.retry_dead`."""
DAYS = 14
"""Days in the chart of a group."""
DAY = 86_400_000


class FailureGroup(NamedTuple):
    """Dead letters with the same error, regardless of numbers in the message."""

    fingerprint: str
    error_type: str
    error_message: str
    """Message of the newest dead letter."""
    size: int
    first: int
    """Time of the oldest dead letter, in UTC milliseconds."""
    last: int
    queues: list[str]
    names: list[str]
    days: list[int]
    """Dead letters per day, oldest day first."""


class DeadLetterSample(NamedTuple):
    """Dead letters, newest first."""

    dead_letters: tuple[DeadLetterRecord, ...]
    at: int
    capped: bool
    """Whether there are more than were examined."""

    def matching(self, wanted: DeadLetterFilter) -> Iterator[DeadLetterRecord]:
        """Yield the dead letters that match a filter."""
        return (dead_letter for dead_letter in self.dead_letters if wanted.matches(dead_letter, self.at))


def read(request: HttpRequest, queue: str = "", fresh: int = FRESH) -> CachedRead[DeadLetterSample]:
    """Return the dead letters of a queue, or of all queues that the user can see.

    Args:
        fresh: Milliseconds before they are read again.
    """
    board = queries.board(request).value
    names = board.names_with(State.FAILED, queue)
    key = ("failures", *names)
    return snapshots.read(key, lambda: _read(names, board.at), fresh=fresh, versioned=True)


def read_query(given: Mapping[str, str]) -> dict[str, str]:
    """Return the filters of a query string.

    Raises:
        OptionError: A filter has an unknown value.
    """
    query = {name: given[name] for name in FILTERS if given.get(name)}
    read_filter(**query)  # type: ignore[arg-type]
    return query


def grouped(found: Sequence[DeadLetterRecord], at: int) -> list[FailureGroup]:
    """Group dead letters by fingerprint, largest group first."""
    groups: dict[str, list[DeadLetterRecord]] = {}
    for dead_letter in found:
        groups.setdefault(fingerprint(dead_letter), []).append(dead_letter)
    return [_group(*group, at) for group in sorted(groups.items(), key=lambda group: -len(group[1]))]


def _group(key: str, members: Sequence[DeadLetterRecord], at: int) -> FailureGroup:
    newest, oldest = members[0], members[-1]
    ages = Counter((at - member.entered_at) // DAY for member in members)
    queues = Counter(member.queue for member in members)
    names = Counter(member.name for member in members)
    return FailureGroup(
        key,
        newest.error_type,
        newest.error_message,
        len(members),
        oldest.entered_at,
        newest.entered_at,
        [name for name, _count in queues.most_common()],
        [name for name, _count in names.most_common()],
        [ages[day] for day in reversed(range(DAYS))],
    )


def page(found: Sequence[DeadLetterRecord], after: str) -> tuple[list[DeadLetterRecord], str]:
    """Return the page after a cursor, and the cursor of the next page if there is one."""
    start = 0
    if after:
        start = next((at for at, dead_letter in enumerate(found, 1) if cursor_of(dead_letter) == after), 0)
    shown = list(found[start : start + LENGTH])
    return shown, cursor_of(shown[-1]) if len(found) > start + LENGTH else ""


def cursor_of(dead_letter: DeadLetterRecord) -> str:
    """Return the cursor that identifies a dead letter in a URL."""
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
