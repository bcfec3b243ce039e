"""Frames of the scheduler's socket: length-prefixed MessagePack, with the contract's own values.

A frame is a big-endian length of four bytes, and as many bytes. It can only contain values of the classes
listed here. Its values are counted before it is decoded.
"""

import struct
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from struct import unpack_from
from typing import Any, NamedTuple
from uuid import UUID

import msgpack

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core import job as records
from djqueue.core.errors import SerializationError
from djqueue.core.explain import BlockingJob, Dependency, Explanation
from djqueue.core.flow import FlowEdge, FlowGraph, FlowNode
from djqueue.core.job import Swept
from djqueue.core.metrics import Bucket, Histogram, RunStats
from djqueue.core.options import JobOptions
from djqueue.core.overview import (
    DiagnosticLine,
    Diagnostics,
    Finding,
    KeyOverview,
    KeysOverview,
    LimiterState,
    Overview,
    QueueOverview,
    Totals,
)
from djqueue.core.pages import JobPage, JobSummary, JobSummaryPage
from djqueue.core.policies import UNSET, Hold, KeyLimit, Rate
from djqueue.core.states import State
from djqueue.core.workers import ProcessInfo, RunningJob, WorkerDump, WorkerInfo

LENGTH = struct.Struct(">I")
MAX_FRAME = 64 * 1024 * 1024
MAX_VALUES = 2_000_000
"""Maximum number of values of a frame. The smallest, an empty list, takes one byte there and eighty in
memory.
"""
MAX_DEPTH = 16
"""Maximum nesting of records, tuples and sets: each level takes 40 KB of the thread's stack."""

TUPLE, FROZENSET, STATE, OPTIONS, RATE, VALUE, ROWS, UNCHANGED = 1, 2, 3, 4, 5, 6, 7, 8
FIRST_RECORD = 16
RECORDS: tuple[type, ...] = (
    records.Batch,
    records.EnqueueResult,
    records.ClaimRequest,
    records.Claimed,
    records.Claims,
    records.Outcome,
    records.Finished,
    records.Lease,
    records.Renewal,
    records.ProgressReport,
    records.Event,
    records.DeadLetterRecord,
    records.CancelResult,
    WorkerInfo,
    records.JobRecord,
    records.JobFailure,
    records.AttemptRecord,
    Swept,
    records.DeadLetterPage,
    KeyLimit,
    LimiterState,
    records.Emission,
    records.ItemMark,
    records.ItemPage,
    Totals,
    QueueOverview,
    Overview,
    Dependency,
    BlockingJob,
    Explanation,
    Histogram,
    RunStats,
    Bucket,
    JobPage,
    DiagnosticLine,
    Diagnostics,
    JobSummary,
    JobSummaryPage,
    RunningJob,
    WorkerDump,
    KeyOverview,
    KeysOverview,
    FlowNode,
    FlowEdge,
    FlowGraph,
    ProcessInfo,
    Finding,
    Hold,
)
"""Named tuples; one's place here is its code on the wire, so new ones go to the end."""
VALUES = (datetime, date, time, timedelta, Decimal, UUID)
"""Further types in the progress of a handler, which the codec supports."""
_CODES = {cls: code for code, cls in enumerate(RECORDS, FIRST_RECORD)}
SHARED_OPTIONS = 1_024
"""Number of options that are kept packed, and unpacked, because the jobs of a batch have the same ones."""
SHORT_OPTIONS = 1_024
"""Maximum bytes of packed options that are kept."""


class Rows(NamedTuple):
    """Records of one class, whose values are packed as one array: that takes a quarter of the time."""

    code: int
    records: list[Any]


def flat(value: Any) -> Any:
    """Return a list of records of one class as `Rows`, which unpack to the list; others as they are."""
    if type(value) is not list or len(value) < 2:
        return value
    code = _CODES.get(type(value[0]))
    if code is None or len(set(map(type, value))) > 1:
        return value
    return Rows(code, value)


