"""Values without an equivalent in Python invalidate only their own row."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import msgpack
import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.contrib.spark.arrow import rows_of, slices_of
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.rows import CHUNK_BYTES, JobColumns, RowError, job_reader
from djqueue.contrib.spark.writing import _together

GIVEN = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.jobs.send"}
AFTER_9999 = 253_402_300_800_000_000
"""Microseconds."""


def timestamps(*values):
    return pyarrow.array(values, pyarrow.int64()).cast(pyarrow.timestamp("us", "UTC"))


def dates(*days):
    return pyarrow.array(days, pyarrow.int32()).cast(pyarrow.date32())


def invalid_text(*values):
    binary = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(binary), binary.buffers())


def pairs(*values):
    return pyarrow.array(values, pyarrow.map_(pyarrow.string(), pyarrow.int64()))


ODD = {
    "a timestamp after the year 9999": (timestamps(0, AFTER_9999), datetime(1970, 1, 1, tzinfo=UTC)),
    "a timestamp before the year 1": (timestamps(0, -AFTER_9999), datetime(1970, 1, 1, tzinfo=UTC)),
    "a date after the year 9999": (dates(0, 2_932_897), date(1970, 1, 1)),
    "text that is not UTF-8": (invalid_text(b"a", b"\xff"), "a"),
    "a map with a key twice": (pairs([("a", 1)], [("a", 1), ("a", 2)]), {"a": 1}),
    "in an array": (
        pyarrow.ListArray.from_arrays([0, 1, 2], dates(0, 2_932_897)),
        [date(1970, 1, 1)],
    ),
}


def read(columns, **options):
    table = pyarrow.table(columns)
    plan = JobColumns(WriteOptions.read({**GIVEN, **options}), table.column_names)
    reader = job_reader(plan, 1_000, partition=3)
    chunks = list(reader.chunks(table.to_batches()))
    batches = [batch for chunk in chunks for batch in chunk.batches]
    return reader, batches


def payloads(batches):
    return [decode(data, MSGPACK)["kwargs"] for batch in batches for data in batch.payloads]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("more", [{}, {"priorityColumn": "p"}], ids=["alike", "with options"])
def test_row_with_an_unsupported_value_is_skipped(odd, more):
    column, plain = ODD[odd]

    reader, batches = read({"p": [1, 2], "odd": column}, onError="skip", **more)

    assert [values["odd"] for values in payloads(batches)] == [plain]
    assert (reader.read, dict(reader.rejected)) == (2, {"odd": 1})


@pytest.mark.parametrize("odd", ODD)
def test_error_names_the_row_with_an_unsupported_value(odd):
    column, _ = ODD[odd]

    with pytest.raises(RowError, match=r"row 2 of partition 3 \(id 'b'\): odd: the value of type .* has no"):
        read({"id": ["a", "b"], "odd": column})


@pytest.mark.parametrize("odd", ODD)
def test_row_with_an_unsupported_value_becomes_a_dead_letter(odd):
    column, plain = ODD[odd]

    _, batches = read({"n": [1, 2], "odd": column}, onError="dead")

    good, bad = sorted(batches, key=lambda batch: batch.options.rejected is not None)
    assert payloads([good]) == [{"n": 1, "odd": plain}]
    assert "odd: the value of type" in bad.options.rejected[1]
    [values] = payloads([bad])
    assert values["n"] == 2
    assert values["odd"].startswith("(a value of the Arrow type ")


def test_unsupported_value_in_an_excluded_column_is_ignored():
    columns = {"n": [1, 2], "odd": timestamps(0, AFTER_9999)}

    _, batches = read(columns, excludeColumns="odd")
    _, kept = read(columns, excludeColumns="odd", onError="dead")

    assert payloads(batches) == payloads(kept) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("option", "column"),
    [
        ("runAtColumn", timestamps(0, AFTER_9999)),
        ("idColumn", invalid_text(b"a", b"\xff")),
        ("concurrencyKeyColumn", invalid_text(b"a", b"\xff")),
        ("tagsColumn", pyarrow.ListArray.from_arrays([0, 1, 2], invalid_text(b"a", b"\xff"))),
        ("delayColumn", pyarrow.array([1.0, float("nan")])),
        ("delayColumn", pyarrow.array([1.0, 1e300])),
        ("ttlColumn", pyarrow.array([1.0, float("inf")])),
        ("priorityColumn", pyarrow.array([1, 2**63 - 1])),
        ("backoffColumn", pyarrow.array([1.0, 1e300])),
    ],
)
def test_unsupported_option_value_invalidates_its_row(option, column):
    reader, batches = read({"n": [1, 2], "odd": column}, onError="skip", **{option: "odd"})

    assert [len(batch.payloads) for batch in batches] == [1]
    assert sum(reader.rejected.values()) == 1


def test_messagepack_payload_is_validated():
    good = encode({"args": [], "kwargs": {"n": 1}}, MSGPACK)
    bad = [b"", good[:-1], good + b"\x01", b"\xc1", msgpack.packb(msgpack.ExtType(99, b"x"))]

    reader, batches = read({"payload": [good, *bad]}, payloadFormat="msgpack", onError="skip")

    assert [data for batch in batches for data in batch.payloads] == [good]
    assert dict(reader.rejected) == {"payload": len(bad)}
    with pytest.raises(RowError, match="row 1 of partition 3: payload: not MessagePack that djqueue can"):
        read({"payload": [b"\xc1"]}, payloadFormat="msgpack")


def test_error_for_a_payload_that_is_too_large_names_its_column():
    columns = {"id": ["a", "b"], "small": ["x", "x"], "large": ["x", "y" * 200]}

    with pytest.raises(RowError) as raised:
        read(columns, maxPayloadBytes="150")

    text = str(raised.value)
    assert text.startswith("row 2 of partition 3 (id 'b'): payload: column 'large' has 202 of 2")
    assert "but maxPayloadBytes is 150: raise it" in text
    assert "DJQUEUE" not in text


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_encoded_payload_that_is_too_large_is_rejected(form):
    payload = b'"' + b"y" * 200 + b'"' if form == "json" else encode("y" * 200, MSGPACK)

    with pytest.raises(RowError, match="payload: column 'payload' has 202 of 202 bytes"):
        read({"payload": [payload]}, payloadFormat=form, maxPayloadBytes="150")


def test_variant_is_decoded():
    types = pytest.importorskip(
        "pyspark.sql.types", reason="Spark is not installed here: see make test-spark"
    )
    one = types.VariantVal.parseJson('{"a": [1, "x", null]}')
    kind = pyarrow.struct(
        [
            pyarrow.field("value", pyarrow.binary(), nullable=False),
            pyarrow.field("metadata", pyarrow.binary(), nullable=False, metadata={"variant": "true"}),
        ]
    )
    raw = {"value": one.value, "metadata": one.metadata}
    columns = {
        "v": pyarrow.array([raw, None], kind),
        "list": pyarrow.array([[raw, None], None], pyarrow.list_(kind)),
        "map": pyarrow.array([[("k", raw)], None], pyarrow.map_(pyarrow.string(), kind)),
        "struct": pyarrow.array(
            [{"n": 1, "v": raw}, None], pyarrow.struct({"n": pyarrow.int64(), "v": kind})
        ),
    }

    first, second = payloads(read(columns)[1])

    value = {"a": [1, "x", None]}
    assert first == {"v": value, "list": [value, None], "map": {"k": value}, "struct": {"n": 1, "v": value}}
    assert second == dict.fromkeys(columns)


def test_slices_are_limited_in_rows_and_bytes():
    sizes = [10, 5_000, 10, 10, 10, 9_000]
    batch = pyarrow.record_batch({"s": ["x" * size for size in sizes]})

    slices = list(slices_of(batch, 4, 4_000))

    assert [row for part in slices for row in part.column("s").to_pylist()] == batch.column("s").to_pylist()
    assert all(part.num_rows == 1 or part.nbytes <= 4_000 for part in slices)
    assert max(part.num_rows for part in slices) <= 4


def test_only_required_columns_are_converted():
    batch = pyarrow.record_batch({"a": [1], "b": [2], "c": [3]})

    assert list(rows_of(batch, {"a", "c"}).values) == [{"a": 1, "c": 3}]
    assert list(rows_of(batch, {"a"}, keep_all=True).values) == [{"a": 1, "b": 2, "c": 3}]


def test_decimal_in_a_variant_keeps_all_digits():
    types = pytest.importorskip(
        "pyspark.sql.types", reason="Spark is not installed here: see make test-spark"
    )
    digits = "12345678901234567890123456789012345678"
    one = types.VariantVal.parseJson(f"[{digits}, 0.{digits}, 1.5]")
    kind = pyarrow.struct(
        [
            pyarrow.field("value", pyarrow.binary(), nullable=False),
            pyarrow.field("metadata", pyarrow.binary(), nullable=False, metadata={"variant": "true"}),
        ]
    )

    [found] = payloads(read({"v": pyarrow.array([{"value": one.value, "metadata": one.metadata}], kind)})[1])

    assert found == {"v": [Decimal(digits), Decimal(f"0.{digits}"), Decimal("1.5")]}


def test_variant_that_is_nested_too_deeply_is_rejected():
    types = pytest.importorskip(
        "pyspark.sql.types", reason="Spark is not installed here: see make test-spark"
    )
    one = types.VariantVal.parseJson("1")
    value, size = one.value, len(one.value)
    for _ in range(2_000):
        # An array of one item: the header with 4-byte offsets, the number of items, and two offsets.
        value = (
            b"\x0f"
            + (1).to_bytes(1, "little")
            + (0).to_bytes(4, "little")
            + size.to_bytes(4, "little")
            + value
        )
        size = len(value)
    kind = pyarrow.struct(
        [
            pyarrow.field("value", pyarrow.binary(), nullable=False),
            pyarrow.field("metadata", pyarrow.binary(), nullable=False, metadata={"variant": "true"}),
        ]
    )
    column = pyarrow.array([{"value": each, "metadata": one.metadata} for each in (one.value, value)], kind)

    for on_error, dead in (("skip", 0), ("dead", 1)):
        reader, batches = read({"v": column}, onError=on_error)

        assert (reader.read, dict(reader.rejected)) == (2, {"v": 1})
        assert sum(len(batch.payloads) for batch in batches) == 1 + dead


def test_json_that_is_nested_too_deeply_is_rejected():
    deep = "[" * 200_000 + "]" * 200_000

    reader, batches = read({"payload": ["1", deep]}, payloadFormat="json", onError="skip")

    assert [len(batch.payloads) for batch in batches] == [1]
    assert dict(reader.rejected) == {"payload": 1}


def test_equal_headers_of_different_types_are_distinguished():
    plan = JobColumns(WriteOptions.read({**GIVEN, "headersColumn": "h"}), ["h"])
    reader = job_reader(plan, 1_000)
    given = [{"t": 1}, {"t": True}, {"t": 1.0}, {"t": 1}]

    found = [reader._options("emails", {"h": one})[0].job.headers.text for one in given]

    assert [*map(json.loads, found)] == given
    assert found[1] == '{"t":true}'


def test_backoff_can_be_json_text():
    texts = ['{"kind": "linear", "base": 2}', "fixed", "{", "7"]

    reader, batches = read({"b": texts}, backoffColumn="b", onError="skip")

    found = [batch.options.backoff for batch in batches]
    assert [(one.kind, one.base) for one in found] == [("linear", 2_000), ("fixed", 1_000), ("fixed", 7_000)]
    assert dict(reader.rejected) == {"backoff": 1}


def test_rejection_reasons_do_not_depend_on_keys_in_values():
    texts = [json.dumps({"n": 1}), *(json.dumps({f"k{n}": {"a": [1] * n + [2**80]}}) for n in range(20))]

    reader, _ = read({"payload": texts}, payloadFormat="json", onError="skip")

    assert dict(reader.rejected) == {"payload": 20}


def test_error_for_text_that_is_not_utf_8_mentions_utf_8():
    with pytest.raises(RowError) as raised:
        read({"n": invalid_text(b"a", b"ab\xff")})

    assert str(raised.value).startswith(
        "row 2 of partition 3: n: the value of type string has no equivalent in Python: 'utf-8' codec can't "
        "decode byte 0xff in position 2"
    )


@pytest.mark.parametrize("zone", ["GMT+8", "PST"])
def test_times_in_an_unknown_time_zone_are_converted_to_utc(zone):
    kind = pyarrow.timestamp("us", tz=zone)
    columns = {
        "at": pyarrow.array([1_000_000, None], kind),
        "list": pyarrow.array([[1_000_000], None], pyarrow.list_(kind)),
        "map": pyarrow.array([[("k", 1_000_000)], None], pyarrow.map_(pyarrow.string(), kind)),
        "struct": pyarrow.array([{"at": 1_000_000}, None], pyarrow.struct({"at": kind})),
    }

    first, second = payloads(read(columns)[1])

    at = datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)
    assert first == {"at": at, "list": [at], "map": {"k": at}, "struct": {"at": at}}
    assert second == dict.fromkeys(columns)


def test_time_that_python_supports_only_in_utc_is_converted_to_utc():
    kind = pyarrow.timestamp("us", tz="Asia/Tokyo")
    last = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    column = pyarrow.array([last, datetime(2026, 1, 1, tzinfo=UTC)], pyarrow.timestamp("us", tz="UTC"))

    first, second = payloads(read({"at": column.cast(kind)})[1])

    assert first == {"at": last}
    assert (str(second["at"].tzinfo), second["at"].hour) == ("Asia/Tokyo", 9)


@pytest.mark.parametrize(("value", "options"), [("x" * 7_000, {}), ('{"a": "%s"}', {"headersColumn": "n"})])
def test_call_stages_about_one_mebibyte_of_payloads_and_options(value, options):
    plan = JobColumns(WriteOptions.read({**GIVEN, **options}), ["n"])
    rows = pyarrow.table({"n": [value.replace("%s", "h" * 7_000)] * 1_000})
    chunks = job_reader(plan, 1_000).chunks(rows.to_batches())

    calls = list(_together(chunks))

    assert sum(chunk.size for call in calls for chunk in call) == 1_000
    assert max(sum(chunk.encoded for chunk in call) for call in calls) <= 2 * CHUNK_BYTES
    assert len(calls) >= 4
