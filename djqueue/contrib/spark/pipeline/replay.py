"""Jobs once more: dead letters are retried, archived jobs enqueued anew."""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from djqueue.codecs import MSGPACK
from djqueue.contrib.spark import change, write
from djqueue.contrib.spark.options import key_of
from djqueue.contrib.spark.writing import WriteReport
from djqueue.core.errors import OptionError
from djqueue.storage.bulkwrites import tag_of

from .archive import archived

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CARRIED = ("priority", "group", "uniqueKey", "subject", "tags")
"""Options that an archived job has in columns of its own, unless all are given another one."""
COLUMNS = {"uniqueKey": "unique_key"}


def replay_dead(letters: "DataFrame", options: Mapping[str, str]) -> WriteReport | None:
    """Retry dead letters, named by queue and id; `answers` says what became of how many.

    options: of the write: `url`, and what else there is to say.
    """
    return change(letters.select("queue", "id"), "retry", options)


def selected(
    spark: "SparkSession", path: str, where: str, since: date | None = None, until: date | None = None
) -> "DataFrame":
    """The archived jobs of these days that a condition of SQL chooses, each as it ended last."""
    everything = archived(spark, path)
    jobs = everything
    if since is not None:
        jobs = jobs.where(sql.col("date") >= sql.lit(since))
    if until is not None:
        jobs = jobs.where(sql.col("date") < sql.lit(until))
    jobs = jobs.where(where)
    # With a retry between, a job is there twice: one that failed, and completed then, has completed.
    again = everything.join(jobs.select("queue", "id"), ["queue", "id"], "left_semi")
    last = again.groupBy("queue", "id").agg(sql.max("finished_at").alias("finished_at"))
    return jobs.join(last, ["queue", "id", "finished_at"], "left_semi").dropDuplicates(["queue", "id"])


def replay_archived(jobs: "DataFrame", name: str, options: Mapping[str, str]) -> WriteReport | None:
    """Enqueue archived jobs anew, each in its queue and by its name: new jobs, with ids of their own.

    name: of this replay: a second one of this name brings nothing more, whatever it selects.
    options: of the write: `url`, and what else all jobs are to have.

    Raises OptionError for jobs whose payload is in another encoding than djqueue's own.
    """
    others = jobs.where(sql.col("content_type") != MSGPACK).select("queue", "name", "content_type").head()
    if others is not None:
        raise OptionError(
            f"job {others.name!r} of queue {others.queue!r} has a payload in {others.content_type}, which "
            "this command cannot enqueue again: exclude the job from the condition"
        )
    given = {key_of(option) for option in options}
    carried = {
        f"{option}Column": COLUMNS.get(option, option) for option in CARRIED if key_of(option) not in given
    }
    said = {
        "queueColumn": "queue",
        "jobColumn": "name",
        "payloadColumn": "payload",
        "payloadFormat": "msgpack",
        "txnAppId": f"replay {name}",
        "txnVersion": "0",
        **carried,
        **options,
    }
    # Of which write it once came is no more true.
    own = sql.filter("tags", lambda tag: ~tag.startswith(tag_of("")))
    columns = ("queue", "name", "payload", *carried.values())
    rows = jobs.withColumn("tags", own).select(*(f"`{column}`" for column in columns))
    return write(rows, said)