def pack(value: Any) -> bytes:
    """Return the frame of a value."""
    body = pack_body(value)
    if len(body) > MAX_FRAME:
        raise SerializationError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    _check_values(body)
    return LENGTH.pack(len(body)) + body


def unpack_frame(body: bytes) -> Any:
    """Return the value of a frame's body that came from another process.

    Raises SerializationError for anything else, and for more values than a frame may have.
    """
    _check_values(body)
    return unpack(body)


def _check_values(body: bytes) -> None:
    if has_more_values(body, MAX_VALUES):
        raise SerializationError(
            f"a frame of {len(body)} bytes has more than {MAX_VALUES:,} values; request fewer jobs at a time"
        )


def pack_body(value: Any) -> bytes:
    """Encode a value of any size for storage; `unpack` decodes it."""
    body: bytes = _pack(value)
    return body


def unpack(body: bytes) -> Any:
    """Return the value of a frame's body. Raises SerializationError if it is invalid."""
    try:
        return _unpack(body)
    except SerializationError:
        raise
    except Exception as error:
        raise SerializationError(f"not a djqueue frame: {error}") from error


def _pack(value: Any, depth: int = 0) -> Any:
    try:
        # An error's message may hold halves of surrogate pairs, as names of files do.
        return msgpack.packb(value, default=_TO_EXT[depth], strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as error:
        raise SerializationError(f"the value cannot be sent over the scheduler's socket: {error}") from error


def _to_ext(depth: int, value: Any) -> msgpack.ExtType:
    cls = type(value)
    if cls is State:
        return msgpack.ExtType(STATE, value.value.encode())
    if cls in VALUES:
        return msgpack.ExtType(VALUE, encode(value, MSGPACK))
    if depth == MAX_DEPTH:
        raise SerializationError(f"the value cannot be sent over the scheduler's socket: {TOO_DEEP}")
    if cls is JobOptions:
        return msgpack.ExtType(OPTIONS, _packed_options(value, depth + 1))
    if cls is Rows:
        return msgpack.ExtType(
            ROWS, _pack([value.code, [[*map(flat, one)] for one in value.records]], depth + 1)
        )
    code = _CODES.get(cls)
    if code is not None:
        return msgpack.ExtType(code, _pack([*map(flat, value)], depth + 1))
    if cls is tuple:
        return msgpack.ExtType(TUPLE, _pack(list(value), depth + 1))
    if cls is frozenset:
        return msgpack.ExtType(FROZENSET, _pack(list(value), depth + 1))
    if cls is Rate:
        return msgpack.ExtType(RATE, _pack([value.capacity, value.per], depth + 1))
    if value is UNSET:
        return msgpack.ExtType(UNCHANGED, b"")
    raise SerializationError(f"{cls.__name__} cannot be sent over the scheduler's socket")


_packed: dict[int, tuple[JobOptions, bytes]] = {}
"""Packed options by the identity of the object, which is kept, so that no other one gets its identity."""


def _packed_options(options: JobOptions, depth: int) -> bytes:
    known = _packed.get(id(options))
    if known is not None:
        return known[1]
    data: bytes = _pack(options.as_dict(), depth)
    if len(data) <= SHORT_OPTIONS:
        if len(_packed) >= SHARED_OPTIONS:
            _packed.clear()
        _packed[id(options)] = options, data
    return data


def _options(data: bytes, depth: int) -> JobOptions:
    return (_shared_options if len(data) <= SHORT_OPTIONS else _unpack_options)(data, depth)


def _unpack_options(data: bytes, depth: int) -> JobOptions:
    return JobOptions.from_dict(_unpack(data, depth))


_shared_options = lru_cache(maxsize=SHARED_OPTIONS)(_unpack_options)


def _unpack(data: bytes, depth: int = 0) -> Any:
    # MessagePack's own timestamp, which this side never sends, is a datetime like others.
    return msgpack.unpackb(
        data, ext_hook=_FROM_EXT[depth], strict_map_key=False, unicode_errors="surrogatepass", timestamp=3
    )


def _from_ext(depth: int, code: int, data: bytes) -> Any:
    if code == STATE:
        return State(data.decode())
    if code == UNCHANGED:
        return UNSET
    if code == VALUE:
        return decode(data, MSGPACK)
    if depth == MAX_DEPTH:
        raise SerializationError(f"not a djqueue frame: {TOO_DEEP}")
    if code == OPTIONS:
        return _options(data, depth + 1)
    value = _unpack(data, depth + 1)
    if code == ROWS:
        first, records = value
        cls = RECORDS[first - FIRST_RECORD] if first >= FIRST_RECORD else None
        if cls is None or not all(type(one) is list for one in records):
            raise SerializationError(f"unknown record {first} in a frame")
        return [cls(*one) for one in records]
    if code == TUPLE:
        return tuple(value)
    if code == FROZENSET:
        return frozenset(value)
    if code == RATE:
        return Rate(*value)
    if FIRST_RECORD <= code < FIRST_RECORD + len(RECORDS):
        return RECORDS[code - FIRST_RECORD](*value)
    raise SerializationError(f"unknown value {code} in a frame")


TOO_DEEP = f"values are nested deeper than {MAX_DEPTH} levels"
_TO_EXT: list[Callable[[Any], msgpack.ExtType]] = [partial(_to_ext, depth) for depth in range(MAX_DEPTH + 1)]
_FROM_EXT: list[Callable[[int, bytes], Any]] = [partial(_from_ext, depth) for depth in range(MAX_DEPTH + 1)]


# Count the values of a frame.

FIXED = {
    0xC0: 0,
    0xC1: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
    # The items of arrays and maps are values of their own.
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}
SIZED = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
WIDTHS = {">B": 1, ">H": 2, ">I": 4}
FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
EXTENSIONS = {0xC7: ">B", 0xC8: ">H", 0xC9: ">I"}


def _skips() -> list[int]:
    """Return, for each type byte, the number of bytes to the next value; negative if it needs decoding."""
    skips = []
    for head in range(256):
        if 0xA0 <= head <= 0xBF:
            skips.append(1 + (head & 0x1F))
        elif head in FIXED:
            skips.append(1 + FIXED[head])
        elif head in SIZED or head in FIXED_EXTENSIONS or head in EXTENSIONS:
            skips.append(-1)
        else:
            skips.append(1)
    return skips


SKIPS = _skips()


def has_more_values(body: bytes, limit: int) -> bool:
    """Return whether a frame's body may hold more than `limit` values. Never reads more than that many.

    MessagePack values are consecutive: a list is its length followed by its items, so one loop over the type
    bytes counts them all. The bodies of extension types are scanned as frames, which may count too many
    values but never too few.
    """
    if len(body) <= limit:
        return False  # A value has at least one byte.
    skips = SKIPS
    place, end, count = 0, len(body), 0
    ends: list[int] = []
    """Ends of the enclosing extensions, the innermost last."""
    while count <= limit:
        if place >= end:
            if not ends:
                return False
            # A body that isn't MessagePack must not hide the values after it.
            place, end = end, ends.pop()
            continue
        count += 1
        head = body[place]
        skip = skips[head]
        if skip > 0:
            place += skip
        elif place + 6 > len(body):
            return False  # At most five more values.
        elif (form := SIZED.get(head)) is not None:
            [size] = unpack_from(form, body, place + 1)
            place += 1 + WIDTHS[form] + size
        else:
            form = EXTENSIONS.get(head)
            if form is None:
                size, width = FIXED_EXTENSIONS[head], 0
            else:
                [size] = unpack_from(form, body, place + 1)
                width = WIDTHS[form]
            place += 2 + width
            ends.append(end)
            end = min(place + size, end)
    return True
