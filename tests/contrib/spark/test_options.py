"""Parsing and checking the options of a write."""

from datetime import timedelta

import pytest

from djqueue.contrib.spark import _texts as texts
from djqueue.contrib.spark.changing import ChangeColumns
from djqueue.contrib.spark.columns import JobColumns
from djqueue.contrib.spark.options import (
    NOT_PER_JOB,
    PER_JOB,
    WriteOptions,
    list_of_text,
    parse,
    text_of_list,
)
from djqueue.core.backoff import Backoff
from djqueue.core.errors import OptionError
from djqueue.core.options import PARSERS

GIVEN = {"url": "redis://127.0.0.1/0", "queue": "emails", "job": "shop.jobs.send"}


def test_option_names_are_not_case_sensitive():
    read = WriteOptions.read(
        {"URL": "redis://x", "QUEUE": "q", "Job": "j", "maxattempts": "5", "UNIQUEKEYCOLUMN": "k"}
    )

    assert (read.url, read.queue, read.job) == ("redis://x", "q", "j")
    assert read.constants == {"max_attempts": 5}
    assert read.columns == {"unique_key": "k"}


def test_option_values_are_parsed_from_text():
    read = WriteOptions.read(
        {
            **GIVEN,
            "priority": "-3",
            "delay": "1.5",
            "tags": "a, b",
            "lifo": "TRUE",
            "subject": "shop.order:7",
            "headers": '{"tenant": 7}',
            "runAtColumn": "at",
            "txnAppId": "nightly",
            "txnVersion": "7",
            "batchSize": "100",
        }
    )

    assert read.constants == {
        "priority": -3,
        "delay": 1.5,
        "tags": ["a", "b"],
        "lifo": True,
        "subject": "shop.order:7",
        "headers": {"tenant": 7},
    }
    assert (read.app, read.version, read.batch_size) == ("nightly", 7, 100)


@pytest.mark.parametrize("option", PER_JOB)
def test_every_job_option_can_come_from_a_column(option):
    head, *rest = option.split("_")
    name = head + "".join(word.title() for word in rest)

    more = {"uniqueKey": "k"} if option == "unique_ttl" else {}
    assert WriteOptions.read({**GIVEN, **more, f"{name}Column": "c"}).columns == {option: "c"}


