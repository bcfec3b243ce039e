"""Create DataFrames with the tables' schemas from the relevant columns."""

from datetime import UTC, datetime, timedelta

from djqueue.contrib.spark.pipeline.archive import encoded_columns
from djqueue.contrib.spark.tables import ATTEMPTS, JOBS, ddl

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def at(minutes=0.0):
    return NOON + timedelta(minutes=minutes)


def job(id, state="completed", *, queue="mail", name="shop.send", **more):
    times = {"enqueued_at": at(), "run_at": at(), "started_at": at(), "finished_at": at(1)}
    return {
        "id": id,
        "state": state,
        "queue": queue,
        "name": name,
        "content_type": "msgpack",
        **times,
        **more,
    }


def run(id, outcome="completed", *, queue="mail", name="shop.send", **more):
    times = {"started_at": at(), "finished_at": at(1), "run_seconds": 60.0}
    return {"id": id, "outcome": outcome, "queue": queue, "name": name, "number": 1, **times, **more}


def jobs_of(spark, *rows):
    return _frame(spark, JOBS, rows)


def runs_of(spark, *rows):
    return _frame(spark, ATTEMPTS, rows)


def _frame(spark, table, rows):
    columns = encoded_columns(table)
    for row in rows:
        assert row.keys() <= {column.name for column in columns}, row
    return spark.createDataFrame([[row.get(column.name) for column in columns] for row in rows], ddl(columns))
