"""The reports of bulk writes, rows that every process reads and writes."""

from typing import Any

from django.db.models import Q

from djqueue.core.clock import Clock
from djqueue.core.units import to_datetime
from djqueue.storage import sparktables
from djqueue.storage.bulkwrites import (
    MAX_REPORT_AGE,
    MAX_REPORTS,
    BulkWriteReport,
    BulkWriteReportPage,
    BulkWriteReports,
)
from djqueue.storage.tables import dialects as tables
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.rows import chunked


class SqlBulkWriteReports(BulkWriteReports):
    """Bulk write reports in the tables of `djqueue.contrib.spark`.

    Args:
        alias: The database.
        clock: The source of times.
    """

    def __init__(self, alias: str, clock: Clock) -> None:
        super().__init__(clock)
        self._alias = alias

    def get(self, write: str) -> BulkWriteReport | None:
        with named(self._alias):
            found = self._rows().filter(write=write).values_list("report", flat=True).first()
        return None if found is None else BulkWriteReport.from_json(found)

    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        with named(self._alias):
            rows = self._rows()
            if after is not None:
                last = rows.filter(write=after).values_list("updated_at", "id").first()
                if last is None:
                    return BulkWriteReportPage([], None)
                rows = rows.filter(Q(updated_at__lt=last[0]) | Q(updated_at=last[0], id__lt=last[1]))
            found = list(rows.order_by("-updated_at", "-id").values_list("report", flat=True)[: limit + 1])
        reports = [BulkWriteReport.from_json(report) for report in found[:limit]]
        return BulkWriteReportPage(reports, reports[-1].write if len(found) > limit else None)

    def _swap(self, report: BulkWriteReport) -> bool:
        values = {
            "revision": report.revision + 1,
            "updated_at": to_datetime(report.updated_at),
            "report": report._replace(revision=report.revision + 1).as_json(),
        }
        with named(self._alias):
            if report.revision:
                stored = self._rows().filter(write=report.write, revision=report.revision)
                return bool(stored.update(**values))
            with tables.dialect_for(self._alias).transaction():
                is_new: bool = self._rows().get_or_create(write=report.write, defaults=values)[1]
                self._forget_old(report.updated_at)
        return is_new

    def _forget_old(self, now: int) -> None:
        self._rows().filter(updated_at__lt=to_datetime(now - MAX_REPORT_AGE)).delete()
        surplus = self._rows().order_by("-updated_at", "-id").values_list("pk", flat=True)
        for some in chunked(list(surplus[MAX_REPORTS:])):
            self._rows().filter(pk__in=some).delete()

    def _rows(self) -> Any:
        return sparktables.spark_model("BulkWrite").objects.using(self._alias)
