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
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]


def test_plugin_can_be_imported_without_spark():
    assert answer(["pyspark"]) == "False []"


@pytest.mark.spark
def test_plugin_provides_the_data_source_with_spark():
    assert answer(["redis", "django", "msgpack"]).startswith("True ")


def test_plugin_imports_neither_redis_nor_django():
    assert answer(["redis", "django", "msgpack"]).endswith(" []")
