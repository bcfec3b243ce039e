"""Implement Spark's data source `djqueue` by delegating to code that does not depend on Spark."""

from . import requirements as requirements  # isort: skip

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
from pyspark.sql.pandas.types import to_arrow_type

from djqueue.core.errors import OptionError

from .columns import check_types
from .locations import REMEDY, has_password
from .options import ReadOptions, WriteOptions
from .reading import JobEventStream, Read
from .reporting import TaskReport
from .tables import EVENTS, ddl
from .writing import Write

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
"""Local property with a streaming query's id, which survives a restart from the checkpoint."""
APPLICATION = "spark.app.id"
"""Local property with the application's id."""


class DjqueueDataSource(DataSource):
    """The data source behind `format("djqueue")`."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "djqueue"

    def schema(self) -> str:
        """Return the schema of the table that the options select. Raises OptionError."""
        return ddl(ReadOptions.read(_of_catalog(self.options)).schema())

    def reader(self, schema: "StructType") -> "BatchReader":
        """Return a reader for `load()`. Raises OptionError on the driver, before any task."""
        options = _read_options(self.options, schema)
        if options.table is EVENTS:
            raise OptionError("table: read events with spark.readStream")
        kinds = {name: to_arrow_type(schema[name].dataType) for name in options.schemas}
        return BatchReader(Read(options, kinds))

    def streamReader(self, schema: "StructType") -> "StreamReader":  # noqa: N802
        """Return a reader for a stream. Raises OptionError on the driver, before any task."""
        options = _read_options(self.options, schema)
        if options.table is not EVENTS:
            raise OptionError("table: only events can be streamed: use .option('table', 'events')")
        if options.max_rows is not None and Limited is object:
            raise OptionError(
                "maxRowsPerTrigger: requires Spark 4.2 or later, since earlier versions ignore it: remove it"
            )
        return StreamReader(JobEventStream(options))

    def writer(self, schema: "StructType", overwrite: bool) -> "BatchWriter":
        """Return a writer for `save()`. Raises OptionError on the driver, before any task."""
        if overwrite:
            raise OptionError("mode: overwrite is not supported: use .mode('append') or INSERT INTO")
        write = Write(WriteOptions.read(_of_catalog(self.options)), schema.names)
        check_types(write.plan, schema)
        return BatchWriter(write)

    def streamWriter(self, schema: "StructType", overwrite: bool) -> "StreamWriter":  # noqa: N802
        """Return a writer for a streaming query. Raises OptionError on the driver."""
        if overwrite:
            raise OptionError(
                "outputMode: complete is not supported, because each batch would repeat all rows: use "
                ".outputMode('append') or 'update'"
            )
        options = WriteOptions.read(_of_catalog(self.options))
        if options.write is not None:
            raise OptionError("writeId: not supported by streams, because each batch has its own id")
        if options.app is not None:
            raise OptionError(
                "txnAppId, txnVersion: not supported by streams, whose batches are identified by the "
                "checkpoint: remove them"
            )
        writer = StreamWriter(options, schema.names)
        check_types(writer.plan, schema)
        return writer


class BatchReader(DataSourceReader):
    """The reader of one `load()`, created on the driver and copied to tasks.

    It has no `pushFilters`. With one, reads fail unless a property of Spark is set; and then Spark uses the
    reader with the filters of one query for other queries of the same DataFrame, too.
    """

    def __init__(self, read: Read) -> None:
        self._read = read

    def partitions(self) -> list[InputPartition]:
        """Return one partition for each task."""
        return [InputPartition(parts) for parts in self._read.partitions()]

    def read(self, partition: InputPartition) -> "Iterator[RecordBatch]":
        """Return the rows of a partition."""
        return self._read.run_task(partition.value)


class StreamReader(DataSourceStreamReader, Limited):
    """The reader of one stream, created on the driver and copied to tasks."""

    def __init__(self, stream: JobEventStream) -> None:
        self._stream = stream

    def initialOffset(self) -> dict[str, str]:  # noqa: N802
        """Return the offset where a new stream starts."""
        return self._stream.start()

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, str]:  # noqa: N802
        """Return where the next batch ends. Spark before 4.2 passes no arguments."""
        limit = getattr(limit, "max_rows", None)
        return self._stream.latest() if start is None else self._stream.next_end(start, limit)

    def getDefaultReadLimit(self) -> Any:  # noqa: N802
        """Return the limit that `maxRowsPerTrigger` sets."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._stream.options.max_rows
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def reportLatestOffset(self) -> dict[str, str]:  # noqa: N802
        """Return the offset after the latest event."""
        return self._stream.latest()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """End the stream at the events that exist now."""
        self._stream.stop_at_current_end()

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        """Return one partition for each queue with new events."""
        return [InputPartition(part) for part in self._stream.ranges(start, end)]

    def read(self, partition: InputPartition) -> "Iterator[RecordBatch]":
        """Return the rows of a partition."""
        return self._stream.run_task(partition.value)


