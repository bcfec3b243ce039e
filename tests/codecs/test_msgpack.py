"""The default codec round-trips values with their types, or rejects them with their path."""

import enum
import io
from array import array
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from pathlib import Path
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import pytest
from django.db import models
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from hypothesis import given, settings

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core.errors import SerializationError
from tests.codecs.values import anatomy, values

BERLIN = ZoneInfo("Europe/Berlin")


def round_trip(value):
    return decode(encode(value, MSGPACK), MSGPACK)


@given(values)
@settings(max_examples=150, deadline=None)
def test_every_supported_value_round_trips(value):
    assert anatomy(round_trip(value)) == anatomy(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**64 - 1,
        -0.0,
        float("inf"),
        "",
        "𝄞 \0",
        b"\xff\x00",
        (),
        ((), [()]),
        [(1, [2, (3,)])],
        {(1, ("a", None)): {b"k": (1.5,)}, None: 1, True: 2, 2.5: 3},
        {date(2024, 2, 29): 1, UUID(int=7): 2, Decimal("1.0"): 3},
        Decimal("1.10"),
        Decimal("-0E+7"),
        Decimal("NaN123"),
        Decimal("9" * 60 + "E-400"),
        UUID(int=2**128 - 1),
        date.min,
        date.max,
        time(23, 59, 59, 999_999, fold=1),
        time(1, 2, tzinfo=timezone(timedelta(hours=-3))),
        timedelta.min,
        timedelta.max,
        timedelta(microseconds=-1),
        datetime(1, 1, 1),
        datetime(9999, 12, 31, 23, 59, 59, 999_999),
        datetime(2024, 5, 1, 12, tzinfo=UTC),
        datetime(2024, 5, 1, tzinfo=timezone(timedelta(seconds=-1, microseconds=5))),
        datetime(2024, 5, 1, tzinfo=timezone(timedelta(hours=1), "")),
        datetime(2024, 5, 1, tzinfo=timezone(timedelta(0), "Zulu")),
        datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN),
        datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=1),
        datetime(2024, 3, 31, 2, 30, tzinfo=BERLIN),
    ],
    ids=repr,
)
def test_edge_values_round_trip(value):
    assert anatomy(round_trip(value)) == anatomy(value)


def test_fold_of_ambiguous_datetime_round_trips():
    first, second = (datetime(2024, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold) for fold in (0, 1))

    assert round_trip(second).utcoffset() == timedelta(hours=1)
    assert round_trip(first).utcoffset() == timedelta(hours=2)


def test_list_that_resembles_an_encoded_tuple_stays_a_list():
    value = [[1, b""], ["\x01", b"\xc7\x00\x01"], (b"\xc7\x00\x01",)]

    assert anatomy(round_trip(value)) == anatomy(value)


def test_decimal_context_of_the_caller_does_not_round_decimals():
    value = Decimal("1.2345678901234567890")
    with localcontext() as context:
        context.prec = 3
        assert round_trip(value).as_tuple() == value.as_tuple()


def test_value_after_a_large_value_is_encoded_correctly():
    assert len(encode("x" * 3_000_000, MSGPACK)) > 3_000_000
    assert round_trip({"n": 1}) == {"n": 1}


class Colour(enum.IntEnum):
    RED = 1


class Size(models.TextChoices):
    LARGE = "l", gettext_lazy("Large")


class Shape(enum.Enum):
    ROUND = "round"


class Name(str):
    __slots__ = ()


class Row(namedtuple("Row", "a b")):
    __slots__ = ()


@dataclass
class Point:
    x: int


class Manager:
    pk = property(lambda self: 1)
    _meta = "as Django's models have"


class Bali(tzinfo):
    def utcoffset(self, when):
        return timedelta(hours=8)


class Moment(datetime):
    pass


class Sequence:
    def __iter__(self):
        return iter((1, 2))


@pytest.mark.parametrize(
    ("value", "content"), [(Size.LARGE, "l"), (Colour.RED, 1), (mark_safe("<b>"), "<b>")], ids=repr
)
def test_choices_and_safe_texts_arrive_as_their_content(value, content):
    assert round_trip([value, {value: (value,)}]) == [content, {content: (content,)}]
    assert type(round_trip([value])[0]) is type(content)


