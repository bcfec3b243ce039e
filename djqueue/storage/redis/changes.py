"""What the mirror reads: which jobs have changed, in order, and how they are now.

Every script that changes jobs appends their ids to the queue's stream. The mirror reads it through the
consumer group `mirror`, with one consumer: what one process was given and did not acknowledge is what the
next one is given first. A hash beside the queues' names says which queues are followed; one that is not in
it has never been, or Redis has lost its data.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from djqueue.core.errors import StorageError
from djqueue.core.groups import GroupLimit
from djqueue.core.job import DeadLetterRecord, JobRecord
from djqueue.core.limiter import Rate

from . import records
from .connections import Connections
from .keys import QueueKeys
from .keyspace import Keyspace, answer
from .options import MirrorOptions
from .records import STATES, pack_text, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

ENTRIES = 200
"""Of the stream, in one reading: of one job each, or of up to a thousand."""
RECORDS = 500
"""Jobs of one reading call, which takes Redis about two milliseconds."""
SCANNED = 1_000
"""Jobs, about, of one part of a look at all of them."""
EVERY = b"".join(STATES)

T = TypeVar("T")

Mark = bytes
"""The last entry of a queue's stream that was given to the mirror: b"" if the stream is not followed. While
one process copies, only its own readings move it, and forward; if it is another one, Redis has lost data.
"""


class DataLostError(StorageError):
    """A queue was obliterated, or Redis has lost its data, while it was copied."""


class Controls(NamedTuple):
    """What a queue was told while it ran."""

    paused: bool
    limited: bool
    rate: Rate | None
    concurrency: int | None
    revision: int
    """How often groups were told something."""
    groups: dict[str | None, GroupLimit] | None
    """What, under None to all; None if it was read before."""


class ChangeBatch(NamedTuple):
    """The next changes of a queue."""

    word: str
    """go | new (nobody has followed the stream before) | gap (some changes were forgotten unread)"""
    before: Mark
    after: Mark
    entries: list[bytes]
    """To be acknowledged."""
    ids: list[str]
    """Jobs that have changed, each once, in the order of their first change."""
    controls: Controls


class ChangePosition(NamedTuple):
    """The end of a queue's stream at one moment."""

    mark: Mark
    entry: bytes
    """The last one of all."""
    number: int
    """Which one that is."""


