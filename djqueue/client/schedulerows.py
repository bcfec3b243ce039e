"""The schedules of the project, for the snapshots of a storage that does not hold them itself."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from djqueue.storage.snapshots import Record, ScheduleRows


class ProjectSchedules(ScheduleRows):
    """The schedules in the tables. Their models are imported at the first use: not every project has them."""

    def pages(self, size: int) -> Iterator[list[Record]]:
        return self._rows.pages(size)

    def is_empty(self) -> bool:
        return self._rows.is_empty()

    def check(self, records: Sequence[Record]) -> None:
        self._rows.check(records)

    def replacing(self, records: Sequence[Record]) -> AbstractContextManager[None]:
        return self._rows.replacing(records)

    @property
    def _rows(self) -> ScheduleRows:
        from djqueue.storage.tables.schedules import TableSchedules

        return TableSchedules()
