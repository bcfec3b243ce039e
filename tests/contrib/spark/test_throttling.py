"""Retries while the storage is unavailable."""

from contextlib import closing
from functools import partial

import pyarrow
import pytest

from djqueue.contrib.spark import throttling
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.throttling import LAST_RETRY_WAIT, StorageRetry, WriteThrottle
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.core.states import State

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough


class Flaky:
    """A call that fails a number of times, and then returns its argument."""

    def __init__(self, failures, error=None):
        self.failures = failures
        self.error = error or StorageUnavailableError("the server loads its data")
        self.asked = []

    def __call__(self, *args, **kwargs):
        self.asked.append((args, kwargs))
        if len(self.asked) <= self.failures:
            raise self.error
        return "answer"


def test_call_to_an_unavailable_storage_is_repeated_with_the_same_arguments():
    naps, storage = [], Flaky(3)

    assert StorageRetry(5, naps.append)(storage, "queue", ids=["a"]) == "answer"

    assert storage.asked == [(("queue",), {"ids": ["a"]})] * 4
    assert [wait <= nap <= 2 * wait for wait, nap in zip((0.5, 1, 2), naps, strict=True)] == [True] * 3


def test_error_is_raised_after_the_last_retry():
    naps, storage = [], Flaky(99)

    with pytest.raises(StorageUnavailableError, match="loads its data"):
        StorageRetry(7, naps.append)(storage)

    assert (len(storage.asked), len(naps)) == (8, 7)
    assert max(naps) <= 2 * LAST_RETRY_WAIT


def test_other_errors_are_not_retried():
    storage = Flaky(1, OptionError("priority: 'high' is not a number"))

    with pytest.raises(OptionError):
        StorageRetry(5, pytest.fail)(storage)

    assert len(storage.asked) == 1


ROWS = 50


@pytest.mark.parametrize(
    "step", ["stage_all", "commit", "begin_all", "publish_all", "end_all", "close", "forget_all"]
)
def test_lost_response_enqueues_no_row_twice(url, storage, monkeypatch, step):
    monkeypatch.setattr(throttling, "FIRST_RETRY_WAIT", 0.0)
    given = {"url": url, "queue": "emails", "job": "j", "batchSize": "10", "idColumn": "key"}
    made = Write(WriteOptions.read(given), ["key"])
    with closing(made.storage()) as one:
        place = type(one.capabilities.staging)
    plain, lost = getattr(place, step), []

    def loses(self, *args, **kwargs):
        answer = plain(self, *args, **kwargs)
        if not lost:
            lost.append(answer)
            raise StorageUnavailableError("the connection is lost")
        return answer

    monkeypatch.setattr(place, step, loses)
    rows = pyarrow.table({"key": [f"row {number}" for number in range(ROWS)]})

    report = made.commit([made.run_task("0.0", rows.to_batches(max_chunksize=10))])

    assert len(lost) == 1
    assert (report.inserted, report.duplicates) == (ROWS, 0)
    assert storage.reads.counts("emails")[State.WAITING] == ROWS


def test_task_fails_if_the_storage_stays_unavailable(url, storage, monkeypatch):
    monkeypatch.setattr(throttling, "FIRST_RETRY_WAIT", 0.0)
    given = {"url": url, "queue": "emails", "job": "j", "maxRetries": "2"}
    made = Write(WriteOptions.read(given), ["n"])
    with closing(made.storage()) as one:
        place = type(one.capabilities.staging)
    tries = []

    def away(self, *args, **kwargs):
        tries.append(args)
        raise StorageUnavailableError("the server loads its data")

    monkeypatch.setattr(place, "stage_all", away)

    with pytest.raises(StorageUnavailableError, match="loads its data"):
        made.run_task("0.0", pyarrow.table({"n": [1]}).to_batches())

    assert len(tries) == 3
    assert len({repr(one) for one in tries}) == 1


def test_rate_limit_counts_jobs_instead_of_chunks(redis_url, monkeypatch):
    options = WriteOptions.read({"url": redis_url, "queue": "q", "job": "j", "rateLimit": "10"})
    write = Write(options, ["b"])
    rows = pyarrow.table({"b": ["x" * 250_000] * 140})
    naps = []
    monkeypatch.setattr(
        "djqueue.contrib.spark.publishing.WriteThrottle", partial(WriteThrottle, sleep=naps.append)
    )

    report = write.commit([write.run_task("0.0", rows.to_batches())])

    # The chunks have two jobs each, and a step has 64 chunks.
    assert report.inserted == 140
    assert 0 < sum(naps) <= 12.8
