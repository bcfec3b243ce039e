"""Reads and their tasks, on real storages without Spark."""

from copy import deepcopy
from datetime import UTC, datetime

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, encode
from djqueue.contrib.spark import throttling
from djqueue.contrib.spark.arrow import batch_of
from djqueue.contrib.spark.options import ReadOptions, WriteOptions
from djqueue.contrib.spark.reading import Read
from djqueue.contrib.spark.tables import JOBS, TABLES
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.storage.database import export as database_export
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.export import RedisExport
from djqueue.testing.factories import (
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    batch,
    claim,
    completing,
    finish,
    job,
)


@pytest.fixture
def read(url, storage):
    """Return the rows of a read as dicts, each task with a copy of the read."""

    def rows(**given):
        made = Read(ReadOptions.read({"url": url, **given}))
        tasks = made.partitions()
        batches = [one for parts in tasks for one in deepcopy(made).run_task(parts)]
        return [row for one in batches for row in one.to_pylist()]

    return rows


def test_job_is_read_as_a_row(storage, read):
    job_id = a_waiting_job(storage, priority=3, tags=("a", "b"), concurrency_key="g")
    record = job(storage, job_id)

    [row] = read()

    assert list(row) == JOBS.names()
    assert (row["id"], row["state"], row["priority"], row["tags"]) == (job_id, "waiting", 3, ["a", "b"])
    assert row["enqueued_at"] == datetime.fromtimestamp(record.created_at / 1_000, UTC)
    assert row["finished_at"] is None


def test_payload_is_read_only_if_requested(storage, read):
    storage.enqueue([batch(payloads=[b"\xa1x"])])

    assert "payload" not in read()[0]
    assert read(includePayload="true", columns="payload,id")[0]["payload"] == '"x"'
    assert read(includePayload="true", values="binary")[0]["payload"] == b"\xa1x"


def test_result_is_json_or_has_the_type_of_the_schema(url, storage, read):
    a_completed_job(storage, result=encode({"total": 7, "sent": True}, MSGPACK))
    kind = pyarrow.struct([("total", pyarrow.float64())])

    def only(**given):
        [row] = read(table="results", columns="result", **given)
        return row["result"]

    assert only() == '{"total": 7, "sent": true}'
    assert only(values="binary") == encode({"total": 7, "sent": True}, MSGPACK)
    made = Read(
        ReadOptions.read({"url": url, "table": "results", "resultSchema": "total double"}), {"result": kind}
    )
    [[one]] = [list(made.run_task(parts)) for parts in made.partitions()]
    assert one.column("result").to_pylist() == [{"total": 7.0}]


def test_result_names_what_its_job_is_about_and_the_write_that_enqueued_it(url, storage, read):
    options = {"url": url, "queue": "mail", "job": "handler", "writeId": "load-7", "tags": "a,b"}
    write = Write(WriteOptions.read({**options, "uniqueKeyColumn": "n", "subject": "s"}), ["n"])
    write.commit([write.run_task("0.0", pyarrow.table({"n": ["k"]}).to_batches())])
    finish(storage, *map(completing, claim(storage)))

    [row] = read(table="results")
    [same] = read(columns="unique_key,bulk_write")

    assert (row["unique_key"], row["subject"], row["bulk_write"]) == ("k", "s", "load-7")
    assert row["tags"] == ["a", "b", "import:load-7"]
    assert same == {"unique_key": "k", "bulk_write": "load-7"}


def test_rows_are_divided_among_the_requested_number_of_partitions(url, storage):
    storage.enqueue([batch(12_000), *(batch(10, queue=f"small {at}") for at in range(20))])

    made = Read(ReadOptions.read({"url": url, "numPartitions": "3"}))
    tasks = made.partitions()
    counted = [sum(one.num_rows for one in made.run_task(parts)) for parts in tasks]

    assert len(tasks) == 3
    assert sum(counted) == 12_200
    assert max(counted) < 7_000


