"""Checks of column types, which need no Spark session."""

import pytest

from djqueue.contrib.spark.changing import ChangeColumns
from djqueue.contrib.spark.columns import check_types
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.rows import JobColumns
from djqueue.core.errors import OptionError

types = pytest.importorskip("pyspark.sql.types", reason="Spark is not installed here: see make test-spark")
pytestmark = pytest.mark.spark
GIVEN = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.jobs.send"}
TEXTS = types.ArrayType(types.StringType())
PAIR = types.StructType([types.StructField(name, types.StringType()) for name in ("queue", "id")])


def check(option, kind, **options):
    given = {**GIVEN, option: "n", **options}
    schema = types.StructType([types.StructField("n", kind)])
    return check_types(JobColumns(WriteOptions.read(given), schema.names), schema)


@pytest.mark.parametrize(
    ("option", "kinds"),
    [
        ("idColumn", ["StringType"]),
        ("priorityColumn", ["ByteType", "ShortType", "IntegerType", "LongType"]),
        ("maxAttemptsColumn", ["LongType"]),
        ("delayColumn", ["LongType", "DoubleType", "DayTimeIntervalType"]),
        ("timeoutColumn", ["IntegerType", "DayTimeIntervalType"]),
        ("runAtColumn", ["TimestampType"]),
        ("onDuplicateColumn", ["StringType"]),
        ("lifoColumn", ["BooleanType"]),
        ("concurrencyKeyColumn", ["StringType"]),
        ("uniqueKeyColumn", ["StringType", "NullType"]),
    ],
)
def test_column_types_that_an_option_supports_are_accepted(option, kinds):
    for kind in kinds:
        assert check(option, getattr(types, kind)()) is None, kind


@pytest.mark.parametrize(
    ("option", "kind"),
    [("tagsColumn", TEXTS), ("dependsOnColumn", TEXTS), ("dependsOnColumn", types.ArrayType(PAIR))],
)
def test_list_columns_are_checked_by_their_element_type(option, kind):
    assert check(option, kind) is None


@pytest.mark.parametrize(
    ("option", "kind", "message"),
    [
        ("idColumn", types.LongType(), "idColumn: column 'n' has type bigint: id: expected a string"),
        ("priorityColumn", types.StringType(), "priorityColumn: column 'n' has type string"),
        ("priorityColumn", types.DoubleType(), "column 'n' has type double"),
        ("uniqueKeyColumn", types.LongType(), "uniqueKeyColumn: column 'n' has type bigint"),
        ("delayColumn", types.BinaryType(), "column 'n' has type binary"),
        ("lifoColumn", types.LongType(), "lifoColumn: column 'n' has type bigint"),
        ("onDuplicateColumn", types.BooleanType(), "column 'n' has type boolean"),
        (
            "tagsColumn",
            types.StringType(),
            "tagsColumn: column 'n' has type string: tags: expected a list of strings",
        ),
        ("tagsColumn", types.ArrayType(types.LongType()), "column 'n' has type array<bigint>"),
        ("dependsOnColumn", types.ArrayType(types.LongType()), "column 'n' has type array<bigint>"),
        (
            "runAtColumn",
            types.TimestampNTZType(),
            "runAtColumn: column 'n' has type timestamp_ntz: it has no time zone; cast it to timestamp",
        ),
        (
            "delayColumn",
            types.YearMonthIntervalType(),
            "n: a column of type interval year to month can't be written: Python has no interval of months",
        ),
        ("argsColumn", types.StringType(), "argsColumn: column 'n' has type string: expected an array"),
        (
            "kwargsColumn",
            TEXTS,
            "column 'n' has type array<string>: expected a map with keys of type string, or a struct",
        ),
    ],
)
def test_column_types_that_an_option_does_not_support_are_rejected(option, kind, message):
    with pytest.raises(OptionError) as raised:
        check(option, kind)

    assert message in str(raised.value)
    assert "got" not in str(raised.value), "no row of the DataFrame has a value of the check"


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [("json", "StringType", "LongType"), ("msgpack", "BinaryType", "StringType")],
)
def test_encoded_payload_column_must_have_the_type_of_its_format(form, taken, refused):
    check("payloadColumn", getattr(types, taken)(), payloadFormat=form)

    with pytest.raises(OptionError, match="payloadColumn: column 'n' has type"):
        check("payloadColumn", getattr(types, refused)(), payloadFormat=form)


