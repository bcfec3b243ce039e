"""Rollups by hour, from jobs and attempts."""

from datetime import timedelta

import pytest
from pyspark.sql.types import StructType

from djqueue.contrib.spark.models import Rollup
from djqueue.contrib.spark.pipeline.rollups import COUNTS, SCHEMA, rollups, store
from tests.contrib.spark.pipeline.frames import NOON, at, job, jobs_of, run, runs_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.django_db]


def of(spark, jobs, runs=(), hours=2):
    return rollups(jobs_of(spark, *jobs), runs_of(spark, *runs), NOON, NOON + timedelta(hours=hours))


def stored(**key):
    return Rollup.objects.using("default").get(**key)


def test_rollup_has_a_fixed_schema(spark):
    assert of(spark, []).schema.simpleString() == StructType.fromDDL(SCHEMA).simpleString()


def test_jobs_and_attempts_are_counted_in_the_hour_in_which_they_were_enqueued_or_ended(spark):
    jobs = [
        job("a", enqueued_at=at(-1), finished_at=at()),
        job("b", finished_at=at(59.9)),
        job("c", "failed", finished_at=at(60), reason="timeout"),
        job("d", "failed", finished_at=at(61), reason="timeout"),
        job("e", "failed", finished_at=at(61), reason="stalled", queue="images"),
        job("f", "cancelled", finished_at=at(120)),
        job("g", "waiting", started_at=None, finished_at=None),
    ]
    runs = [
        run("a", "retried", finished_at=at(-1)),
        run("c", "retried", finished_at=at(30)),
        run("c", "stalled", finished_at=at(60), number=2),
    ]
    assert store(of(spark, jobs, runs), "default") == (2, 4)

    def counts(**key):
        row = stored(**key)
        return {name: value for name in COUNTS if (value := getattr(row, name))}

    assert counts(hour=NOON, queue="mail") == {"enqueued": 5, "completed": 2, "retried": 1}
    assert counts(hour=at(60), queue="mail") == {"failed": 2, "stalled": 1}
    assert stored(hour=at(60), queue="mail").reasons == {"timeout": 2}
    assert stored(hour=at(60), queue="images").reasons == {"stalled": 1}


def test_times_are_percentiles_of_finished_attempts(spark):
    runs = [run(str(n), wait_seconds=n / 1_000, run_seconds=n / 100) for n in range(101)]
    runs += [run("lost", "stalled", run_seconds=9_000.0)]
    store(of(spark, [], runs), "default")

    row = stored(hour=NOON)
    assert (row.wait_p50, row.wait_p95, row.wait_p99) == (50, 95, 99)
    assert (row.run_p50, row.run_p95, row.run_p99) == (500, 950, 990)
    assert (row.name, row.stalled) == ("shop.send", 1)


def test_second_run_replaces_only_its_own_rows(spark):
    store(of(spark, [job("a"), job("b", name="shop.print")]), "default")
    before = {row.name: row.pk for row in Rollup.objects.all()}
    store(of(spark, [job("a"), job("c")]), "default")

    assert {row.name: (row.pk, row.completed) for row in Rollup.objects.all()} == {
        "shop.send": (before["shop.send"], 2),
        "shop.print": (before["shop.print"], 1),
    }


def test_attempts_of_removed_jobs_are_counted_without_a_job_name(spark):
    store(of(spark, [], [run("a", "retried", name=None)]), "default")

    assert stored(name="").retried == 1
