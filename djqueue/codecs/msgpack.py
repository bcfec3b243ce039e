"""The default codec: MessagePack with extension types. A value is encoded without loss, or refused.

None, bool, int (64 bits), float, str, bytes, list and dict are native MessagePack types. Members of choices
and texts that Django marks as safe are encoded as the str or int that they are. Every other type has a code.
A tuple is a list whose first item marks it as a tuple, so that only native types nest. Dict keys may have any
hashable type.

Python salts the hashes of str and bytes only. Other keys can be chosen so that all of them have one hash, and
a dict then compares each of them with all earlier ones. So a value of more than a few bytes is refused if a
dict in it has too many such keys: see `refusals.keys_trouble`.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Context, Decimal, InvalidOperation
from functools import lru_cache
from itertools import chain
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
from msgpack import ExtType, Packer, Timestamp

from djqueue.core.errors import SerializationError

from .refusals import content_of, keys_trouble, refusal, too_large

# Codes of the extension types. They are stored, so the meaning of a code never changes.
TUPLE = 1
DATETIME = 2
DATE = 3
TIME = 4
TIMEDELTA = 5
DECIMAL = 6
UUID_CODE = 7

TUPLE_MARK = ExtType(TUPLE, b"")
MARK_BYTES = b"\xc7\x00\x01"
"""The encoded mark of tuples."""

STRAYS = frozenset({bytearray, memoryview, ExtType, Timestamp})
"""Types that MessagePack accepts, but does not return unchanged."""
SCALARS = frozenset({int, float, bool, str, type(None)})
BEGINNINGS = b"\xc4\xc5\xc6\xc7\xc8\xc9\xd4\xd5\xd6\xd7\xd8"
"""First bytes of `bytes` and of extension types; without them, no mark can be in the wrong place."""
WITHOUT_BEGINNINGS = bytes(0 if byte in BEGINNINGS else byte for byte in range(256))

FREE_SIZE = 2_048
"""Bytes of a value up to which its keys are not checked: a hundred keys cost little, whatever they are."""
MAP16, MAP32 = b"\xde", b"\xdf"
"""First bytes of a dict with more than 15 keys."""
ZONES = 1_024
"""Number of time zones that are kept, which is more than there are. Each is read from a file."""

LARGEST_BUFFER = 1 << 20
"""Maximum bytes of a packer's buffer: a packer keeps its buffer, and is dropped above this size."""


CallsEncoder = Callable[[Sequence[Sequence[Any]], Sequence[Mapping[str, Any]]], list[bytes]]
"""Encodes calls, given the positional and the named arguments of each."""


def encoder(limit: int | None, what: str) -> Callable[[Any], bytes]:
    """Return an encoder: see `djqueue.codecs.get_encoder`."""

    def encode(value: Any) -> bytes:
        # Each call has its own packer. One per thread would not suffice: a finalizer that runs during a
        # call may encode a value, too.
        try:
            packer = _packers.pop()
        except IndexError:
            packer = Packer(strict_types=True, default=_extended)
        try:
            data: bytes = packer.pack(value)
        except Exception as error:
            raise refusal(value, what, error) from error
        size = len(data)
        if size <= LARGEST_BUFFER:
            _packers.append(packer)
        if limit is not None and size > limit:
            raise too_large(size, limit, what)
        # `translate` returns the same object if nothing is found: the cheapest search for several bytes.
        if data.translate(WITHOUT_BEGINNINGS) is not data or (size > FREE_SIZE and _may_have_keys(data)):
            _check_parts(value, what)
        return data

    return encode


_packers: list[Packer] = []

# A job's call as it is encoded: a map of the two entries "args" and "kwargs".
CALL_ARGS = b"\x82\xa4args"
CALL_KWARGS = b"\xa6kwargs"
NO_KWARGS = CALL_KWARGS + b"\x80"


