"""Spark sessions for tests: one at a time, in the single JVM of the process."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STARTS_SOON = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that lives for a few seconds gains nothing from being optimised."""
LOCAL = "local[2,4]"
"""Two tasks at once, each tried four times: plain `local[2]` tries once."""


@contextmanager
def session(master: str, folder: Path, more: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Start a session with djqueue for the block.

    Args:
        folder: The directory for Spark's files.
        more: Spark properties.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from djqueue.contrib.spark import register

    assert SparkContext._active_spark_context is None, (
        "there is another session: tests marked spark_cluster run by themselves, in `make test-spark-cluster`"
    )
    # Spark's Python workers inherit the environment of the first one.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.delenv("DJANGO_SETTINGS_MODULE", raising=False)  # Executors have no project.
        builder = SparkSession.builder.master(master)
        for name, value in {**settings(folder), **(more or {})}.items():
            builder = builder.config(name, value)
        found = builder.getOrCreate()
    try:
        register(found)
        yield found
    finally:
        found.stop()


def environment() -> dict[str, str]:
    """Environment in which Spark's processes find these tests and the package."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path, "TZ": "UTC"}


def settings(folder: Path) -> dict[str, str]:
    """Properties of every session. Those of a stopped session stay in the JVM, so there are few."""
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": STARTS_SOON,
        "spark.executor.extraJavaOptions": STARTS_SOON,
        "spark.executorEnv.PYTHONPATH": environment()["PYTHONPATH"],
        "spark.local.dir": str(folder),
        "spark.log.level": "OFF",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "500",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
