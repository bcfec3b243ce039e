"""Packages that a process of Spark lacks."""

import re
import subprocess
import sys

import pytest

from djqueue.contrib.spark import packages
from djqueue.contrib.spark.locations import storage_at
from djqueue.core.errors import ConfigurationError
from tests.contrib.spark.test_requirements import FAKE


@pytest.mark.parametrize("names", [["redis"], ["hiredis", "msgpack"]])
def test_redis_url_names_the_missing_packages_with_the_remedy(names, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in names else object())

    with pytest.raises(ConfigurationError, match=re.escape(f"{sys.executable} on ")) as raised:
        storage_at("redis://:hunter2@127.0.0.1:1/0")

    assert f" lacks {' and '.join(names)}, which djqueue needs on the driver and every" in str(raised.value)
    assert f"pip install {' '.join(names)} there" in str(raised.value)
    assert "hunter2" not in str(raised.value)


def test_task_without_pyarrow_or_msgpack_names_them():
    program = FAKE.format(version="4.1.0", calls=["import djqueue.contrib.spark.source"]).replace(
        "import djqueue.contrib.spark as spark",
        "import djqueue.contrib.spark.packages as packages\npackages.find_spec = lambda name: None",
    )

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert " lacks pyarrow and msgpack, which djqueue needs on the driver and every executor" in found.stdout
