"""Speculative copies of a slow task, while the slow one continues to write."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.contrib.spark.cluster.checks import QUEUE, are_once, goes_by_itself
from tests.contrib.spark.sessions import environment, session
from tests.servers import Server
from tests.support import eventually

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [
    pytest.mark.spark_cluster,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

HOSTS = ("127.0.0.1", "127.0.0.2")
ROWS = 4_000
SPECULATION = {
    "spark.executor.memory": "768m",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "200ms",
}


class Daemon(Server):
    """Start a master or worker with its own host name, since Spark runs copies of a task on other hosts."""

    def __init__(self, host: str, master: str = "") -> None:
        super().__init__()
        self.host = host
        self.master = master

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def command(self) -> list[str]:
        import pyspark

        kind = "worker.Worker" if self.master else "master.Master"
        more = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.folder), self.master]
        place = ["--host", self.host, "--port", str(self.port), "--webui-port", "0"]
        script = Path(pyspark.__file__).parent / "bin" / "spark-class"
        return [str(script), f"org.apache.spark.deploy.{kind}", *place, *(more if self.master else [])]

    def is_ready(self) -> bool:
        said = (self.folder / "log").read_text(errors="replace")
        return ("Successfully registered" if self.master else "I have been elected leader") in said

    def _process_options(self) -> dict[str, object]:
        return {"env": {**os.environ, **environment(), "SPARK_LOCAL_IP": self.host}}


@pytest.fixture(scope="module")
def spark(tmp_path_factory: Any) -> Iterator[Any]:
    """Start two workers with one core each, on two hosts."""
    from tests.contrib.spark.cluster.faulty import FaultySource

    with closing(socket.socket()) as probe:
        try:
            probe.bind((HOSTS[1], 0))
        except OSError:
            pytest.skip(f"{HOSTS[1]} is no address of this machine")
    with (
        Daemon(HOSTS[0]) as master,
        Daemon(HOSTS[0], master.url),
        Daemon(HOSTS[1], master.url),
        session(master.url, tmp_path_factory.mktemp("spark"), SPECULATION) as spark,
    ):
        spark.dataSource.register(FaultySource)
        yield spark


def test_rows_of_the_slower_copy_of_a_task_are_not_published(
    spark: Any, storage: Any, redis_server: Any, tmp_path: Any
) -> None:
    rows = spark.range(0, ROWS, 1, 4).toDF("n")
    options = {"url": redis_server.url, "queue": QUEUE, "job": "shop.send", "batchSize": 100}
    faulty = rows.write.format("faulty").options(**options, accident="linger", marks=str(tmp_path))

    faulty.mode("append").save()

    are_once(storage, range(ROWS))
    eventually(lambda: (tmp_path / "lingered").exists(), message="the slower one has gone on")
    eventually(lambda: _has_ended(spark), message="no task runs any more")
    are_once(storage, range(ROWS))
    goes_by_itself(storage)


def _has_ended(spark: Any) -> bool:
    tracker = spark.sparkContext._jsc.sc().statusTracker()
    return all(found.numRunningTasks() == 0 for found in tracker.getExecutorInfos())
