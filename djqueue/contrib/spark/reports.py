"""The reports of writes, as rows."""

from collections.abc import Iterator

from djqueue.storage.bulkwrites import BulkWriteReport, BulkWriteReports
from djqueue.storage.export import Export, ExportFilter, ExportPart, Page


class ReportExport(Export):
    """See `Export`: a thousand reports at most, so they are one part."""

    tables = frozenset({"imports"})

    def __init__(self, imports: BulkWriteReports) -> None:
        self._imports = imports

    def parts(self, wanted: ExportFilter, many: int) -> list[ExportPart]:
        """See `Export`."""
        return [ExportPart("", 0, 0, 0)]

    def pages(self, wanted: ExportFilter, part: ExportPart, size: int) -> Iterator[Page]:
        """See `Export`."""
        after: str | None = None
        while True:
            found, after = self._imports.page(size, after)
            yield _page(found)
            if after is None:
                return


def _page(found: list[BulkWriteReport]) -> Page:
    return {
        "write": [one.write for one in found],
        "app": [one.app for one in found],
        "version": [one.version for one in found],
        "state": [one.state for one in found],
        "operation": [one.operation for one in found],
        "queues": [one.queues for one in found],
        "names": [one.names for one in found],
        "started_at": [one.started_at for one in found],
        "updated_at": [one.updated_at for one in found],
        "finished_at": [one.finished_at or None for one in found],
        "rows": [one.rows for one in found],
        "inserted": [one.inserted for one in found],
        "duplicates": [one.duplicates for one in found],
        "rejected": [sum(one.rejected.values()) for one in found],
        "batches": [one.batches or None for one in found],
        "spark": [one.spark or None for one in found],
        "user": [one.user or None for one in found],
        "error": [one.error or None for one in found],
    }
