"""Read a storage's tables and streams of events, on the driver and in tasks, without depending on Spark."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from djqueue.core.errors import OptionError
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import BulkWriteReport, BulkWriteReports, write_of
from djqueue.storage.export import (
    CallRetry,
    Export,
    ExportFilter,
    ExportPart,
    Feed,
    FeedRange,
    Page,
    Places,
    once,
)

from .arrow import batch_of
from .locations import storage_at
from .options import BINARY, EARLIEST, ReadOptions
from .readable import ReadableColumns
from .tables import BULK_WRITE, PAYLOAD, RESULT, TAGS
from .throttling import StorageRetry
from .timeouts import Timeouts

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch

T = TypeVar("T")


class Read:
    """One read, created and checked on the driver and copied to tasks.

    Args:
        options: The options.
        kinds: The Arrow types of the columns to which the options give a schema.

    Raises:
        OptionError: An option is invalid.
        StorageUnavailableError: The server does not respond.
    """

    def __init__(self, options: ReadOptions, kinds: "Mapping[str, DataType] | None" = None) -> None:
        self.options = options
        self.columns = options.schema()
        names = {column.name for column in self.columns} & {PAYLOAD, RESULT}
        self._kinds: dict[str, DataType | None] = dict.fromkeys(names if options.values != BINARY else ())
        self._kinds |= kinds or {}
        ReadableColumns(self._kinds)

    def storage(self) -> Storage:
        """Return a new storage, which the caller must close."""
        return storage_of(self.options)

    def partitions(self) -> list[list[ExportPart]]:
        """Return what each task reads: at most `numPartitions` lists of about equal numbers of rows."""
        count = self.options.partitions
        with closing(self.storage()) as storage:
            storage.connect()
            parts = export_of(storage, self.options.table.name).parts(self.options.wanted(), count)
        # At least one partition: Spark replaces an empty list with a partition of its own.
        tasks: list[list[ExportPart]] = [[] for _ in range(min(count, len(parts)) or 1)]
        sizes = [0] * len(tasks)
        for part in sorted(parts, key=lambda part: part.rows, reverse=True):
            index = sizes.index(min(sizes))
            tasks[index].append(part)
            sizes[index] += part.rows + 1
        return tasks

    def run_task(self, parts: Sequence[ExportPart]) -> "Iterator[RecordBatch]":
        """Return the rows of a task's parts. Each call is repeated while the storage is unavailable."""
        wanted, retry = self.options.wanted(), StorageRetry(self.options.max_retries)
        with closing(self.storage()) as storage:
            export = export_of(storage, self.options.table.name)
            readable = ReadableColumns(self._kinds)
            for part in parts:
                for page in export.pages(wanted, part, self.options.batch_size, retry):
                    batch = batch_of(self.columns, _with_write(readable.convert(page)), self._kinds)
                    if batch.num_rows:
                        yield batch
            readable.warn()