def calls_encoder(limit: int | None, what: str) -> CallsEncoder:
    """Return an encoder of many calls: see `djqueue.codecs.get_calls_encoder`."""
    encode_one = encoder(limit, what)

    def encode(args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> list[bytes]:
        try:
            packer = _packers.pop()
        except IndexError:
            packer = Packer(strict_types=True, default=_extended)
        pack = packer.pack
        try:
            if any(kwargs):
                pairs = zip(args, kwargs, strict=True)
                found = [CALL_ARGS + pack([*a]) + CALL_KWARGS + pack({**k}) for a, k in pairs]
            else:
                found = [CALL_ARGS + pack([*a]) + NO_KWARGS for a in args]
            largest = max(map(len, found), default=0)
        except Exception:
            # Encoding them one at a time raises the error of the first wrong one, with its path.
            found, largest = [], LARGEST_BUFFER + 1
        if largest <= LARGEST_BUFFER:
            _packers.append(packer)
        if len(found) != len(args) or (limit is not None and largest > limit):
            return [encode_one({"args": [*a], "kwargs": {**k}}) for a, k in zip(args, kwargs, strict=True)]
        if not _are_scalars(args, kwargs):
            for data, a, k in zip(found, args, kwargs, strict=True):
                if data.translate(WITHOUT_BEGINNINGS) is not data or (
                    len(data) > FREE_SIZE and _may_have_keys(data)
                ):
                    _check_parts({"args": [*a], "kwargs": {**k}}, what)
        return found

    return encode


def decode(data: bytes) -> Any:
    """Decode a value: see `djqueue.codecs.decode`."""
    try:
        if len(data) > FREE_SIZE and _may_have_keys(data):
            return _with_checked_keys(data)
        if MARK_BYTES not in data:
            return msgpack.unpackb(data, strict_map_key=False, timestamp=3, ext_hook=_restored)
        return _unpacked(data, strict_map_key=False)
    except SerializationError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise SerializationError(f"not a MessagePack value: {reason}") from error


def _may_have_keys(data: bytes) -> bool:
    """Return whether bytes may contain a dict with more than 15 keys."""
    return MAP16 in data or MAP32 in data


def _with_checked_keys(data: bytes) -> Any:
    try:
        return _unpacked(data, strict_map_key=True)
    except ValueError:
        pass  # A key is neither str nor bytes, or the data is malformed, which fails again.
    # Takes longer, because of the pairs.
    return _unpacked(data, strict_map_key=False, object_pairs_hook=_mapping)


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    trouble = keys_trouble([key for key, _ in pairs])
    if trouble is not None:
        raise SerializationError(f"not a value of djqueue: {trouble}")
    return dict(pairs)


def _unpacked(data: bytes, **options: Any) -> Any:
    if MARK_BYTES not in data:
        return msgpack.unpackb(data, timestamp=3, ext_hook=_restored, **options)
    tuples = _Tuples()
    value = msgpack.unpackb(
        data, timestamp=3, ext_hook=tuples.restored, list_hook=tuples.from_list, **options
    )
    if tuples.marks:
        raise SerializationError("not a MessagePack value: a tuple marker is not followed by a list")
    return value


class _Tuples:
    """Converts marked lists to tuples; `marks` counts the marks that have not been converted."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks = 0

    def restored(self, code: int, data: bytes) -> Any:
        if code == TUPLE and not data:
            self.marks += 1
            return TUPLE_MARK
        return _restored(code, data)

    def from_list(self, items: list[Any]) -> Any:
        if items and items[0] is TUPLE_MARK:
            self.marks -= 1
            return tuple(items[1:])
        return items


def _are_scalars(args: Sequence[Sequence[Any]], kwargs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all arguments of calls have types that can have no strays in them."""
    if not SCALARS.issuperset(map(type, chain.from_iterable(args))):
        return False
    return not any(kwargs) or (
        SCALARS.issuperset(map(type, chain.from_iterable(kwargs)))
        and all(SCALARS.issuperset(map(type, named.values())) for named in kwargs)
    )


def _check_parts(value: Any, what: str) -> None:
    """Raise SerializationError for what MessagePack encodes, but `decode` would refuse or not restore."""
    parts = [value]
    for part in parts:
        kind = type(part)
        if kind is dict:
            if keys_trouble(part) is not None:
                raise refusal(value, what)
            parts += part
            parts += part.values()
        elif kind is list or kind is tuple:
            parts += part
        elif kind in STRAYS:
            raise refusal(value, what)


def _extended(value: Any) -> Any:
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    content = content_of(value)
    if content is value:
        raise TypeError(f"{type(value).__name__} cannot be encoded")
    return content


def _restored(code: int, data: bytes) -> Any:
    decode = _DECODERS.get(code)
    if decode is None:
        raise SerializationError(f"not a MessagePack value: unknown extension type {code}")
    return decode(data)


# Dates and times: the fields of the wall clock, then the time zone.

_DATETIME = struct.Struct(">HBBBBBIB")
_DATE = struct.Struct(">HBB")
_TIME = struct.Struct(">BBBIB")
_TIMEDELTA = struct.Struct(">iii")
_OFFSET = struct.Struct(">q")
_MICROSECOND = timedelta(microseconds=1)


def _encode_datetime(value: datetime) -> ExtType:
    wall = _DATETIME.pack(
        value.year,
        value.month,
        value.day,
        value.hour,
        value.minute,
        value.second,
        value.microsecond,
        value.fold,
    )
    return ExtType(DATETIME, wall + _encode_zone(value.tzinfo))


def _decode_datetime(data: bytes) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold = _DATETIME.unpack_from(data)
    zone = _decode_zone(data[_DATETIME.size :])
    return datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)


