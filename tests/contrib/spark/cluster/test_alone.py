"""A driver and executors with djqueue as one archive, and without Django or an installed djqueue."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import djqueue
from tests.contrib.spark.cluster.checks import QUEUE, are_once
from tests.contrib.spark.sessions import settings

pyspark = pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")

pytestmark = [pytest.mark.spark_cluster, pytest.mark.slow]

PACKAGES = ("pyspark", "py4j", "pyarrow", "numpy", "numpy.libs", "msgpack", "redis", "hiredis")
"""What docs/spark-reference.md says that Spark's processes need for Redis; pyarrow needs numpy."""
DRIVER = """
import json, sys
from pyspark.sql import SparkSession

archive, url, queue, config = *sys.argv[1:4], json.loads(sys.argv[4])
builder = SparkSession.builder.master("local-cluster[1,1,1024]")
for name, value in config.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
spark.sparkContext.addPyFile(archive)

from djqueue.contrib.spark import enqueue, register

register(spark)
report = enqueue(spark.range(0, 1000, 1, 3).toDF("n"), queue, "shop.send", url=url)
read = spark.read.format("djqueue").option("url", url).option("table", "jobs").load().count()

def look(_):
    import importlib.util
    import djqueue
    return djqueue.__file__, str(importlib.util.find_spec("django"))

[found] = spark.sparkContext.range(0, 1, 1, 1).map(look).collect()
spark.stop()
print("FOUND", json.dumps([report.inserted, read, *found]))
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a Python with the packages that are needed, and no others."""
    home = tmp_path / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    [site] = home.glob("lib/python*/site-packages")
    installed = Path(pyspark.__file__).parents[1]
    for name in PACKAGES:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return home / "bin" / "python"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Return djqueue as a file that Spark sends to its executors, as the wheel is one."""
    path, package = tmp_path / "djqueue.zip", Path(djqueue.__file__).parent
    with zipfile.ZipFile(path, "w") as found:
        for file in package.rglob("*"):
            if file.suffix in (".py", ".lua", ".sql"):
                found.write(file, file.relative_to(package.parent))
    return path


def test_rows_are_written_and_read_with_only_the_archive(
    storage: Any, redis_server: Any, python: Path, archive: Path, tmp_path: Path
) -> None:
    config = {**settings(tmp_path / "spark"), "spark.executor.memory": "768m"}
    del config["spark.executorEnv.PYTHONPATH"]
    names = {name for name in os.environ if not name.startswith(("PYTHON", "DJANGO", "PYSPARK"))}
    environment = {name: os.environ[name] for name in names}

    finished = subprocess.run(
        [python, "-c", DRIVER, archive, redis_server.url, QUEUE, json.dumps(config)],
        cwd=tmp_path,
        env={**environment, "PYSPARK_PYTHON": str(python), "TZ": "UTC"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr[-4_000:]
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("FOUND ")]
    inserted, read, package, django = json.loads(line.removeprefix("FOUND "))
    assert (inserted, read, django) == (1_000, 1_000, "None")
    assert "djqueue.zip" in package
    are_once(storage, range(1_000))
