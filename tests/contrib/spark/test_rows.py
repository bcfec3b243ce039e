"""Conversion of rows to jobs: payloads, options, ids and invalid rows."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.rows import (
    JobColumns,
    JobReader,
    KeyedQueues,
    RowError,
    UniformJobReader,
    job_reader,
)
from djqueue.core.backoff import Backoff
from djqueue.core.errors import OptionError

GIVEN = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.jobs.send"}


def chunks_of(columns, size=1_000, rows_of=None, **options):
    table = pyarrow.table(columns)
    plan = JobColumns(WriteOptions.read({**GIVEN, **options}), table.column_names)
    rows = job_reader(plan, size)
    found = list(rows.chunks(table.to_batches()))
    if rows_of is not None:
        rows_of.append(rows)
    return found


def values(chunks):
    return [decode(data, MSGPACK) for chunk in chunks for batch in chunk.batches for data in batch.payloads]


def test_all_columns_become_keyword_arguments():
    assert values(chunks_of({"order": [1, 2], "name": ["ann", None]})) == [
        {"args": [], "kwargs": {"order": 1, "name": "ann"}},
        {"args": [], "kwargs": {"order": 2, "name": None}},
    ]


def test_common_unique_ttl_applies_only_to_jobs_with_a_unique_key():
    [chunk] = chunks_of({"n": [1, 2], "key": ["a", None]}, uniqueKeyColumn="key", uniqueTtl="60")

    found = [(batch.options.unique_key, batch.options.unique_ttl) for batch in chunk.batches]
    assert found == [("a", 60_000), (None, None)]


def test_error_has_option_names_in_the_spelling_of_spark():
    with pytest.raises(RowError, match="uniqueTtl: requires a uniqueKey"):
        chunks_of({"n": [1], "key": [None], "ttl": [60]}, uniqueKeyColumn="key", uniqueTtlColumn="ttl")
    with pytest.raises(OptionError, match="delay and runAt can't be combined"):
        chunks_of({"n": [1]}, delay="5", runAt="2026-06-01T12:00:00Z")


def test_columns_used_by_options_are_not_arguments():
    found = chunks_of({"order": [1], "p": [5], "at": [None]}, priorityColumn="p", runAtColumn="at")

    assert values(found) == [{"args": [], "kwargs": {"order": 1}}]


def test_columns_of_the_payload_can_be_selected():
    columns = {"a": [1], "b": [2], "c": [3]}

    assert values(chunks_of(columns, includeColumns="c,a"))[0]["kwargs"] == {"c": 3, "a": 1}
    assert values(chunks_of(columns, excludeColumns="b"))[0]["kwargs"] == {"a": 1, "c": 3}
    assert values(chunks_of(columns, priorityColumn="a", includeColumns="a,b"))[0]["kwargs"] == {
        "a": 1,
        "b": 2,
    }


def test_arguments_can_come_from_columns():
    kwargs = pyarrow.array([[("x", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    found = chunks_of({"args": [[1, 2], None], "kwargs": kwargs, "more": [0, 0]}, argsColumn="args")

    assert values(found) == [{"args": [1, 2], "kwargs": {"x": 1}}, {"args": [], "kwargs": {}}]


def test_payload_can_come_from_a_column():
    assert values(chunks_of({"payload": [7], "more": [0]}, payloadColumn="payload")) == [7]
    assert values(chunks_of({"payload": [{"a": 1}]})) == [{"a": 1}]
    assert values(chunks_of({"p": ['{"a": [1]}']}, payloadColumn="p", payloadFormat="json")) == [{"a": [1]}]
    assert values(chunks_of({"payload": [b"\x07"]}, payloadFormat="msgpack")) == [7]


def test_payload_values_keep_their_types():
    row = {
        "time": datetime(2026, 6, 1, 12, 30, tzinfo=UTC),
        "day": date(2026, 6, 1),
        "amount": Decimal("1.50"),
        "lasts": timedelta(seconds=90),
        "raw": b"\xff",
        "list": [1, None],
        "struct": {"a": {"b": "c"}},
        "large": 2**63 - 1,
    }

    assert values(chunks_of({name: [value] for name, value in row.items()}))[0]["kwargs"] == row


def test_job_options_come_from_columns():
    [chunk] = chunks_of(
        {
            "n": [1, 2, 3],
            "p": [5, 5, None],
            "tags": [["a"], ["a"], None],
            "about": ["x", "x", None],
            "in": [timedelta(seconds=1), timedelta(seconds=1), None],
        },
        priorityColumn="p",
        tagsColumn="tags",
        subjectColumn="about",
        delayColumn="in",
        maxAttempts="9",
    )

    first, last = chunk.batches
    assert (len(first.payloads), first.options.priority, first.options.tags) == (2, 5, ("a",))
    assert (first.options.subject, first.delay, first.options.max_attempts) == ("x", 1_000, 9)
    assert (len(last.payloads), last.options.priority, last.delay, last.options.max_attempts) == (
        1,
        0,
        None,
        9,
    )


@pytest.mark.parametrize(
    "column", [[{"tenant": 7, "none": None}, {"tenant": 8, "none": None}], ['{"tenant": 7}', '{"tenant": 8}']]
)
def test_headers_can_be_a_struct_or_json(column):
    [chunk] = chunks_of({"n": [1, 2], "h": column}, headersColumn="h")

    assert [batch.headers for batch in chunk.batches] == [{"tenant": 7}, {"tenant": 8}]


def test_headers_that_are_not_json_are_rejected():
    with pytest.raises(RowError, match="headers: not JSON"):
        chunks_of({"n": [1], "h": ["{"]}, headersColumn="h")


def test_common_job_options_have_the_same_meaning_as_in_enqueue():
    given = {"delay": "60", "timeout": "1.5", "retention": "31536000", "tags": "a, b", "priority": "-3"}

    [[batch]] = [chunk.batches for chunk in chunks_of({"n": [1]}, **given)]

    options = batch.options
    assert (batch.delay, options.timeout, options.retention) == (60_000, 1_500, 31_536_000_000)
    assert (options.tags, options.priority) == (("a", "b"), -3)


def test_common_start_time_applies_to_all_jobs():
    [[batch]] = [chunk.batches for chunk in chunks_of({"n": [1]}, runAt="2026-01-31T12:00:00+01:00")]

    assert batch.run_at == 1_769_857_200_000


def test_job_ids_come_from_a_column_or_are_generated():
    [chunk] = chunks_of({"n": [1, 2]})
    [named] = chunks_of({"key": ["a", "b"]}, idColumn="key")

    assert len(set(chunk.batches[0].ids)) == 2
    assert chunk.batches[0].fresh
    assert named.batches[0].ids == ["a", "b"]
    assert not named.batches[0].fresh


def test_rows_are_chunked_by_queue_and_job_in_their_order():
    table = pyarrow.table({"q": ["a", "b", "a", "a", "b"], "j": ["x"] * 5, "n": range(5)})
    options = WriteOptions.read({"url": GIVEN["url"], "queueColumn": "q", "jobColumn": "j"})

    found = list(JobReader(JobColumns(options, table.column_names), 2).chunks(table.to_batches()))

    assert [(chunk.queue, [value["kwargs"]["n"] for value in values([chunk])]) for chunk in found] == [
        ("a", [0, 2]),
        ("b", [1, 4]),
        ("a", [3]),
    ]


def test_backoff_can_come_from_a_column():
    rule = pyarrow.struct(
        [("kind", pyarrow.string()), ("base", pyarrow.float64()), ("cap", pyarrow.float64())]
    )
    structs = pyarrow.array([{"kind": "linear", "base": 2.0, "cap": None}, None], rule)
    [chunk] = chunks_of({"n": [1, 2], "b": structs}, backoffColumn="b")
    [seconds] = chunks_of({"n": [1], "b": [1.5]}, backoffColumn="b")

    first, last = chunk.batches
    assert (first.options.backoff, first.options.backoff_given) == (Backoff(kind="linear", base=2_000), True)
    assert (last.options.backoff, last.options.backoff_given) == (Backoff(), False)
    assert seconds.batches[0].options.backoff == Backoff(kind="fixed", base=1_500, jitter=0.0)


def test_jobs_can_depend_on_jobs_of_their_own_or_another_queue():
    others = [[{"queue": "orders", "id": "order:1"}], None]
    table = pyarrow.table({"q": ["a", "b"], "n": [1, 2], "after": [["x", "y"], None], "others": others})

    def dependencies(**options):
        given = {"url": GIVEN["url"], "queueColumn": "q", "job": "j", **options}
        plan = JobColumns(WriteOptions.read(given), table.column_names)
        return [chunk.batches[0].options.depends_on for chunk in JobReader(plan).chunks(table.to_batches())]

    assert dependencies(dependsOnColumn="after") == [(("a", "x"), ("a", "y")), ()]
    assert dependencies(dependsOnColumn="others") == [(("orders", "order:1"),), ()]
    assert dependencies(dependsOn="x, y") == [(("a", "x"), ("a", "y")), (("b", "x"), ("b", "y"))]
    [chunk] = chunks_of({"n": [1]}, dependsOn="order:1")
    assert chunk.batches[0].options.depends_on == (("emails", "order:1"),)


WRONG = [
    ({"after": [7]}, {"dependsOnColumn": "after"}, "row 1 of partition 0: dependsOn: expected an id"),
    ({"b": ["often"]}, {"backoffColumn": "b"}, "row 1 of partition 0: backoff: 'often' is not one of"),
    ({"key": ["a", None]}, {"idColumn": "key"}, "row 2 of partition 0: id: expected a string"),
    ({"p": [1, 2**40]}, {"priorityColumn": "p"}, "row 2 of partition 0: priority: "),
    ({"payload": ["{", "{}"]}, {"payloadFormat": "json"}, "row 1 of partition 0: payload: not JSON"),
    ({"payload": [None, "{}"]}, {"payloadFormat": "json"}, "payload: expected JSON text, got NoneType"),
    ({"payload": ["x"]}, {"payloadFormat": "msgpack"}, "row 1 of partition 0: payload: expected binary"),
    ({"args": ["x"]}, {}, "row 1 of partition 0: args: expected an array"),
    ({"n": ["x" * 200]}, {"maxPayloadBytes": "100"}, "row 1 of partition 0: "),
]


@pytest.mark.parametrize(("columns", "options", "message"), WRONG)
def test_error_names_the_invalid_row(columns, options, message):
    with pytest.raises(RowError) as raised:
        chunks_of(columns, **options)

    assert message in str(raised.value)


def test_invalid_rows_can_be_skipped_and_are_counted():
    seen = []
    found = chunks_of({"key": ["a", None, "c", ""]}, idColumn="key", onError="skip", rows_of=seen)

    assert found[0].batches[0].ids == ["a", "c"]
    assert (seen[0].read, dict(seen[0].rejected)) == (4, {"id": 2})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idColumn": "ky"}, "idColumn: no column 'ky'; did you mean 'key'"),
        ({"excludeColumns": "key,other"}, "excludeColumns: no column 'other'"),
        ({"payloadColumn": "key", "argsColumn": "n"}, "payloadColumn can't be combined"),
    ],
)
def test_missing_columns_are_rejected_before_rows_are_read(options, message):
    with pytest.raises(OptionError) as raised:
        JobColumns(WriteOptions.read({**GIVEN, **options}), ["key", "n"])

    assert message in str(raised.value)


@pytest.mark.parametrize("size", [1, 3, 4, 1_000])
def test_rows_with_equal_options_give_the_same_jobs_as_other_rows(size):
    table = pyarrow.table({"payload": [b"\x01", None, b"\x02", b"\x03", b"\x04", None, b"\x05"]})
    options = WriteOptions.read({**GIVEN, "payloadFormat": "msgpack", "onError": "skip"})
    plan = JobColumns(options, table.column_names)
    found = []
    for kind in (JobReader, UniformJobReader):
        rows = kind(plan, size)
        chunks = list(rows.chunks([*table.to_batches(max_chunksize=5), *table.to_batches()]))
        found.append((values(chunks), rows.read, rows.rejected))
        assert all(chunk.size <= size for chunk in chunks)
        assert all(len({*batch.ids}) == len(batch.payloads) for chunk in chunks for batch in chunk.batches)

    assert found[0] == found[1]
    assert found[0][0] == [1, 2, 3, 4, 5] * 2


def test_rows_with_different_options_are_converted_one_by_one():
    def kind(mode="optional", **options):
        keyed = KeyedQueues(lambda queues: dict.fromkeys(queues, mode))
        return type(job_reader(JobColumns(WriteOptions.read({**GIVEN, **options}), ["n"]), 10, keyed))

    assert kind() is UniformJobReader
    assert kind(priority="5", delay="1", concurrency_key="g") is UniformJobReader
    assert kind("keyed", concurrency_key="g") is UniformJobReader
    assert kind("keyed") is JobReader
    assert kind(idColumn="n") is JobReader
    assert kind(priorityColumn="n") is JobReader


def test_key_modes_of_many_queues_are_looked_up_together():
    asked = []

    def modes(queues):
        asked.append(queues)
        return {queue: "keyed" if queue.startswith("k") else "optional" for queue in queues}

    table = pyarrow.table(
        {
            "q": [*(f"q{n}" for n in range(500)), *(f"k{n}" for n in range(500)), "q0", "", "q999"],
            "g": [None] * 500 + ["g"] * 499 + [None] * 4,
        }
    )
    given = {
        "queueColumn": "q",
        "concurrencyKeyColumn": "g",
        "onError": "skip",
        "url": "redis://h",
        "job": "send",
    }
    rows = job_reader(JobColumns(WriteOptions.read(given), table.column_names), 10, KeyedQueues(modes))
    jobs = sum(chunk.size > 0 for chunk in rows.chunks(table.to_batches()))

    assert [len(queues) for queues in asked] == [501, 1]
    assert asked[1] == ["q999"]
    assert (jobs, sum(rows.rejected.values())) == (500 + 499 + 1, 2)


def test_error_names_the_invalid_row_among_many():
    with pytest.raises(RowError, match="row 1502 of partition 0: payload: expected binary"):
        chunks_of({"payload": [b"\x01"] * 1_501 + [None]}, payloadFormat="msgpack")
