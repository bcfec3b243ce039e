"""Start the Spark session of a command, and shorten Spark's errors."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
DJQUEUE_ERROR = re.compile(r"^(?:djqueue\.[\w.]+\.)?(\w+Error): (.+)$", re.MULTILINE)
CONDITION = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .+")
"""The first line of an error of Spark with a name. Queries, plans and stack traces follow."""
MAX_MESSAGE = 2_000
QUERY_LOGGERS = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
"""Loggers that print the errors of queries as JSON, with stack traces."""


class SparkError(DjqueueError):
    """A Spark operation failed."""


@contextmanager
def session(app: str, master: str, conf: Mapping[str, str]) -> "Iterator[SparkSession]":
    """Start a session for the block, or use the active one and leave it running.

    Raises:
        ConfigurationError: Spark is not installed, or fails to start.
    """
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigurationError(f"Spark is not installed ({error}): pip install djqueue[spark]") from None
    from djqueue.contrib.spark import register

    running = SparkSession.getActiveSession()
    if running is not None:
        yield running
        return
    # Tasks on this machine use the same Python.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app).master(master)
    for name, value in {**DEFAULTS, **conf}.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except PySparkException as error:
        raise ConfigurationError(
            f"Spark failed to start with --master {master}: {error}; Spark requires Java 17 or 21"
        ) from None
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()


@contextmanager
def readable_errors() -> Iterator[None]:
    """Convert Spark's exceptions in the block to OptionError or SparkError, with only the reason."""
    from pyspark.logger import PySparkLogger

    loggers = [PySparkLogger.getLogger(name) for name in QUERY_LOGGERS]
    were_disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True  # The error is shown once.
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        raise error_of(str(error)) from error
    finally:
        for logger, was_disabled in zip(loggers, were_disabled, strict=True):
            logger.disabled = was_disabled


def error_of(text: str) -> DjqueueError:
    """Return the error in a message of Spark, which may contain Python and Java stack traces."""
    errors = DJQUEUE_ERROR.findall(text)
    if errors:
        # The last one is the original error, in the process that raised it.
        name, reason = errors[-1]
        return OptionError(reason) if name == OptionError.__name__ else SparkError(reason)
    reason = text.partition("\nJVM stacktrace")[0].strip()
    if (condition := CONDITION.match(reason)) is not None:
        reason = condition[0].rstrip("; ")
    return SparkError(reason[:MAX_MESSAGE])
