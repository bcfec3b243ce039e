"""Enqueue the rows of Spark DataFrames as jobs, exactly once, and change existing jobs.

See docs/spark.md. Importing this package requires neither pyspark nor a Django project. Django imports it at
start-up if it is in INSTALLED_APPS, so it imports its modules when they are used.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from importlib import import_module
from secrets import token_hex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from djqueue.storage.bulkwrites import BulkWriteReport

    from .options import WriteOptions
    from .reporting import WriteReport
    from .waiting import WriteOutcome, WriteTimeoutError

CONNECT = "pyspark.sql.connect."
"""The package of Spark Connect's DataFrames."""

logger = logging.getLogger("djqueue.spark")

__all__ = [
    "WriteOutcome",
    "WriteReport",
    "WriteTimeoutError",
    "change",
    "enqueue",
    "register",
    "wait",
    "write",
]
LAZY = {"WriteReport": "reporting", "WriteOutcome": "waiting", "WriteTimeoutError": "waiting"}
"""Modules of classes that are imported when they are used."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LAZY[name]}"), name)


def register(spark: "SparkSession") -> None:
    """Register `format("djqueue")` with a session that does not discover it."""
    from .source import DjqueueDataSource

    spark.dataSource.register(DjqueueDataSource)


def enqueue(
    df: "DataFrame",
    queue: str | None = None,
    job: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> "WriteReport | None":
    """Enqueue each row of a DataFrame as a job, and return a report.

    Args:
        df: The rows.
        queue: The queue, unless the option `queueColumn` is set.
        job: The job's name, unless the option `jobColumn` is set.
        options: Options of `format("djqueue")`; see docs/spark-reference.md. Inside a Django project, its
            settings provide defaults for the storage, the queue and the job.
        more: Further options, which may be in snake case, such as `max_attempts=3`.

    Returns:
        The report, or None if the jobs were written but the report could not be saved or read.

    Raises:
        OptionError: An option or a column is invalid.
        ConfigurationError: PySpark is missing, or older than 4.1.
        StorageError: This process cannot read reports of the storage. Nothing is written.
        PySparkException: The write failed; the message ends with the reason.
    """
    targets = {"queue": queue, "job": job}
    named = {name: value for name, value in targets.items() if value is not None}
    return write(df, {**_texts(options, more), **named})


def change(
    df: "DataFrame", operation: str, options: Mapping[str, Any] | None = None, **more: Any
) -> "WriteReport | None":
    """Retry, cancel, delete or update the jobs whose ids are in a DataFrame. Like `enqueue`."""
    return write(df, {**_texts(options, more), "operation": operation})


def write(df: "DataFrame", options: Mapping[str, str]) -> "WriteReport | None":
    """Write a DataFrame with options in Spark's spelling. Like `enqueue`."""
    from djqueue.core.errors import DjqueueError, OptionError

    from . import requirements as requirements
    from .locations import REMEDY, has_password
    from .options import WriteOptions, key_of
    from .project import with_defaults
    from .reporting import WriteReport

    all_options = with_defaults(options)
    if not any(key_of(name) == "writeid" for name in all_options):
        all_options["writeId"] = token_hex(8)
    checked = WriteOptions.read(all_options)
    if type(df).__module__.startswith(CONNECT) and has_password(checked.url):
        raise OptionError(
            f"url: the server of Spark Connect shows a password in its event log and its pages: {REMEDY}"
        )
    if checked.dry_run:
        return _dry_run(df, checked)
    # A client of Spark Connect may have no access to the storage: find out before the jobs exist.
    _saved_report(checked)
    df.write.format("djqueue").options(**all_options).mode("append").save()
    try:
        report = _saved_report(checked)
    except DjqueueError as error:
        logger.warning("Write %s is done, but its report could not be read: %s", checked.write, error)
        return None
    return None if report is None else WriteReport.of(report)


def wait(
    write: "str | WriteReport",
    timeout: float | timedelta | None = None,
    *,
    url: str | None = None,
    key_prefix: str | None = None,
    progress: Callable[[str], object] | None = print,
) -> "WriteOutcome":
    """Wait until all jobs of a bulk write have ended, and return their number by outcome.

    Args:
        write: The write's `writeId`, its report, or its `txnAppId` for the last version.
        timeout: Maximum time to wait, in seconds; None for no limit.
        url: The storage that it was written to. Inside a Django project, its settings provide it.
        key_prefix: The `keyPrefix` of that storage.
        progress: Receives a line about each change; None for no lines.

    Raises:
        WriteTimeoutError: Some jobs have not ended in time. Its `outcome` has the numbers so far.
        OptionError: An option is invalid, or the storage has no such write.
        StorageError: The write failed, or the storage does not respond.
    """
    from .locations import storage_at
    from .options import ReadOptions
    from .project import with_defaults
    from .waiting import WriteWait

    given = with_defaults(_texts({"url": url, "keyPrefix": key_prefix}, {}))
    place = ReadOptions.read({name: given[name] for name in ("url", "keyPrefix") if name in given})
    name = write if isinstance(write, str) else write.write
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    with closing(storage_at(place.url, place.prefix)) as storage:
        storage.connect()
        return WriteWait(storage, name, progress).run(seconds)


def _saved_report(options: "WriteOptions") -> "BulkWriteReport | None":
    """Return the report that the storage saved. Raises DjqueueError if this process cannot read it."""
    from .locations import storage_at

    with closing(storage_at(options.url, options.prefix)) as storage:
        reports = storage.capabilities.bulk_writes
        return None if reports is None else reports.get(str(options.write))


def _texts(options: Mapping[str, Any] | None, more: Mapping[str, Any]) -> dict[str, str]:
    values = {**(options or {}), **more}
    return {name: _text(name, value) for name, value in values.items() if value is not None}


def _text(name: str, value: Any) -> str:
    """Convert an option's value to text, as `.option()` takes it. Raises OptionError."""
    from djqueue.core.errors import OptionError

    from .options import text_of_list

    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, timedelta):
        return repr(value.total_seconds())
    if isinstance(value, Mapping):
        try:
            return json.dumps(dict(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"{name}: cannot be written as JSON: {error}") from None
    if isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            if not isinstance(item, str):
                raise OptionError(f"{name}: expected strings, got {item!r}: convert it with str()")
        return text_of_list(value)
    return str(value)


def _dry_run(df: "DataFrame", options: "WriteOptions") -> "WriteReport":
    """Validate the rows, and return the report.

    A dry run saves no report with the storage, so the tasks return their reports as rows.
    """
    from .columns import check_types
    from .reporting import TaskReport
    from .writing import Write

    write = Write(options, df.columns)
    check_types(write.plan, df.schema)

    def run_tasks(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        report = write.run_task(f"{partition}.0", batches)
        text = json.dumps({"rows": report.rows, "rejected": report.rejected, "changed": report.changed})
        yield pyarrow.record_batch({"report": [text]})

    reports = df.mapInArrow(run_tasks, "report string").collect()
    return write.commit([TaskReport(part="0.0", **json.loads(row.report)) for row in reports])