WRONG = [
    ({"queu": "x"}, "unknown option 'queu'; did you mean 'queue'"),
    ({"prioritty": "1"}, "unknown option 'prioritty'; did you mean 'priority'"),
    ({"txnAppId": "a", "txnVersion": str(2**63)}, "txnVersion: must be at most 9,223,372,036,854,775,807"),
    ({"stageTtl": "1e300"}, "stageTtl: must be at most 31,536,000; got 1e300"),
    ({"writeId": ""}, "writeId: must have 1 to 200 characters; got 0"),
    ({"txnAppId": "", "txnVersion": "1"}, "txnAppId: must have 1 to 200 characters; got 0"),
    ({"priority": "high"}, "priority: 'high' is not a whole number"),
    ({"priority": "1e9"}, "priority: '1e9' is not a whole number"),
    ({"delay": "nan"}, "delay: "),
    ({"delay": "-1"}, "delay: "),
    ({"runAt": "tomorrow"}, "runAt: 'tomorrow' is not a time"),
    (
        {"runAt": "2026-01-31"},
        "runAt: '2026-01-31' has no time zone: use a time such as 2026-06-01T12:00:00Z",
    ),
    ({"delay": "5 minutes"}, "delay: '5 minutes' is not a number of seconds"),
    ({"durable": "true"}, "durable: not available for Spark's writes, because it only affects"),
    (
        {"enqueue_on_commit": "true"},
        "enqueue_on_commit: not available for Spark's writes, because Spark has no",
    ),
    ({"contentType": "text/plain"}, "contentType: not available for Spark's writes, because payloads"),
    ({"lifo": "maybe"}, "lifo: must be true or false; got 'maybe'"),
    ({"queue": "x" * 256}, "queue: must have 1 to 255 characters; got 256"),
    ({"txnAppId": "a"}, "txnAppId and txnVersion must be set together"),
    ({"txnVersion": "1"}, "txnAppId and txnVersion must be set together"),
    ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion: must be a number of at least 0; got -1"),
    ({"txnAppId": "a" * 201, "txnVersion": "1"}, "txnAppId: must have 1 to 200 characters; got 201"),
    ({"writeId": "w" * 201}, "writeId: must have 1 to 200 characters; got 201"),
    (
        {"deliveryMode": "direct"},
        "deliveryMode: not available for Spark's writes, because all rows are staged, which is faster and",
    ),
    ({"onError": "ignore"}, "onError: 'ignore' is not one of fail, skip, dead"),
    ({"operation": "replace"}, "operation: 'replace' is not one of enqueue, retry, cancel, delete, update"),
    ({"max_attempts": "3", "maxAttempts": "4"}, "maxAttempts: the option is set twice, also as max_attempts"),
    ({"backoff": "sometimes"}, "backoff: 'sometimes' is not one of fixed, linear, exponential"),
    ({"backoff": '{"kind"'}, "backoff: not JSON"),
    ({"headers": "{"}, "headers: not JSON"),
    ({"headers": "[1]"}, "headers: expected a dict of names and values, got a list"),
    ({"runAt": "noon"}, "runAt: 'noon' is not a time, such as 2026-06-01T12:00:00Z"),
    ({"keyMode": "all"}, "keyMode: 'all' is not one of optional, keyed, global"),
    ({"maxRetries": "-1"}, "maxRetries: must be a number of at least 0; got -1"),
    ({"batchSize": "0"}, "batchSize: must be a number of at least 1; got 0"),
    (
        {"batchSize": "1001"},
        "batchSize: must be at most 1,000, the jobs of one call to the storage; got 1001",
    ),
    ({"rateLimit": "inf"}, "rateLimit: must be a number of at least 0.001; got inf"),
    (
        {"concurrency_key": "g", "concurrencyKeyColumn": "c"},
        "concurrencyKey: set as an option and as a column",
    ),
    ({"maxAttempts": "0"}, "maxAttempts: must be from 1"),
    (
        {"queueColumn": "q"},
        "queue and queueColumn can't be combined: remove queue to take it from column 'q'",
    ),
    ({"job_column": "n"}, "job and jobColumn can't be combined: remove job to take it from column 'n'"),
    ({"path": "/data"}, "path: save() and load() take no path, because the option url names the storage"),
    ({"numPartitions": "5"}, "unknown option 'numPartitions': remove it"),
    ({"batchSize": "1.5"}, "batchSize: '1.5' is not a whole number"),
    ({"priority": "9" * 5_000}, "9… is not a whole number"),
    ({"maxQueueDepth": str(2**63)}, "maxQueueDepth: must be at most 9,223,372,036,854,775,807"),
    ({"includeColumns": "a", "excludeColumns": "a"}, "excludeColumns can't be combined with includeColumns"),
    ({"uniqueTtl": "5"}, "uniqueTtl: requires uniqueKey or uniqueKeyColumn"),
    ({"uniqueTtlColumn": "t"}, "uniqueTtl: requires uniqueKey or uniqueKeyColumn"),
]


@pytest.mark.parametrize(
    ("more", "message"), WRONG, ids=[next(iter(more)) + str(at) for at, (more, _) in enumerate(WRONG)]
)
def test_invalid_option_is_rejected_with_its_name(more, message):
    with pytest.raises(OptionError) as raised:
        WriteOptions.read({**GIVEN, **more})

    assert message in str(raised.value)


def test_option_names_can_be_in_snake_case():
    read = WriteOptions.read(
        {"url": "redis://x", "queue": "q", "job": "j", "id_column": "key", "max_attempts": "5"}
    )

    assert (read.columns, read.constants) == ({"id": "key"}, {"max_attempts": 5})


