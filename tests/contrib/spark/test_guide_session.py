"""The program of docs/spark.md, from Parquet to the joined results; `make test-spark` installs Spark."""

import ast
from contextlib import closing

import pytest

from djqueue.codecs import MSGPACK, encode
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import claim, completing, failing, finish
from tests.docs.pages import ROOT, blocks

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

JOB = "shop.jobs.send_receipt"
MAX_LINES = 10


def end_jobs(storage):
    """Complete all jobs but one, which fails."""
    first, *others = claim(storage, 100, names=[JOB])
    result = encode({"sent": True, "to": "someone"}, MSGPACK)
    finish(storage, failing(first), *(completing(job, result) for job in others))


def test_program_of_the_guide_joins_results_with_the_rows(spark, redis_server, tmp_path):
    import pyspark.sql.functions

    import djqueue.contrib.spark

    redis_server.clean()
    names = ["ann", "ben", "cleo"]
    customers = spark.createDataFrame(
        [(name, f"{name}@example.com") for name in names], "customer string, email string"
    )
    orders = spark.createDataFrame([(name, 1.5) for name in names * 2], "customer string, total double")
    customers.write.parquet(str(tmp_path / "customers"))
    orders.write.parquet(str(tmp_path / "orders"))
    [block] = blocks(ROOT / "docs" / "spark.md", "py")
    assert len(block.text.splitlines()) <= MAX_LINES
    text = block.text.replace('parquet("', f'parquet("{tmp_path}/').replace(
        "env:DJQUEUE_URL", redis_server.url
    )
    given = {"spark": spark, "djs": djqueue.contrib.spark, "sum": pyspark.sql.functions.sum}

    with closing(RedisStorage(url=redis_server.url)) as storage:
        for statement in ast.parse(text).body:
            if "djs.wait" in ast.unparse(statement):
                end_jobs(storage)
            exec(compile(ast.Module([statement], []), str(block), "exec"), given)

    rows = spark.read.parquet(str(tmp_path / "receipts")).collect()
    assert sorted(row.customer for row in rows) == names
    assert sorted((row.state, row.sent) for row in rows) == [("completed", True)] * 2 + [("failed", None)]