@dataclass
class Message(WriterCommitMessage):
    """The message from a task to the driver."""

    report: TaskReport
    write: Write | None = None
    """For a stream, the write that the task belonged to."""


class BatchWriter(DataSourceArrowWriter):
    """The writer of one `save()`, copied to the tasks and to the committing process."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, iterator: "Iterator[RecordBatch]") -> Message:
        """Write a task's rows."""
        return Message(self._write.run_task(_part(), iterator, _property(APPLICATION)))

    def commit(self, messages: "list[Message | None]") -> None:
        """Publish the rows of all tasks."""
        self._write.commit([message.report for message in messages if message is not None])

    def abort(self, messages: "list[Message | None]") -> None:
        """Discard the rows of all tasks."""
        self._write.abort([message.report for message in messages if message is not None])


class StreamWriter(DataSourceStreamArrowWriter):
    """The writer of one micro-batch.

    Spark commits with another instance than the one that it copied to the tasks.
    """

    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        self._checked = Write(options, columns)
        self.plan = self._checked.plan

    def write(self, iterator: "Iterator[RecordBatch]") -> Message:
        """Write a task's rows."""
        write = self._checked
        write.app = write.report = f"stream-{_property(QUERY)}"
        return Message(write.run_task(_part(), iterator, _property(APPLICATION)), write)

    def commit(self, messages: "list[Message | None]", batchId: int) -> None:  # noqa: N803
        """Publish the rows of all tasks. A batch that was already committed is skipped."""
        by_write: dict[str, list[Message]] = {}
        for message in messages:
            if message is not None and message.write is not None:
                by_write.setdefault(message.write.id, []).append(message)
        for group in by_write.values():
            write = group[0].write
            assert write is not None
            write.commit([message.report for message in group], batchId)

    def abort(self, messages: "list[Message | None]", batchId: int) -> None:  # noqa: N803
        """Discard the rows of all tasks."""
        for message in messages:
            if message is not None and message.write is not None:
                message.write.abort([message.report])


def _property(name: str) -> str:
    """Return a local property of the running task."""
    context = TaskContext.get()
    assert context is not None
    return context.getLocalProperty(name) or ""


def _part() -> str:
    """Return the part of this task attempt, unique even among the attempts of several stages."""
    context = TaskContext.get()
    assert context is not None
    return f"{context.partitionId()}.{context.taskAttemptId()}"


CATALOG = ("owner", "provider", "path", "location", "comment", "is_managed_location")
"""Properties that Spark adds to the options of `CREATE TABLE`."""
CATALOG_OPTION = "option."
"""Prefix of a copy of each option of `CREATE TABLE`."""


def _of_catalog(given: Any) -> dict[str, str]:
    """Return the options of a read or a write, without what Spark's catalog adds to them.

    Raises:
        OptionError: `CREATE TABLE` has a password, which Spark writes to its event log and its catalog.
    """
    options = dict(given)
    if not any(name.startswith(CATALOG_OPTION) for name in options):
        return options
    if has_password(options.get("url", "")):
        raise OptionError(
            "url: a password in CREATE TABLE is shown in Spark's event log and catalog. Change the password, "
            f"which this statement has already logged, and {REMEDY}"
        )
    return {
        name: value
        for name, value in options.items()
        if name.lower() not in CATALOG and not name.startswith(CATALOG_OPTION)
    }


def _read_options(given: Any, schema: "StructType") -> ReadOptions:
    options = ReadOptions.read(_of_catalog(given))
    given_columns = [(column.name, column.dataType.simpleString()) for column in schema.fields]
    expected = {column.name: column.type for column in options.schema()}
    if list(expected) != schema.names or any(
        expected[name] != kind for name, kind in given_columns if name not in options.schemas
    ):
        raise OptionError(
            "schema: cannot be changed: select columns with the option columns. A table or view whose CREATE "
            "statement lists columns is for INSERT INTO"
        )
    return options
