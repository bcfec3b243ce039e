"""Rollups: what happened in each hour, of each queue and job, as one row."""

from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from djqueue.core.durations import to_milliseconds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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
"""Of what `rollups` returns: percentiles are milliseconds, null where there was nothing to measure."""
ENDED = ("completed", "failed", "cancelled")
"""States in which jobs end."""
RAN = ("completed", "failed", "retried")
"""Outcomes of runs that went on to their end."""


def rollups(jobs: "DataFrame", attempts: "DataFrame", since: datetime, until: datetime) -> "DataFrame":
    """One row for each hour, queue and job in which something happened: see `SCHEMA`.

    jobs, attempts: the tables of that name, as `spark.read.format("djqueue")` or an archive has them.
    since, until: whole hours; what happened from the first to before the second counts.

    A job counts as enqueued in the hour in which it came, and as completed, failed or cancelled in that in
    which it ended, for the reason that it has; a run counts in the hour in which it ended.
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
    by_reason = happened.where("reason is not null").groupBy(*KEY, "reason").agg(sql.count("*").alias("many"))
    reasons = by_reason.groupBy(*KEY).agg(
        sql.map_from_entries(sql.sort_array(sql.collect_list(sql.struct("reason", "many")))).alias("reasons")
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
