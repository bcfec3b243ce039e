"""Dependencies of jobs, and rows with missing ones, on real storages."""

import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage
from djqueue.testing.factories import a_waiting_job
from tests.contrib.spark.test_writing import take_in

QUEUE = "emails"
AFTER = [["first"], None, ["first", "nobody"], [], ["nobody"]]


def there(storage, queue, job_id):
    """Enqueue a job, and wait until it is visible."""
    a_waiting_job(storage, queue=queue, id=job_id)
    if isinstance(storage, DatabaseStorage):
        storage.active.gate.flush()


@pytest.mark.parametrize("delivery", ["staged", "direct"])
def test_a_job_waits_for_those_that_its_row_names(storage, url, delivery):
    there(storage, QUEUE, "first")
    columns = {"key": ["a", "b", "c", "d", "e"], "after": AFTER}
    given = {"url": url, "queue": QUEUE, "job": "j", "idColumn": "key", "dependsOnColumn": "after"}
    made = Write(WriteOptions.read({**given, "onError": "skip", "deliveryMode": delivery}), list(columns))

    report = made.commit([made.run_task("0.0", pyarrow.table(columns).to_batches())])
    take_in(storage)

    assert (report.inserted, report.rejected) == (3, {"dependsOn": 2})
    states = storage.reads.states(QUEUE, columns["key"])
    assert states == [State.BLOCKED, State.WAITING, None, State.WAITING, None]


def test_each_row_depends_on_jobs_of_its_own_queue(storage, url):
    there(storage, "one", "first")
    columns = {"q": ["one", "two", None], "key": ["a", "b", "c"]}
    given = {"url": url, "queueColumn": "q", "job": "j", "idColumn": "key", "dependsOn": "first"}
    made = Write(WriteOptions.read({**given, "onError": "skip"}), list(columns))

    report = made.commit([made.run_task("0.0", pyarrow.table(columns).to_batches())])

    assert (report.inserted, report.rejected) == (1, {"dependsOn": 1, "queue": 1})


def test_what_all_jobs_depend_on_is_looked_for_before_a_task(storage, url):
    given = {"url": url, "queue": QUEUE, "job": "j", "dependsOn": "nobody"}

    with pytest.raises(OptionError, match="dependsOn: queue 'emails' has no job 'nobody'"):
        Write(WriteOptions.read(given), ["n"])


def test_a_job_whose_dependency_goes_before_it_comes_is_a_dead_letter(storage, url):
    there(storage, QUEUE, "first")
    there(storage, QUEUE, "second")
    columns = {"key": ["a", "b", "c"], "after": [["first"], None, ["second"]]}
    given = {"url": url, "queue": QUEUE, "job": "j", "idColumn": "key", "dependsOnColumn": "after"}
    made = Write(WriteOptions.read(given), list(columns))
    told = made.run_task("0.0", pyarrow.table(columns).to_batches())
    storage.jobs.remove(QUEUE, ["first"])

    report = made.commit([told])
    take_in(storage)

    assert (report.rows, report.inserted, report.rejected) == (3, 3, {})
    assert storage.reads.states(QUEUE, columns["key"]) == [State.FAILED, State.WAITING, State.BLOCKED]
    assert [letter.id for letter in storage.reads.dead_letters(QUEUE)] == ["a"]
