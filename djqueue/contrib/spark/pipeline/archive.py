"""Archive ended jobs and their attempts as Parquet, by queue and day, and purge archived jobs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql

from djqueue.contrib.spark.options import BINARY
from djqueue.contrib.spark.readable import as_json
from djqueue.contrib.spark.tables import ATTEMPTS, JOBS, PAYLOAD, Table, ddl
from djqueue.contrib.spark.tables import Column as TableColumn
from djqueue.core.errors import StorageError
from djqueue.core.states import TERMINAL
from djqueue.core.units import to_milliseconds
from djqueue.storage.base import Storage

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql import Column, DataFrame, SparkSession

PARTITIONS = ("queue", "date")
KEYS = {"jobs": ("queue", "id", "finished_at"), "attempts": ("queue", "id", "number", "finished_at")}
"""Columns that identify a row. A job that was retried may end more than once."""
ENDED = tuple(sorted(state.value for state in TERMINAL))
DAY = 86_400_000
EARLIEST = date(1970, 1, 1)
PURGE_BATCH = 500
PAYLOAD_JSON = "payload_json"
"""Optional column of archived jobs; see `readable`."""


class ArchiveError(StorageError):
    """The archive does not contain all of the jobs."""


@dataclass(frozen=True)
class Archived:
    """Numbers of jobs and attempts archived."""

    jobs: int
    """Jobs that were in the storage and are now in the archive."""
    attempts: int
    partitions: int
    """Combinations of queue and day."""


def archived(spark: "SparkSession", path: str, table: Table = JOBS) -> "DataFrame":
    """Return a table of an archive, with the columns of `spark.read.format("djqueue")` and `date`."""
    schema = f"{ddl(encoded_columns(table))}, `date` date"
    return spark.read.schema(schema).parquet(f"{path.rstrip('/')}/{table.name}")


def encoded_columns(table: Table) -> list[TableColumn]:
    """Return a table's columns, with payloads as the storage has them: `option("values", "binary")`."""
    return [
        column._replace(type=BINARY) if column.name == PAYLOAD else column
        for column in table.chosen(payload=True)
    ]


def ended(jobs: "DataFrame", since: date, until: date, states: Sequence[str] = ENDED) -> "DataFrame":
    """Return the jobs that ended in a range of days, with `date`, the day on which they ended in UTC."""
    at = sql.unix_millis("finished_at")
    first, last = (to_milliseconds(start_of_day(day)) for day in (since, until))
    chosen = jobs.where(sql.col("state").isin(*states) & (at >= first) & (at < last))
    return chosen.withColumn("date", _date(at))


def readable(jobs: "DataFrame") -> "DataFrame":
    """Return jobs with `payload_json`, their payloads as JSON, for people and other tools.

    Values that JSON lacks become text, and bytes become Base64. It is null if a payload cannot be decoded.
    """
    from pyspark.sql.types import StringType, StructType

    def convert(batches: "Iterable[RecordBatch]") -> "Iterator[RecordBatch]":
        import pyarrow

        for batch in batches:
            payloads = batch.column("payload").to_pylist()
            kinds = batch.column("content_type").to_pylist()
            found = [as_json(*pair) for pair in zip(payloads, kinds, strict=True)]
            yield batch.append_column(PAYLOAD_JSON, pyarrow.array(found, pyarrow.string()))

    schema = StructType([*jobs.schema.fields]).add(PAYLOAD_JSON, StringType())
    return jobs.mapInArrow(convert, schema)


def archive(spark: "SparkSession", path: str, jobs: "DataFrame", attempts: "DataFrame") -> Archived:
    """Write ended jobs with their attempts, and verify that they were written.

    Files of the same queues and days are replaced. If an archive has rows whose jobs are no longer in the
    storage, the new rows are added next to them instead.

    Args:
        spark: The session.
        path: The archive's directory.
        jobs: Jobs with `date`, from `ended`. Persist it, because it is read twice and must not change.
        attempts: Attempts of these and any other jobs.

    Raises:
        ArchiveError: Some jobs are missing from the archive.
    """
    runs = attempts.join(jobs.select("queue", "id", "date"), ["queue", "id"]).persist()
    try:
        # Write attempts first, so that an archived job always has its attempts.
        _write(spark, path, ATTEMPTS, runs)
        _write(spark, path, JOBS, jobs)
        wanted, stored = _counts(jobs), _counts(written(spark, path, jobs))
        if wanted != stored:
            missing = [name for name, count in wanted.items() if stored.get(name, 0) != count]
            raise ArchiveError(
                f"{path}: {', '.join(missing)}: the archive is incomplete, so no job was removed: run the "
                "command again"
            )
        return Archived(sum(wanted.values()), runs.count(), len(wanted))
    finally:
        runs.unpersist()


