"""The schedules of a snapshot: rows of `CronJob`, as plain records."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import DataError, IntegrityError, connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import DurationField

from djqueue import models
from djqueue.core.errors import OptionError, SnapshotTargetError
from djqueue.core.messages import in_one_line
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.fields import MillisecondsField
from djqueue.storage.snapshots import Record, ScheduleRows

FIELDS = [field for field in models.CronJob._meta.concrete_fields if not field.primary_key]
NAMES = [field.name for field in FIELDS]
MICROSECOND = timedelta(microseconds=1)
INVALID = (TypeError, ValueError, OverflowError, AttributeError, ValidationError)
"""Errors of values that a column cannot hold."""


class TableSchedules(ScheduleRows):
    """The schedules in the database to which the project's routers send them."""

    @staticmethod
    def _alias() -> str:
        return router.db_for_write(models.CronJob)

    def pages(self, size: int) -> Iterator[list[Record]]:
        alias = self._alias()
        if self._exists(alias):
            yield from pages(connections[alias], alias, size)

    def is_empty(self) -> bool:
        alias = self._alias()
        return not self._exists(alias) or is_empty(alias)

    def check(self, records: Sequence[Record]) -> None:
        alias = self._alias()
        if records and not self._exists(alias):
            raise SnapshotTargetError(
                f"the snapshot has {len(records)} schedules, but database {alias!r} has no table for them: "
                "run manage.py migrate first"
            )
        if records:
            # A restore that has deleted jobs must not fail at its schedules.
            with transaction.atomic(using=alias):
                replace(alias, records)
                transaction.set_rollback(True, using=alias)

    @contextmanager
    def replacing(self, records: Sequence[Record]) -> Iterator[None]:
        alias = self._alias()
        if not self._exists(alias):
            self.check(records)
            yield
            return
        with transaction.atomic(using=alias):
            replace(alias, records)
            yield

    @staticmethod
    def _exists(alias: str) -> bool:
        return models.CronJob._meta.db_table in connections[alias].introspection.table_names()


def pages(connection: BaseDatabaseWrapper, alias: str, size: int) -> Iterator[list[Record]]:
    """Yield all schedules in pages, read on this connection."""
    last = 0
    while True:
        found = models.CronJob.objects.using(alias).filter(id__gt=last).order_by("id")[:size]
        compiler = found.values_list("id", *NAMES).query.get_compiler(connection=connection)
        rows = [tuple(row) for row in compiler.results_iter()]
        if rows:
            yield [_record(row[1:]) for row in rows]
        if len(rows) < size:
            return
        last = rows[-1][0]


def is_empty(alias: str) -> bool:
    """Return whether there is no schedule."""
    return not models.CronJob.objects.using(alias).exists()


def replace(alias: str, records: Sequence[Record]) -> None:
    """Replace all schedules. The caller has opened a transaction.

    Raises OptionError if the table cannot hold a record.
    """
    rows = models.CronJob.objects.using(alias)
    rows.all().delete()
    try:
        rows.bulk_create([_row(record) for record in records], batch_size=200)
    except (DataError, IntegrityError, *INVALID) as error:
        raise OptionError(
            f"snapshot: the schedules are invalid: expected the columns of {rows.model.__name__} "
            f"({type(error).__name__}: {in_one_line(error)})"
        ) from error


def _record(values: Sequence[Any]) -> dict[str, Any]:
    return {field.name: _plain(field, value) for field, value in zip(FIELDS, values, strict=True)}


def _plain(field: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(field, MillisecondsField):
        return to_milliseconds(value)
    return value // MICROSECOND if isinstance(field, DurationField) else value


def _row(record: Record) -> models.CronJob:
    values = {}
    for field in FIELDS:
        if field.name in record:
            value = record[field.name]
            if value is not None and isinstance(field, MillisecondsField):
                value = to_datetime(value)
            elif value is not None and isinstance(field, DurationField):
                value = timedelta(microseconds=value)
            values[field.name] = value
    return models.CronJob(**values)