def test_queue_and_job_columns_must_be_strings():
    schema = types.StructType([types.StructField(name, types.LongType()) for name in ("q", "j")])
    given = {"url": GIVEN["url"], "queueColumn": "q", "jobColumn": "j"}

    with pytest.raises(OptionError, match="queueColumn: column 'q' has type bigint"):
        check_types(JobColumns(WriteOptions.read(given), schema.names), schema)


def test_column_types_of_operations_are_checked():
    schema = types.StructType([types.StructField(name, types.LongType()) for name in ("id", "n")])
    given = {"url": GIVEN["url"], "queue": "emails", "operation": "cancel"}

    with pytest.raises(OptionError, match="idColumn: column 'id' has type bigint"):
        check_types(ChangeColumns(WriteOptions.read(given), schema.names), schema)


STRUCT = types.StructType([types.StructField("a", types.LongType())])
MONTHS = types.YearMonthIntervalType()
IMPOSSIBLE = [
    (types.CalendarIntervalType(), "interval", "cast it to a string"),
    (types.ArrayType(MONTHS), "array<interval year to month>", "cast it to a number of months"),
    (types.StructType([types.StructField("a", MONTHS)]), "struct<a:interval year to month>", "cast it"),
    (types.MapType(STRUCT, types.LongType()), "map<struct<a:bigint>,bigint>", "with map_entries"),
    (types.MapType(TEXTS, types.LongType()), "map<array<string>,bigint>", "with map_entries"),
    (types.MapType(types.StringType(), MONTHS), "map<string,interval year to month>", "cast it"),
]


@pytest.mark.parametrize(("kind", "shown", "remedy"), IMPOSSIBLE)
def test_payload_column_without_a_python_equivalent_is_rejected(kind, shown, remedy):
    schema = types.StructType([types.StructField("n", types.LongType()), types.StructField("odd", kind)])
    options = WriteOptions.read(GIVEN)

    with pytest.raises(OptionError) as raised:
        check_types(JobColumns(options, schema.names), schema)

    text = str(raised.value)
    assert text.startswith(f"odd: a column of type {shown} can't be part of a payload: ")
    assert remedy in text
    assert text.endswith("or leave the column out with excludeColumns")
    without = WriteOptions.read({**GIVEN, "excludeColumns": "odd"})
    assert check_types(JobColumns(without, schema.names), schema) is None


@pytest.mark.parametrize(
    "kind",
    [
        types.TimeType(),
        types.VariantType(),
        types.TimestampNTZType(),
        types.MapType(types.DateType(), STRUCT),
    ],
)
def test_payload_columns_can_have_any_other_type(kind):
    schema = types.StructType([types.StructField("n", kind)])

    assert check_types(JobColumns(WriteOptions.read(GIVEN), schema.names), schema) is None


@pytest.mark.parametrize("more", [{}, {"excludeColumns": "odd"}])
def test_month_interval_is_rejected_at_any_depth(more):
    schema = types.StructType([types.StructField("n", types.LongType()), types.StructField("odd", MONTHS)])

    with pytest.raises(OptionError) as raised:
        check_types(JobColumns(WriteOptions.read({**GIVEN, **more}), schema.names), schema)

    assert str(raised.value) == (
        "odd: a column of type interval year to month can't be written: Python has no interval of months; "
        "cast it to a number of months, or to a string, or drop it"
    )


@pytest.mark.parametrize("key", [types.IntegerType(), types.DateType()])
def test_argument_names_must_be_strings(key):
    kind = types.MapType(key, types.StringType())

    with pytest.raises(OptionError, match=r"kwargsColumn: .* expected a map with keys of type string"):
        check("kwargsColumn", kind)
    assert check("kwargsColumn", types.MapType(types.StringType(), types.LongType())) is None


def test_map_column_is_rejected_for_tags():
    with pytest.raises(OptionError, match=r"tagsColumn: .* expected a list of strings"):
        check("tagsColumn", types.MapType(types.StringType(), types.StringType()))