def test_backoff_is_seconds_a_kind_or_an_object():
    def backoff(text):
        return parse("backoff", WriteOptions.read({**GIVEN, "backoff": text}).constants["backoff"])

    assert backoff("1.5") == Backoff(kind="fixed", base=1_500, jitter=0.0)
    assert backoff("linear") == Backoff(kind="linear")
    assert backoff('{"kind": "linear", "base": 2, "cap": 60}') == Backoff(
        kind="linear", base=2_000, cap=60_000
    )


def test_dlq_is_an_alias_of_dead_in_on_error():
    assert WriteOptions.read({**GIVEN, "onError": "dlq"}).on_error == "dead"


def test_operation_needs_no_job_and_has_default_columns():
    read = WriteOptions.read({"url": "redis://x", "operation": "Retry"})

    assert (read.operation, read.queue_column, read.columns) == ("retry", "queue", {"id": "id"})
    assert WriteOptions.read({"url": "redis://x", "operation": "cancel", "queue": "q"}).queue_column is None


@pytest.mark.parametrize(
    ("operation", "more", "message"),
    [
        ("retry", {"job": "j"}, "job: not supported by the operation retry"),
        ("cancel", {"priority": "1"}, "priority: not supported by the operation cancel"),
        ("delete", {"stageTtl": "60"}, "stageTtl: not supported by the operation delete"),
        ("delete", {"dryRun": "true"}, "dryRun: not supported by the operation delete"),
        ("update", {"max_attempts": "3"}, "max_attempts: not supported by the operation update"),
        ("update", {"txnAppId": "a"}, "txnAppId: not supported by the operation update"),
        ("cancel", {"queue": "q", "queueColumn": "c"}, "queue and queueColumn can't be combined"),
        ("retry", {"backpressureTimeout": "9"}, "backpressureTimeout: requires maxQueueDepth"),
        ("cancel", {"batchSize": "5000"}, "batchSize: must be at most 1,000"),
        ("retry", {"onError": "dead"}, "onError: dead is supported only by the operation enqueue"),
    ],
)
def test_option_without_effect_on_the_operation_is_rejected(operation, more, message):
    with pytest.raises(OptionError) as raised:
        WriteOptions.read({"url": "redis://x", "operation": operation, **more})

    assert message in str(raised.value)


def test_key_mode_without_a_queue_is_rejected():
    given = {"url": "redis://x", "queueColumn": "q", "job": "j", "keyMode": "keyed"}

    with pytest.raises(
        OptionError, match="keyMode: sets the mode of one queue, so it requires the option queue"
    ):
        WriteOptions.read(given)


OF_A_PAYLOAD = [
    (["n"], {"payloadFormat": "json"}, "payloadFormat: json requires a payload column: set payloadColumn"),
    (
        ["payload", "n"],
        {"includeColumns": "n"},
        "includeColumns: has no effect, because jobs receive only column",
    ),
    (
        ["kwargs", "n"],
        {"excludeColumns": "n"},
        "excludeColumns: has no effect, because .* only column 'kwargs'",
    ),
    (["n", "p"], {"payloadColumn": "p", "excludeColumns": "n"}, "excludeColumns: has no effect"),
]


@pytest.mark.parametrize(("columns", "more", "message"), OF_A_PAYLOAD)
def test_option_without_effect_on_the_payload_is_rejected(columns, more, message):
    with pytest.raises(OptionError, match=message):
        JobColumns(WriteOptions.read({**GIVEN, **more}), columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "columns: the DataFrame has none, and Spark does not pass on rows without columns: add one"),
        (["id", "x", "id"], "columns: 2 columns are named 'id': rename or drop all but one"),
    ],
)
@pytest.mark.parametrize("kind", [JobColumns, ChangeColumns])
def test_columns_that_spark_does_not_pass_on_are_rejected(kind, columns, message):
    with pytest.raises(OptionError, match=message):
        kind(WriteOptions.read(GIVEN), columns)