class JobEventStream:
    """One stream of events, created and checked on the driver and copied to tasks."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.columns = options.schema()
        self._target: Places | None = None
        """End of a stream with the trigger `availableNow`."""

    def storage(self) -> Storage:
        """Return a new storage, which the caller must close."""
        return storage_of(self.options)

    def _ask(self, question: Callable[[Feed], T]) -> T:
        """Return the answer of the feed to a question, repeated while the storage is unavailable."""
        with closing(self.storage()) as storage:
            return StorageRetry(self.options.max_retries)(question, feed_of(storage))

    def start(self) -> dict[str, str]:
        """Return the offsets where a new stream starts."""
        with closing(self.storage()) as storage:
            storage.connect()
            feed = feed_of(storage)
            is_early = self.options.starting == EARLIEST
            return dict((feed.first if is_early else feed.last)(self.options.queues))

    def stop_at_current_end(self) -> None:
        """Ignore events that happen from now on."""
        self._target = self._last()

    def next_end(self, start: Mapping[str, str], limit: int | None) -> dict[str, str]:
        """Return the offsets where the next batch ends, after at most `limit` rows."""
        until = self._last() if self._target is None else self._target
        if limit is None:
            return {**start, **until}
        return dict(self._ask(lambda feed: feed.ahead(start, until, limit)))

    def latest(self) -> dict[str, str]:
        """Return the offsets after the latest events."""
        return dict(self._last())

    def _last(self) -> Places:
        return self._ask(lambda feed: feed.last(self.options.queues))

    def ranges(self, start: Mapping[str, str], end: Mapping[str, str]) -> list[FeedRange]:
        """Return the range that each task reads, one for each queue."""
        return [
            FeedRange(stream, start.get(stream, ""), position)
            for stream, position in sorted(end.items())
            if start.get(stream) != position
        ]

    def run_task(self, part: FeedRange) -> "Iterator[RecordBatch]":
        """Return the rows of a range. Raises EventsLostError if some have expired."""
        complete, size = self.options.fail_on_data_loss, self.options.batch_size
        retry = StorageRetry(self.options.max_retries)
        with closing(self.storage()) as storage:
            for page in feed_of(storage).read(part, size, complete=complete, retry=retry):
                yield batch_of(self.columns, page)


def _with_write(page: Page) -> Page:
    """Add the name of the bulk write that enqueued each job, which is in its tags."""
    if TAGS not in page:
        return page
    return {**page, BULK_WRITE: [write_of(tags) for tags in page[TAGS]]}


def storage_of(options: ReadOptions) -> Storage:
    """Return the storage of a read, which the caller must close."""
    timeouts = Timeouts(options.timeout, options.socket_timeout)
    return storage_at(options.url, options.prefix, timeouts=timeouts)


def export_of(storage: Storage, table: str) -> Export:
    """Return the export that reads a table. Raises OptionError if the storage has no such table."""
    if table == "imports" and storage.capabilities.bulk_writes is not None:
        return ReportExport(storage.capabilities.bulk_writes)
    export = storage.capabilities.export
    if export is None:
        raise OptionError(f"url: {storage.describe()} does not support reads")
    if table not in export.tables:
        others = {"imports": storage.capabilities.bulk_writes, "events": storage.capabilities.feed}
        known = ", ".join(
            sorted(export.tables | {name for name, reader in others.items() if reader is not None})
        )
        raise OptionError(
            f"table: {table} is stored in the project's database, not in {storage.describe()}: use the "
            f"database's URL; this storage has {known}"
        )
    return export


def feed_of(storage: Storage) -> Feed:
    """Return the events of a storage. Raises OptionError if it stores none."""
    if storage.capabilities.feed is None:
        raise OptionError(
            f"table: {storage.describe()} stores no events: read the tables attempts and jobs instead"
        )
    return storage.capabilities.feed


class ReportExport(Export):
    """Export of bulk write reports. They are at most a thousand, so one part has them all."""

    tables = frozenset({"imports"})

    def __init__(self, imports: BulkWriteReports) -> None:
        self._imports = imports

    def parts(self, wanted: ExportFilter, count: int) -> list[ExportPart]:
        """Return the only part."""
        return [ExportPart("", 0, 0, 0)]

    def pages(
        self, wanted: ExportFilter, part: ExportPart, size: int, retry: CallRetry = once
    ) -> Iterator[Page]:
        """Yield the reports of bulk writes in pages."""
        after: str | None = None
        while True:
            reports, after = retry(self._imports.page, size, after)
            yield _page(reports)
            if after is None:
                return


def _page(reports: list[BulkWriteReport]) -> Page:
    return {
        "write": [report.write for report in reports],
        "app": [report.app for report in reports],
        "version": [report.version for report in reports],
        "state": [report.state for report in reports],
        "operation": [report.operation for report in reports],
        "queues": [report.queues for report in reports],
        "names": [report.names for report in reports],
        "started_at": [report.started_at for report in reports],
        "updated_at": [report.updated_at for report in reports],
        "finished_at": [report.finished_at or None for report in reports],
        "rows": [report.rows for report in reports],
        "inserted": [report.inserted for report in reports],
        "duplicates": [report.duplicates for report in reports],
        "rejected": [sum(report.rejected.values()) for report in reports],
        "skipped": [report.skipped for report in reports],
        "batches": [report.batches or None for report in reports],
        "spark": [report.spark or None for report in reports],
        "user": [report.user or None for report in reports],
        "error": [report.error or None for report in reports],
    }
