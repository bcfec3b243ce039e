"""The streams of changes, as the mirror and the event feed read them.

Every script that changes jobs appends their ids and new states to the queue's stream.

The mirror reads which jobs have changed, in order, and their current records. It uses the consumer group
`mirror`, with one consumer: the next process first gets the entries that the last one did not acknowledge. A
hash lists the queues that are followed. A queue that is not in it was never followed, or Redis has lost its
data.

The feed returns each change as an event: see `djqueue.storage.export` and `lua/events.lua`. A position is the
last entry that was read, at least in part: its id, its number among all entries ever added, and how many of
its rows were read (`*` for all). The number shows whether later entries were trimmed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from djqueue.core.errors import OptionError, StorageError
from djqueue.core.job import DeadLetterRecord, JobRecord
from djqueue.core.policies import Hold, KeyLimit, Rate
from djqueue.core.states import State
from djqueue.storage.export import (
    PAGE_BYTES,
    CallRetry,
    EventsLostError,
    Feed,
    FeedRange,
    Page,
    Places,
    once,
    page_of,
)

from . import records
from .connections import Connections
from .keys import RESULT, QueueKeys
from .keyspace import Keyspace, answer, in_calls, scan_part
from .options import MirrorOptions
from .records import STATES, mapping, pack_text, text, unpack_ids
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

FIRST_ENTRIES, MIN_ENTRIES, MAX_ENTRIES = 200, 20, 2_000
"""Stream entries of one read: at first, and the limits. Each has one job or up to a thousand."""
CHANGES = 2_000
"""Changes for which a read should suffice."""
ROUND = 200_000
"""Changes after which a round reads no more."""
ACKNOWLEDGED = 2_000
"""Entries that one command acknowledges."""
SAMPLED = 4
"""Entries from which the changes of all new ones are estimated."""
RECORDS = 1_000
"""Jobs of one read, which takes Redis about two milliseconds."""
T = TypeVar("T")
Mark = bytes
"""The last entry of a queue's stream that was delivered to the mirror; b"" if the stream is not followed.
Only the reads of the process that copies change it, and only forward; otherwise Redis has lost data.
"""
COLUMNS = ("offset", "at", "queue", "id", "event")
"""Columns of events that the stream has."""
EVENTS = {code[0]: state.value for code, state in STATES.items()} | {ord("u"): "updated", ord("r"): "removed"}
"""Names of events, by the first byte of the new state or the kind of change."""
ALL = "*"
ENTRIES = 100
"""Entries of one read; each may have a thousand rows."""


class DataLostError(StorageError):
    """A queue was obliterated or lost its data while it was copied."""


class Controls(NamedTuple):
    """The overrides of a queue."""

    paused: bool
    holds: tuple[Hold, ...]
    limited: bool
    rate: Rate | None
    concurrency: int | None
    revision: int
    """Number of changes of group overrides so far."""
    groups: dict[str | None, KeyLimit] | None
    """Overrides by group, None for the defaults; None if they have not changed since the last read."""


class ChangeBatch(NamedTuple):
    """The next changes of a queue."""

    status: str
    """go | new (the stream was not followed before) | gap (changes were trimmed before they were read)"""
    before: Mark
    after: Mark
    entries: list[bytes]
    """Ids of the entries to acknowledge."""
    ids: list[str]
    """Changed jobs, each once, in the order of their first change."""
    controls: Controls
    is_full: bool
    """Whether more changes may be waiting."""


class Backlog(NamedTuple):
    """A queue's stream at one moment."""

    added: int
    """Entries added so far."""
    waiting: int
    """Entries that are not read or not acknowledged; 0 if the stream is not followed."""
    changes: float
    """Changes in each of the last entries, on average."""


class ChangePosition(NamedTuple):
    """The end of a queue's stream at one moment."""

    mark: Mark
    entry: bytes
    """Id of the last entry."""
    number: int
    """Number of that entry."""


