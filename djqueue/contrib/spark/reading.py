"""What a read does, on the driver and in its tasks: plain Python, without Spark."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from djqueue.core.errors import OptionError
from djqueue.storage.base import Storage
from djqueue.storage.export import Export, ExportPart, Page

from .locations import storage_at
from .read_options import ReadOptions
from .reports import ReportExport
from .tables import Column

if TYPE_CHECKING:
    from pyarrow import Array, DataType, RecordBatch


class Read:
    """One read. Made, and checked, on the driver; its copies work in tasks.

    Raises OptionError for what cannot be, and StorageUnavailableError if nobody answers at the URL.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.columns = options.schema()

    def storage(self) -> Storage:
        """For the caller, who closes it."""
        return storage_at(self.options.url, self.options.prefix)

    def partitions(self) -> list[list[ExportPart]]:
        """What each task reads: at most `numPartitions`, of about as many rows each."""
        many = self.options.partitions
        with closing(self.storage()) as storage:
            storage.connect()
            parts = export_of(storage, self.options.table.name).parts(self.options.wanted(), many)
        # At least one: Spark takes no partition at all for one of its own making.
        tasks: list[list[ExportPart]] = [[] for _ in range(min(many, len(parts)) or 1)]
        sizes = [0] * len(tasks)
        for part in sorted(parts, key=lambda part: part.rows, reverse=True):
            place = sizes.index(min(sizes))
            tasks[place].append(part)
            sizes[place] += part.rows + 1
        return tasks

    def run_task(self, parts: Sequence[ExportPart]) -> "Iterator[RecordBatch]":
        """The rows of a task's parts."""
        wanted = self.options.wanted()
        with closing(self.storage()) as storage:
            export = export_of(storage, self.options.table.name)
            for part in parts:
                for page in export.pages(wanted, part, self.options.batch_size):
                    batch = batch_of(self.columns, page)
                    if batch.num_rows:
                        yield batch


def export_of(storage: Storage, table: str) -> Export:
    """What can be read of a storage. Raises OptionError if it has no such table."""
    if table == "imports" and storage.capabilities.bulk_writes is not None:
        return ReportExport(storage.capabilities.bulk_writes)
    export = storage.capabilities.export
    if export is None:
        raise OptionError(f"url: {storage.describe()} does not support reads")
    if table not in export.tables:
        known = ", ".join(sorted(export.tables))
        raise OptionError(
            f"table: {table} is stored in the project's database, not in {storage.describe()}: use the "
            f"database's URL; this storage has {known}"
        )
    return export


def batch_of(columns: Sequence[Column], page: Page) -> "RecordBatch":
    """A page as Arrow; a column that it has not is null."""
    import pyarrow

    many = len(next(iter(page.values()), ()))
    arrays = [_array(page.get(column.name), _type(column.type), many) for column in columns]
    return pyarrow.RecordBatch.from_arrays(arrays, names=[column.name for column in columns])


def _array(values: Sequence[Any] | None, kind: "DataType", many: int) -> "Array":
    import pyarrow

    if values is None:
        return pyarrow.nulls(many, kind)
    if pyarrow.types.is_timestamp(kind):
        return _array(values, pyarrow.int64(), many).cast(pyarrow.timestamp("ms", "UTC")).cast(kind)
    if many > 1 and values[0] == values[-1] and values.count(values[0]) == many:
        # As most columns of most pages: a name, a state, or nothing.
        return pyarrow.repeat(_array(values[:1], kind, 1)[0], many)
    if kind == pyarrow.string():
        try:
            return pyarrow.array(values, kind)
        except UnicodeEncodeError:
            # Names of files may have halves of surrogate pairs, for which Spark has no place.
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
