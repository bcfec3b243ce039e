"""Spark Connect: a client without a JVM, and a server that runs the tasks."""

import json
import os
import subprocess
import sys
from contextlib import closing

import pytest

from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.sessions import environment, settings

pytest.importorskip("grpc", reason="Spark Connect is not installed here: see make test-spark")
pytestmark = [pytest.mark.spark, pytest.mark.slow]

CLIENT = """
import json, sys
from pyspark.sql import SparkSession

url, config = sys.argv[1], json.loads(sys.argv[2])
builder = SparkSession.builder.remote("local[2]")
for name, value in config.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
assert "connect" in type(spark).__module__

from djqueue.contrib.spark import change, enqueue, register

register(spark)
rows = spark.range(0, 1_000, 1, 2).selectExpr("id as n")
checked = enqueue(rows, "emails", "shop.send", url=url, dry_run=True)
staged = enqueue(rows, "emails", "shop.send", url=url, txn_app_id="load", txn_version=1)
again = enqueue(rows, "emails", "shop.send", url=url, txn_app_id="load", txn_version=1)
jobs = spark.read.format("djqueue").option("url", url).load()
cancelled = change(jobs.select("queue", "id").limit(10), "cancel", url=url)
try:
    enqueue(rows, "emails", "shop.send", url=url, priority_column="nn")
except Exception as error:
    problem = str(error)
found = [checked.rows, staged.inserted, again.skipped, jobs.count(), cancelled.answers, problem]
spark.stop()
print("FOUND", json.dumps(found))
"""


def test_spark_connect_client_writes_changes_and_reads(redis_url, tmp_path):
    config = {name: value for name, value in settings(tmp_path).items() if name.startswith("spark.sql.")}

    finished = subprocess.run(
        [sys.executable, "-c", CLIENT, redis_url, json.dumps(config)],
        cwd=tmp_path,
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    problem = [line for line in finished.stderr.splitlines() if not line.startswith("\tat ")]
    assert finished.returncode == 0, "\n".join(problem[-60:])
    [line] = [line for line in finished.stdout.splitlines() if line.startswith("FOUND ")]
    *counts, problem = json.loads(line.removeprefix("FOUND "))
    assert counts == [1_000, 1_000, True, 1_000, {"cancelled": 10}]
    assert "priorityColumn: no column 'nn'; did you mean 'n'" in problem
    with closing(RedisStorage(url=redis_url)) as storage:
        assert storage.reads.counts("emails")[State.WAITING] == 990
