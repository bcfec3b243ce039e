"""PySpark that is missing or too old."""

import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[3] / "djqueue" / "contrib" / "spark" / "plugin" / "__init__.py"
FAKE = """
import sys
from types import ModuleType

class DataSource:
    def __init__(self, options):
        self.options = options

version = {version!r}
sys.modules["pyspark"] = pyspark = ModuleType("pyspark") if version else None
if version:
    pyspark.__version__ = version
    pyspark.__path__ = []
    sys.modules["pyspark.sql"] = sql = ModuleType("pyspark.sql")
    sql.__path__ = []
    sys.modules["pyspark.sql.datasource"] = datasource = ModuleType("pyspark.sql.datasource")
    datasource.DataSource = DataSource
from djqueue.core.errors import ConfigurationError
import djqueue.contrib.spark as spark
try:
    {call}
except ConfigurationError as error:
    print(error)
"""
CALLS = {
    "register": "spark.register(None)",
    "enqueue": "spark.enqueue(None, 'emails', 'shop.send', url='redis://127.0.0.1/0')",
    "change": "spark.change(None, 'retry', url='redis://127.0.0.1/0')",
    "format": f"import runpy; runpy.run_path({str(PLUGIN)!r})['DefaultSource']({{}}).writer(None, False)",
}
OLD = (
    "djqueue needs PySpark 4.1 or later, but {} is installed: pip install --upgrade djqueue[spark], "
    "on a cluster of that version of Spark"
)


def said(version, call):
    command = [sys.executable, "-c", FAKE.format(version=version, call=CALLS[call])]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.mark.parametrize(
    ("version", "call"),
    [
        ("3.5.9", "register"),
        ("4.0.1", "register"),
        ("4.0.1", "enqueue"),
        ("3.5.9", "change"),
        ("4.0.1", "format"),
    ],
)
def test_an_old_version_is_named_in_one_sentence(version, call):
    assert said(version, call) == OLD.format(version)


@pytest.mark.parametrize("call", ["register", "enqueue"])
def test_a_missing_pyspark_is_named_with_the_extra(call):
    assert said("", call).startswith("djqueue needs PySpark 4.1 or later: pip install djqueue[spark] (")
