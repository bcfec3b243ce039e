"""Executors that write to Redis or read from it, on machines without Django."""

import importlib.util
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage

ABSENT = ("django", "asgiref", "sqlparse", "kombu", "celery", "cronsim", "django_redis")
"""Packages that djqueue depends on, but an executor does not need."""
TASK = f"""
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
url, modules = sys.argv[1], sys.argv[2:]
for module in modules:
    __import__(module)
import pyarrow
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.options import ReadOptions
from djqueue.contrib.spark.reading import Read
from djqueue.contrib.spark.reading import JobEventStream
from djqueue.contrib.spark.writing import Write

def write(columns, **more):
    options = WriteOptions.read({{"url": url, "queue": "emails", **more}})
    write = Write(options, list(columns))
    report = write.commit([write.run_task("0.0", pyarrow.table(columns).to_batches())])
    return report.inserted or report.answers

stream = JobEventStream(ReadOptions.read({{"url": url, "table": "events"}}))
start = stream.start()
staged = write({{"n": [1, 2]}}, job="shop.send")
keyed = write({{"key": ["a"]}}, job="shop.send", idColumn="key")
cancelled = write({{"id": ["a"]}}, operation="cancel")
read = Read(ReadOptions.read({{"url": url}}))
ids = [row for part in read.partitions() for batch in read.run_task(part) for row in batch.to_pylist()]
events = [batch.num_rows for part in stream.ranges(start, stream.latest()) for batch in stream.run_task(part)]
print(json.dumps([staged, keyed, cancelled, len(ids), sum(events)]))
"""
MODULES = [
    f"djqueue.contrib.spark.{path.stem}"
    for path in (Path(__file__).parents[3] / "djqueue" / "contrib" / "spark").glob("*.py")
    if path.stem in {"changing", "columns", "options", "project", "reporting", "rows", "tables", "throttling"}
]
SOURCE = ["djqueue.contrib.spark.source"] if importlib.util.find_spec("pyspark") else []


def test_tasks_write_to_and_read_from_redis_without_django(redis_url):
    finished = subprocess.run(
        [sys.executable, "-c", TASK, redis_url, *MODULES, *SOURCE],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == [2, 1, {"cancelled": 1}, 3, 4]
    with closing(RedisStorage(url=redis_url)) as storage:
        assert storage.reads.counts("emails")[State.WAITING] == 2


def test_names_of_absent_packages_are_importable():
    assert all(name in sys.modules or importlib.util.find_spec(name) for name in ABSENT)


def test_database_url_without_django_is_rejected_with_the_remedy(tmp_path):
    database = tmp_path / "db.sqlite3"
    database.touch()

    finished = subprocess.run(
        [sys.executable, "-c", TASK, f"sqlite://{database}"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert finished.returncode == 1
    assert "OptionError: url: a database needs Django on the driver and every executor" in finished.stderr
