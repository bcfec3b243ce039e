"""Malformed bytes raise SerializationError and nothing else."""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.codecs.msgpack import TUPLE_MARK
from djqueue.core.errors import SerializationError
from tests.codecs.values import values


def extension(code, data):
    return msgpack.packb(msgpack.ExtType(code, data))


def decode_or_refuse(data):
    """True if the bytes are a value, False if they are refused; anything else fails the test."""
    try:
        decode(data, MSGPACK)
    except SerializationError:
        return False
    return True


@given(st.binary(max_size=60))
@example(b"")
@example(b"\xc1")
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_decoded_or_rejected(data):
    assert decode_or_refuse(data) in (True, False)


@given(st.integers(0, 127), st.binary(max_size=30))
@settings(max_examples=300, deadline=None)
def test_random_extensions_are_decoded_or_rejected(code, data):
    assert decode_or_refuse(extension(code, data)) in (True, False)


@given(values, st.data())
@settings(max_examples=100, deadline=None)
def test_truncated_value_is_rejected(value, data):
    encoded = encode(value, MSGPACK)
    end = data.draw(st.integers(0, len(encoded) - 1))

    assert not decode_or_refuse(encoded[:end])


@given(values, st.data())
@settings(max_examples=150, deadline=None)
def test_value_with_a_changed_byte_is_decoded_or_rejected(value, data):
    encoded = bytearray(encode(value, MSGPACK))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))

    assert decode_or_refuse(bytes(encoded)) in (True, False)


MARK = msgpack.packb(TUPLE_MARK)
MALFORMED = {
    "nothing": b"",
    "two values": b"\x01\x02",
    "a list as a key": b"\x81\x90\x01",
    "a list in a tuple as a key": msgpack.packb({0: 1}).replace(b"\x00", b"\x92" + MARK + b"\x90"),
    "invalid UTF-8": b"\xa1\xff",
    "a list longer than the bytes": b"\xdd\xff\xff\xff\xff",
    "nested without end": b"\x91" * 100_000,
    "a mark alone": MARK,
    "a mark that is not first": b"\x92\x01" + MARK,
    "two marks": b"\x92" + MARK + MARK,
    "a mark as a key": b"\x81" + MARK + b"\x01",
    "a mark beside a tuple": b"\x92\x91" + MARK + MARK,
    "a mark in a longer form": b"\x91\xc8\x00\x00\x01",
    "a mark with data": b"\x91" + extension(1, b"x"),
    "an unknown extension": extension(99, b""),
    "a short datetime": extension(2, b"\x07"),
    "the 13th month": extension(2, struct.pack(">HBBBBBIB", 2024, 13, 1, 0, 0, 0, 0, 0)),
    "an unknown form of zone": extension(2, struct.pack(">HBBBBBIB", 2024, 1, 1, 0, 0, 0, 0, 0) + b"?"),
    "a long date": extension(3, struct.pack(">HBB", 2024, 1, 1) + b"x"),
    "a whole day of offset": extension(
        4, struct.pack(">BBBIB", 1, 1, 1, 0, 0) + b"o" + struct.pack(">q", 86_400_000_000)
    ),
    "an offset without end": extension(
        4, struct.pack(">BBBIB", 1, 1, 1, 0, 0) + b"o" + struct.pack(">q", 2**63 - 1)
    ),
    "days past all": extension(5, struct.pack(">iii", 2**31 - 1, 0, 0)),
    "no decimal": extension(6, b"one"),
    "a decimal without end": extension(6, b"1E+99999999999999999999"),
    "a short UUID": extension(7, b"\x00" * 15),
    "a timestamp past all": b"\xc7\x0c\xff" + struct.pack(">Iq", 0, 2**62),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_are_rejected(data):
    assert not decode_or_refuse(data)


@pytest.mark.parametrize("key", ["Nowhere/Nothing", "../../etc/passwd", "/etc/passwd", "", "a\0b", "Europe"])
def test_error_names_the_unknown_time_zone(key):
    data = extension(2, struct.pack(">HBBBBBIB", 2024, 1, 1, 0, 0, 0, 0, 0) + b"z" + key.encode())

    with pytest.raises(SerializationError, match=r"unknown time zone") as caught:
        decode(data, MSGPACK)
    assert repr(key) in str(caught.value)


def test_msgpack_timestamp_is_decoded_as_aware_datetime():
    value = decode(msgpack.packb(msgpack.Timestamp(86_400, 5_000)), MSGPACK)

    assert value.isoformat() == "1970-01-02T00:00:00.000005+00:00"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_bytes_like_object_is_decoded(kind):
    assert decode(kind(encode((1, "a"), MSGPACK)), MSGPACK) == (1, "a")


@pytest.mark.parametrize("data", [None, "text", 5, [1]])
def test_objects_other_than_bytes_are_rejected(data):
    with pytest.raises(SerializationError, match="expected bytes"):
        decode(data, MSGPACK)


# Keys that were chosen to have one hash: a dict of a few thousand of them takes minutes.

SAME_HASH = {
    UUID: lambda number: UUID(int=number * (2**61 - 1)),
    Decimal: lambda number: Decimal(number * (2**61 - 1)),
    tuple: lambda number: ("a", UUID(int=number * (2**61 - 1))),
}


def mapping(keys):
    """Return the bytes of a dict, which need not be filled for that."""
    return b"\xdf" + struct.pack(">I", len(keys)) + b"".join(encode(key, MSGPACK) + b"\x01" for key in keys)


@pytest.mark.parametrize("kind", SAME_HASH, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("where", [b"", b"\x92\x01", b"\x92" + MARK, b"\x81\xa1a"], ids=repr)
def test_keys_of_one_hash_are_rejected(kind, where):
    keys = [SAME_HASH[kind](number) for number in range(1, 1_000)]
    assert len({hash(key) for key in keys}) == 1

    with pytest.raises(SerializationError, match="more than 64 keys of one hash"):
        decode(where + mapping(keys), MSGPACK)
    with pytest.raises(SerializationError, match=r"^payload\[0\]: a dict with more than 64 keys of one"):
        encode([dict.fromkeys(keys[:200])], MSGPACK)


def test_too_many_keys_without_salted_hashes_are_rejected():
    keys = range(10_001)

    with pytest.raises(SerializationError, match="10,001 keys other than str and bytes, more than 10,000"):
        decode(mapping(keys), MSGPACK)
    with pytest.raises(SerializationError, match=r"^payload.counts: a dict with 10,001 keys other"):
        encode({"counts": dict.fromkeys(keys)}, MSGPACK)


@pytest.mark.parametrize(
    "value",
    [
        {number: -number for number in range(10_000)},
        {str(number): number for number in range(20_000)},
        {b"%d" % number: (number,) for number in range(20_000)},
        {2.0**power: power for power in range(-1_074, 1_024)},
        {
            datetime(2030, 1, 1, 1, minute, second, tzinfo=UTC): (1, 2)
            for minute in range(60)
            for second in range(60)
        },
        {(row, column): [{}] for row in range(90) for column in range(90)},
        [{UUID(int=number): {number: number}} for number in range(1_000)],
    ],
    ids=["int", "str", "bytes", "powers of two", "datetime", "tuple", "small dicts"],
)
def test_large_dict_of_usual_keys_round_trips(value):
    assert decode(encode(value, MSGPACK), MSGPACK) == value
