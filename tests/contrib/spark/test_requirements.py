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
for call in {calls}:
    try:
        exec(call)
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


def errors(version, *names):
    """Return the error of each call with this version of PySpark."""
    program = FAKE.format(version=version, calls=[CALLS[name] for name in names])
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()


@pytest.mark.parametrize("version", ["3.5.9", "4.0.1"])
def test_error_for_an_old_pyspark_names_its_version_and_the_remedy(version):
    assert errors(version, *CALLS) == [OLD.format(version)] * len(CALLS)


def test_error_for_a_missing_pyspark_names_the_extra():
    for error in errors("", "register", "enqueue"):
        assert error.startswith("djqueue needs PySpark 4.1 or later: pip install djqueue[spark] (")
