"""Buckets of metrics in Redis: see `lua/measure.lua`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from djqueue.core.clock import Clock
from djqueue.core.metrics import (
    ALL_TIME,
    HOUR,
    MINUTE,
    OTHERS,
    Bucket,
    Row,
    RunStats,
    Span,
    Tiers,
    assemble,
    since_beginning,
    span_of,
    values_of,
)
from djqueue.core.options import DAY

from .keys import QueueKeys
from .records import pack, pack_text, pairs, text, unpack
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script

LENGTHS = {MINUTE: ("m", DAY), HOUR: ("h", 30 * DAY), DAY: ("d", 400 * DAY)}
"""By bucket length: its name in keys, and the stretch of time that one hash covers."""


class Metrics:
    """Steps that add to buckets and read them.

    clock: of this machine; the script checks that Redis's is close.
    """

    def __init__(
        self,
        keys: Callable[[str], QueueKeys],
        queues: Callable[[], Steps[list[str]]],
        tiers: Tiers,
        clock: Clock,
    ) -> None:
        self._keys = keys
        self._queues = queues
        self._kept = tiers.kept()
        self._clock = clock

    def present(self, keys: QueueKeys) -> tuple[bytes, list[bytes]]:
        """Return the encoded bucket lengths, and the keys of the three stretches around now of each.

        The key of all time comes last.
        """
        now = self._clock.now()
        tiers: list[tuple[int, ...]] = []
        names: list[bytes] = []
        for step, (_, stretch) in LENGTHS.items():
            first = now // stretch - 1
            tiers.append((step, stretch, first, self._kept[step] + stretch))
            names += [_key(keys, step, number) for number in range(first, first + 3)]
        return pack([*tiers, (ALL_TIME,)]), [*names, _all_time(keys)]

    def all_keys(self, keys: QueueKeys) -> list[bytes]:
        """Return all keys that may exist."""
        now = self._clock.now()
        return [
            _all_time(keys),
            *(
                _key(keys, step, number)
                for step, (_, stretch) in LENGTHS.items()
                for number in range((now - self._kept[step]) // stretch - 1, now // stretch + 2)
            ),
        ]

    def record(self, stats: Sequence[RunStats]) -> Steps[None]:
        """Add metrics of attempts."""
        by_queue: dict[str, list[Any]] = {}
        for one in stats:
            by_queue.setdefault(one.queue, []).extend((one.name, values_of(one)))
        for queue, runs in by_queue.items():
            keys = self._keys(queue)
            tiers, names = self.present(keys)
            yield [ScriptCall(script("record"), keys, [tiers, pack(runs), pack(OTHERS)], names)]

    def series(
        self, queues: Sequence[str] | None, start: int, end: int, step: int, by_name: bool
    ) -> Steps[list[Bucket]]:
        """Return the buckets of a queue in a time span."""
        span = span_of(start, end, step)
        names = list(dict.fromkeys(queues)) if queues is not None else (yield from self._queues())
        parts = [(queue, key, starts) for queue in names for key, starts in self._parts(queue, span)]
        if by_name:
            rows = yield from self._by_name(parts)
        else:
            rows = yield from self._rows([(queue, key, starts, "") for queue, key, starts in parts])
        return assemble(rows, queues, span, by_name=by_name)

    def cumulative(self, queues: Sequence[str] | None) -> Steps[list[Bucket]]:
        """Return everything since the queues began, by queue and by job name."""
        names = list(dict.fromkeys(queues)) if queues is not None else (yield from self._queues())
        if not names:
            return []
        answers = yield [RedisCommand((b"HGETALL", _all_time(self._keys(queue)))) for queue in names]
        rows: list[Row] = []
        for queue, fields in zip(names, answers, strict=True):
            for field, values in pairs(fields):
                start, _, name = field.partition(b"\0")
                if start == b"0":
                    rows.append((queue, text(name), 0, [int(number) for number in unpack(values)]))
        return since_beginning(rows)

    def _parts(self, queue: str, span: Span) -> Iterator[tuple[bytes, list[int]]]:
        """Yield the hashes with buckets of a time span, each with the starts in it."""
        oldest = self._clock.now() - self._kept[span.tier]
        parts: dict[int, list[int]] = {}
        for start in span.starts():
            if start >= oldest - span.tier:
                parts.setdefault(start // LENGTHS[span.tier][1], []).append(start)
        keys = self._keys(queue)
        for number, starts in parts.items():
            yield _key(keys, span.tier, number), starts

    def _by_name(self, parts: Sequence[tuple[str, bytes, list[int]]]) -> Steps[list[Row]]:
        known = yield [RedisCommand((b"HGET", key, b"names")) for _, key, _ in parts]
        wanted = [
            (queue, key, starts, name)
            for (queue, key, starts), names in zip(parts, known, strict=True)
            if names is not None
            for name in (*unpack(names), OTHERS)
        ]
        return (yield from self._rows(wanted))

    def _rows(self, wanted: Sequence[tuple[str, bytes, list[int], str]]) -> Steps[list[Row]]:
        if not wanted:
            return []
        fields: dict[tuple[int, int, str], list[bytes]] = {}
        commands: list[ScriptCall | RedisCommand] = []
        for _, key, starts, name in wanted:
            stretch = (starts[0], len(starts), name)
            if stretch not in fields:
                behind = b"\0" + pack_text(name) if name else b""
                fields[stretch] = [b"%d%b" % (start, behind) for start in starts]
            commands.append(RedisCommand((b"HMGET", key, *fields[stretch])))
        answers = yield commands
        rows: list[Row] = []
        for (queue, _, starts, name), found in zip(wanted, answers, strict=True):
            for start, values in zip(starts, found, strict=True):
                if values is not None:
                    rows.append((queue, name, start, [int(number) for number in unpack(values)]))
        return rows


def _all_time(keys: QueueKeys) -> bytes:
    return keys.key("metrics:all")


def _key(keys: QueueKeys, step: int, number: int) -> bytes:
    return keys.key(f"metrics:{LENGTHS[step][0]}:{number}")
