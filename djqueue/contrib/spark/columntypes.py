"""Checks of the types of a DataFrame's columns, on the driver.

A sample value of each column's Spark type is passed to the option's own parser.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from djqueue.core.errors import OptionError
from djqueue.core.options import check_text

from .columns import Columns
from .options import DEPENDS_ON, WriteOptions, camel, dependencies, parse

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SAMPLES: dict[str, Any] = {
    **dict.fromkeys(("string", "char", "varchar"), "a"),
    "binary": b"a",
    "boolean": True,
    **dict.fromkeys(("byte", "short", "integer", "long"), 1),
    **dict.fromkeys(("float", "double"), 1.0),
    "decimal": Decimal(1),
    "date": date(2026, 1, 1),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), datetime(2026, 1, 1, tzinfo=UTC)),
    "time": time(),
    "daytimeinterval": timedelta(seconds=1),
}
"""A sample value for each of Spark's type names."""
MONTHS = "yearmonthinterval"
REMEDIES = {
    MONTHS: "Python has no interval of months; cast it to a number of months, or to a string",
    **dict.fromkeys(
        ("interval", "calendarinterval"), "Python has no interval of months and days; cast it to a string"
    ),
}
"""Remedies for columns of Spark types without an equivalent in Python."""
TYPE_ERROR = "expected"
"""In messages of parsers that reject a type; the others reject a value."""


class UnknownType(Exception):
    """A type without a sample value, such as that of a column of nulls."""


def check_types(columns: Columns, schema: "StructType") -> None:
    """Raise OptionError, with option, column and type, if a column's type can't hold what it is used for."""
    for column in schema.fields:
        if column.dataType.typeName() == MONTHS:
            # PySpark fails to read any row of such a DataFrame.
            raise OptionError(
                f"{column.name}: a column of type {column.dataType.simpleString()} can't be written: "
                f"{REMEDIES[MONTHS]}, or drop it"
            )
    for column in columns.payload_columns:
        kind = schema[column].dataType
        problem = _problem(kind)
        if problem is not None:
            raise OptionError(
                f"{column}: a column of type {kind.simpleString()} can't be part of a payload: {problem}, or "
                "leave the column out with excludeColumns"
            )
    for option, column, check in _uses(columns.options, columns):
        kind = schema[column].dataType
        name = kind.typeName()
        if name in REMEDIES or (name == "timestamp_ntz" and option == "runAtColumn"):
            problem = REMEDIES.get(name, "it has no time zone; cast it to timestamp")
            raise OptionError(f"{option}: column {column!r} has type {kind.simpleString()}: {problem}")
        try:
            value = _sample(kind)
        except UnknownType:
            continue
        if option == "headersColumn" and isinstance(value, str):
            continue  # Each row has a JSON object, which is parsed with the row.
        try:
            check(value)
        except OptionError as error:
            is_plain = not isinstance(value, (str, list, dict))
            if is_plain or TYPE_ERROR in str(error):
                # What it got is a sample of the type, and in no row of the DataFrame.
                problem = str(error).partition(", got ")[0]
                raise OptionError(
                    f"{option}: column {column!r} has type {kind.simpleString()}: {problem}"
                ) from None


def _problem(kind: Any) -> str | None:
    """Return why Python can't represent the values of a Spark type, with a remedy; None if it can."""
    name = kind.typeName()
    if name in REMEDIES:
        return REMEDIES[name]
    if name == "array":
        return _problem(kind.elementType)
    if name == "struct":
        return next(filter(None, (_problem(field.dataType) for field in kind.fields)), None)
    if name == "map":
        if kind.keyType.typeName() in ("array", "map", "struct", "variant"):
            return (
                f"keys of type {kind.keyType.simpleString()} can't be the keys of a dict; convert the map "
                "with map_entries"
            )
        return _problem(kind.keyType) or _problem(kind.valueType)
    return None


def _uses(options: WriteOptions, columns: Columns) -> Iterator[tuple[str, str, Callable[[Any], object]]]:
    if options.queue_column is not None:
        yield "queueColumn", options.queue_column, lambda value: check_text("queue", value)
    if options.job_column is not None:
        yield "jobColumn", options.job_column, lambda value: check_text("job", value)
    if columns.id_column is not None:
        yield "idColumn", columns.id_column, lambda value: check_text("id", value)
    for name, column in columns.per_row.items():
        yield f"{camel(name)}Column", column, _parser(name)
    if columns.args is not None:
        yield "argsColumn", columns.args, _instance(list, "an array")
    if columns.kwargs is not None:
        yield "kwargsColumn", columns.kwargs, _named
    if columns.payload is not None and options.payload_format == "msgpack":
        yield "payloadColumn", columns.payload, _instance(bytes, "binary MessagePack")
    if columns.payload is not None and options.payload_format == "json":
        yield "payloadColumn", columns.payload, _instance((str, bytes), "JSON text")


def _parser(name: str) -> Callable[[Any], object]:
    if name == DEPENDS_ON:
        return lambda value: dependencies("a", value)
    return lambda value: parse(name, value)


def _instance(kinds: type | tuple[type, ...], expected: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, kinds):
            raise OptionError(f"expected {expected}")

    return check


def _named(value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise OptionError("expected a map with keys of type string, or a struct")


def _sample(kind: Any) -> Any:
    """Return a sample value of a Spark type. Raises UnknownType."""
    name = kind.typeName()
    if name == "array":
        return [_sample(kind.elementType)]
    if name == "map":
        return {_sample(kind.keyType): _sample(kind.valueType)}
    if name == "struct":
        return {field.name: _sample(field.dataType) for field in kind.fields}
    try:
        return SAMPLES[name]
    except KeyError:
        raise UnknownType(name) from None
