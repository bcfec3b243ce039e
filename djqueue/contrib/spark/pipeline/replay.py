"""Run jobs again: retry dead letters, or enqueue archived jobs as new ones."""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from djqueue.codecs import MSGPACK
from djqueue.contrib.spark import change, write
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.reporting import WriteReport
from djqueue.core.errors import OptionError
from djqueue.storage.bulkwrites import tag_of

from .archive import archived

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CARRIED = ("priority", "concurrencyKey", "uniqueKey", "subject", "tags", "headers")
"""Options taken from the columns of an archived job, unless set for all jobs."""
COLUMNS = {"concurrencyKey": "concurrency_key", "uniqueKey": "unique_key"}


def replay_dead(jobs: "DataFrame", options: Mapping[str, str]) -> WriteReport | None:
    """Retry dead letters, identified by queue and id. The report's `answers` has the results.

    Args:
        jobs: The dead letters.
        options: Options of the write, such as `url`.
    """
    return change(jobs.select("queue", "id"), "retry", options)


def selected(
    spark: "SparkSession", path: str, where: str, since: date | None = None, until: date | None = None
) -> "DataFrame":
    """Return the archived jobs of these days that match an SQL condition, as they last ended."""
    everything = archived(spark, path)
    jobs = everything
    if since is not None:
        jobs = jobs.where(sql.col("date") >= sql.lit(since))
    if until is not None:
        jobs = jobs.where(sql.col("date") < sql.lit(until))
    jobs = jobs.where(where)
    # A retried job is archived more than once: a job that failed and then completed counts as completed.
    again = everything.join(jobs.select("queue", "id"), ["queue", "id"], "left_semi")
    last = again.groupBy("queue", "id").agg(sql.max("finished_at").alias("finished_at"))
    return jobs.join(last, ["queue", "id", "finished_at"], "left_semi").dropDuplicates(["queue", "id"])


def replay_archived(jobs: "DataFrame", name: str, options: Mapping[str, str]) -> WriteReport | None:
    """Enqueue archived jobs as new jobs with new ids, in their queues and with their names.

    Args:
        jobs: The jobs, from `selected`.
        name: The replay's name. A second replay with the same name enqueues nothing.
        options: Options of the write: `url`, and options of all jobs.

    Raises:
        OptionError: A payload is not encoded as MessagePack.
    """
    others = jobs.where(sql.col("content_type") != MSGPACK).select("queue", "name", "content_type").head()
    if others is not None:
        raise OptionError(
            f"job {others.name!r} of queue {others.queue!r} has a payload in {others.content_type}, which "
            "this command cannot enqueue again: exclude the job from the condition"
        )
    named = {key_of(option) for option in options}
    carried = {
        f"{option}Column": COLUMNS.get(option, option) for option in CARRIED if key_of(option) not in named
    }
    write_options = {
        "queueColumn": "queue",
        "jobColumn": "name",
        "payloadColumn": "payload",
        "payloadFormat": "msgpack",
        "txnAppId": f"replay {name}",
        "txnVersion": "0",
        **carried,
        **options,
    }
    # Remove the tag of the write that first enqueued the job.
    own = sql.filter("tags", lambda tag: ~tag.startswith(tag_of("")))
    columns = ("queue", "name", "payload", *carried.values())
    rows = jobs.withColumn("tags", own).select(*(f"`{column}`" for column in columns))
    return write(rows, write_options)
