"""Store the reports of bulk writes in the tables, where every process reads and writes them directly."""

from typing import Any

from django.db import transaction
from django.db.models import Q

from djqueue.core.clock import Clock
from djqueue.core.durations import to_datetime
from djqueue.storage import sparktables
from djqueue.storage.bulkwrites import (
    MAX_REPORT_AGE,
    MAX_REPORTS,
    BulkWriteReport,
    BulkWriteReportPage,
    BulkWriteReports,
)
from djqueue.storage.tables.dberrors import named
from djqueue.storage.tables.rows import chunked


class DatabaseBulkWriteReports(BulkWriteReports):
    """Bulk write reports in the tables.

    Args:
        alias: The database's alias in DATABASES.
    """

    def __init__(self, alias: str, clock: Clock) -> None:
        super().__init__(clock)
        self._alias = alias

    def get(self, write: str) -> BulkWriteReport | None:
        """Return the report of a write, or None if it does not exist."""
        with named(self._alias):
            found = self._rows().filter(write=write).values_list("report", flat=True).first()
        return None if found is None else BulkWriteReport.from_json(found)

    def page(self, limit: int, after: str | None = None) -> BulkWriteReportPage:
        """Return a page of reports, the most recently changed first."""
        with named(self._alias):
            rows = self._rows()
            if after is not None:
                there = self._rows().filter(write=after).values_list("updated_at", "id").first()
                if there is None:
                    return BulkWriteReportPage([], None)
                rows = rows.filter(Q(updated_at__lt=there[0]) | Q(updated_at=there[0], id__lt=there[1]))
            found = list(rows.order_by("-updated_at", "-id").values_list("report", flat=True)[: limit + 1])
        reports = [BulkWriteReport.from_json(report) for report in found[:limit]]
        return BulkWriteReportPage(reports, reports[-1].write if len(found) > limit else None)

    def _swap(self, report: BulkWriteReport) -> bool:
        following = report._replace(revision=report.revision + 1)
        said = {
            "revision": following.revision,
            "updated_at": to_datetime(report.updated_at),
            "report": following.as_json(),
        }
        with named(self._alias):
            if report.revision:
                there = self._rows().filter(write=report.write, revision=report.revision)
                return bool(there.update(**said))
            with transaction.atomic(using=self._alias):
                is_new: bool = self._rows().get_or_create(write=report.write, defaults=said)[1]
                self._forget_old(report.updated_at)
        return is_new

    def _forget_old(self, now: int) -> None:
        self._rows().filter(updated_at__lt=to_datetime(now - MAX_REPORT_AGE)).delete()
        surplus = self._rows().order_by("-updated_at", "-id").values_list("pk", flat=True)
        for some in chunked(list(surplus[MAX_REPORTS:])):
            self._rows().filter(pk__in=some).delete()

    def _rows(self) -> Any:
        return sparktables.spark_model("BulkWrite").objects.using(self._alias)
