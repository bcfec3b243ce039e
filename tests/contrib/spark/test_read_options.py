"""Parsing and checking the options of a read."""

import pytest

from djqueue.contrib.spark.options import ReadOptions
from djqueue.contrib.spark.tables import EVENTS, JOBS
from djqueue.core.errors import OptionError
from djqueue.core.states import State

URL = "redis://:hunter2@127.0.0.1:1/0"


def read(**given):
    return ReadOptions.read({"url": URL, **{name: str(value) for name, value in given.items()}})


def test_default_read_covers_all_jobs():
    options = read()

    assert options.table is JOBS
    assert options.wanted().queues is options.wanted().states is None
    assert [column.name for column in options.schema()] == JOBS.names()


def test_every_read_option_is_parsed_regardless_of_case():
    options = read(
        TABLE="Jobs",
        queues="a, b",
        state="Failed,completed",
        id="1,2",
        name='["shop.send", "a, b"]',
        tag="red",
        uniqueKey="k",
        subject="shop.order:7",
        since="2026-01-31",
        until="2026-01-31T12:00:00+01:00",
        columns="id,payload,concurrency_key",
        includepayload="TRUE",
        numPartitions=4,
        batchSize=500,
        timeout=30,
        socketTimeout=2.5,
        maxRetries=7,
    )

    wanted = options.wanted()
    assert wanted.queues == ("a", "b")
    assert wanted.states == {State.FAILED, State.COMPLETED}
    assert (wanted.ids, wanted.names, wanted.tags) == (("1", "2"), ("shop.send", "a, b"), ("red",))
    assert (wanted.unique_keys, wanted.subjects) == (("k",), ("shop.order:7",))
    assert (wanted.until - wanted.since) == 11 * 3_600_000
    assert [column.name for column in options.schema()] == ["id", "payload", "concurrency_key"]
    assert (options.partitions, options.batch_size) == (4, 500)
    assert (options.timeout, options.socket_timeout, options.max_retries) == (30, 2.5, 7)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("total DOUBLE, lines INT", "struct<total DOUBLE, lines INT>"),
        ("tags array<string>", "struct<tags array<string>>"),
        ("double", "double"),
        ("array<struct<a: int, b: string>>", "array<struct<a: int, b: string>>"),
        ("decimal(10, 2)", "decimal(10, 2)"),
    ],
)
def test_schema_is_a_type_or_the_fields_of_a_struct(text, kind):
    options = read(table="results", columns="id,result", resultSchema=text)

    assert [column.type for column in options.schema()] == ["string", kind]
    assert options.wanted().columns == {"id", "result", "content_type"}


def test_payload_schema_includes_the_payload():
    assert read(payloadSchema="kwargs struct<n: int>").schema()[-1] == (
        "payload",
        "struct<kwargs struct<n: int>>",
        JOBS.columns[-1].meaning,
    )


def test_stream_has_additional_options():
    options = read(table="events", startingOffsets="Earliest", maxRowsPerTrigger=20, failOnDataLoss="false")

    assert options.table is EVENTS
    assert (options.starting, options.max_rows, options.fail_on_data_loss) == ("earliest", 20, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tabel": "jobs"}, "unknown option 'tabel'; did you mean 'table'"),
        ({"path": "/data"}, r"path: save\(\) and load\(\) take no path"),
        (
            {"job": "j"},
            "job: not an option of reads: remove it. To enqueue rows in SQL, list",
        ),
        ({"lifo": "true"}, "unknown option 'lifo': remove it"),
        ({"table": "job"}, "table: 'job' is not one of .*; did you mean 'jobs'"),
        ({"queue": "a", "queues": "b"}, "queue and queues can't be combined"),
        ({"queues": " , "}, "queues: is empty"),
        ({"state": "wating"}, "state: 'wating' is not one of .*; did you mean 'waiting'"),
        ({"table": "attempts", "state": "failed"}, "state: rows of attempts cannot be filtered by state"),
        (
            {"table": "results", "state": "active"},
            "state: results exist only for completed, failed and cancelled",
        ),
        ({"id": " , "}, "id: must have 1 to 1,000 values; got 0"),
        ({"table": "attempts", "tag": "a"}, "tag: rows of attempts cannot be filtered by tag"),
        ({"table": "dead", "uniqueKey": "a"}, "uniqueKey: rows of dead cannot be filtered by uniqueKey"),
        ({"table": "cron", "name": "a"}, "name: rows of cron cannot be filtered by name"),
        ({"table": "events", "subject": "a"}, "subject: not an option for reading events"),
        ({"since": "yesterday"}, "since: 'yesterday' is neither a date"),
        ({"since": "2026-02-01", "until": "2026-02-01"}, "until: must be later than since"),
        ({"table": "cron", "since": "2026-02-01"}, "rows of cron cannot be filtered by time"),
        (
            {"columns": "id,concurency_key"},
            r"no column 'concurency_key'; did you mean 'concurrency_key'\? The columns are queue, id, name",
        ),
        ({"columns": "payload"}, "columns: payload requires includePayload"),
        ({"columns": "id", "includePayload": "true"}, "includePayload: has no effect, because columns"),
        ({"table": "dead", "includePayload": "true"}, "includePayload: supported only by the table jobs"),
        ({"table": "dead", "payloadSchema": "n int"}, "payloadSchema: supported only by the table jobs"),
        (
            {"payloadSchema": "n int", "includePayload": "false"},
            "payloadSchema: has no effect, because the col",
        ),
        ({"resultSchema": "n int"}, "resultSchema: has no effect, because the column result is not read"),
        (
            {"table": "results", "resultSchema": "n int", "values": "json"},
            "resultSchema: can't be combined with values",
        ),
        ({"values": "binary"}, "values: has no effect, because no payloads and no results are read"),
        ({"table": "results", "values": "text"}, "values: 'text' is not one of json, binary"),
        ({"includePayload": "yes"}, "includePayload: must be true or false; got 'yes'"),
        ({"numPartitions": "0"}, "numPartitions: must be from 1 to .*; got 0"),
        ({"batchSize": "many"}, "batchSize: 'many' is not a whole number"),
        ({"batchSize": "9999"}, "batchSize: must be from 1 to 3,000; got 9999"),
        ({"timeout": "0"}, "timeout: must be a number of at least 0.001; got 0"),
        ({"socketTimeout": "soon"}, "socketTimeout: 'soon' is not a number"),
        ({"maxRetries": "-1"}, "maxRetries: must be a number of at least 0; got -1"),
        ({"maxRowsPerTrigger": "5"}, "maxRowsPerTrigger: not an option for reading jobs"),
        ({"table": "events", "numPartitions": "5"}, "numPartitions: not an option for reading events"),
        ({"table": "events", "startingOffsets": "now"}, "startingOffsets: must be earliest"),
    ],
)
def test_invalid_read_option_is_rejected_with_its_name(given, message):
    with pytest.raises(OptionError, match=message) as raised:
        read(**given)

    assert "hunter2" not in str(raised.value)


def test_url_is_required():
    with pytest.raises(OptionError, match="url: set the storage to read from"):
        ReadOptions.read({})