def written(spark: "SparkSession", path: str, jobs: "DataFrame") -> "DataFrame":
    """Return those of the jobs that an archive has, read from its files."""
    stored = archived(spark, path).select(*KEYS["jobs"], "date")
    return stored.join(jobs.select(*KEYS["jobs"]), list(KEYS["jobs"]), "left_semi").distinct()


def purge(storage: Storage, jobs: "DataFrame") -> Counter[str]:
    """Remove archived jobs from the storage. Returns how many were removed, changed or gone.

    A job that has changed since it was archived, for example because it was retried, is not removed.

    Args:
        storage: The storage of the jobs.
        jobs: Jobs by queue, id and finished_at, read back from the archive with `written`.
    """
    done: Counter[str] = Counter()
    for group in _groups_of(jobs, PURGE_BATCH):
        queue = group[0][0]
        records = storage.reads.jobs(queue, [id for _, id, _ in group])
        unchanged = []
        last = 0
        for (_, id, at), record in zip(group, records, strict=True):
            if record is None:
                done["gone"] += 1
            elif record.state not in TERMINAL or record.finished_at != at:
                done["changed"] += 1
            else:
                unchanged.append(id)
                last = max(last, at)
        # A job retried since it was read has not ended, or ended later.
        removed = storage.jobs.remove(queue, unchanged, ended_before=last + 1) if unchanged else []
        done["removed"] += sum(removed)
        done["changed"] += len(removed) - sum(removed)
    return done


def start_of_day(day: date) -> datetime:
    """Return midnight UTC of a day."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _write(spark: "SparkSession", path: str, table: Table, rows: "DataFrame") -> None:
    target = f"{path.rstrip('/')}/{table.name}"
    columns = [*(column.name for column in table.chosen(payload=True)), "date"]
    columns += [PAYLOAD_JSON] if PAYLOAD_JSON in rows.columns else []
    rows = rows.select(*(f"`{name}`" for name in columns))
    kept = _kept(spark, path, table, rows)

    def save(some: "DataFrame", mode: str) -> None:
        writer = some.repartition(*PARTITIONS).write.mode(mode).partitionBy(*PARTITIONS)
        writer.option("partitionOverwriteMode", "dynamic").parquet(target)

    if not kept:
        save(rows, "overwrite")
        return
    save(_among(spark, rows, kept, "left_anti"), "overwrite")
    key = list(KEYS[table.name])
    added = _among(spark, rows, kept, "left_semi")
    save(added.join(archived(spark, path, table).select(*key), key, "left_anti"), "append")


def _kept(spark: "SparkSession", path: str, table: Table, rows: "DataFrame") -> list[tuple[str, date]]:
    """Return the queues and days whose archived rows replacing the files would lose."""
    touched = rows.select(*PARTITIONS).distinct()
    key = list(KEYS[table.name])
    try:
        stored = archived(spark, path, table).join(touched, list(PARTITIONS), "left_semi")
        more = stored.join(rows.select(*key), key, "left_anti").select(*PARTITIONS).distinct()
        partitions = more.collect()  # Spark Connect looks for the path only now.
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return []
    return [(row.queue, row.date) for row in partitions]


def _among(
    spark: "SparkSession", rows: "DataFrame", partitions: Sequence[tuple[str, date]], how: str
) -> "DataFrame":
    """Return the rows in these queues and days ("left_semi"), or all others ("left_anti").

    A join, because Spark fails on a condition that names thousands of them.
    """
    chosen = spark.createDataFrame([*partitions], "queue string, date date")
    return rows.join(sql.broadcast(chosen), list(PARTITIONS), how)


def _counts(jobs: "DataFrame") -> dict[str, int]:
    rows = jobs.groupBy(*PARTITIONS).count().collect()
    return {f"{row.queue} of {row.date}": row["count"] for row in rows}


def _date(at: "Column") -> "Column":
    return sql.date_from_unix_date(sql.floor(at / DAY).cast("int"))


def _groups_of(df: "DataFrame", size: int) -> Iterator[list[tuple[str, str, int]]]:
    """Yield queue, id and end (UTC milliseconds) of jobs, at most `size` of one queue at a time."""
    group: list[tuple[str, str, int]] = []
    chosen = df.select("queue", "id", sql.unix_millis("finished_at").alias("at")).orderBy("queue", "id")
    for row in chosen.toLocalIterator():
        if group and (group[0][0] != row.queue or len(group) == size):
            yield group
            group = []
        group.append((row.queue, row.id, row.at))
    if group:
        yield group
