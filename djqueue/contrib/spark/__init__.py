"""Spark: jobs from the rows of a DataFrame, many at a time and each once. See docs/spark.md.

Importing this needs neither pyspark nor a Django project.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .writing import Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Report", "enqueue", "register"]


def register(spark: "SparkSession") -> None:
    """Make `format("djqueue")` known to a session, where it does not find it by itself."""
    from .source import DjqueueDataSource

    spark.dataSource.register(DjqueueDataSource)


def enqueue(df: "DataFrame", queue: str, job: str, options: Mapping[str, Any] | None = None) -> None:
    """Write a DataFrame's rows as jobs of one queue.

    options: those of `format("djqueue")`: see docs/spark.md.

    Raises what Spark raises, with the reason in its message.
    """
    given = {name: _text(value) for name, value in (options or {}).items()}
    writer = df.write.format("djqueue").options(queue=queue, job=job, **given)
    writer.mode("append").save()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
