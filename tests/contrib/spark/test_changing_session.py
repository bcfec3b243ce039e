"""Reports, dead letters and changes of existing jobs, in Spark. See `test_session`."""

import pytest

from djqueue.contrib.spark import change, enqueue
from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.testing.factories import a_failed_job, claim
from tests.contrib.spark.conftest import leftovers

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUEUE = "emails"


@pytest.fixture
def url(redis_url):
    return redis_url


def test_enqueue_returns_the_report_of_the_write(spark, storage, redis_server):
    rows = spark.range(0, 1_000, 1, 3).selectExpr("id", "cast(id as string) as key")
    told = [
        enqueue(rows.limit(many), QUEUE, "shop.send", url=redis_server.url, id_column="key", priority=2)
        for many in (700, 1_000)
    ]

    assert [(one.rows, one.inserted, one.duplicates) for one in told] == [(700, 700, 0), (1_000, 300, 700)]
    assert told[0].queues == (QUEUE,)
    assert str(told[0]) == f"enqueue in emails: 700 rows; 700 inserted (write {told[0].write})"
    assert storage.reads.page(QUEUE, State.WAITING, 1)[0].options.priority == 2


def test_invalid_rows_become_dead_letters_of_a_successful_write(spark, storage, redis_server):
    rows = spark.range(0, 100, 1, 2).selectExpr("id as n", "if(id % 10 = 0, null, cast(id as string)) as key")
    options = {"url": redis_server.url, "idColumn": "key", "onError": "dead"}

    with pytest.raises(Exception, match="id: expected a string, got None"):
        enqueue(rows, QUEUE, "shop.send", {**options, "onError": "fail"})
    assert storage.reads.dead_letters(QUEUE) == []
    report = enqueue(rows, QUEUE, "shop.send", options)

    assert (report.inserted, report.dead_letters, report.rejected) == (90, 10, {"id": 10})
    assert len(storage.reads.dead_letters(QUEUE)) == 10
    assert leftovers(storage) == []


def test_dead_letters_are_retried_by_the_ids_of_a_dataframe(spark, storage, redis_server):
    ids = [a_failed_job(storage, queue=QUEUE, id=f"job:{number}") for number in range(20)]
    rows = spark.createDataFrame([(name,) for name in [*ids[:15], "nobody"]], "id string").repartition(2)

    tried = change(rows, "retry", url=redis_server.url, queue=QUEUE, dry_run=True)
    assert tried.answers == {"retried": 15, "not_found": 1}
    assert len(storage.reads.dead_letters(QUEUE)) == 20

    report = change(rows, "retry", url=redis_server.url, queue=QUEUE)

    assert (report.operation, report.answers) == ("retry", {"retried": 15, "not_found": 1})
    assert {one.id for one in claim(storage, 30)} == {*ids[:15]}


def test_stream_can_cancel_jobs(spark, storage, redis_server, tmp_path):
    enqueue(
        spark.range(10).selectExpr("cast(id as string) as id"),
        QUEUE,
        "shop.send",
        url=redis_server.url,
        id_column="id",
    )
    source = str(tmp_path / "source")
    spark.range(0, 4).selectExpr("cast(id as string) as id", "'emails' as queue").write.parquet(source)
    stream = spark.readStream.schema("id string, queue string").parquet(source)

    query = (
        stream.writeStream.format("djqueue")
        .options(url=redis_server.url, operation="cancel")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )

    assert query.awaitTermination(120)
    counts = storage.reads.counts(QUEUE)
    assert (counts[State.CANCELLED], counts[State.WAITING]) == (4, 6)


def test_queues_and_jobs_can_come_only_from_columns(spark, storage, redis_server):
    rows = spark.range(4).selectExpr("id as n", "'mail-' || id % 2 as q", "'shop.' || id % 2 as j")

    report = enqueue(rows, url=redis_server.url, queueColumn="q", job_column="j")
    other = enqueue(rows, options={"url": redis_server.url, "queue": "emails", "job": "shop.send"})

    assert report.queues == ("mail-0", "mail-1")
    assert {job.name for job in storage.reads.page("mail-1", State.WAITING, 10)} == {"shop.1"}
    assert (other.queues, other.inserted) == (("emails",), 4)
    with pytest.raises(OptionError, match="queue: set the option, or name a column with queueColumn"):
        enqueue(rows, job="shop.send", url=redis_server.url)


def test_dry_run_returns_the_expected_report(spark, storage, redis_server):
    rows = spark.range(0, 10, 1, 2).selectExpr("if(id = 3, null, cast(id as string)) as key")

    report = enqueue(
        rows, QUEUE, "shop.send", url=redis_server.url, idColumn="key", onError="skip", dryRun=True
    )

    assert (report.rows, report.rejected) == (10, {"id": 1})
    assert storage.queues.names() == []


def test_dry_run_names_the_partition_of_an_invalid_row(spark, redis_server):
    rows = spark.range(0, 10, 1, 2).selectExpr("if(id = 8, null, cast(id as string)) as key")

    with pytest.raises(Exception, match="row 4 of partition 1: id:"):
        enqueue(rows, QUEUE, "shop.send", url=redis_server.url, idColumn="key", dryRun=True)


def test_query_plan_does_not_contain_the_password(spark, storage, redis_server, tmp_path):
    said = []
    with pytest.raises(OptionError) as raised:
        enqueue(spark.range(1), QUEUE, "shop.send", url="redis://:hunter7@127.0.0.1/0", priority="high")
    said.append(str(raised.value))
    with pytest.raises(Exception, match="does not answer") as unreachable:
        enqueue(spark.range(1), QUEUE, "shop.send", url="redis://:hunter7@127.0.0.1:1/0")
    said.append(str(unreachable.value))

    storage._connections.sync().execute_command(
        "ACL", "SETUSER", "loader", "on", ">hunter7", "~*", "&*", "+@all"
    )
    try:
        url = redis_server.url.replace("redis://", "redis://loader:hunter7@")
        enqueue(spark.range(3), QUEUE, "shop.send", url=url)
        store = spark._jsparkSession.sharedState().statusStore()
        plans = store.executionsList().mkString("\n")
        details = [
            str(store.execution(run.executionId()).get().physicalPlanDescription())
            for run in _each(store.executionsList())
        ]
    finally:
        storage._connections.sync().execute_command("ACL", "DELUSER", "loader")

    assert len(storage.reads.page(QUEUE, State.WAITING, 9)) == 3
    assert details
    assert "hunter7" not in "\n".join([*said, plans, *details])


def _each(found):
    """Return the entries of a Scala sequence."""
    return [found.apply(place) for place in range(found.size())]
