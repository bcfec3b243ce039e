"""Spark: jobs from the rows of a DataFrame, many at a time and each once. See docs/spark.md.

Importing this needs neither pyspark nor a Django project.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from .locations import storage_at
from .options import WriteOptions
from .project import with_defaults
from .writing import TaskReport, Write, WriteReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["WriteReport", "change", "enqueue", "register", "write"]


def register(spark: "SparkSession") -> None:
    """Make `format("djqueue")` known to a session, where it does not find it by itself."""
    from .source import DjqueueDataSource

    spark.dataSource.register(DjqueueDataSource)


def enqueue(
    df: "DataFrame", queue: str, job: str, options: Mapping[str, Any] | None = None, **more: Any
) -> WriteReport | None:
    """Write a DataFrame's rows as jobs of one queue; answers what became of them.

    options, more: those of `format("djqueue")`, see docs/spark.md, also as `max_attempts=3`. Where a Django
        project is configured, what it says of its storage, of the queue and of the job counts for those that
        are missing.

    None: all is written, and only its report could not be kept.
    Raises OptionError for what is wrong, and what Spark raises, with the reason in its message.
    """
    return write(df, {**_texts(options, more), "queue": queue, "job": job})


def change(
    df: "DataFrame", operation: str, options: Mapping[str, Any] | None = None, **more: Any
) -> WriteReport | None:
    """Do something to the jobs whose ids a DataFrame has: retry, cancel, delete or update. See `enqueue`."""
    return write(df, {**_texts(options, more), "operation": operation})


def write(df: "DataFrame", options: Mapping[str, str]) -> WriteReport | None:
    """Do with a DataFrame's rows what the options say, written as Spark has them. See `enqueue`."""
    said = {"writeId": token_hex(8), **with_defaults(options)}
    known = WriteOptions.read(said)
    if known.dry_run:
        return _tried(df, known)
    df.write.format("djqueue").options(**said).mode("append").save()
    with closing(storage_at(known.url, known.prefix)) as storage:
        reports = storage.capabilities.bulk_writes
        found = None if reports is None else reports.get(str(known.write))
    return None if found is None else WriteReport.of(found)


def _texts(options: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in {**(options or {}), **more}.items()}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tried(df: "DataFrame", options: WriteOptions) -> WriteReport:
    """The report of what writes nothing, and so leaves none: what the tasks say comes as rows."""
    write = Write(options, df.columns)

    def told(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow

        said = write.run_task("0.0", batches)
        text = json.dumps({"rows": said.rows, "rejected": said.rejected, "changed": said.changed})
        yield pyarrow.record_batch({"told": [text]})

    found = df.mapInArrow(told, "told string").collect()
    return write.commit([TaskReport(part="0.0", **json.loads(row.told)) for row in found])
