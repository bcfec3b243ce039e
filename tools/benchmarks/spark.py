"""`python -m tools.benchmarks.spark`: rows of a DataFrame into a storage, against other ways to do so.

All in one run, in turns, each in an empty place; the table shows medians. Spark's two tasks, the driver and
the server share the machine. `make test-spark` installs Spark.
"""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import django
import msgpack
import pyarrow
import redis
from django.conf import settings

from djqueue.contrib.spark import enqueue
from djqueue.contrib.spark.aliases import alias_of
from djqueue.contrib.spark.locations import storage_at
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.sessions import session
from tests.servers import PostgresServer, RedisServer
from tests.support import eventually
from tests.tables import empty_tables
from tools.benchmarks.bare import percentile
from tools.benchmarks.client import TEXT

QUEUE, BESIDE, JOB = "bench", "beside", "shop.send"
PARTITIONS = 4
BATCH = 1_000
ARROW = 10_000
"""Rows of a record batch, unless Spark is told otherwise."""
SETTINGS = {"spark.driver.extraJavaOptions": "", "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW)}
GOALS = {
    "staged rows/s": ">= 120,000",
    "staged / enqueue_many": ">= 0.65",
    "staged / foreachPartition": ">= 1",
    "task memory, Arrow batches": "<= 3",
    "enqueue beside it p99 ms": "<= 10",
}
BARE = """
local entries = {}
for i = 1, #ARGV, 2 do
  redis.call('HSET', 'job:' .. ARGV[i], 'payload', ARGV[i + 1])
  entries[#entries + 1] = ARGV[i]
end
return redis.call('RPUSH', 'waiting', unpack(entries))
"""
"""A hash for each job, and a list: what Redis does at best."""


def configure(folder: str) -> None:
    """A Django project on a SQLite file."""
    database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(Path(folder) / "bench.sqlite3"),
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "djqueue"],
        DATABASES={"default": database},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.spark", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="default: 1,000,000")
    parser.add_argument("--place", choices=sorted(PLACES), default="redis", help="default: redis")
    parser.add_argument("--runs", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--only", choices=sorted(WAYS), action="append", help="default: all")
    options = parser.parse_args()
    ways = {name: way for name, way in WAYS.items() if not options.only or name in options.only}
    found: dict[str, list[float]] = {}
    with PLACES[options.place]() as place, tempfile.TemporaryDirectory() as folder:
        if not settings.configured:
            configure(folder)
        if options.place != "redis":
            ways = {name: way for name, way in ways.items() if name in ANYWHERE}
        print(f"{platform.platform()}, {os.cpu_count()} cores, CPython {platform.python_version()}, ", end="")
        print(f"{place.about()}, ", end="")
        print(", ".join(f"{name} {version(name)}" for name in ("pyspark", "pyarrow", "redis", "hiredis")))
        with session("local[2]", Path(folder), SETTINGS) as spark:
            small = Bench(spark, place, min(options.rows, 20_000))
            for way in ways.values():
                way(small)
            for _ in range(options.runs):
                for name, values in one_run(Bench(spark, place, options.rows), ways).items():
                    found.setdefault(name, []).append(values)
    for name, values in found.items():
        goal = f"  (goal {GOALS[name]})" if name in GOALS else ""
        spread = f"{min(values):,.4g} to {max(values):,.4g}"
        print(f"{name:32} {statistics.median(values):>14,.2f} {spread:>24}{goal}")
    return 0


def one_run(bench: "Bench", ways: "dict[str, Way]") -> dict[str, float]:
    """All ways, one after the other, and what they are to one another."""
    found: dict[str, float] = {}
    for way in ways.values():
        found |= way(bench)
    for other in ("bare EVALSHA", "enqueue_many", "foreachPartition"):
        if {"staged rows/s", f"{other} rows/s"} <= found.keys():
            found[f"staged / {other}"] = found["staged rows/s"] / found[f"{other} rows/s"]
    return found


class RedisPlace:
    """An empty Redis server."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.url = server.url

    def clean(self) -> None:
        """Delete everything. This takes seconds if there are many jobs, and other clients must not wait."""
        with self.server.client() as client:
            client.flushall(asynchronous=True)
            eventually(lambda: not client.info("memory")["lazyfree_pending_objects"], 120)

    def about(self) -> str:
        """The version."""
        return f"Redis {self.server.client().info('server')['redis_version']}"


class DatabasePlace:
    """A database with the tables."""

    def __init__(self, url: str) -> None:
        from django.core.management import call_command

        self.url = url
        self._alias = alias_of(url)
        call_command("migrate", database=self._alias, verbosity=0)

    def clean(self) -> None:
        """Empty the tables."""
        empty_tables(self._alias)

    def about(self) -> str:
        """The version."""
        from django.db import connections

        connection = connections[self._alias]
        version = ".".join(map(str, connection.get_database_version()))
        return f"{connection.display_name} {version}"


@contextmanager
def redis_place() -> Iterator[RedisPlace]:
    with RedisServer() as server:
        yield RedisPlace(server)


@contextmanager
def postgresql_place() -> Iterator[DatabasePlace]:
    with PostgresServer() as server:
        yield DatabasePlace(server.create_database())


@contextmanager
def sqlite_place() -> Iterator[DatabasePlace]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "djqueue.db"
        path.touch()
        yield DatabasePlace(f"sqlite://{path}")


PLACES = {"redis": redis_place, "postgresql": postgresql_place, "sqlite": sqlite_place}
ANYWHERE = ("many", "staged", "read", "partition")
"""Ways that work in every place."""


class Bench:
    """A session, a place, and how many rows are brought."""

    def __init__(self, spark: Any, place: Any, rows: int) -> None:
        self.spark = spark
        self.place = place
        self.rows = rows

    @property
    def server(self) -> RedisServer:
        """The server, if the place is Redis."""
        server: RedisServer = self.place.server
        return server

    def frame(self) -> Any:
        """The rows as a DataFrame."""
        numbers = self.spark.range(0, self.rows, 1, PARTITIONS)
        return numbers.selectExpr("id as n", "concat('user-', id) as user", f"'{TEXT}' as text")

    def payloads(self) -> Iterator[dict[str, Any]]:
        """The same as Python's values."""
        return ({"n": n, "user": f"user-{n}", "text": TEXT} for n in range(self.rows))

    def rate(self, act: Callable[[], Any], *, counted: bool = True, besides: int = 0) -> float:
        """Rows a second, into an empty place. besides: jobs that are there, too."""
        self.place.clean()
        start = time.perf_counter()
        act()
        took = time.perf_counter() - start
        if counted:
            with closing(storage_at(self.place.url)) as storage:
                there = storage.reads.counts(QUEUE)[State.WAITING]
            if there != self.rows + besides:
                raise RuntimeError(f"{there} jobs of {self.rows} rows")
        return self.rows / took

    def write(self) -> None:
        """By the data source."""
        enqueue(self.frame(), QUEUE, JOB, {"url": self.place.url})


Way = Callable[[Bench], dict[str, float]]


def bare(bench: Bench) -> dict[str, float]:
    """A script of five lines in a loop, with one answer outstanding: nothing of djqueue."""
    with redis.Redis(port=bench.server.port) as client:
        sha = client.script_load(BARE)
        connection = client.connection_pool.get_connection()

        def act() -> None:
            words: list[Any] = []
            waiting = 0
            for n, payload in enumerate(bench.payloads()):
                words += (f"job-{n}", msgpack.packb(payload))
                if len(words) == 2 * BATCH or n == bench.rows - 1:
                    connection.send_command("EVALSHA", sha, 0, *words)
                    words = []
                    waiting += 1
                    if waiting == 2:
                        connection.read_response()
                        waiting = 1
            connection.read_response()

        try:
            return {"bare EVALSHA rows/s": bench.rate(act, counted=False)}
        finally:
            client.connection_pool.release(connection)


def many(bench: Bench) -> dict[str, float]:
    """`enqueue_many` in one plain process, of rows that are there already."""
    from djqueue import Queue

    with closing(storage_at(bench.place.url)) as storage:
        queue, rows = Queue(QUEUE, storage=storage), list(bench.payloads())

        def act() -> None:
            for first in range(0, len(rows), 100 * BATCH):
                queue.enqueue_many(rows[first : first + 100 * BATCH], name=JOB)

        return {"enqueue_many rows/s": bench.rate(act)}


def staged(bench: Bench) -> dict[str, float]:
    """The data source, as it is without options; beside it, another client that enqueues jobs one by one."""
    found = {"staged rows/s": bench.rate(bench.write)}
    if not isinstance(bench.place, RedisPlace):
        return found
    with beside(bench) as times:
        bench.rate(bench.write)
    found["enqueue beside it p50 ms"] = percentile(times, 50)
    found["enqueue beside it p99 ms"] = percentile(times, 99)
    with bench.server.client() as client:
        client.config_set("slowlog-log-slower-than", 0)
        client.config_set("slowlog-max-len", 10_000)
        client.slowlog_reset()
        bench.rate(bench.write)
        found["longest call ms"] = max(call["duration"] for call in client.slowlog_get(10_000)) / 1_000
        client.config_set("slowlog-log-slower-than", -1)
    return found


@contextmanager
def beside(bench: Bench) -> Iterator[list[float]]:
    """Milliseconds of another client's enqueues, one after the other, meanwhile."""
    times: list[float] = []
    code = f"from tools.benchmarks.spark import beats; beats({bench.server.url!r})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield times
        said, _ = other.communicate()
    times += map(float, said.split())


def beats(url: str) -> None:
    """A job each five milliseconds, until standard input ends."""
    from djqueue import Queue

    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder, closing(RedisStorage(url=url)) as storage:
        configure(folder)
        queue = Queue(BESIDE, storage=storage)
        queue.enqueue(0)
        print("ready", flush=True)
        while not over.wait(0.005):
            start = time.perf_counter()
            queue.enqueue(0)
            times.append((time.perf_counter() - start) * 1_000)
    print(*times)


def read(bench: Bench) -> dict[str, float]:
    """`spark.read` of the same jobs, all of their columns, into nothing."""
    bench.rate(bench.write)
    jobs = bench.spark.read.format("djqueue").options(url=bench.place.url, numPartitions=PARTITIONS).load()
    start = time.perf_counter()
    jobs.write.format("noop").mode("overwrite").save()
    return {"read jobs/s": bench.rows / (time.perf_counter() - start)}


def by_partition(bench: Bench) -> dict[str, float]:
    """What one writes without it: in each partition `enqueue_many`, a thousand rows at a time."""
    url = bench.place.url

    def bring(rows: Any) -> None:
        # Imported here: Django's settings of this process cannot be sent to a task.
        from django.conf import settings

        from djqueue import Queue
        from djqueue.contrib.spark.locations import storage_at

        with tempfile.TemporaryDirectory() as folder:
            if "redis" in url and not settings.configured:
                configure(folder)
            with closing(storage_at(url)) as storage:
                queue, left = Queue(QUEUE, storage=storage), iter(rows)
                while some := [row.asDict() for row in islice(left, BATCH)]:
                    queue.enqueue_many(some, name=JOB)

    return {"foreachPartition rows/s": bench.rate(lambda: bench.frame().foreachPartition(bring))}


def memory(bench: Bench) -> dict[str, float]:
    """What a task needs besides what it is given, in the size of a record batch, in a process of its own."""
    bench.server.clean()
    with tempfile.NamedTemporaryFile() as file:
        written = None
        for first in range(0, bench.rows, ARROW):
            numbers = range(first, min(first + ARROW, bench.rows))
            users = [f"user-{n}" for n in numbers]
            batch = pyarrow.record_batch({"n": [*numbers], "user": users, "text": [TEXT] * len(users)})
            written = written or pyarrow.ipc.new_stream(file, batch.schema)
            written.write_batch(batch)
        written.close()
        file.flush()
        given = f"{file.name!r}, {bench.server.url!r}"
        code = f"from tools.benchmarks.spark import task_memory; task_memory({given})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {"task memory, Arrow batches": float(done.stdout)}


def task_memory(path: str, url: str) -> None:
    """Print it: how far the peak of a task is above that of somebody who only looks at the batches."""
    from djqueue.contrib.spark.options import WriteOptions
    from djqueue.contrib.spark.writing import Write

    write = Write(WriteOptions.read({"url": url, "queue": QUEUE, "job": JOB}), ["n", "user", "text"])
    with pyarrow.OSFile(path) as file:
        first = next(iter(pyarrow.ipc.open_stream(file)))
        write.run_task("0.0", [first.slice(0, 10)])  # what is loaded once
    peaks = []
    for look in (lambda batches: [None for _ in batches], lambda batches: write.run_task("1.1", batches)):
        with pyarrow.OSFile(path) as file:
            look(iter(pyarrow.ipc.open_stream(file)))
        peaks.append(peak())
    print((peaks[1] - peaks[0]) / first.nbytes)


def peak() -> int:
    """The most bytes that this process has had in memory."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in `ru_maxrss` what the parent had when it started this process.
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1_024


WAYS: dict[str, Way] = {
    "bare": bare,
    "many": many,
    "staged": staged,
    "read": read,
    "partition": by_partition,
    "memory": memory,
}

if __name__ == "__main__":
    raise SystemExit(main())
