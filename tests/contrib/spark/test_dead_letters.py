"""Invalid rows as dead letters, on real storages without Spark."""

from contextlib import closing
from copy import deepcopy

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.rows import MIN_SALVAGED, salvage_payload
from djqueue.contrib.spark.writing import Write
from djqueue.core.job import REJECTED
from djqueue.core.policies import KEYED, DeadLetterPolicy, QueuePolicy
from djqueue.testing.factories import batch, claim
from tests.contrib.spark.conftest import open_storage

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough

QUEUE = "emails"
COLUMNS = {
    "key": ["a", None, "c", "d"],
    "urgency": [1, 2, 2**40, 3],
    "name": ["ann", "bob", "cid", "dan"],
}


@pytest.fixture
def write(url):
    def make(columns=COLUMNS, **more):
        given = {"url": url, "queue": QUEUE, "job": "shop.send", "onError": "dead"}
        given |= {"idColumn": "key", "priorityColumn": "urgency", **more}
        return Write(WriteOptions.read({name: said for name, said in given.items() if said}), list(columns))

    return make


def run(made, columns=COLUMNS, part="0.0"):
    return deepcopy(made).run_task(part, pyarrow.table(columns).to_batches(max_chunksize=3))


def values(storage):
    """Return the rows in the dead letters' payloads."""
    letters = storage.reads.dead_letters(QUEUE)
    records = storage.reads.jobs(QUEUE, [letter.id for letter in letters])
    return [decode(record.payload, MSGPACK)["kwargs"] for record in records]


def test_invalid_rows_become_dead_letters_with_their_values(storage, write):
    made = write()
    told = run(made)
    assert storage.queues.names() == []

    report = made.commit([told])

    assert (report.rows, report.inserted, report.duplicates, report.dead_letters) == (4, 2, 0, 2)
    assert report.rejected == {"id": 1, "priority": 1}
    letters = storage.reads.dead_letters(QUEUE)
    assert [(letter.reason, letter.name) for letter in letters] == [(REJECTED, "shop.send")] * 2
    assert "id: expected a string, got None" in letters[0].error_message
    assert letters[1].error_message.startswith("priority: must be from")
    assert letters[1].error_type == "djqueue.core.errors.OptionError"
    assert values(storage) == [
        {"key": None, "urgency": 2, "name": "bob"},
        {"key": "c", "urgency": 2**40, "name": "cid"},
    ]
    assert sorted(one.id for one in claim(storage, 9, names=["shop.send"])) == ["a", "d"]
    assert str(report) == (
        "enqueue in emails: 4 rows; 2 inserted; 2 rejected (id: 1, priority: 1); "
        f"2 of these are dead letters (write {report.write})"
    )


def test_failed_write_leaves_no_dead_letters(storage, write):
    made = write()
    told = run(made)

    made.abort([told])

    assert storage.queues.names() == []
    assert storage.reads.dead_letters(QUEUE) == []


def test_repeated_write_adds_no_second_dead_letter(storage, write):
    named = {"txnAppId": "nightly", "txnVersion": "7"}
    reports = []
    for _ in range(2):
        made = write(**named)
        reports.append(made.commit([run(made)]))

    assert len(storage.reads.dead_letters(QUEUE)) == 2
    assert reports[1].skipped
    assert [report.dead_letters for report in reports] == [2, 2]


def test_repeated_task_adds_its_dead_letters_once(storage, write):
    made = write()
    run(made, part="0.0")

    report = made.commit([run(made, part="0.1")])

    assert len(storage.reads.dead_letters(QUEUE)) == 2
    assert (report.dead_letters, sum(report.rejected.values())) == (2, 2)


def test_row_without_a_queue_is_counted_without_a_dead_letter(storage, url):
    columns = {"q": [QUEUE, None, QUEUE], "j": ["send", "send", None]}
    given = {"url": url, "queueColumn": "q", "jobColumn": "j", "onError": "dead"}
    made = Write(WriteOptions.read(given), list(columns))

    report = made.commit([run(made, columns)])

    assert (report.inserted, report.rejected, report.dead_letters) == (1, {"queue": 1, "job": 1}, 1)
    assert [letter.name for letter in storage.reads.dead_letters(QUEUE)] == ["rejected"]


def test_dead_letter_has_the_options_of_the_write_and_no_unique_key(storage, write):
    made = write(maxAttempts="9", uniqueKey="one", priorityColumn=None, idColumn="key")
    made.commit([run(made, {**COLUMNS, "key": [None, None, None, None]})])

    [first, *_] = storage.reads.jobs(QUEUE, [letter.id for letter in storage.reads.dead_letters(QUEUE)])
    assert len(storage.reads.dead_letters(QUEUE)) == 4
    assert (first.options.max_attempts, first.options.unique_key) == (9, None)


def test_dead_letters_of_a_write_expire_like_others(storage, write):
    made = write()
    made.commit([run(made)])

    [letter, _] = storage.reads.dead_letters(QUEUE)
    assert letter.expires_at - letter.entered_at == DeadLetterPolicy().ttl


@pytest.mark.parametrize("target", [{"queue": QUEUE}, {"queueColumn": "q"}])
def test_queue_with_required_keys_rejects_rows_without_a_key(url, target):
    with closing(open_storage(url, policies={QUEUE: QueuePolicy(key_mode=KEYED)})) as owner:
        owner.enqueue([batch(1, queue=QUEUE, concurrency_key="g", name="other")])
        columns = {"q": [QUEUE, QUEUE], "owner": ["ann", None]}
        given = {"url": url, "job": "send", "concurrencyKeyColumn": "owner", "onError": "dead"}
        made = Write(WriteOptions.read({**given, **target}), list(columns))

        report = made.commit([run(made, columns)])

        assert (report.inserted, report.rejected, report.dead_letters) == (1, {"concurrency_key": 1}, 1)
        assert len(owner.reads.dead_letters(QUEUE)) == 1


def test_new_redis_queue_gets_the_configured_key_mode(redis_url):
    columns = {"owner": ["ann"]}
    given = {
        "url": redis_url,
        "queue": QUEUE,
        "job": "send",
        "concurrencyKeyColumn": "owner",
        "keyMode": "keyed",
    }
    made = Write(WriteOptions.read(given), list(columns))

    made.commit([run(made, columns)])

    with closing(open_storage(redis_url)) as storage:
        assert storage.reads.concurrency_keys(QUEUE, 0, ()).mode == "keyed"


def test_values_that_cannot_be_encoded_are_kept_as_text():
    row = {"n": 1, "odd": {1.5: object}, "huge": "x" * (MIN_SALVAGED + 1), "small": "y"}

    kept = decode(salvage_payload(row, 100), MSGPACK)["kwargs"]

    assert (kept["n"], kept["small"]) == (1, "y")
    assert kept["odd"] == repr(row["odd"])
    assert kept["huge"] == f"({MIN_SALVAGED + 6} bytes, omitted)"
