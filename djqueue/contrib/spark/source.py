"""The Python Data Source `djqueue`: what Spark calls, which passes it on to what does not know Spark."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from djqueue.core.errors import OptionError

from .following import Following
from .kinds import check_kinds
from .options import WriteOptions
from .read_options import ReadOptions
from .reading import Read
from .tables import EVENTS, ddl
from .writing import TaskReport, Write

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # before Spark 4.2
    Limited: Any = object
else:
    Limited = SupportsTriggerAvailableNow

QUERY = "sql.streaming.queryId"
"""The local property that names a streaming query; the same after a restart from its checkpoint."""
APPLICATION = "spark.app.id"
"""The local property that names the application."""


class DjqueueDataSource(DataSource):
    """`format("djqueue")`."""

    @classmethod
    def name(cls) -> str:
        """See `DataSource`."""
        return "djqueue"

    def schema(self) -> str:
        """See `DataSource`: that of the table. Raises OptionError."""
        return ddl(ReadOptions.read(self.options).schema())

    def reader(self, schema: "StructType") -> "BatchReader":
        """See `DataSource`. Raises OptionError on the driver, before any task."""
        options = _read_options(self.options, schema)
        if options.table is EVENTS:
            raise OptionError("table: read events with spark.readStream")
        return BatchReader(Read(options))

    def streamReader(self, schema: "StructType") -> "StreamReader":  # noqa: N802
        """See `DataSource`. Raises OptionError on the driver, before any task."""
        options = _read_options(self.options, schema)
        if options.table is not EVENTS:
            raise OptionError("table: only events can be streamed: use .option('table', 'events')")
        return StreamReader(Following(options))

    def writer(self, schema: "StructType", overwrite: bool) -> "BatchWriter":
        """See `DataSource`. Raises OptionError on the driver, before any task."""
        write = Write(_options(self.options, overwrite=overwrite), schema.names)
        check_kinds(write.plan, schema)
        return BatchWriter(write)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "StreamWriter":  # noqa: N802
        """See `DataSource`."""
        options = _options(self.options, overwrite=overwrite)
        if options.write is not None:
            raise OptionError("writeId: not supported by streams, because each batch has its own id")
        writer = StreamWriter(options, schema.names)
        check_kinds(writer.plan, schema)
        return writer


class BatchReader(DataSourceReader):
    """Of one `load()`: made on the driver, copied to tasks.

    There is no `pushFilters`: with one, Spark 4 shares what is left of a filter with reads that have none.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def partitions(self) -> list[InputPartition]:
        """See `DataSourceReader`."""
        return [InputPartition(parts) for parts in self._read.partitions()]

    def read(self, partition: InputPartition) -> "Iterator[RecordBatch]":
        """See `DataSourceReader`."""
        return self._read.run_task(partition.value)


class StreamReader(DataSourceStreamReader, Limited):
    """Of one stream: made on the driver, copied to tasks."""

    def __init__(self, following: Following) -> None:
        self._following = following

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        """See `DataSourceStreamReader`."""
        return self._following.begin()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, str]:  # noqa: N802
        """See `DataSourceStreamReader`; before Spark 4.2 without arguments, and then without a limit."""
        most = getattr(limit, "max_rows", None)
        return self._following.latest() if start is None else self._following.ahead(start, most)

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """See `DataSourceStreamReader`."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        most = self._following.options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802
        """See `DataSourceStreamReader`."""
        return self._following.latest()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """See `SupportsTriggerAvailableNow`."""
        self._following.stop_here()

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        """See `DataSourceStreamReader`."""
        return [InputPartition(stretch) for stretch in self._following.stretches(start, end)]

    def read(self, partition: InputPartition) -> "Iterator[RecordBatch]":
        """See `DataSourceStreamReader`."""
        return self._following.run_task(partition.value)


@dataclass
class Message(WriterCommitMessage):
    """What a task tells the driver."""

    told: TaskReport
    write: Write | None = None
    """Of a stream: in which name its tasks have worked."""


class BatchWriter(DataSourceArrowWriter):
    """Of one `save()`: made on the driver, copied to tasks, and to the process that commits."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, iterator: "Iterator[RecordBatch]") -> Message:
        """See `DataSourceArrowWriter`."""
        return Message(self._write.run_task(_part(), iterator, _property(APPLICATION)))

    def commit(self, messages: "list[Message | None]") -> None:
        """See `DataSourceArrowWriter`."""
        self._write.commit([message.told for message in messages if message is not None])

    def abort(self, messages: "list[Message | None]") -> None:
        """See `DataSourceArrowWriter`."""
        self._write.abort([message.told for message in messages if message is not None])


class StreamWriter(DataSourceStreamArrowWriter):
    """Of one micro-batch; the object that commits is another one than that whose copies were the tasks'."""

    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        self._checked = Write(options, columns)
        self.plan = self._checked.plan

    def write(self, iterator: "Iterator[RecordBatch]") -> Message:
        """See `DataSourceStreamArrowWriter`."""
        write = self._checked
        write.app = write.report = f"stream-{_property(QUERY)}"
        return Message(write.run_task(_part(), iterator, _property(APPLICATION)), write)

    def commit(self, messages: "list[Message | None]", batchId: int) -> None:  # noqa: N803
        """See `DataSourceStreamArrowWriter`: what was committed before is not committed again."""
        by_write: dict[str, list[Message]] = {}
        for message in messages:
            if message is not None and message.write is not None:
                by_write.setdefault(message.write.id, []).append(message)
        for found in by_write.values():
            write = found[0].write
            assert write is not None
            write.commit([message.told for message in found], batchId)

    def abort(self, messages: "list[Message | None]", batchId: int) -> None:  # noqa: N803
        """See `DataSourceStreamArrowWriter`."""
        for message in messages:
            if message is not None and message.write is not None:
                message.write.abort([message.told])


def _property(name: str) -> str:
    """What Spark tells a task of itself."""
    context = TaskContext.get()
    assert context is not None
    return context.getLocalProperty(name) or ""


def _part() -> str:
    """The name of this task's part, of this try alone: attempts of different stages have equal numbers."""
    context = TaskContext.get()
    assert context is not None
    return f"{context.partitionId()}.{context.taskAttemptId()}"


def _read_options(given: Any, schema: "StructType") -> ReadOptions:
    options = ReadOptions.read(given)
    if schema.names != [column.name for column in options.schema()]:
        raise OptionError("schema: cannot be changed: select columns with the option columns")
    return options


def _options(given: Any, *, overwrite: bool) -> WriteOptions:
    if overwrite:
        raise OptionError("mode: overwrite is not supported: use .mode('append')")
    return WriteOptions.read(dict(given))
