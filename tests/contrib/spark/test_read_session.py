"""Reading in Spark; `make test-spark` installs it."""

from contextlib import closing

import pytest

from djqueue.contrib.spark.tables import JOBS
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import a_completed_job, a_failed_job, batch, claim, completing, finish
from tests.contrib.spark.conftest import open_storage

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def storage(redis_server):
    redis_server.clean()
    with closing(RedisStorage(url=redis_server.url)) as storage:
        yield storage


@pytest.fixture
def load(spark, redis_server):
    def load(**options):
        return spark.read.format("djqueue").options(url=redis_server.url, **options).load()

    return load


def test_jobs_are_read_as_a_dataframe(load, storage):
    ids = [answer.id for answer in storage.enqueue([batch(12_000), batch(3, queue="other", priority=5)])]

    jobs = load(numPartitions="4")

    assert jobs.columns == JOBS.names()
    assert jobs.rdd.getNumPartitions() == 4
    assert sorted(row.id for row in jobs.select("id").collect()) == sorted(ids)
    assert [tuple(row) for row in jobs.groupBy("queue", "state").count().orderBy("queue").collect()] == [
        ("default", "waiting", 12_000),
        ("other", "waiting", 3),
    ]


def numbers_source():
    """Return a data source with the numbers 0 to 2, whose reader takes filters."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo

    class NumbersReader(DataSourceReader):
        wanted = None

        def pushFilters(self, filters):
            self.wanted = next((one.value for one in filters if isinstance(one, EqualTo)), None)
            return filters  # Spark applies all of them again.

        def read(self, partition):
            yield from ((number,) for number in range(3) if self.wanted in (None, number))

    class Numbers(DataSource):
        @classmethod
        def name(cls):
            return "numbers"

        def schema(self):
            return "number int"

        def reader(self, schema):
            return NumbersReader()

    return Numbers


def test_spark_cannot_push_filters_to_a_python_data_source(spark):
    """If this fails, `BatchReader` may have `pushFilters`."""
    spark.dataSource.register(numbers_source())
    with pytest.raises(Exception, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        spark.read.format("numbers").load().count()

    spark.conf.set(PUSHDOWN, "true")
    try:
        numbers = spark.read.format("numbers").load()
        assert numbers.filter("number = 1").count() == 1
        assert numbers.count() != 3
    finally:
        spark.conf.unset(PUSHDOWN)


def test_options_select_rows_and_columns(load, storage):
    ids = [answer.id for answer in storage.enqueue([batch(50, tags=("red",), subject="shop.order:1")])]
    storage.enqueue([batch(50, name="other", unique_key="k")])

    assert sorted(row.id for row in load(tag="red", columns="id").collect()) == sorted(ids)
    assert load(name="other", columns="id").count() == 1
    assert load(id=",".join(ids[:3])).filter("state = 'waiting'").count() == 3
    assert load(subject="shop.order:1", timeout="30", socketTimeout="20", maxRetries="1").count() == 50


def test_filter_applies_only_to_its_own_read(load, storage):
    storage.enqueue([batch(10)])
    jobs = load()

    assert jobs.filter("state = 'failed'").count() == 0
    assert jobs.count() == 10
    assert jobs.filter("state = 'failed'").unionAll(jobs).count() == 10


def test_table_can_be_selected_by_option_and_read_in_sql(spark, load, storage, redis_server):
    a_completed_job(storage)
    failed = a_failed_job(storage)
    options = f"OPTIONS(url '{redis_server.url}', table 'dead')"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW dead USING djqueue {options}")

    assert [row.id for row in spark.sql("SELECT id FROM dead").collect()] == [failed]
    assert sorted(row.outcome for row in load(table="attempts").collect()) == ["completed", "failed"]
    assert load(table="results", columns="state,result", state="completed").columns == ["state", "result"]


def test_invalid_options_are_rejected_before_tasks_start(load, spark, redis_server):
    for options, message in (
        ({"tabel": "jobs"}, "unknown option 'tabel'; did you mean 'table'"),
        ({"table": "cron"}, "table: cron is stored in the project's database"),
        ({"url": "redis://:hunter2@127.0.0.1:1/0"}, "does not answer"),
    ):
        with pytest.raises(Exception, match=message) as raised:
            spark.read.format("djqueue").options(**{"url": redis_server.url, **options}).load().count()
        assert "hunter2" not in str(raised.value)
    with pytest.raises(Exception, match="schema: cannot be changed"):
        spark.read.format("djqueue").schema("id string").options(url=redis_server.url).load().count()


def test_stream_of_events_resumes_at_its_offset(spark, storage, redis_server, tmp_path):
    sink, checkpoint = str(tmp_path / "events"), str(tmp_path / "checkpoint")
    options = {"table": "events", "startingOffsets": "earliest"}
    is_limited = not spark.version.startswith("4.1.")
    if is_limited:
        options["maxRowsPerTrigger"] = "20"

    def run():
        stream = spark.readStream.format("djqueue").options(url=redis_server.url, **options).load()
        writer = stream.writeStream.format("parquet").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start(sink)
        assert query.awaitTermination(300)
        return [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]

    storage.enqueue([batch(30), batch(20, queue="other")])
    first = run()
    finish(storage, *map(completing, claim(storage, 5)))
    second = run()

    assert (first, second) == ([20, 20, 10] if is_limited else [50], [10])
    events = spark.read.parquet(sink)
    assert [tuple(row) for row in events.groupBy("event").count().orderBy("event").collect()] == [
        ("active", 5),
        ("completed", 5),
        ("waiting", 50),
    ]
    assert events.select("queue", "offset").distinct().count() == 60


def test_database_can_be_read_without_a_project(spark, sqlite_url):
    with closing(open_storage(sqlite_url)) as storage:
        a_failed_job(storage)
        ids = [answer.id for answer in storage.enqueue([batch(50)])]

    def load(**options):
        return spark.read.format("djqueue").options(url=sqlite_url, **options).load()

    assert sorted(row.id for row in load(state="waiting").collect()) == sorted(ids)
    assert load(table="dead").count() == 1
    assert load(table="cron").count() == 0
