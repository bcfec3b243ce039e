"""Arrow's columns as rows of Python's own values."""

from collections.abc import Iterator
from typing import Any

NUMBERS = frozenset({"int8", "int16", "int32", "int64", "float", "double", "bool"})
"""Types whose values NumPy turns into Python's at once, if none is missing."""
TEXTS = frozenset({"string", "large_string", "binary", "large_binary"})
"""The same, also if some are missing."""


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a record batch; a map is a dict."""
    if not batch.num_columns:
        return iter([{} for _ in range(batch.num_rows)])
    names = batch.schema.names
    return (dict(zip(names, row, strict=True)) for row in zip(*map(_values, batch.columns), strict=True))


def _values(column: Any) -> list[Any]:
    # `to_pylist` makes an object of Arrow's for each value first: ten times as long.
    kind = str(column.type)
    values: list[Any]
    if kind in TEXTS or (kind in NUMBERS and not column.null_count):
        values = column.to_numpy(zero_copy_only=False).tolist()
    else:
        values = column.to_pylist(maps_as_pydicts="strict")
    return values
