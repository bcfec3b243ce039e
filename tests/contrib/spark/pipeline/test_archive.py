"""Archiving ended jobs as Parquet, and purging them."""

from datetime import date

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql

from djqueue.contrib.spark.pipeline import archive as archive_module
from djqueue.contrib.spark.pipeline.archive import (
    ENDED,
    ArchiveError,
    _among,
    archive,
    archived,
    ended,
    purge,
    written,
)
from djqueue.contrib.spark.tables import ATTEMPTS, JOBS
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.testing.factories import a_failed_job, claim, completing, enqueue
from tests.contrib.spark.pipeline.frames import at, job, jobs_of, run, runs_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

FIRST, SECOND, THIRD = date(2026, 6, 1), date(2026, 6, 2), date(2026, 6, 3)


class Missing(AnalysisException):
    def getCondition(self):
        return "PATH_NOT_FOUND"


class LazyFrame:
    """A DataFrame of Spark Connect, which looks for its files when its rows are needed."""

    def __getattr__(self, name):
        return lambda *args: self

    def collect(self):
        raise Missing("no such path")


def test_archive_that_is_found_missing_only_when_read_counts_as_new(monkeypatch):
    monkeypatch.setattr(archive_module, "archived", lambda *args: LazyFrame())

    assert archive_module._kept(None, "/new", JOBS, LazyFrame()) == []


def put(spark, path, jobs, runs=(), since=FIRST, until=THIRD, states=ENDED):
    chosen = ended(jobs_of(spark, *jobs), since, until, states).persist()
    try:
        return archive(spark, path, chosen, runs_of(spark, *runs))
    finally:
        chosen.unpersist()


def found(spark, path, *columns):
    return sorted(tuple(row) for row in archived(spark, path).select(*columns).collect())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "archive")


def test_ended_jobs_are_archived_by_queue_and_day_with_their_attempts(spark, path, tmp_path):
    jobs = [
        job("a", payload=b"\xa1a", tags=["x"], concurrency_key="g"),
        job("b", "failed", queue="1", finished_at=at(12 * 60), reason="timeout"),
        job("late", finished_at=at(36 * 60)),
        job("waits", "waiting", finished_at=None),
    ]
    done = put(spark, path, jobs, [run("a", "retried"), run("a", number=2), run("late"), run("gone")])

    assert (done.jobs, done.attempts, done.partitions) == (2, 2, 2)
    assert {str(file.relative_to(path)) for file in (tmp_path / "archive").glob("jobs/*/*")} == {
        "jobs/queue=mail/date=2026-06-01",
        "jobs/queue=1/date=2026-06-02",
    }
    assert found(
        spark, path, "queue", "date", "id", "state", "reason", "payload", "tags", "concurrency_key"
    ) == [
        ("1", SECOND, "b", "failed", "timeout", None, None, None),
        ("mail", FIRST, "a", "completed", None, b"\xa1a", ["x"], "g"),
    ]
    runs = archived(spark, path, ATTEMPTS).select("id", "number", "outcome").collect()
    assert sorted(map(tuple, runs)) == [("a", 1, "retried"), ("a", 2, "completed")]


def test_second_run_replaces_a_day_and_keeps_jobs_removed_from_the_storage(spark, path):
    a, b, c = job("a"), job("b"), job("c", finished_at=at(12 * 60))
    put(spark, path, [a, b, c], [run("a"), run("b")])
    put(spark, path, [a, b], [run("a"), run("b")])
    assert found(spark, path, "id") == [("a",), ("b",), ("c",)]

    # "a" no longer exists; "d" ends on the same day, as does "b" again, after a retry.
    put(spark, path, [b, job("d"), job("b", finished_at=at(5))], [run("b"), run("d")])

    assert found(spark, path, "id", "finished_at") == sorted(
        tuple(row)
        for row in jobs_of(spark, a, b, c, job("d"), job("b", finished_at=at(5)))
        .select("id", "finished_at")
        .collect()
    )
    assert archived(spark, path, ATTEMPTS).count() == 3


def test_archive_keeps_removed_jobs_of_thousands_of_queues(spark):
    kept = [(f"queue-{number}", FIRST) for number in range(5_000)]
    rows = spark.createDataFrame(
        [("queue-7", FIRST), ("queue-7", THIRD), ("other", FIRST)], "queue string, date date"
    )

    assert [tuple(row) for row in _among(spark, rows, kept, "left_semi").collect()] == [("queue-7", FIRST)]
    others = {tuple(row) for row in _among(spark, rows, kept, "left_anti").collect()}
    assert others == {("queue-7", THIRD), ("other", FIRST)}


def test_incomplete_archive_raises_an_error(spark, path, monkeypatch):
    monkeypatch.setattr(
        "djqueue.contrib.spark.pipeline.archive.archived",
        lambda *of: archived(*of).where("id != 'b'"),
    )
    with pytest.raises(ArchiveError, match="mail of 2026-06-01: the archive is incomplete"):
        put(spark, path, [job("a"), job("b")])


def test_purge_removes_only_jobs_that_are_unchanged_since_archiving(spark, path, storage):
    ids = {name: enqueue(storage, queue="mail", id=name) for name in ("done", "other")}
    storage.finish([completing(one) for one in claim(storage, 2)])
    ids["retried"] = a_failed_job(storage, queue="mail")
    records = {name: storage.reads.jobs("mail", [id])[0] for name, id in ids.items()}
    today = to_datetime(records["done"].finished_at).date()
    rows = [
        job(record.id, record.state.value, finished_at=to_datetime(record.finished_at))
        for name, record in records.items()
        if name != "other"
    ]
    rows.append(job("gone", finished_at=to_datetime(records["done"].finished_at)))
    chosen = jobs_of(spark, *rows).withColumn("date", sql.lit(today)).persist()
    archive(spark, path, chosen, runs_of(spark))
    assert storage.jobs.retry("mail", [ids["retried"]]) == ["retried"]

    assert purge(storage, written(spark, path, chosen)) == {"removed": 1, "changed": 1, "gone": 1}

    chosen.unpersist()
    assert storage.reads.states("mail", list(ids.values())) == [None, State.COMPLETED, State.WAITING]