def test_lost_replies_leave_out_and_double_no_row(storage, read, monkeypatch):
    monkeypatch.setattr(throttling, "FIRST_RETRY_WAIT", 0.0)
    ids = [answer.id for answer in storage.enqueue([batch(700)])]
    is_redis = isinstance(storage, RedisStorage)
    place, name = (RedisExport, "_read") if is_redis else (database_export, "_rows")
    plain, calls = getattr(place, name), []

    def loses(*args):
        reply = plain(*args)
        calls.append(args)
        if len(calls) % 2:
            raise StorageUnavailableError("the connection is lost")
        return reply

    monkeypatch.setattr(place, name, loses)

    assert sorted(row["id"] for row in read(batchSize="100", includePayload="true")) == sorted(ids)
    assert len(calls) >= 10


def test_read_fails_after_max_retries(storage, read, monkeypatch):
    monkeypatch.setattr(throttling, "FIRST_RETRY_WAIT", 0.0)
    storage.enqueue([batch(10)])
    is_redis = isinstance(storage, RedisStorage)
    place, name = (RedisExport, "_read") if is_redis else (database_export, "_rows")
    calls = []

    def away(*args):
        calls.append(args)
        raise StorageUnavailableError("the server loads its data")

    monkeypatch.setattr(place, name, away)

    with pytest.raises(StorageUnavailableError, match="loads its data"):
        read(maxRetries="2")

    assert len(calls) == 3


def test_read_of_an_empty_storage_has_one_empty_partition(read, url):
    assert Read(ReadOptions.read({"url": url})).partitions() == [[]]
    assert read() == []


@pytest.mark.parametrize("table", ["results", "attempts", "dead"])
def test_other_tables_have_their_columns(storage, read, table):
    a_completed_job(storage)
    a_failed_job(storage)

    found = read(table=table)

    assert {"results": 2, "attempts": 2, "dead": 1}[table] == len(found)
    assert all(list(row) == TABLES[table].names() for row in found)


def test_reports_of_writes_are_read_as_a_table(url, storage, read):
    write = Write(
        WriteOptions.read({"url": url, "queue": "mail", "job": "shop.send", "idColumn": "n"}), ["n"]
    )
    told = [write.run_task("0.0", pyarrow.table({"n": ["a", "b", "b"]}).to_batches())]
    write.commit(told)

    [row] = read(table="imports")

    assert list(row) == TABLES["imports"].names()
    assert (row["write"], row["state"], row["queues"]) == (write.id, "done", ["mail"])
    assert (row["rows"], row["inserted"], row["duplicates"]) == (3, 2, 1)
    assert row["skipped"] is False


def test_report_of_a_repeated_write_is_marked_as_skipped(url, storage, read):
    named = {"txnAppId": "nightly", "txnVersion": "7"}
    for _ in range(2):
        write = Write(WriteOptions.read({"url": url, "queue": "mail", "job": "shop.send", **named}), ["n"])
        write.commit([write.run_task("0.0", pyarrow.table({"n": ["a", "b"]}).to_batches())])

    found = read(table="imports")

    assert sorted((row["skipped"], row["inserted"]) for row in found) == [(False, 2), (True, 2)]


def test_unsupported_table_is_rejected_with_the_supported_ones(redis_url):
    with pytest.raises(
        OptionError,
        match=r"cron is stored in the project's database.*attempts, dead, events, imports, jobs, results$",
    ):
        Read(ReadOptions.read({"url": redis_url, "table": "cron"})).partitions()


@pytest.mark.parametrize(
    "url", ["redis://:hunter2@127.0.0.1:1/0", "postgresql://someone:hunter2@127.0.0.1:1/shop"]
)
def test_error_for_an_unreachable_storage_does_not_contain_the_password(url, django_db_blocker):
    made = Read(ReadOptions.read({"url": url}))

    with (
        django_db_blocker.unblock(),
        pytest.raises(StorageUnavailableError, match=r"does not answer|cannot be used") as raised,
    ):
        made.partitions()

    assert "hunter2" not in str(raised.value)


def test_text_that_is_not_unicode_is_escaped():
    [row] = batch_of(JOBS.chosen(["id", "worker"]), {"id": ["a\udc80"]}).to_pylist()

    assert row == {"id": "a\\udc80", "worker": None}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_column_type_has_an_arrow_type(table):
    found = batch_of(table.columns, {column.name: [None] for column in table.columns})

    assert found.num_rows == 1
    assert all(pyarrow.types.is_null(kind) is False for kind in found.schema.types)