@pytest.mark.parametrize("role", ["payload", "args", "kwargs"])
def test_columns_are_not_dropped_because_of_the_name_of_another_column(role):
    given = {**GIVEN, "priorityColumn": "p"}

    with pytest.raises(OptionError) as raised:
        JobColumns(WriteOptions.read(given), [role, "p", "n", "m"])

    assert str(raised.value) == (
        f"{role}: jobs would not receive column 'n' and 1 more column, because column {role!r} replaces the "
        f"others: drop these, or set {role}Column to {role!r} if jobs need only that, or rename it to pass "
        "all columns as arguments"
    )
    plan = JobColumns(WriteOptions.read({**given, f"{role}Column": role}), [role, "p", "n", "m"])
    assert plan.payload_columns == (role,)
    assert JobColumns(WriteOptions.read(given), [role, "p"]).payload_columns == (role,)


@pytest.mark.parametrize("text", ["", " , ", "[]"])
def test_included_columns_must_name_at_least_one_column(text):
    with pytest.raises(OptionError, match="includeColumns: names no column: name at least one, or remove"):
        WriteOptions.read({**GIVEN, "includeColumns": text})


def test_strings_with_commas_can_be_given_as_a_json_array():
    given = {**GIVEN, "tags": '["a,b", " c "]', "includeColumns": '["x,y"]', "dependsOn": "[1], a"}

    found = WriteOptions.read(given)

    assert found.constants == {"tags": ["a,b", " c "], "depends_on": ["[1]", "a"]}
    assert found.include == ("x,y",)


@pytest.mark.parametrize("strings", [[], ["a", "b"], ["a,b"], [" a"], [""], ['["a"]'], ["[a", "b]"]])
def test_string_lists_survive_conversion_to_text_and_back(strings):
    assert list_of_text(text_of_list(strings)) == strings


@pytest.mark.parametrize("operation", ["retry", "update"])
def test_excluded_columns_are_rejected_for_an_operation_without_a_payload(operation):
    given = {"url": "redis://x", "operation": operation, "excludeColumns": "n"}
    if operation == "update":
        given["priority"] = "3"

    with pytest.raises(OptionError, match="excludeColumns: has no effect on the operation"):
        ChangeColumns(WriteOptions.read(given), ["id", "queue", "n"])


def test_every_job_option_is_supported_or_explicitly_excluded():
    assert {*PER_JOB} | NOT_PER_JOB == {*PARSERS}


def test_repr_of_the_options_does_not_contain_the_url():
    assert "hunter2" not in repr(WriteOptions.read({**GIVEN, "url": "redis://:hunter2@127.0.0.1/0"}))


@pytest.mark.parametrize("missing", ["url", "queue", "job"])
def test_missing_required_option_is_rejected_with_its_name(missing):
    with pytest.raises(OptionError, match=f"{missing}: set"):
        WriteOptions.read({name: value for name, value in GIVEN.items() if name != missing})


def test_python_values_are_converted_to_option_texts():
    given = {
        "tags": ["a", "b"],
        "headers": {"tenant": 7},
        "backoff": {"kind": "linear", "base": 2},
        "delay": timedelta(minutes=1),
        "lifo": True,
        "concurrency_key": None,
        "keyPrefix": None,
    }

    read = WriteOptions.read(texts({**GIVEN, **given}, {"subject": None, "max_attempts": 5}))

    assert read.constants == {
        "tags": ["a", "b"],
        "headers": {"tenant": 7},
        "backoff": {"kind": "linear", "base": 2},
        "delay": 60.0,
        "lifo": True,
        "max_attempts": 5,
    }
    assert read.prefix == ""


@pytest.mark.parametrize("value", [[1], {"at": object()}])
def test_python_values_without_a_text_form_are_rejected(value):
    with pytest.raises(OptionError, match="tags: "):
        texts({"tags": value}, {})