REFUSED = [
    (Manager(), "payload.items[3].file: ", "Manager objects", "pass its primary key"),
    (io.BytesIO(b"x"), "payload.items[3].file: ", "_io.BytesIO objects", "pass its name, or the"),
    (Path("a"), "payload.items[3].file: ", "Path objects", "pass str(…)"),
    (Shape.ROUND, "payload.items[3].file: ", "Shape objects", "pass its value"),
    ({1}, "payload.items[3].file: ", "set objects", "pass a sorted list"),
    (frozenset(), "payload.items[3].file: ", "frozenset objects", "pass a sorted list"),
    (Name("a"), "payload.items[3].file: ", "Name objects", "pass str(…)"),
    ([Colour.RED, {1}], "payload.items[3].file[1]: ", "set objects", "pass a sorted list"),
    (gettext_lazy("a"), "payload.items[3].file: ", "__proxy__ objects", "pass str(…)"),
    (Moment(2024, 5, 1), "payload.items[3].file: ", "Moment objects", "the standard library's"),
    (array("i", [1]), "payload.items[3].file: ", "array.array objects", "pass its tolist()"),
    (OrderedDict(), "payload.items[3].file: ", "collections.OrderedDict objects", "pass dict(…)"),
    (Row(1, 2), "payload.items[3].file: ", "Row objects", "pass tuple(…) or _asdict()"),
    (Point(1), "payload.items[3].file: ", "Point objects", "pass dataclasses.asdict(…)"),
    (bytearray(b"a"), "payload.items[3].file: ", "bytearray objects", "pass bytes(…)"),
    (memoryview(b"a"), "payload.items[3].file: ", "memoryview objects", "pass bytes(…)"),
    (Sequence(), "payload.items[3].file: ", "Sequence objects", "pass list(…)"),
    (len, "payload.items[3].file: ", "builtin_function_or_method objects", "pass its name"),
    (object(), "payload.items[3].file: ", "object objects cannot be encoded", ""),
    (1j, "payload.items[3].file: ", "complex objects cannot be encoded", ""),
    (msgpack.ExtType(3, b"a"), "payload.items[3].file: ", "ExtType objects", ""),
    (msgpack.Timestamp(1), "payload.items[3].file: ", "Timestamp objects", ""),
    (2**64, "payload.items[3].file: ", "an int of more than 64 bits", "pass str(…)"),
    (-(2**63) - 1, "payload.items[3].file: ", "an int of more than 64 bits", "pass str(…)"),
    ("a\ud800", "payload.items[3].file: ", "a lone surrogate at 1", ""),
    (datetime(2024, 1, 1, tzinfo=Bali()), "payload.items[3].file: ", "Bali", "zoneinfo.ZoneInfo"),
    (time(1, tzinfo=Bali()), "payload.items[3].file: ", "Bali", "zoneinfo.ZoneInfo"),
    (
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(0), "\ud800")),
        "payload.items[3].file: ",
        "a lone surrogate",
        "",
    ),
    ([{"a b": (1, {2})}], "payload.items[3].file[0]['a b'][1]: ", "set objects", ""),
    ({7: {1}}, "payload.items[3].file[7]: ", "set objects", ""),
    ({1: 1, Name("k"): 2}, "payload.items[3].file.keys()[1]: ", "Name objects", "pass str(…)"),
    ({(1, len): 2}, "payload.items[3].file.keys()[0][1]: ", "builtin_function", ""),
]


@pytest.mark.parametrize(
    ("value", "path", "trouble", "remedy"), REFUSED, ids=[type(row[0]).__name__ for row in REFUSED]
)
def test_unsupported_value_is_rejected_with_its_path(value, path, trouble, remedy):
    with pytest.raises(SerializationError) as caught:
        encode({"items": [1, 2, 3, {"file": value}]}, MSGPACK)

    message = str(caught.value)
    assert message.startswith(path)
    assert trouble in message
    assert remedy in message


def test_error_uses_the_name_given_by_the_caller():
    with pytest.raises(SerializationError, match=r"^result\[0\]: "):
        encode([object()], MSGPACK, what="result")


def test_value_that_contains_itself_is_rejected():
    value = {"list": [1]}
    value["list"].append(value)

    with pytest.raises(SerializationError, match=r"^payload.list\[1\]: the dict contains itself$"):
        encode(value, MSGPACK)


def test_repeated_value_is_not_a_cycle():
    part = [1]

    assert round_trip([part, part, (part,)]) == [[1], [1], ([1],)]


@pytest.mark.parametrize("nest", [lambda part: [part], lambda part: (part,), lambda part: {0: part}])
def test_too_deeply_nested_value_is_rejected(nest):
    value = None
    for _ in range(5_000):
        value = nest(value)

    with pytest.raises(SerializationError, match="nested deeper than 500 levels") as caught:
        encode(value, MSGPACK)
    assert len(str(caught.value)) < 300


def test_deeply_nested_value_round_trips():
    value = expected = ()
    for _ in range(400):
        value, expected = [value], [expected]

    assert round_trip(value) == expected


def test_value_after_a_rejected_value_is_encoded_correctly():
    before = encode([1, "a", (2,)], MSGPACK)
    for refused in ([1, 2, {3}], ["x" * 1000, 2**70], {"a": bytearray(9)}):
        with pytest.raises(SerializationError):
            encode(refused, MSGPACK)

    assert encode([1, "a", (2,)], MSGPACK) == before