class ChangeStream:
    """The changes of all queues of one storage. Methods may be called from any thread.

    options: what the mirror is to keep.
    """

    def __init__(self, keyspace: Keyspace, options: MirrorOptions, connections: Connections) -> None:
        self.options = options
        self._keyspace = keyspace
        self._connections = connections

    @property
    def is_cluster(self) -> bool:
        """Whether a queue may lose its data while others keep theirs."""
        return self._connections.is_cluster

    def queues(self) -> tuple[list[str], dict[str, int]]:
        """The names of the queues, sorted; and since when those that are followed are: see `trust`."""
        return self._keyspace.run(self._queues())

    def _queues(self) -> Steps[tuple[list[str], dict[str, int]]]:
        # In this order: if data is lost in between, no queue is taken for one that was obliterated.
        [names] = yield [RedisCommand((b"SMEMBERS", self._keyspace.common.key("queues")))]
        [followed] = yield [RedisCommand((b"HGETALL", self._keyspace.common.key("mirror")))]
        pairs = followed.items() if isinstance(followed, dict) else zip(*[iter(followed)] * 2, strict=True)
        return sorted(map(text, names)), {text(name): int(since) for name, since in pairs}

    def trust(self, queue: str, since: int) -> None:
        """Note that the queue, if there is one, is followed without a break, so that jobs which Redis does
        not know have been removed: those enqueued since a time in UTC milliseconds. Older ones it may have
        lost.
        """
        arguments = [pack_text(queue), since]
        self._keyspace.run(
            answer(ScriptCall(script("trust"), self._keyspace.common, arguments, sequence=False))
        )

    def forget(self, queue: str) -> None:
        """Note that the queue is not followed."""
        self._keyspace.run(
            answer(RedisCommand((b"HDEL", self._keyspace.common.key("mirror"), pack_text(queue))))
        )

    # The stream.

    def next(self, queue: str, said: int | None = None) -> ChangeBatch:
        """What has changed; the same again until it is acknowledged. said: as it was read before."""
        arguments = [ENTRIES, b"" if said is None else said]
        call = ScriptCall(script("changes"), self._keyspace.keys(queue), arguments, sequence=False)
        word, before, after, told, found, *groups = self._keyspace.run(answer(call))
        ids = dict.fromkeys(job_id for _, packed in found for job_id in unpack(packed))
        entries = [entry for entry, _ in found]
        return ChangeBatch(text(word), before, after, entries, list(ids), _controls(told, *groups))

    def acknowledge(self, queue: str, entries: Sequence[bytes]) -> None:
        """Have these not given again."""
        if entries:
            words = (b"XACK", self._keyspace.keys(queue).key("log"), b"mirror", *entries)
            self._keyspace.run(answer(RedisCommand(words)))

    def follow(self, queue: str) -> ChangePosition:
        """Follow the stream, if nobody does; its end, behind which `go_on` may go on."""
        return ChangePosition(*self._keyspace.run(self._follow(queue)))

    def go_on(self, queue: str, place: ChangePosition) -> Mark:
        """Follow the stream from behind this place on: all before it has been seen in another way."""
        mark: Mark = self._keyspace.run(self._follow(queue, place.entry, place.number))[0]
        return mark

    def leave(self, queue: str) -> None:
        """Let go of the stream of a queue that is not there any more."""
        self._keyspace.run(answer(RedisCommand((b"UNLINK", self._keyspace.keys(queue).key("log")))))

    def _follow(self, queue: str, *place: bytes | int) -> Steps[Any]:
        return answer(ScriptCall(script("follow"), self._keyspace.keys(queue), place, sequence=False))

    # The jobs.

    def pages(self, queue: str) -> Iterator[list[str]]:
        """The ids of all jobs, a part at a time, some of them perhaps twice. What comes or goes meanwhile may
        be missed, but is among the changes.
        """
        cursor = b"0"
        while True:
            arguments = [cursor, SCANNED, EVERY, b""]
            call = ScriptCall(script("scan"), self._keyspace.keys(queue), arguments, sequence=False)
            [cursor, entries] = self._keyspace.run(answer(call))
            yield [text(job_id) for job_id in entries[1::2]]
            if cursor == b"0":
                return

    def records(self, queue: str, ids: Sequence[str], mark: Mark) -> list[JobRecord | None]:
        """Jobs as they are now: see `Storage.jobs`. Raises DataLostError if this is not the queue's mark."""
        return self._keyspace.run(self._records(self._keyspace.keys(queue), ids, mark))

    def _records(self, keys: QueueKeys, ids: Sequence[str], mark: Mark) -> Steps[list[JobRecord | None]]:
        found: list[JobRecord | None] = []
        for first in range(0, len(ids), RECORDS):
            some = ids[first : first + RECORDS]
            theirs = [*map(keys.result, some), *map(keys.log_lines, some)]
            arguments = [*map(pack_text, some)]
            call = ScriptCall(script("records"), keys, arguments, theirs, sequence=False)
            [[now, present, replies]] = yield [call]
            if present != mark:
                raise DataLostError
            now = int(now)
            found += [
                None if reply is None else records.record(keys.queue, job_id, reply, now)
                for job_id, reply in zip(some, replies, strict=True)
            ]
        return found

    def letters(self, queue: str, ids: Sequence[str]) -> dict[str, DeadLetterRecord]:
        """The dead letters of those of the jobs that have one."""
        words = (b"HMGET", self._keyspace.keys(queue).key("dead_letters"), *map(pack_text, ids))
        found = self._keyspace.run(answer(RedisCommand(words))) if ids else []
        pairs = zip(ids, found, strict=True)
        return {job_id: records.letter(queue, job_id, data) for job_id, data in pairs if data is not None}


def _controls(told: Sequence[bytes | None], said: bytes, groups: Any) -> Controls:
    paused, limited, capacity, per, concurrency = told
    rate = Rate(int(capacity), int(per)) if capacity and per else None
    most = int(concurrency) if concurrency else None
    limits = None if groups is None else records.group_limits(groups)
    return Controls(paused is not None, limited is not None, rate, most, int(said), limits)
