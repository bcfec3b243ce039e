"""The stream of changes of each queue as events: see `djqueue.storage.feed` and `lua/events.lua`.

A position is the last entry that was read, at least in part: its id, its number among all entries ever added,
and how many of its rows were read (`*` for all). The number shows whether later entries were trimmed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from djqueue.core.errors import OptionError
from djqueue.storage.export import Page, page_of
from djqueue.storage.feed import EventsLostError, Feed, FeedRange, Places

from .keys import QueueKeys
from .keyspace import answer
from .records import STATES, text, unpack, unpack_ids
from .roundtrips import ScriptCall, Steps
from .scripts import script

COLUMNS = ("offset", "at", "queue", "id", "name", "event")
EVENTS = {code[0]: state.value for code, state in STATES.items()}
EVENTS |= {ord("u"): "updated", ord("r"): "removed"}
ALL = "*"
ENTRIES = 100
"""Entries of one read; each may have a thousand rows."""


class FeedPosition(NamedTuple):
    """A position in a stream: see the module."""

    entry: str
    number: int
    rows: int | None
    """Number of rows read; None for all."""

    def __str__(self) -> str:
        return f"{self.entry} {self.number} {ALL if self.rows is None else self.rows}"


BEGIN = FeedPosition("0-0", 0, None)


class FeedEntry(NamedTuple):
    """An entry of a stream."""

    id: str
    number: int
    jobs: list[str]
    became: bytes
    names: list[str]


class Look(NamedTuple):
    """Some entries, and the state of the stream."""

    added: int
    trimmed: int
    last: str
    entries: list[FeedEntry]
    has_jobs: bool
    """True if a queue without a stream has jobs."""


class RedisFeed(Feed):
    """Events of all queues.

    run, keys, queues: of the storage.
    """

    def __init__(
        self,
        run: Callable[[Steps[Any]], Any],
        keys: Callable[[str], QueueKeys],
        queues: Callable[[], list[str]],
    ) -> None:
        self._run = run
        self._keys = keys
        self._queues = queues

    def first(self, queues: tuple[str, ...] | None) -> Places:
        looks = self._looks(queues)
        return {queue: str(BEGIN._replace(number=look.trimmed)) for queue, look in looks.items()}

    def last(self, queues: tuple[str, ...] | None) -> Places:
        return {
            queue: str(FeedPosition(look.last, look.added, None) if look.added else BEGIN)
            for queue, look in self._looks(queues).items()
        }

    def ahead(self, places: Places, until: Places, limit: int) -> Places:
        reached = {
            queue: list(self._steps(queue, _place(places.get(queue)), _place(end), limit))
            for queue, end in until.items()
        }
        found = dict(places)
        left, streams = limit, len(reached)
        # Queues with few rows leave the rest of their share to the others.
        for queue, steps in sorted(reached.items(), key=lambda item: item[1][-1][1] if item[1] else 0):
            place, rows = _within(steps, -(-left // streams), _place(places.get(queue)))
            if place is not None:
                found[queue] = str(place)
            left, streams = left - rows, streams - 1
        return found

    def _steps(
        self, queue: str, start: FeedPosition, end: FeedPosition, limit: int
    ) -> Iterator[tuple[FeedPosition, int]]:
        """Return the position after each entry up to `end`, with the number of rows up to it."""
        rows = 0
        for entry, skipped, upto in self._entries(queue, start, end):
            rows += upto - skipped
            yield FeedPosition(entry.id, entry.number, None if upto == len(entry.jobs) else upto), rows
            if rows >= limit:
                return

    def read(self, stretch: FeedRange, size: int, *, complete: bool) -> Iterator[Page]:
        rows: list[tuple[Any, ...]] = []
        start, end = _place(stretch.start), _place(stretch.end)
        for entry, skipped, upto in self._entries(stretch.stream, start, end, names=True, complete=complete):
            at = int(entry.id.partition("-")[0])
            for place in range(skipped, upto):
                event = EVENTS[entry.became[place]] if entry.became else None
                name = entry.names[place] or None
                offset = f"{entry.id}:{place}"
                rows.append((offset, at, stretch.stream, entry.jobs[place], name, event))
            while len(rows) >= size:
                yield page_of(COLUMNS, rows[:size])
                del rows[:size]
        if rows:
            yield page_of(COLUMNS, rows)

    def _entries(
        self,
        queue: str,
        start: FeedPosition,
        end: FeedPosition,
        *,
        names: bool = False,
        complete: bool = False,
    ) -> Iterator[tuple[FeedEntry, int, int]]:
        """Return the entries between two positions, with the range of their rows."""
        begin, read = f"({start.entry}", start.number
        if start.rows is not None:
            begin, read = start.entry, start.number - 1
        while True:
            look = self._look(queue, begin, end.entry, ENTRIES, names=names)
            is_new = look.added < max(start.number, end.number)  # the queue was obliterated meanwhile
            if complete and (is_new or (read < look.trimmed and read < end.number)):
                raise EventsLostError(
                    f"queue {queue!r}: events were trimmed before they were read: the stream keeps the "
                    f"last {look.added - look.trimmed} calls (STREAM); set failOnDataLoss=false to "
                    "continue without them"
                )
            read = max(0 if read > look.added else read, look.trimmed)
            for entry in look.entries:
                read += 1
                skipped = start.rows or 0 if entry.id == start.entry else 0
                upto = end.rows if entry.id == end.entry and end.rows is not None else len(entry.jobs)
                if upto > skipped:
                    yield entry._replace(number=read), skipped, upto
            if len(look.entries) < ENTRIES:
                return
            begin = f"({look.entries[-1].id}"

    def _look(self, queue: str, begin: str, end: str, many: int, *, names: bool = False) -> Look:
        arguments = [begin.encode(), end.encode(), many, b"1" if names else b""]
        call = ScriptCall(script("events"), self._keys(queue), arguments, sequence=False)
        added, length, last, found, has_jobs = self._run(answer(call))
        entries = [
            FeedEntry(text(name), 0, unpack_ids(jobs), became, unpack(packed) if packed else [])
            for name, jobs, became, packed in zip(*[iter(found)] * 4, strict=True)
        ]
        return Look(added, added - length, text(last), entries, has_jobs == 1)

    def _looks(self, queues: tuple[str, ...] | None) -> dict[str, Look]:
        names = self._queues() if queues is None else queues
        looks = {queue: self._look(queue, "-", "-", 1) for queue in names}
        if any(look.has_jobs for look in looks.values()) and not any(look.added for look in looks.values()):
            raise OptionError(
                "events: no queue keeps a change stream: set neither MIRROR to False nor STREAM to 0"
            )
        return looks


def _place(packed: str | None) -> FeedPosition:
    if not packed:
        return BEGIN
    entry, number, rows = packed.split(" ")
    return FeedPosition(entry, int(number), None if rows == ALL else int(rows))


def _within(
    steps: Sequence[tuple[FeedPosition, int]], limit: int, start: FeedPosition
) -> tuple[FeedPosition | None, int]:
    """Return the position after at most so many rows, and their number."""
    before = 0
    last: FeedPosition | None = None
    for place, rows in steps:
        if rows > limit:
            taken = start.rows or 0 if place.entry == start.entry else 0
            return (last, before) if limit == before else (place._replace(rows=taken + limit - before), limit)
        last, before = place, rows
    return last, before
