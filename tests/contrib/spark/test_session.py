"""Writing in Spark; `make test-spark` installs it."""

import os

import pytest

from djqueue.contrib.spark import enqueue
from djqueue.core.states import State
from djqueue.storage.bulkwrites import DONE
from tests.contrib.spark.conftest import failing_once, leftovers
from tests.contrib.spark.test_writing import numbers

pyspark = pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def url(redis_url):
    return redis_url


def test_dataframe_is_enqueued_as_jobs(spark, storage, redis_server):
    enqueue(spark.range(0, 3_000, 1, 3).toDF("n"), "emails", "shop.send", {"url": redis_server.url})

    assert numbers(storage) == [*range(3_000)]
    assert leftovers(storage) == []


def test_write_saves_a_report(spark, storage, redis_server):
    enqueue(spark.range(0, 3_000, 1, 3).toDF("n"), "emails", "shop.send", {"url": redis_server.url})

    [found] = storage.capabilities.bulk_writes.page(10).imports
    assert (found.state, found.rows, found.inserted, found.parts) == (DONE, 3_000, 3_000, 3)
    assert found.spark == spark.sparkContext.applicationId
    assert found.user
    assert all(job.options.tags == (found.tag,) for job in storage.reads.page("emails", State.WAITING, 5_000))


def test_failed_and_repeated_task_enqueues_its_rows_once(spark, storage, redis_server, tmp_path):
    marker = str(tmp_path / "failed")
    rows = spark.range(0, 3_000, 1, 3).toDF("n").mapInArrow(failing_once(marker), "n long")
    enqueue(rows, "emails", "shop.send", {"url": redis_server.url})

    assert os.path.exists(marker)
    assert numbers(storage) == [*range(3_000)]
    assert leftovers(storage) == []


def test_failed_write_enqueues_nothing(spark, storage, redis_server):
    rows = spark.range(0, 2_000).selectExpr("if(id = 1500, null, cast(id as string)) as key")

    with pytest.raises(Exception, match="id: expected a string, got None"):
        enqueue(rows, "emails", "shop.send", {"url": redis_server.url, "idColumn": "key"})

    assert storage.queues.names() == []
    assert leftovers(storage) == []


def test_invalid_options_are_rejected_before_tasks_start(spark, storage, redis_server):
    rows = spark.range(0, 10).toDF("n")

    for options, message in (
        ({"priorty": "1"}, "unknown option 'priorty'; did you mean 'priority'"),
        ({"idColumn": "key"}, "no column 'key'"),
        ({"idColumn": "n"}, "idColumn: column 'n' has type bigint"),
        ({"url": "redis://:hunter2@127.0.0.1:1/0"}, "does not answer"),
    ):
        with pytest.raises(Exception, match=message) as raised:
            enqueue(rows, "emails", "shop.send", {"url": redis_server.url, **options})
        assert "hunter2" not in str(raised.value)
    with pytest.raises(Exception, match="overwrite is not supported"):
        rows.write.format("djqueue").options(url=redis_server.url, queue="q", job="j").mode(
            "overwrite"
        ).save()


def test_restarted_stream_continues_at_its_checkpoint(spark, storage, redis_server, tmp_path):
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    options = {"url": redis_server.url, "queue": "emails", "job": "shop.send"}

    def run():
        stream = spark.readStream.schema("n long").option("maxFilesPerTrigger", 1).parquet(str(source))
        writer = stream.writeStream.format("djqueue").options(**options)
        writer = writer.queryName("orders").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)

    for first in (0, 1_000):
        spark.range(first, first + 1_000, 1, 2).toDF("n").write.mode("append").parquet(str(source))
        run()
    # Repeat the last batch, as if its driver had died before recording that it was done.
    done = [path for path in (checkpoint / "commits").iterdir() if path.name.isdigit()]
    last = max(done, key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    run()

    assert numbers(storage) == [*range(2_000)]
    assert leftovers(storage) == []
    [found] = storage.capabilities.bulk_writes.page(10).imports
    assert (found.state, found.batches, found.rows, found.inserted) == (DONE, len(done), 2_000, 2_000)
    assert {job.options.tags for job in storage.reads.page("emails", State.WAITING, 5_000)} == {(found.tag,)}
