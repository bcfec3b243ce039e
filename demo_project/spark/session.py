"""A Spark in this process and its JVM, quiet, on this machine alone."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from demo_project.demo.children import HOST, ChildError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]


def expect_spark() -> None:
    """Raises ChildError, with what to install, if there is no Spark or no Java."""
    try:
        import pyspark  # noqa: F401
    except ModuleNotFoundError:
        raise ChildError('Spark is not installed. Run: pip install "djqueue[spark]"') from None
    home = os.environ.get("JAVA_HOME")
    where = Path(home) / "bin" if home else None
    if shutil.which("java", path=where) is None:
        place = f"in JAVA_HOME ({home})" if home else "on PATH, and JAVA_HOME is not set"
        raise ChildError(
            f"Spark needs Java 17 or 21, and there is no java {place}."
            " Debian: apt install openjdk-17-jre-headless."
        )


@contextmanager
def spark_in(folder: Path) -> Iterator["SparkSession"]:
    """Spark with two threads, which has `format("djqueue")`."""
    from pyspark.sql import SparkSession

    from djqueue.contrib.spark import register

    # Its Python processes are started by the JVM: they need this interpreter and this project, too.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", HOST)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    builder = SparkSession.builder.appName("flights").master("local[2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.host": HOST,
        "spark.driver.bindAddress": HOST,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()