def _encode_time(value: time) -> ExtType:
    wall = _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)
    return ExtType(TIME, wall + _encode_zone(value.tzinfo))


def _decode_time(data: bytes) -> time:
    hour, minute, second, microsecond, fold = _TIME.unpack_from(data)
    return time(hour, minute, second, microsecond, _decode_zone(data[_TIME.size :]), fold=fold)


def _encode_zone(zone: tzinfo | None) -> bytes:
    if zone is None:
        return b""
    if type(zone) is ZoneInfo and zone.key is not None:
        return b"z" + zone.key.encode()
    if type(zone) is timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        packed = _OFFSET.pack(offset // _MICROSECOND)
        return b"n" + packed + name[0].encode() if name else b"o" + packed
    raise TypeError(f"a time zone of type {type(zone).__name__} cannot be encoded")


def _decode_zone(data: bytes) -> tzinfo | None:
    if not data:
        return None
    kind, tail = data[:1], data[1:]
    if kind == b"z":
        return _zone(tail.decode())
    if kind not in (b"o", b"n") or (kind == b"o" and len(tail) != _OFFSET.size):
        raise ValueError("unknown time zone format")
    offset = _OFFSET.unpack_from(tail)[0] * _MICROSECOND
    return timezone(offset) if kind == b"o" else timezone(offset, tail[_OFFSET.size :].decode())


@lru_cache(maxsize=ZONES)
def _zone(key: str) -> ZoneInfo:
    try:
        return ZoneInfo(key)
    except (KeyError, ValueError, OSError) as error:
        raise SerializationError(
            f"unknown time zone {key!r}; install the tzdata package, which has all time zones"
        ) from error


def _encode_date(value: date) -> ExtType:
    return ExtType(DATE, _DATE.pack(value.year, value.month, value.day))


def _encode_timedelta(value: timedelta) -> ExtType:
    return ExtType(TIMEDELTA, _TIMEDELTA.pack(value.days, value.seconds, value.microseconds))


def _decode_timedelta(data: bytes) -> timedelta:
    days, seconds, microseconds = _TIMEDELTA.unpack(data)
    return timedelta(days, seconds, microseconds)


# The caller's decimal context may convert malformed texts to NaN.
_STRICT = Context(traps=[InvalidOperation])

_ENCODERS: dict[type, Callable[[Any], Any]] = {
    tuple: lambda value: [TUPLE_MARK, *value],
    datetime: _encode_datetime,
    date: _encode_date,
    time: _encode_time,
    timedelta: _encode_timedelta,
    Decimal: lambda value: ExtType(DECIMAL, str(value).encode()),
    UUID: lambda value: ExtType(UUID_CODE, value.bytes),
}
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    DATETIME: _decode_datetime,
    DATE: lambda data: date(*_DATE.unpack(data)),
    TIME: _decode_time,
    TIMEDELTA: _decode_timedelta,
    DECIMAL: lambda data: Decimal(data.decode(), _STRICT),
    UUID_CODE: lambda data: UUID(bytes=data),
}
