"""Operations on existing jobs, one per row of a DataFrame, on real storages without Spark."""

from copy import deepcopy
from datetime import UTC, datetime

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.testing.factories import (
    NAME,
    PAYLOAD,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    job,
)

QUEUE = "emails"
ERROR = ("djqueue.core.errors.OptionError", "priority: 'high' is not a number")


@pytest.fixture
def change(url):
    """Return a function that runs an operation on two record batches, and returns the report."""

    def do(operation, columns, again=False, **options):
        table = pyarrow.table(columns)
        given = {"url": url, "operation": operation, "queue": QUEUE, **options}
        if options.get("queueColumn") or "queue" in columns:
            del given["queue"]
        made = Write(WriteOptions.read(given), table.column_names)
        if again:
            deepcopy(made).run_task("0.0", table.to_batches(max_chunksize=2))
        return made.commit([deepcopy(made).run_task("0.1", table.to_batches(max_chunksize=2))])

    return do


def test_dead_letters_are_retried(storage, change):
    a_failed_job(storage, queue=QUEUE, id="a")
    a_failed_job(storage, queue=QUEUE, id="b")
    a_completed_job(storage, queue=QUEUE, id="done")

    report = change("retry", {"id": ["a", "nobody", "done", "b"]}, batchSize="3")

    assert (report.operation, report.rows) == ("retry", 4)
    assert report.answers == {"retried": 2, "not_found": 1, "not_failed": 1}
    assert (report.inserted, report.duplicates, report.rejected) == (0, 0, {})
    assert storage.reads.dead_letters(QUEUE) == []


def test_repeated_task_changes_no_further_jobs(storage, change):
    a_failed_job(storage, queue=QUEUE, id="a")

    report = change("retry", {"id": ["a"]}, again=True)

    assert report.answers == {"not_failed": 1}
    assert [one.id for one in claim(storage, 5)] == ["a"]


def test_queue_column_determines_the_queue_of_each_row(storage, change):
    a_waiting_job(storage, queue="one", id="a")
    a_waiting_job(storage, queue="two", id="a")

    report = change("delete", {"queue": ["one", "two", "two"], "id": ["a", "a", "b"]})

    assert report.answers == {"removed": 2, "not_removed": 1}
    assert storage.reads.page("one", None, 9) == storage.reads.page("two", None, 9) == []


def test_jobs_are_cancelled(storage, change):
    a_waiting_job(storage, queue=QUEUE, id="waits", name="other")
    an_active_job(storage, queue=QUEUE, id="runs")

    report = change("cancel", {"key": ["waits", "runs", "nobody"]}, idColumn="key")

    assert report.answers == {"cancelled": 1, "requested": 1, "not_found": 1}
    assert storage.reads.states(QUEUE, ["waits", "runs"]) == [State.CANCELLED, State.ACTIVE]


def test_update_sets_the_values_of_each_row_on_pending_jobs(storage, change):
    for name in ("a", "b", "c"):
        a_waiting_job(storage, queue=QUEUE, id=name)
    at = datetime(2096, 6, 1, 12, tzinfo=UTC)

    report = change(
        "update",
        {
            "id": ["a", "b", "c", "gone"],
            "urgency": [7, None, None, 1],
            "at": [None, at, None, None],
            "args": [[1], None, [3], None],
        },
        priorityColumn="urgency",
        runAtColumn="at",
    )

    assert report.answers == {"updated": 3, "not_updated": 1}
    first, second, third = storage.reads.jobs(QUEUE, ["a", "b", "c"])
    assert (first.options.priority, decode(first.payload, MSGPACK)["args"]) == (7, [1])
    assert (second.state, second.run_at) == (State.DELAYED, int(at.timestamp() * 1_000))
    assert second.payload == PAYLOAD
    assert decode(third.payload, MSGPACK)["args"] == [3]


def test_constant_value_applies_to_all_rows(storage, change):
    a_waiting_job(storage, queue=QUEUE, id="a")
    a_waiting_job(storage, queue=QUEUE, id="b")

    report = change("update", {"id": ["a", "b"], "note": ["x", "y"]}, priority="5")

    assert report.answers == {"updated": 2}
    assert [one.options.priority for one in storage.reads.jobs(QUEUE, ["a", "b"])] == [5, 5]
    # Other columns don't become the payload here.
    assert job(storage, "a", QUEUE).payload == PAYLOAD


def test_row_without_values_is_counted_as_unchanged(storage, change):
    a_waiting_job(storage, queue=QUEUE, id="a")
    columns = {"id": ["a"], "p": pyarrow.array([None], pyarrow.int64())}

    assert change("update", columns, priorityColumn="p").answers == {"unchanged": 1}


def test_dead_letter_can_be_retried_with_a_new_payload(storage, change):
    storage.enqueue([batch(ids=["row"], queue=QUEUE, payloads=[b"bad"], rejected=ERROR)])
    a_failed_job(storage, queue=QUEUE, id="failed")
    a_waiting_job(storage, queue=QUEUE, id="waits", name="other")

    assert change("retry", {"id": ["row"]}).answers == {"rejected": 1}
    columns = {"id": ["row", "waits", "nobody", "failed"], "payload": ["good", "x", "x", None]}
    report = change("retry", columns)

    assert report.answers == {"retried": 2, "waiting": 1, "not_found": 1}
    assert sorted((one.id, one.payload) for one in claim(storage, 5, names=[NAME])) == [
        ("failed", PAYLOAD),
        ("row", encode("good", MSGPACK)),
    ]


def test_dry_run_of_a_retry_changes_no_job(storage, change):
    a_failed_job(storage, queue=QUEUE, id="a")

    report = change("retry", {"id": ["a", "nobody"]}, dryRun="true")

    assert report.answers == {"retried": 1, "not_found": 1}
    assert job(storage, "a", QUEUE).state is State.FAILED


def test_rows_without_an_id_can_be_skipped(storage, change):
    a_waiting_job(storage, queue=QUEUE, id="a")

    report = change("delete", {"id": ["a", None]}, onError="skip")

    assert (report.answers, report.rejected, report.rows) == ({"removed": 1}, {"id": 1}, 2)


@pytest.mark.parametrize(
    ("operation", "columns", "options", "message"),
    [
        ("retry", ["key"], {}, "idColumn: no column 'id'"),
        ("update", ["id", "note"], {}, "update: no change was given"),
        ("retry", ["id", "payload"], {"dryRun": "true"}, "dryRun can't be combined with a payload"),
    ],
)
def test_invalid_change_is_rejected_before_tasks_start(url, operation, columns, options, message):
    given = WriteOptions.read({"url": url, "operation": operation, "queue": QUEUE, **options})

    with pytest.raises(OptionError) as raised:
        Write(given, columns)

    assert message in str(raised.value)


def test_report_counts_the_outcomes_of_the_jobs(storage, change):
    a_waiting_job(storage, queue=QUEUE, id="a")

    report = change("cancel", {"id": ["a", None]}, onError="skip", writeId="tonight")

    assert str(report) == "cancel in emails: 2 rows; 1 cancelled; 1 rejected (id: 1) (write tonight)"
