"""Convert Arrow record batches to rows of Python values, and pages of a table to record batches.

Rows: whole columns are converted at once. If that fails, each value is converted by itself, so that one value
without a Python equivalent makes only its own row invalid.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Context, localcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from djqueue.core.errors import SerializationError
from djqueue.storage.export import Page

from .tables import Column

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch

SLICE_BYTES = 1024 * 1024
"""Bytes of Arrow data to convert at once, unless a single row has more."""
NUMBER_TYPES = frozenset({"int8", "int16", "int32", "int64", "float", "double", "bool"})
"""Arrow types that NumPy converts to Python values at once, unless a value is null."""
TEXT_TYPES = frozenset({"string", "large_string", "binary", "large_binary"})
"""Arrow types that NumPy converts at once, with or without nulls."""
VARIANT_DECIMALS = Context(prec=100)
"""Exact for the decimals of variants, which have at most 38 digits; the default context rounds to 28."""
MAX_REASON = 200
"""Maximum length of the reason why a value can't be converted, in characters."""

Decoder = Callable[[Any], Any]


class Unconvertible:
    """A value without a Python equivalent. In a dead letter, its text takes its place."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"({self.reason})"


class ConvertedRows(NamedTuple):
    """The rows of a record batch."""

    values: Iterator[dict[str, Any]]
    """Values by column name."""
    errors: Mapping[int, SerializationError]
    """Errors of rows that can't be converted, by the row's index."""


def rows_of(batch: Any, needed: Collection[str] | None = None, *, keep_all: bool = False) -> ConvertedRows:
    """Convert a record batch. A map becomes a dict, and a variant the value that it holds.

    Args:
        batch: The record batch.
        needed: The columns that jobs are made from; None for all. The others are left out, and never make a
            row invalid.
        keep_all: Whether to keep the other columns.
    """
    names: list[str] = []
    columns: list[list[Any]] = []
    errors: dict[int, SerializationError] = {}
    for index, name in enumerate(batch.schema.names):
        is_needed = needed is None or name in needed
        if is_needed or keep_all:
            names.append(name)
            columns.append(_column(batch, index, name, errors if is_needed else {}))
    if not columns:
        return ConvertedRows(iter([{} for _ in range(batch.num_rows)]), errors)
    return ConvertedRows((dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)), errors)


def slices_of(batch: Any, rows: int, size: int = SLICE_BYTES) -> Iterator[Any]:
    """Split a record batch into slices of at most `rows` rows, and of at most `size` bytes or one row."""
    for first in range(0, batch.num_rows, rows):
        yield from _halves(batch.slice(first, rows), size)


def _halves(part: Any, size: int) -> Iterator[Any]:
    if part.num_rows <= 1 or part.nbytes <= size:
        yield part
        return
    middle = part.num_rows // 2
    yield from _halves(part.slice(0, middle), size)
    yield from _halves(part.slice(middle), size)


def _column(batch: Any, index: int, name: str, errors: dict[int, SerializationError]) -> list[Any]:
    import pyarrow

    failures = (
        ArithmeticError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        pyarrow.ArrowException,
    )
    column = batch.column(index)
    kind = column.type
    try:
        return _whole(column)
    except LookupError:
        # Python does not know the session's time zone, such as GMT+8.
        if (kind_in_utc := _in_utc(kind)) != kind:
            column = column.cast(kind_in_utc)
            with suppress(*failures):
                return _whole(column)
    except failures:
        pass
    values: list[Any] = []
    for row in range(batch.num_rows):
        try:
            [value] = _one(column.slice(row, 1), failures)
        except failures as error:
            value = Unconvertible(f"a value of the Arrow type {kind}: {error}"[:MAX_REASON])
            problem = f"{name}: the value of type {kind} has no equivalent in Python: {error}"
            errors.setdefault(row, SerializationError(problem[: 2 * MAX_REASON]))
        values.append(value)
    return values


def _one(column: Any, failures: tuple[type[Exception], ...]) -> list[Any]:
    """Convert a single value: in UTC, if its year is 1 to 9999 only there."""
    if str(column.type) in TEXT_TYPES:
        values: list[Any] = column.to_pylist()  # Its error says where text is not UTF-8.
        return values
    try:
        return _whole(column)
    except failures:
        if (kind := _in_utc(column.type)) == column.type:
            raise
        return _whole(column.cast(kind))


def _in_utc(kind: Any) -> Any:
    """Return an Arrow type with all its time zones replaced by UTC."""
    import pyarrow
    from pyarrow import types

    if types.is_timestamp(kind) and kind.tz is not None:
        return pyarrow.timestamp(kind.unit, "UTC")
    if types.is_list(kind):
        return pyarrow.list_(_field_in_utc(kind.value_field))
    if types.is_large_list(kind):
        return pyarrow.large_list(_field_in_utc(kind.value_field))
    if types.is_map(kind):
        return pyarrow.map_(_field_in_utc(kind.key_field), _field_in_utc(kind.item_field))
    if types.is_struct(kind):
        return pyarrow.struct([_field_in_utc(kind.field(index)) for index in range(kind.num_fields)])
    return kind


def _field_in_utc(field: Any) -> Any:
    return field.with_type(_in_utc(field.type))


def _whole(column: Any) -> list[Any]:
    # `to_pylist` first creates an Arrow object for each value, which takes ten times as long.
    kind = str(column.type)
    values: list[Any]
    if kind in TEXT_TYPES or (kind in NUMBER_TYPES and not column.null_count):
        values = column.to_numpy(zero_copy_only=False).tolist()
    else:
        values = column.to_pylist(maps_as_pydicts="strict")
        decode = _variants_in(column.type)
        if decode is not None:
            values = [decode(value) for value in values]
    return values


def _variants_in(kind: Any) -> Decoder | None:
    """Return a function that decodes the variants in values of an Arrow type; None if it has none."""
    from pyarrow import types

    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        if any((field.metadata or {}).get(b"variant") == b"true" for field in fields):
            return _variant
        decoders = {
            field.name: decode for field in fields if (decode := _variants_in(field.type)) is not None
        }
        return partial(_in_struct, decoders) if decoders else None
    if types.is_list(kind) or types.is_large_list(kind):
        decode = _variants_in(kind.value_type)
        return None if decode is None else partial(_in_list, decode)
    if types.is_map(kind):
        decode = _variants_in(kind.item_type)
        return None if decode is None else partial(_in_map, decode)
    return None


def _variant(value: Any) -> Any:
    if value is None:
        return None
    # Import late: only Spark creates variants.
    from pyspark.sql.types import VariantVal

    with localcontext(VARIANT_DECIMALS):
        return VariantVal(value["value"], value["metadata"]).toPython()


def _in_struct(decoders: Mapping[str, Decoder], value: Any) -> Any:
    if value is None:
        return None
    return {**value, **{name: decode(value[name]) for name, decode in decoders.items()}}


def _in_list(decode: Decoder, value: Any) -> Any:
    return None if value is None else [decode(one) for one in value]


def _in_map(decode: Decoder, value: Any) -> Any:
    return None if value is None else {name: decode(one) for name, one in value.items()}


def batch_of(
    columns: Sequence[Column], page: Page, kinds: "Mapping[str, DataType | None] | None" = None
) -> "RecordBatch":
    """Convert a page to Arrow; missing columns are null.

    Args:
        columns: The columns.
        page: The page.
        kinds: Arrow types of columns whose types the user gave.
    """
    import pyarrow

    count, given = len(next(iter(page.values()), ())), kinds or {}
    arrays = [
        _array(page.get(column.name), given.get(column.name) or _type(column.type), count)
        for column in columns
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def _array(values: Sequence[Any] | None, kind: "DataType", count: int) -> "Array":
    import pyarrow

    if values is None:
        return pyarrow.nulls(count, kind)
    if pyarrow.types.is_timestamp(kind):
        return _array(values, pyarrow.int64(), count).cast(pyarrow.timestamp("ms", "UTC")).cast(kind)
    if count > 1 and values[0] == values[-1] and values.count(values[0]) == count:
        # Most columns have a single value per page, such as a name or a state.
        return pyarrow.repeat(_array(values[:1], kind, 1)[0], count)
    if kind == pyarrow.string():
        try:
            return pyarrow.array(values, kind)
        except UnicodeEncodeError:
            # File names may contain lone surrogates, which Spark cannot represent.
            return pyarrow.array([_encodable(value) for value in values], kind)
    return pyarrow.array(values, kind)


def _encodable(value: str | None) -> str | None:
    return None if value is None else value.encode(errors="backslashreplace").decode()


def _type(name: str) -> "DataType":
    import pyarrow

    return {
        "string": pyarrow.string(),
        "int": pyarrow.int32(),
        "bigint": pyarrow.int64(),
        "double": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        "binary": pyarrow.binary(),
        "timestamp": pyarrow.timestamp("us", "UTC"),
        "array<string>": pyarrow.list_(pyarrow.string()),
    }[name]
