"""Waiting for the jobs of a bulk write."""

import random

import pyarrow
import pytest

from djqueue.contrib.spark import WriteTimeoutError, wait
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.waiting import SAMPLE, WriteOutcome, WriteWait
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError, ResultTimeoutError, StorageError
from djqueue.storage.bulkwrites import FAILED, PUBLISHING, BulkWriteReport, QueueShare
from djqueue.testing.factories import batch, cancelling, claim, completing, failing, finish

NAME = "load-7"


def load(url, keys, **given):
    """Write jobs with these unique keys, and return the report."""
    options = {"url": url, "queue": "mail", "job": "handler", "uniqueKeyColumn": "n", **given}
    write = Write(WriteOptions.read(options), ["n"])
    return write.commit([write.run_task("0.0", pyarrow.table({"n": keys}).to_batches())])


class Waiter:
    """Time that passes while a wait sleeps, and what happens meanwhile."""

    def __init__(self, *events):
        self.events = list(events)
        self.now = 0.0
        self.naps = []
        self.lines = []

    def sleep(self, seconds):
        self.now += seconds
        self.naps.append(seconds)
        if self.events:
            self.events.pop(0)()

    def run(self, storage, write=NAME, timeout=None):
        made = WriteWait(storage, write, self.lines.append, lambda: self.now, self.sleep)
        made._random = random.Random(1)
        return made.run(timeout)


def end(storage, count, outcome=completing):
    """Return a function that ends this many jobs."""
    return lambda: finish(storage, *map(outcome, claim(storage, count)))


def test_wait_returns_the_number_of_jobs_by_outcome(url, storage):
    load(url, ["a", "b", "c", "d", "e"], writeId=NAME)
    storage.enqueue([batch(3, queue="mail", priority=-1)])
    [gone] = claim(storage)
    waiter = Waiter(
        end(storage, 1),
        end(storage, 1, failing),
        end(storage, 1, cancelling),
        lambda: finish(storage, completing(gone)) and storage.jobs.remove("mail", [gone.id]),
        end(storage, 1),
    )

    outcome = waiter.run(storage)

    assert outcome == WriteOutcome(write=NAME, completed=2, failed=1, cancelled=1, removed=1)
    assert str(outcome) == "load-7: 2 completed, 1 failed, 1 cancelled, 1 removed"
    assert waiter.lines[0] == "load-7: 5 unfinished"
    assert "load-7: about 3 of 5 unfinished" in waiter.lines
    assert waiter.lines[-1] == str(outcome)


def test_wait_reads_only_a_sample_between_two_counts(url, storage, monkeypatch):
    many = 3 * SAMPLE
    load(url, [str(number) for number in range(many)], writeId=NAME)
    counted, sampled = [], []
    count, states = WriteWait._count, WriteWait._unfinished
    monkeypatch.setattr(WriteWait, "_count", lambda *args: counted.append(args) or count(*args))
    monkeypatch.setattr(
        WriteWait, "_unfinished", lambda wait, sample: sampled.append(len(sample)) or states(wait, sample)
    )
    waiter = Waiter(*[end(storage, 30)] * 10)

    assert waiter.run(storage).completed == many
    assert (len(counted), max(sampled)) == (2, SAMPLE)
    assert waiter.naps[0] < max(waiter.naps) or len(waiter.naps) == len(sampled)


def test_timeout_has_the_outcome_so_far(url, storage):
    load(url, ["a", "b"], writeId=NAME)
    waiter = Waiter(end(storage, 1))

    with pytest.raises(WriteTimeoutError, match=r"within 20 s: load-7: 1 completed, 1 unfinished$") as raised:
        waiter.run(storage, timeout=20)

    assert isinstance(raised.value, ResultTimeoutError)
    assert raised.value.outcome == WriteOutcome(write=NAME, completed=1, unfinished=1)
    assert waiter.now == pytest.approx(20)


def test_write_is_found_by_its_report_or_its_application(url, storage):
    report = load(url, ["a"], txnAppId="nightly", txnVersion="1")
    finish(storage, *map(completing, claim(storage)))
    lines = []

    assert wait(report, url=url, progress=lines.append).completed == 1
    assert wait("nightly", url=url, progress=None).completed == 1
    assert lines == [f"{report.write}: 1 completed"]


def test_repeated_write_waits_for_the_jobs_of_the_first_one(url, storage):
    for _ in range(2):
        report = load(url, ["a", "b"], txnAppId="nightly", txnVersion="1")
    assert report.skipped

    outcome = Waiter(end(storage, 1), end(storage, 1)).run(storage, report.write)

    assert (outcome.completed, outcome.removed) == (2, 0)


def test_wait_includes_the_publishing_of_the_write(storage):
    reports = storage.capabilities.bulk_writes
    report = BulkWriteReport(NAME, NAME, 0, 1, shares={"mail": QueueShare(4, 1)})
    reports.keep(report._replace(state=PUBLISHING))
    waiter = Waiter(lambda: reports.keep(report._replace(state="done")))

    assert waiter.run(storage).total == 0
    assert waiter.lines == ["load-7: publishing, 25% published", "load-7: no jobs"]


def test_failed_write_ends_the_wait(storage):
    storage.capabilities.bulk_writes.keep(
        BulkWriteReport(NAME, NAME, 0, 1, state=FAILED, error="The tasks failed")
    )

    with pytest.raises(StorageError, match="The bulk write 'load-7' failed: The tasks failed"):
        Waiter().run(storage)


def test_unknown_write_is_refused_with_a_similar_name(url, storage):
    load(url, ["a"], writeId=NAME)

    with pytest.raises(OptionError, match="no report of a bulk write 'load7'; did you mean 'load-7'"):
        wait("load7", url=url)


def test_write_that_changed_jobs_has_no_outcome(storage):
    storage.capabilities.bulk_writes.keep(BulkWriteReport(NAME, NAME, 0, 1, state="done", operation="retry"))

    with pytest.raises(OptionError, match=r"write: 'load-7' has changed existing jobs \(retry\)"):
        Waiter().run(storage)
