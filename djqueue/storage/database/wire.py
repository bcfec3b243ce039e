"""Frames of the scheduler's socket: length-prefixed MessagePack, with the contract's own values.

A frame is four bytes of length, big-endian, and that many bytes. Only the classes listed here can come
out of one.
"""

import struct
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgpack

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core import job as records
from djqueue.core.errors import SerializationError
from djqueue.core.limiter import Rate
from djqueue.core.maintenance import Swept
from djqueue.core.options import JobOptions
from djqueue.core.states import State

LENGTH = struct.Struct(">I")
MAX_FRAME = 64 * 1024 * 1024

TUPLE, FROZENSET, STATE, OPTIONS, RATE, VALUE = 1, 2, 3, 4, 5, 6
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
    records.Report,
    records.Event,
    records.DeadLetter,
    records.CancelResult,
    records.WorkerInfo,
    records.JobRecord,
    records.JobError,
    records.Attempt,
    Swept,
)
"""Named tuples; one's place here is its code on the wire, so new ones go to the end."""
VALUES = (datetime, date, time, timedelta, Decimal, UUID)
"""What a handler's progress may hold besides; the codec knows how."""
_CODES = {cls: code for code, cls in enumerate(RECORDS, FIRST_RECORD)}


def pack(value: Any) -> bytes:
    """A frame."""
    body: bytes = _pack(value)
    if len(body) > MAX_FRAME:
        raise SerializationError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The value of a frame's body. Raises SerializationError for anything else."""
    try:
        return _unpack(body)
    except SerializationError:
        raise
    except Exception as error:
        raise SerializationError(f"not a frame of djqueue: {error}") from error


def _pack(value: Any) -> Any:
    try:
        # An error's message may hold halves of surrogate pairs, as names of files do.
        return msgpack.packb(value, default=_to_ext, strict_types=True, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as error:
        raise SerializationError(f"this does not go over the scheduler's socket: {error}") from error


def _to_ext(value: Any) -> msgpack.ExtType:
    cls = type(value)
    code = _CODES.get(cls)
    if code is not None:
        return msgpack.ExtType(code, _pack(list(value)))
    if cls is tuple:
        return msgpack.ExtType(TUPLE, _pack(list(value)))
    if cls is frozenset:
        return msgpack.ExtType(FROZENSET, _pack(list(value)))
    if cls is State:
        return msgpack.ExtType(STATE, value.value.encode())
    if cls is JobOptions:
        return msgpack.ExtType(OPTIONS, _pack(value.as_dict()))
    if cls is Rate:
        return msgpack.ExtType(RATE, _pack([value.capacity, value.per]))
    if cls in VALUES:
        return msgpack.ExtType(VALUE, encode(value, MSGPACK))
    raise SerializationError(f"{cls.__name__} does not go over the scheduler's socket")


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_from_ext, strict_map_key=False, unicode_errors="surrogatepass")


def _from_ext(code: int, data: bytes) -> Any:
    if code == STATE:
        return State(data.decode())
    if code == VALUE:
        return decode(data, MSGPACK)
    value = _unpack(data)
    if code == TUPLE:
        return tuple(value)
    if code == FROZENSET:
        return frozenset(value)
    if code == OPTIONS:
        return JobOptions.from_dict(value)
    if code == RATE:
        return Rate(*value)
    if FIRST_RECORD <= code < FIRST_RECORD + len(RECORDS):
        return RECORDS[code - FIRST_RECORD](*value)
    raise SerializationError(f"unknown value {code} in a frame")
