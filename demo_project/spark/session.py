"""A Spark on this machine alone, in this process and a JVM."""

import os
import shutil
from contextlib import AbstractContextManager
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
            f"Spark requires Java 17 or 21, but no java was found {place}. Debian: apt install "
            "openjdk-17-jre-headless."
        )


def spark_in(folder: Path) -> AbstractContextManager["SparkSession"]:
    """Spark with two threads, which has `format("djqueue")`."""
    from djqueue.contrib.spark.pipeline.session import session

    # Its Python processes are started by the JVM, and need this project, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("SPARK_LOCAL_IP", HOST)
    return session(
        "flights",
        "local[2]",
        {
            "spark.ui.enabled": "false",
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
        },
    )
