"""Dependencies of jobs, and rows with missing ones, on real storages."""

import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.testing.factories import a_waiting_job

QUEUE = "emails"
AFTER = [["first"], None, ["first", "nobody"], [], ["nobody"]]


def there(storage, queue, job_id):
    a_waiting_job(storage, queue=queue, id=job_id)


def test_job_waits_for_the_dependencies_of_its_row(storage, url):
    there(storage, QUEUE, "first")
    columns = {"key": ["a", "b", "c", "d", "e"], "after": AFTER}
    given = {"url": url, "queue": QUEUE, "job": "j", "idColumn": "key", "dependsOnColumn": "after"}
    made = Write(WriteOptions.read({**given, "onError": "skip"}), list(columns))

    report = made.commit([made.run_task("0.0", pyarrow.table(columns).to_batches())])

    assert (report.inserted, report.rejected) == (3, {"dependsOn": 2})
    states = storage.reads.states(QUEUE, columns["key"])
    assert states == [State.BLOCKED, State.WAITING, None, State.WAITING, None]


def test_dependencies_refer_to_the_queue_of_the_row(storage, url):
    there(storage, "one", "first")
    columns = {"q": ["one", "two", None], "key": ["a", "b", "c"]}
    given = {"url": url, "queueColumn": "q", "job": "j", "idColumn": "key", "dependsOn": "first"}
    made = Write(WriteOptions.read({**given, "onError": "skip"}), list(columns))

    report = made.commit([made.run_task("0.0", pyarrow.table(columns).to_batches())])

    assert (report.inserted, report.rejected) == (1, {"dependsOn": 1, "queue": 1})


def test_missing_common_dependency_is_rejected_before_tasks_start(storage, url):
    given = {"url": url, "queue": QUEUE, "job": "j", "dependsOn": "nobody"}

    with pytest.raises(OptionError, match="dependsOn: queue 'emails' has no job 'nobody'"):
        Write(WriteOptions.read(given), ["n"])


def test_job_becomes_a_dead_letter_if_its_dependency_is_removed_before_publication(storage, url):
    there(storage, QUEUE, "first")
    there(storage, QUEUE, "second")
    columns = {"key": ["a", "b", "c"], "after": [["first"], None, ["second"]]}
    given = {"url": url, "queue": QUEUE, "job": "j", "idColumn": "key", "dependsOnColumn": "after"}
    made = Write(WriteOptions.read(given), list(columns))
    told = made.run_task("0.0", pyarrow.table(columns).to_batches())
    storage.jobs.remove(QUEUE, ["first"])

    report = made.commit([told])

    assert (report.rows, report.inserted, report.rejected) == (3, 3, {})
    assert storage.reads.states(QUEUE, columns["key"]) == [State.FAILED, State.WAITING, State.BLOCKED]
    assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == ["a"]
