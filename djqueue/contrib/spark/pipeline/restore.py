"""Restore archived jobs to the tables as history, which no worker runs."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as sql

from djqueue.contrib.spark.tables import ATTEMPTS, JOBS, Table
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.headers import Headers
from djqueue.core.options import JobOptions
from djqueue.core.units import to_datetime

from .archive import DAY, archived

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from djqueue.models import Job, JobAttempt

BATCH = 500
STATES = ("completed", "cancelled")
"""Failed jobs are excluded: they are dead letters, which could be retried."""

Row = Mapping[str, Any]


class RestoreReport(NamedTuple):
    """Numbers of restored and skipped jobs."""

    inserted: int
    skipped: int
    """Jobs that were skipped, because their ids are in the tables."""


def restore(spark: "SparkSession", path: str, jobs: "DataFrame", alias: str, keep: int) -> RestoreReport:
    """Insert completed and cancelled jobs of an archive, with their attempts, into a database's tables.

    Args:
        spark: The session.
        path: The archive's directory.
        jobs: Jobs of this archive, each once, from `replay.selected`.
        alias: The database.
        keep: Days until the jobs expire.
    """
    from django.db import transaction

    from djqueue.models import Job, JobAttempt
    from djqueue.storage.tables import leaderlease

    runs = archived(spark, path, ATTEMPTS).where("outcome <> 'completed'")
    of_job = runs.groupBy("queue", "id").agg(sql.collect_list(sql.struct(*_columns(ATTEMPTS))).alias("runs"))
    rows = (
        jobs.where(sql.col("state").isin(*STATES))
        .select(*_columns(JOBS))
        .join(of_job, ["queue", "id"], "left")
    )
    until = SYSTEM_CLOCK.now() + keep * DAY
    inserted = skipped = 0
    for group in _parts(rows, BATCH):
        with transaction.atomic(using=alias):
            taken = _taken(alias, group)
            new = [row for row in group if (row["queue"], row["id"]) not in taken]
            if new:
                leaderlease.mark_changed_rows(alias)
            Job.objects.using(alias).bulk_create([_job(row, until) for row in new])
            ended = [_attempt(run.asDict()) for row in new for run in row["runs"] or ()]
            JobAttempt.objects.using(alias).bulk_create(ended, batch_size=BATCH)
        inserted += len(new)
        skipped += len(group) - len(new)
    return RestoreReport(inserted, skipped)


def _columns(table: Table) -> "list[Column]":
    """Return a table's columns, with times as UTC milliseconds: timestamps would be in the driver's zone."""
    return [
        (sql.unix_millis(f"`{name}`") if kind == "timestamp" else sql.col(f"`{name}`")).alias(name)
        for name, kind, *_ in table.chosen(payload=True)
    ]


def _parts(rows: "DataFrame", size: int) -> Iterator[list[Row]]:
    iterator = iter(rows.toLocalIterator())
    while part := [row.asDict() for row in islice(iterator, size)]:
        yield part


def _taken(alias: str, rows: list[Row]) -> set[tuple[str, str]]:
    from djqueue.models import Job

    taken: set[tuple[str, str]] = set()
    for queue in {row["queue"] for row in rows}:
        ids = [row["id"] for row in rows if row["queue"] == queue]
        existing = Job.objects.using(alias).filter(queue=queue, job_id__in=ids)
        taken.update((queue, id) for id in existing.values_list("job_id", flat=True))
    return taken


def _job(row: Row, until: int) -> "Job":
    from djqueue.models import Job
    from djqueue.storage.tables.rows import pack_options

    # Record the unique key without holding it, so that other jobs can use it.
    options = JobOptions(
        priority=row["priority"] or 0,
        unique_key=row["unique_key"],
        concurrency_key=row["concurrency_key"],
        subject=row["subject"],
        tags=tuple(row["tags"] or ()),
        headers=Headers(row["headers"] or ""),
        content_type=row["content_type"],
    )
    same = ("queue", "name", "state", "concurrency_key", "subject", "content_type")
    counts = {name: row[name] or 0 for name in ("priority", "attempts", "failures", "stalls")}
    words = {name: row[name] or "" for name in ("worker", "reason", "error_type", "error_message")}
    return Job(
        **{name: row[name] for name in same},
        **counts,
        **words,
        job_id=row["id"],
        payload=row["payload"] or b"",
        options=pack_options(options),
        created_at=to_datetime(row["enqueued_at"]),
        run_at=to_datetime(row["run_at"]),
        started_at=_time(row["started_at"]),
        finished_at=_time(row["finished_at"]),
        expires_at=to_datetime(until),
    )


def _attempt(row: Row) -> "JobAttempt":
    from djqueue.models import JobAttempt

    return JobAttempt(
        queue=row["queue"],
        job_id=row["id"],
        attempt=row["number"],
        worker=row["worker"] or "",
        started_at=to_datetime(row["started_at"]),
        finished_at=to_datetime(row["finished_at"]),
        outcome=row["outcome"],
        error_type=row["error_type"] or "",
        error_message=row["error_message"] or "",
    )


def _time(at: int | None) -> Any:
    return None if at is None else to_datetime(at)
