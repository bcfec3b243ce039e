"""The Spark that a command runs in."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from djqueue.core.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULTS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


@contextmanager
def session(app: str, master: str, conf: Mapping[str, str]) -> "Iterator[SparkSession]":
    """A session, which ends with the block; one that runs already is used, and left running.

    Raises ConfigurationError if there is no Spark, or it does not start.
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
    # The Python of the tasks: where they run on this machine, this one.
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
