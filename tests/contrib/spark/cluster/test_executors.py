"""Killed executors and Python workers, while they stage rows behind a shuffle."""

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.cluster.checks import QUEUE, are_once, goes_by_itself
from tests.contrib.spark.sessions import session
from tests.proxies import LossyProxy
from tests.servers import RedisCluster

pyspark = pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")

pytestmark = [
    pytest.mark.spark_cluster,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

ROWS = 6_000
NUMBERS = 1_500
"""Different rows: each is there more than once, and so it stays."""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: Any) -> Any:
    """Start two executor processes with one core each."""
    from tests.contrib.spark.cluster.faulty import FaultySource

    memory = {"spark.executor.memory": "768m"}
    with session("local-cluster[2,1,1024]", tmp_path_factory.mktemp("spark"), memory) as spark:
        spark.dataSource.register(FaultySource)
        left = Path(pyspark.__file__).parent / "work" / spark.sparkContext.applicationId
        yield spark
    # Executors of a local-cluster write their logs next to Spark itself, whatever the configuration.
    shutil.rmtree(left, ignore_errors=True)


def of_each_number_some(spark: Any) -> Any:
    """Return rows behind a shuffle, whose order differs each time."""
    return spark.range(0, ROWS, 1, 4).selectExpr(f"id % {NUMBERS} as n").repartition(3)


WANTED = [n % NUMBERS for n in range(ROWS)]


@pytest.mark.parametrize("accident", ["raise", "exit", "executor"])
def test_repeated_task_enqueues_its_rows_once(
    spark: Any, storage: Any, redis_server: Any, tmp_path: Any, accident: str
) -> None:
    options = {
        "url": redis_server.url,
        "queue": QUEUE,
        "job": "shop.send",
        "batchSize": 100,
        "accident": accident,
        "marks": str(tmp_path),
    }
    faulty = of_each_number_some(spark).write.format("faulty").options(**options)

    faulty.mode("append").save()

    assert (tmp_path / "struck").exists()
    are_once(storage, WANTED)
    goes_by_itself(storage)


def test_write_succeeds_when_connections_end(spark: Any, storage: Any, redis_server: Any) -> None:
    with LossyProxy(redis_server.port, range(500, 20_000, 900), range(9_000, 500_000, 20_000)) as proxy:
        options = {"url": proxy.url, "queue": QUEUE, "job": "shop.send", "batchSize": 100}
        of_each_number_some(spark).write.format("djqueue").options(**options).mode("append").save()
        assert proxy.made > 5

    are_once(storage, WANTED)


def test_killed_executor_writing_to_a_redis_cluster_enqueues_each_row_once(spark: Any, tmp_path: Any) -> None:
    with RedisCluster() as servers, closing(RedisStorage(**servers.options)) as storage:
        options = {"url": servers.url, "queueColumn": "queue", "job": "shop.send", "batchSize": 100}
        rows = of_each_number_some(spark).selectExpr("n", f"concat('{QUEUE}-', n % 4) as queue")
        faulty = rows.write.format("faulty").options(**options, accident="exit", marks=str(tmp_path))
        faulty.mode("append").save()

        assert (tmp_path / "struck").exists()
        for part in range(4):
            are_once(storage, [n for n in WANTED if n % 4 == part], f"{QUEUE}-{part}")
