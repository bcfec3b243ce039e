"""Whether columns have types that can be what they are for: said on the driver, before a task reads a row.

What an option takes is known by what checks its values: it is shown a value as the column would have.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from djqueue.core.errors import OptionError
from djqueue.core.options import check_text

from .options import DEPENDS_ON, WriteOptions, camel, dependencies, parse
from .rows import Columns

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SAMPLES: dict[str, Any] = {
    "string": "a",
    "binary": b"a",
    "boolean": True,
    **dict.fromkeys(("byte", "short", "integer", "long"), 1),
    **dict.fromkeys(("float", "double"), 1.0),
    "decimal": Decimal(1),
    "date": date(2026, 1, 1),
    **dict.fromkeys(("timestamp", "timestamp_ntz"), datetime(2026, 1, 1, tzinfo=UTC)),
    "daytimeinterval": timedelta(seconds=1),
}
"""By the names of Spark's types."""
SAID = "expected"
"""In the message of what refuses a type; others refuse a value."""


class UnknownType(Exception):
    """A type of which nothing is known, such as that of a column of nulls."""


def check_kinds(columns: Columns, schema: "StructType") -> None:
    """Raise OptionError, naming option, column and type, if no value of a column can be what it is for."""
    for said, column, check in _uses(columns.options, columns):
        kind = schema[column].dataType
        try:
            value = _sample(kind)
        except UnknownType:
            continue
        try:
            check(value)
        except OptionError as error:
            is_plain = not isinstance(value, (str, list, dict))
            if is_plain or SAID in str(error):
                raise OptionError(
                    f"{said}: column {column!r} has type {kind.simpleString()}: {error}"
                ) from None


def _uses(options: WriteOptions, columns: Columns) -> Iterator[tuple[str, str, Callable[[Any], object]]]:
    if options.queue_column is not None and options.queue is None:
        yield "queueColumn", options.queue_column, lambda value: check_text("queue", value)
    if options.job_column is not None and options.job is None:
        yield "jobColumn", options.job_column, lambda value: check_text("job", value)
    if columns.id_column is not None:
        yield "idColumn", columns.id_column, lambda value: check_text("id", value)
    for name, column in columns.per_row.items():
        yield f"{camel(name)}Column", column, _parser(name)
    if columns.args is not None:
        yield "argsColumn", columns.args, _instance(list, "an array")
    if columns.kwargs is not None:
        yield "kwargsColumn", columns.kwargs, _instance(dict, "a map or a struct")
    if columns.payload is not None and options.payload_format == "msgpack":
        yield "payloadColumn", columns.payload, _instance(bytes, "binary MessagePack")
    if columns.payload is not None and options.payload_format == "json":
        yield "payloadColumn", columns.payload, _instance((str, bytes), "text of JSON")


def _parser(name: str) -> Callable[[Any], object]:
    if name == DEPENDS_ON:
        return lambda value: dependencies("a", value)
    return lambda value: parse(name, value)


def _instance(kinds: type | tuple[type, ...], said: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, kinds):
            raise OptionError(f"expected {said}")

    return check


def _sample(kind: Any) -> Any:
    """A value of a type of Spark, as rows have it. Raises Unknown."""
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
