"""Rows of record batches, with the same values as Arrow's slower conversion."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow
import pytest

from djqueue.contrib.spark.arrow import rows_of

VALUES = {
    "int8": (pyarrow.int8(), [-128, 127]),
    "int64": (pyarrow.int64(), [-(2**63), 2**63 - 1]),
    "float32": (pyarrow.float32(), [0.5, float("inf")]),
    "float64": (pyarrow.float64(), [0.1, -1e300]),
    "boolean": (pyarrow.bool_(), [True, False]),
    "string": (pyarrow.string(), ["", "grün \0 \U0001f600"]),
    "large_string": (pyarrow.large_string(), ["a", "b"]),
    "binary": (pyarrow.binary(), [b"\xff\0", b""]),
    "timestamp": (pyarrow.timestamp("us", "UTC"), [datetime(2026, 6, 1, tzinfo=UTC)] * 2),
    "date": (pyarrow.date32(), [date(2026, 6, 1), date(1, 1, 1)]),
    "decimal": (pyarrow.decimal128(10, 2), [Decimal("1.50"), Decimal("-0.01")]),
    "duration": (pyarrow.duration("us"), [timedelta(days=1), timedelta(microseconds=1)]),
    "list": (pyarrow.list_(pyarrow.int64()), [[1, None], []]),
    "map": (pyarrow.map_(pyarrow.string(), pyarrow.int64()), [{"a": 1}, {}]),
    "struct": (pyarrow.struct({"a": pyarrow.string()}), [{"a": "b"}, {"a": None}]),
    "null": (pyarrow.null(), [None, None]),
}


@pytest.mark.parametrize("missing", [False, True], ids=["whole", "with nulls"])
@pytest.mark.parametrize("kind", VALUES)
def test_row_values_equal_those_of_the_arrow_conversion(kind, missing):
    arrow, values = VALUES[kind]
    values = [*values, None, *values] if missing else values
    batch = pyarrow.record_batch({"n": pyarrow.array(range(len(values) + 2)), "value": wide(values, arrow)})

    found = [row["value"] for row in rows_of(batch.slice(1, len(values))).values]

    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


def wide(values, arrow):
    """Return an array sliced from a longer one, so that it has an offset."""
    return pyarrow.array([values[0], *values, values[0]], arrow)


def test_rows_without_columns_are_counted():
    batch = pyarrow.RecordBatch.from_struct_array(pyarrow.array([{}, {}], pyarrow.struct([])))

    assert list(rows_of(batch).values) == [{}, {}]
