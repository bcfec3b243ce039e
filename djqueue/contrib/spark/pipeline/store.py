"""Rollups into the table that the dashboard's charts are made from."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.durations import to_datetime
from djqueue.core.errors import OptionError
from djqueue.storage import sparktables

from .rollups import COUNTS, KEY, PERCENTILES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from djqueue.contrib.spark.models import Rollup

WRITTEN = (*COUNTS, *PERCENTILES, "reasons", "written_at")


def store(rollups: "DataFrame", alias: str) -> tuple[int, int]:
    """Write rollups into a database of the project; returns the numbers of hours and of rows.

    Each hour is one transaction. A row of the same hour, queue and job is replaced; others of the hour stay,
    so that an hour whose jobs the storage has forgotten since keeps what is known of it.
    """
    from django.db import connections, transaction

    if not sparktables.are_installed():
        raise OptionError(f"rollups: the project lacks their table: {sparktables.REMEDY}")
    from djqueue.contrib.spark.models import Rollup

    named = connections[alias].features.supports_update_conflicts_with_target
    hours = count = 0
    for _, rows in groupby(_rows(rollups), key=lambda row: row.hour):
        some = list(rows)
        with transaction.atomic(using=alias):
            Rollup.objects.using(alias).bulk_create(
                some,
                batch_size=500,
                update_conflicts=True,
                update_fields=WRITTEN,
                unique_fields=KEY if named else None,
            )
        hours += 1
        count += len(some)
    return hours, count


def _rows(rollups: "DataFrame") -> "Iterator[Rollup]":
    from djqueue.contrib.spark.models import Rollup

    now = to_datetime(SYSTEM_CLOCK.now())
    # As numbers: a timestamp would come in the driver's own time zone.
    rows = rollups.withColumn("hour", sql.unix_millis("hour")).orderBy(*KEY)
    for row in rows.toLocalIterator():
        values: dict[str, Any] = row.asDict()
        yield Rollup(**{**values, "hour": to_datetime(values["hour"]), "written_at": now})
