"""Compute hourly metrics for each queue and job name, and store them for the dashboard's charts."""

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sql

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.storage import sparktables

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from djqueue.contrib.spark.models import Rollup

HOUR = 3_600_000
KEY = ("hour", "queue", "name")
COUNTS = ("enqueued", "completed", "failed", "cancelled", "retried", "stalled")
TIMES = ("wait", "run")
PARTS = (50, 95, 99)
PERCENTILES = tuple(f"{times}_p{part}" for times in TIMES for part in PARTS)
SCHEMA = ", ".join(
    [
        "hour timestamp, queue string, name string",
        *(f"{name} bigint" for name in COUNTS),
        *(f"{name} bigint" for name in PERCENTILES),
        "reasons map<string,bigint>",
    ]
)
"""The schema of rollups. Percentiles are in milliseconds, and null without attempts."""
WRITTEN = (*COUNTS, *PERCENTILES, "reasons", "written_at")
ENDED = ("completed", "failed", "cancelled")
"""States of ended jobs."""
RAN = ("completed", "failed", "retried")
"""Outcomes of attempts that were not interrupted."""


def rollups(jobs: "DataFrame", attempts: "DataFrame", since: datetime, until: datetime) -> "DataFrame":
    """Return one row for each hour, queue and job name with any activity; see `SCHEMA`.

    A job counts as enqueued in the hour in which it was enqueued, and as completed, failed or cancelled in
    the hour in which it ended. An attempt counts in the hour in which it ended.

    Args:
        jobs: The table of jobs, from `spark.read.format("djqueue")` or an archive.
        attempts: The table of attempts.
        since: The first hour.
        until: The hour after the last one.
    """
    first, last = to_milliseconds(since), to_milliseconds(until)

    def facts(rows: "DataFrame", at: str, **columns: "Column") -> "DataFrame":
        when = sql.unix_millis(at)
        chosen = {
            "hour": sql.timestamp_millis(sql.floor(when / HOUR) * HOUR),
            "queue": sql.col("queue"),
            "name": sql.coalesce("name", sql.lit("")),
            **{name: sql.lit(0).cast("bigint") for name in COUNTS},
            **{name: sql.lit(None).cast("bigint") for name in TIMES},
            "reason": sql.lit(None).cast("string"),
            **columns,
        }
        within = rows.where((when >= first) & (when < last))
        return within.select(*(column.alias(name) for name, column in chosen.items()))

    def is_(column: str, word: str) -> "Column":
        return (sql.col(column) == word).cast("bigint")

    reason = sql.when(sql.col("state") == "failed", sql.coalesce("reason", sql.lit("")))
    went = sql.col("outcome").isin(*RAN)
    happened = (
        facts(jobs, "enqueued_at", enqueued=sql.lit(1).cast("bigint"))
        .unionByName(
            facts(
                jobs.where(sql.col("state").isin(*ENDED)),
                "finished_at",
                reason=reason,
                **{state: is_("state", state) for state in ENDED},
            )
        )
        .unionByName(
            facts(
                attempts,
                "finished_at",
                retried=is_("outcome", "retried"),
                stalled=is_("outcome", "stalled"),
                wait=sql.round(sql.col("wait_seconds") * 1_000).cast("bigint"),
                run=sql.when(went, sql.round(sql.col("run_seconds") * 1_000).cast("bigint")),
            )
        )
    )
    parts = sql.array(*(sql.lit(part / 100) for part in PARTS))
    sums = happened.groupBy(*KEY).agg(
        *(sql.sum(name).alias(name) for name in COUNTS),
        *(sql.percentile(name, parts).alias(name) for name in TIMES),
    )
    by_reason = (
        happened.where("reason is not null").groupBy(*KEY, "reason").agg(sql.count("*").alias("count"))
    )
    reasons = by_reason.groupBy(*KEY).agg(
        sql.map_from_entries(sql.sort_array(sql.collect_list(sql.struct("reason", "count")))).alias("reasons")
    )
    none = sql.create_map().cast("map<string,bigint>")
    return sums.join(reasons, list(KEY), "left").select(
        *KEY,
        *COUNTS,
        *(
            sql.round(sql.col(times)[at]).cast("bigint").alias(f"{times}_p{part}")
            for times in TIMES
            for at, part in enumerate(PARTS)
        ),
        sql.coalesce("reasons", none).alias("reasons"),
    )


def store(rollups: "DataFrame", alias: str) -> tuple[int, int]:
    """Write rollups to a database of the project. Returns the numbers of hours and of rows.

    Each hour is one transaction. It replaces the rows of the same hour, queue and job name, and keeps the
    others, so an hour does not lose the metrics of jobs that no longer exist.
    """
    from django.db import connections, transaction

    if not sparktables.are_installed():
        raise OptionError(f"rollups: the project's database has no table for them: {sparktables.REMEDY}")
    from djqueue.contrib.spark.models import Rollup

    named = connections[alias].features.supports_update_conflicts_with_target
    hours = count = 0
    for _, rows in groupby(_rows(rollups), key=lambda row: row.hour):
        rollups_of_hour = list(rows)
        with transaction.atomic(using=alias):
            Rollup.objects.using(alias).bulk_create(
                rollups_of_hour,
                batch_size=500,
                update_conflicts=True,
                update_fields=WRITTEN,
                unique_fields=KEY if named else None,
            )
        hours += 1
        count += len(rollups_of_hour)
    return hours, count


def _rows(rollups: "DataFrame") -> "Iterator[Rollup]":
    from djqueue.contrib.spark.models import Rollup

    now = to_datetime(SYSTEM_CLOCK.now())
    # Read times as numbers: timestamps would be in the driver's time zone.
    rows = rollups.withColumn("hour", sql.unix_millis("hour")).orderBy(*KEY)
    for row in rows.toLocalIterator():
        values: dict[str, Any] = row.asDict()
        yield Rollup(**{**values, "hour": to_datetime(values["hour"]), "written_at": now})
