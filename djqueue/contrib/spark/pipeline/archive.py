"""Jobs that have ended, as Parquet by queue and day: `PATH/jobs` and, of the same jobs, `PATH/attempts`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql

from djqueue.contrib.spark.tables import ATTEMPTS, JOBS, Table, ddl
from djqueue.core.durations import to_milliseconds
from djqueue.core.errors import StorageError
from djqueue.core.states import TERMINAL

from .days import midnight

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS = ("queue", "date")
KEYS = {"jobs": ("queue", "id", "finished_at"), "attempts": ("queue", "id", "number", "finished_at")}
"""What makes a row another one: an id may end more than once, with a retry between."""
ENDED = tuple(sorted(state.value for state in TERMINAL))
DAY = 86_400_000
EARLIEST = date(1970, 1, 1)


class ArchiveError(StorageError):
    """What is in the archive is not what was to be written."""


@dataclass(frozen=True)
class Archived:
    """What became of an archive's run."""

    jobs: int
    """That were in the storage, and are in the archive now."""
    attempts: int
    partitions: int
    """Queues and days that they are of."""


def archived(spark: "SparkSession", path: str, table: Table = JOBS) -> "DataFrame":
    """A table of an archive, with the columns of `spark.read.format("djqueue")`, and `date`."""
    schema = f"{ddl(table.chosen(payload=True))}, `date` date"
    return spark.read.schema(schema).parquet(f"{path.rstrip('/')}/{table.name}")


def ended(jobs: "DataFrame", since: date, until: date, states: Sequence[str] = ENDED) -> "DataFrame":
    """The jobs that ended from one day to before another, with `date`, the day of their end in UTC."""
    at = sql.unix_millis("finished_at")
    first, last = (to_milliseconds(midnight(day)) for day in (since, until))
    chosen = jobs.where(sql.col("state").isin(*states) & (at >= first) & (at < last))
    return chosen.withColumn("date", _date(at))


def archive(spark: "SparkSession", path: str, jobs: "DataFrame", attempts: "DataFrame") -> Archived:
    """Write ended jobs, with their runs, and check that they are there.

    jobs: with `date`, and kept: what is read twice must not change. See `ended`.
    attempts: of these and of any other jobs.

    Files of the same queues and days are replaced. Where an archive has rows that are not to be written
    again, as their jobs are no longer in the storage, what is new comes beside them instead.

    Raises ArchiveError if the archive lacks some of the jobs afterwards.
    """
    runs = attempts.join(jobs.select("queue", "id", "date"), ["queue", "id"]).persist()
    try:
        # Runs first: a job that is in the archive has its runs there.
        _write(spark, path, ATTEMPTS, runs)
        _write(spark, path, JOBS, jobs)
        wanted, there = _many(jobs), _many(written(spark, path, jobs))
        if wanted != there:
            lacking = [name for name, many in wanted.items() if there.get(name, 0) != many]
            raise ArchiveError(
                f"{path}: {', '.join(lacking)}: the archive is incomplete, so no job was removed: run the "
                "command again"
            )
        return Archived(sum(wanted.values()), runs.count(), len(wanted))
    finally:
        runs.unpersist()


def written(spark: "SparkSession", path: str, jobs: "DataFrame") -> "DataFrame":
    """Of these jobs those that an archive has, as read from its files."""
    there = archived(spark, path).select(*KEYS["jobs"], "date")
    return there.join(jobs.select(*KEYS["jobs"]), list(KEYS["jobs"]), "left_semi").distinct()


def _write(spark: "SparkSession", path: str, table: Table, rows: "DataFrame") -> None:
    target = f"{path.rstrip('/')}/{table.name}"
    columns = [*(column.name for column in table.chosen(payload=True)), "date"]
    rows = rows.select(*(f"`{name}`" for name in columns))
    kept = _kept(spark, path, table, rows)

    def save(some: "DataFrame", mode: str) -> None:
        writer = some.repartition(*PARTITIONS).write.mode(mode).partitionBy(*PARTITIONS)
        writer.option("partitionOverwriteMode", "dynamic").parquet(target)

    if not kept:
        save(rows, "overwrite")
        return
    is_kept = _among(kept)
    save(rows.where(~is_kept), "overwrite")
    key = list(KEYS[table.name])
    new = rows.where(is_kept).join(archived(spark, path, table).select(*key), key, "left_anti")
    save(new, "append")


def _kept(spark: "SparkSession", path: str, table: Table, rows: "DataFrame") -> list[tuple[str, date]]:
    """The queues and days, of those to be written, of which the archive has what would be lost."""
    try:
        there = archived(spark, path, table)
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []
    touched = rows.select(*PARTITIONS).distinct()
    key = list(KEYS[table.name])
    more = there.join(touched, list(PARTITIONS), "left_semi").join(rows.select(*key), key, "left_anti")
    return [(row.queue, row.date) for row in more.select(*PARTITIONS).distinct().collect()]


def _among(partitions: Sequence[tuple[str, date]]) -> "Column":
    found = sql.lit(False)
    for queue, day in partitions:
        found = found | ((sql.col("queue") == queue) & (sql.col("date") == sql.lit(day)))
    return found


def _many(jobs: "DataFrame") -> dict[str, int]:
    rows = jobs.groupBy(*PARTITIONS).count().collect()
    return {f"{row.queue} of {row.date}": row["count"] for row in rows}


def _date(at: "Column") -> "Column":
    return sql.date_from_unix_date(sql.floor(at / DAY).cast("int"))


def rows_of(df: "DataFrame", size: int) -> Iterator[list[tuple[str, str, int]]]:
    """Queue, id and end (UTC milliseconds) of jobs: of one queue at a time, at most so many at once."""
    some: list[tuple[str, str, int]] = []
    chosen = df.select("queue", "id", sql.unix_millis("finished_at").alias("at")).orderBy("queue", "id")
    for row in chosen.toLocalIterator():
        if some and (some[0][0] != row.queue or len(some) == size):
            yield some
            some = []
        some.append((row.queue, row.id, row.at))
    if some:
        yield some
