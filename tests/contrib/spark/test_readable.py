"""Payloads and results as JSON text, and as values of the types that a schema names."""

import logging
import sys
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, get_encoder
from djqueue.contrib.spark.readable import ReadableColumns, as_json
from djqueue.core.errors import OptionError

encode = get_encoder(MSGPACK)


def converted(kind, *values, content_type=MSGPACK):
    """Encode values, and return them as read: as an Arrow type, or as JSON if it is None."""
    columns = ReadableColumns({"result": kind})
    page = columns.convert(
        {
            "queue": ["mail"] * len(values),
            "id": [f"job-{number}" for number in range(len(values))],
            "content_type": [content_type] * len(values),
            "result": [value if value is None else encode(value) for value in values],
        }
    )
    columns.warn()
    return pyarrow.array(page["result"], kind or pyarrow.string()).to_pylist()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"kwargs": {"n": 1, "ä": None}}, '{"kwargs": {"n": 1, "ä": null}}'),
        ({"at": datetime(2026, 1, 31, tzinfo=UTC)}, '{"at": "2026-01-31T00:00:00+00:00"}'),
        ([Decimal("1.50"), b"ab", (1, 2)], '["1.50", "YWI=", [1, 2]]'),
        ({(1, 2): float("nan"), 3: float("-inf")}, '{"(1, 2)": "NaN", "3": "-Infinity"}'),
        (timedelta(minutes=1), '"0:01:00"'),
    ],
)
def test_payload_is_decoded_as_json(value, expected):
    assert as_json(encode(value), MSGPACK) == expected
    assert converted(None, value) == [expected]


def test_json_needs_no_codec_of_kombu(monkeypatch):
    monkeypatch.setitem(sys.modules, "djqueue.codecs.registry", None)
    monkeypatch.delattr("djqueue.codecs.registry", raising=False)

    assert as_json(b'{"n": 1}', "application/json") == '{"n": 1}'
    assert as_json(b"n: 1", "application/x-yaml") is None


@pytest.mark.parametrize(
    ("payload", "kind"), [(None, MSGPACK), (b"\xc1", MSGPACK), (b"x", "unknown"), (b"{", "json")]
)
def test_payload_that_cannot_be_decoded_is_null(payload, kind):
    assert as_json(payload, kind) is None


def test_missing_value_and_none_are_null():
    assert converted(None, None, {"n": 1}) == [None, '{"n": 1}']
    assert ReadableColumns({"result": None}).convert(
        {"queue": ["q"], "id": ["a"], "content_type": [MSGPACK], "result": [encode(None)]}
    )["result"] == [None]


NUMBERS = pyarrow.struct([("total", pyarrow.float64()), ("lines", pyarrow.int32())])


def test_struct_has_the_fields_of_the_schema(caplog):
    found = converted(NUMBERS, {"total": 7, "lines": 2, "more": "x"}, {"total": Decimal("1.5")}, None)

    assert found == [{"total": 7.0, "lines": 2}, {"total": 1.5, "lines": None}, None]
    assert caplog.records == []


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (pyarrow.string(), "a", "a"),
        (pyarrow.string(), Decimal("1.50"), "1.50"),
        (pyarrow.string(), {"n": [1, True]}, '{"n": [1, true]}'),
        (pyarrow.bool_(), True, True),
        (pyarrow.binary(), b"ab", b"ab"),
        (pyarrow.int8(), -128, -128),
        (pyarrow.int64(), 2.0, 2),
        (pyarrow.float64(), 3, 3.0),
        (pyarrow.float64(), Decimal("0.25"), 0.25),
        (pyarrow.decimal128(5, 2), "1.005", None),
        (pyarrow.decimal128(5, 2), Decimal("123.456"), Decimal("123.46")),
        (pyarrow.date32(), date(2026, 1, 31), date(2026, 1, 31)),
        (pyarrow.date32(), "2026-01-31", date(2026, 1, 31)),
        (pyarrow.date32(), datetime(2026, 1, 31, 12), date(2026, 1, 31)),
        (pyarrow.timestamp("us", "UTC"), "2026-01-31T01:00:00+01:00", datetime(2026, 1, 31, tzinfo=UTC)),
        (
            pyarrow.timestamp("us", "UTC"),
            datetime(2026, 1, 31, 1, tzinfo=timezone(timedelta(hours=1))),
            datetime(2026, 1, 31, tzinfo=UTC),
        ),
        (pyarrow.timestamp("us"), date(2026, 1, 31), datetime(2026, 1, 31)),
        (pyarrow.time64("us"), time(12, 30), time(12, 30)),
        (pyarrow.duration("us"), timedelta(seconds=1), timedelta(seconds=1)),
        (pyarrow.list_(pyarrow.int32()), (1, "a", None), [1, None, None]),
        (pyarrow.map_(pyarrow.string(), pyarrow.int32()), {"a": 1, "b": "c"}, [("a", 1), ("b", None)]),
    ],
)
def test_value_is_converted_to_the_type_of_the_schema(kind, value, expected):
    assert converted(pyarrow.struct([("x", kind)]), {"x": value}) == [{"x": expected}]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pyarrow.int8(), 128),
        (pyarrow.int32(), 1.5),
        (pyarrow.int32(), True),
        (pyarrow.int32(), "1"),
        (pyarrow.int32(), float("nan")),
        (pyarrow.int32(), Decimal("NaN")),
        (pyarrow.decimal128(5, 2), 1_000),
        (pyarrow.decimal128(5, 2), float("inf")),
        (pyarrow.bool_(), 1),
        (pyarrow.date32(), "yesterday"),
        (pyarrow.timestamp("us", "UTC"), datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
        (NUMBERS, [1]),
        (pyarrow.list_(pyarrow.int32()), "abc"),
    ],
)
def test_value_of_another_type_is_null_and_counted(kind, value, caplog):
    caplog.set_level(logging.WARNING, "djqueue.spark")

    assert converted(kind, value, value) == [None, None]

    [record] = caplog.records
    assert record.getMessage().startswith("2 values of column result are null")
    assert "the first is that of job job-0 of queue mail: " in record.getMessage()


def test_type_that_values_cannot_have_is_refused():
    with pytest.raises(OptionError, match=r"resultSchema: values can't be read as month_day_nano_interval"):
        ReadableColumns({"result": pyarrow.struct([("x", pyarrow.month_day_nano_interval())])})
