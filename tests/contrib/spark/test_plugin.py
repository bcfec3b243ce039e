"""The package `pyspark_djqueue`, which Spark imports whenever it looks up a data source."""

import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[3] / "djqueue" / "contrib" / "spark" / "plugin" / "__init__.py"
LOADS = f"""
import runpy, sys
without = {{without!r}}
for name in without:
    sys.modules[name] = None
found = runpy.run_path({str(PLUGIN)!r})
there = {{{{name for name, module in sys.modules.items() if module}}}}
print("DefaultSource" in found, sorted({{{{"redis", "django", "djqueue", "pyarrow"}}}} & there))
"""


def answer(without):
    command = [sys.executable, "-c", LOADS.format(without=without)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split(
        "\n"
    )[0]


def test_it_does_not_fail_where_there_is_no_spark():
    assert answer(["pyspark"]) == "False []"


@pytest.mark.spark
def test_where_there_is_spark_it_has_the_source():
    assert answer(["redis", "django", "msgpack"]).startswith("True ")


def test_it_imports_neither_redis_nor_django():
    assert answer(["redis", "django", "msgpack"]).endswith(" []")