class ChangeStream:
    """The changes of all queues of one storage. Methods may be called from any thread.

    options: what the mirror keeps.
    length: approximate number of entries that a stream keeps.
    """

    def __init__(
        self, keyspace: Keyspace, options: MirrorOptions, length: int, connections: Connections
    ) -> None:
        self.options = options
        self.length = length
        self._keyspace = keyspace
        self._connections = connections
        self._entries: dict[str, int] = {}
        """Entries of the next read, by queue."""

    @property
    def is_cluster(self) -> bool:
        """True if one queue may lose its data while others keep theirs."""
        return self._connections.is_cluster

    def queues(self) -> tuple[list[str], dict[str, int]]:
        """Return the sorted names of the queues, and since when each is followed: see `trust`."""
        return self._keyspace.run(self._queues())

    def _queues(self) -> Steps[tuple[list[str], dict[str, int]]]:
        # In this order: a loss of data in between must not look like an obliterated queue.
        [names] = yield [RedisCommand((b"SMEMBERS", self._keyspace.common.key("queues")))]
        [followed] = yield [RedisCommand((b"HGETALL", self._keyspace.common.key("mirror")))]
        return sorted(map(text, names)), mapping(followed)

    def trust(self, queue: str, since: int) -> None:
        """Record that an existing queue is followed without a break since a time in UTC milliseconds.

        Jobs enqueued since then that Redis does not know were removed; older ones may have been lost.
        """
        arguments = [pack_text(queue), since]
        self._keyspace.ask(ScriptCall(script("trust"), self._keyspace.common, arguments, sequence=False))

    def forget(self, queue: str) -> None:
        """Record that a queue is not followed."""
        self._keyspace.ask(RedisCommand((b"HDEL", self._keyspace.common.key("mirror"), pack_text(queue))))

    # The stream.

    def next(self, queue: str, revision: int | None = None) -> ChangeBatch:
        """Return the next changes; the same ones until they are acknowledged. revision: as read before.

        Raises DataLostError if the queue loses its data while they are read.
        """
        batch = self._read(queue, revision)
        ids = dict.fromkeys(batch.ids)
        changes = len(batch.ids)
        while batch.is_full and changes < ROUND:
            more = self._read(queue, batch.controls.revision, batch.entries[-1])
            if more.status != "go" or more.before != batch.after:
                raise DataLostError
            changes += len(more.ids)
            ids.update(dict.fromkeys(more.ids))
            batch = batch._replace(
                after=more.after, entries=batch.entries + more.entries, is_full=more.is_full
            )
        return batch._replace(ids=list(ids))

    def _read(self, queue: str, revision: int | None, past: bytes = b"") -> ChangeBatch:
        """Read once, after an entry that was read and not acknowledged."""
        limit = self._entries.get(queue, FIRST_ENTRIES)
        arguments = [limit, b"" if revision is None else revision, past]
        call = ScriptCall(script("changes"), self._keyspace.keys(queue), arguments, sequence=False)
        status, before, after, overrides, stored, *groups = self._keyspace.ask(call)
        changed = [job_id for _, packed in stored for job_id in unpack_ids(packed)]
        entries = [entry for entry, _ in stored]
        is_full = len(entries) == limit
        if len(changed) > CHANGES:
            self._entries[queue] = max(limit // 2, MIN_ENTRIES)
        elif is_full and 2 * len(changed) <= CHANGES:
            self._entries[queue] = min(limit * 2, MAX_ENTRIES)
        return ChangeBatch(
            text(status), before, after, entries, changed, _controls(overrides, *groups), is_full=is_full
        )

    def backlogs(self) -> dict[str, Backlog]:
        """Return the backlogs of all queues."""
        return self._keyspace.run(self._backlogs())

    def _backlogs(self) -> Steps[dict[str, Backlog]]:
        [names] = yield [RedisCommand((b"SMEMBERS", self._keyspace.common.key("queues")))]
        queues = [text(name) for name in names]
        called = script("backlog")
        replies = yield [
            ScriptCall(called, self._keyspace.keys(queue), [SAMPLED], sequence=False) for queue in queues
        ]
        return {
            queue: Backlog(added, waiting, changes / max(entries, 1))
            for queue, (added, waiting, changes, entries) in zip(queues, replies, strict=True)
        }

    def acknowledge(self, queue: str, entries: Sequence[bytes]) -> None:
        """Acknowledge entries, so that they are not read again."""
        key = self._keyspace.keys(queue).key("log")
        for first in range(0, len(entries), ACKNOWLEDGED):
            chunk = entries[first : first + ACKNOWLEDGED]
            self._keyspace.ask(RedisCommand((b"XACK", key, b"mirror", *chunk)))

    def follow(self, queue: str) -> ChangePosition:
        """Follow the stream if it is not followed yet; return its end, from which `go_on` may continue."""
        return ChangePosition(*self._keyspace.run(self._follow(queue)))

    def go_on(self, queue: str, position: ChangePosition) -> Mark:
        """Follow the stream from after this position: everything before it was read in another way."""
        mark: Mark = self._keyspace.run(self._follow(queue, position.entry, position.number))[0]
        return mark

    def leave(self, queue: str) -> None:
        """Stop following the stream of a queue that no longer exists."""
        self._entries.pop(queue, None)
        self._keyspace.ask(RedisCommand((b"UNLINK", self._keyspace.keys(queue).key("log"))))

    def _follow(self, queue: str, *position: bytes | int) -> Steps[Any]:
        return answer(ScriptCall(script("follow"), self._keyspace.keys(queue), position, sequence=False))

    # The jobs.

    def pages(self, queue: str) -> Iterator[list[str]]:
        """Yield the ids of all jobs, a part at a time, some perhaps twice.

        Jobs that are added or removed meanwhile may be missed, but are among the changes.
        """
        keys, cursor = self._keyspace.keys(queue), b""
        while cursor != b"0":
            steps = scan_part(keys, frozenset(State), None, cursor or b"0")
            cursor, jobs = self._keyspace.run(steps)
            yield [job_id for _, job_id in jobs]

    def records(self, queue: str, ids: Sequence[str], mark: Mark) -> list[JobRecord | None]:
        """Return the current records of jobs. Raises DataLostError if the queue's mark is another one.

        Results and log lines are read a moment later. A job that changes in between is among the next
        changes.
        """
        return self._keyspace.run(self._records(self._keyspace.keys(queue), ids, mark))

    def _records(self, keys: QueueKeys, ids: Sequence[str], mark: Mark) -> Steps[list[JobRecord | None]]:
        jobs: list[JobRecord | None] = []
        limit = RECORDS
        while len(jobs) < len(ids):
            chunk = ids[len(jobs) : len(jobs) + limit]
            arguments = [PAGE_BYTES, *map(pack_text, chunk)]
            call = ScriptCall(script("records"), keys, arguments, sequence=False)
            [[now, present, blobs, sts, progress, history]] = yield [call]
            if present != mark:
                raise DataLostError
            chunk = chunk[: len(blobs)]
            limit = min(2 * len(chunk), RECORDS)
            none = [None] * len(chunk)
            # Only jobs that were claimed have results or log lines, and keys are the larger part of a call.
            results, lines = none.copy(), none.copy()
            begun = [at for at, st in enumerate(sts) if st is not None]
            if begun:
                done = [at for at in begun if STATES[sts[at][:1]] is State.COMPLETED]
                logs = [keys.log_lines(chunk[at]) for at in begun]
                if done:
                    values = yield from in_calls("results", keys, [chunk[at] for at in done], RESULT)
                    for at, value in zip(done, values, strict=True):
                        results[at] = value
                [logged] = yield [RedisCommand((b"EXISTS", *logs))]
                if logged:
                    [written] = yield [ScriptCall(script("lines"), keys, (), logs, sequence=False)]
                    for at, value in zip(begun, written, strict=True):
                        lines[at] = value
            parts = (blobs, sts, results, progress or none, history or none, lines)
            jobs += records.records(keys.queue, chunk, parts, int(now))
        return jobs

    def dead_letters(self, queue: str, ids: Sequence[str]) -> dict[str, DeadLetterRecord]:
        """Return the dead letters of jobs that have one."""
        words = (b"HMGET", self._keyspace.keys(queue).key("dead_letters"), *map(pack_text, ids))
        letters = self._keyspace.ask(RedisCommand(words)) if ids else []
        pairs = zip(ids, letters, strict=True)
        return {
            job_id: records.dead_letter(queue, job_id, data) for job_id, data in pairs if data is not None
        }


def _controls(overrides: Sequence[bytes | None], revision: bytes, groups: Any) -> Controls:
    paused, limited, capacity, per, concurrency, holds = overrides
    rate, slots = records.unpack_limits(capacity, per, concurrency)
    limits = None if groups is None else records.key_limits(groups)
    own = paused is not None, records.unpack_holds(holds), limited is not None
    return Controls(*own, rate, slots, int(revision), limits)


class FeedPosition(NamedTuple):
    """A position in a stream, as the feed passes it to callers."""

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
        positions = dict(places)
        left, streams = limit, len(reached)
        # Queues with few rows leave the rest of their share to the others.
        for queue, steps in sorted(reached.items(), key=lambda item: item[1][-1][1] if item[1] else 0):
            position, rows = _within(steps, -(-left // streams), _place(places.get(queue)))
            if position is not None:
                positions[queue] = str(position)
            left, streams = left - rows, streams - 1
        return positions

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

    def read(
        self, stretch: FeedRange, size: int, *, complete: bool, retry: CallRetry = once
    ) -> Iterator[Page]:
        rows: list[tuple[Any, ...]] = []
        start, end = _place(stretch.start), _place(stretch.end)
        for entry, skipped, upto in self._entries(stretch.stream, start, end, retry, complete=complete):
            at = int(entry.id.partition("-")[0])
            for row in range(skipped, upto):
                event = EVENTS[entry.became[row]] if entry.became else None
                rows.append((f"{entry.id}:{row}", at, stretch.stream, entry.jobs[row], event))
            while len(rows) >= size:
                yield self._page(stretch.stream, rows[:size], retry)
                del rows[:size]
        if rows:
            yield self._page(stretch.stream, rows, retry)

    def _page(self, queue: str, rows: Sequence[tuple[Any, ...]], retry: CallRetry) -> Page:
        page: dict[str, Sequence[Any]] = {**page_of(COLUMNS, rows)}
        ids = list(dict.fromkeys(page["id"]))
        names = retry(lambda: self._run(in_calls("names", self._keys(queue), ids)))
        name_of = dict(zip(ids, names, strict=True))
        page["name"] = [text(name_of[job_id]) or None for job_id in page["id"]]
        return page

    def _entries(
        self,
        queue: str,
        start: FeedPosition,
        end: FeedPosition,
        retry: CallRetry = once,
        *,
        complete: bool = False,
    ) -> Iterator[tuple[FeedEntry, int, int]]:
        """Return the entries between two positions, with the range of their rows."""
        begin, read = f"({start.entry}", start.number
        if start.rows is not None:
            begin, read = start.entry, start.number - 1
        while True:
            look = retry(self._look, queue, begin, end.entry, ENTRIES)
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

    def _look(self, queue: str, begin: str, end: str, count: int) -> Look:
        arguments = [begin.encode(), end.encode(), count]
        call = ScriptCall(script("events"), self._keys(queue), arguments, sequence=False)
        added, length, last, stored, has_jobs = self._run(answer(call))
        entries = [
            FeedEntry(text(name), 0, unpack_ids(jobs), became)
            for name, jobs, became in zip(*[iter(stored)] * 3, strict=True)
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
    for position, rows in steps:
        if rows > limit:
            taken = start.rows or 0 if position.entry == start.entry else 0
            return (
                (last, before) if limit == before else (position._replace(rows=taken + limit - before), limit)
            )
        last, before = position, rows
    return last, before
