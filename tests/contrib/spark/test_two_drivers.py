"""Two drivers that publish one write at once, and writes of which a part is already published."""

import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.core.states import State

QUEUE = "emails"
ROWS = 40
NAMED = {"txnAppId": "nightly", "txnVersion": "7"}


def write_to(url, **more):
    given = {"url": url, "job": "shop.send", "batchSize": "10", **NAMED, **more}
    if "queueColumn" not in given:
        given["queue"] = QUEUE
    return Write(WriteOptions.read(given), ["q", "n"])


def staged(write, queues=(QUEUE,)):
    table = pyarrow.table(
        {"q": [queue for queue in queues for _ in range(ROWS)], "n": range(ROWS * len(queues))}
    )
    return [write.run_task("0.0", table.to_batches())]


@pytest.mark.parametrize("step", ["publish_all", "end_all"])
def test_slower_of_two_drivers_reports_success(storage, url, monkeypatch, step):
    first, second = write_to(url), write_to(url)
    tasks, others = staged(first), staged(second)
    kind = type(storage.capabilities.staging)
    plain = getattr(kind, step)
    reports = []

    def is_overtaken(self, *args, **kwargs):
        if not reports:
            reports.append(None)
            reports[0] = second.commit(others)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(kind, step, is_overtaken)

    report = first.commit(tasks)

    assert reports[0].inserted == ROWS
    assert report.inserted == ROWS
    assert sum(storage.reads.counts(QUEUE)[state] for state in State) == ROWS
    saved = storage.capabilities.bulk_writes.get(first.id)
    assert (saved.state, saved.total.inserted) == ("done", ROWS)


def test_write_is_skipped_if_all_its_queues_are_published(storage, url):
    first = write_to(url, queueColumn="q")
    assert not first.commit(staged(first, ["a"])).skipped

    again = write_to(url, queueColumn="q")
    assert again.commit(staged(again, ["a"])).skipped
    assert storage.capabilities.bulk_writes.get(again.id).skipped


def test_write_without_rows_is_not_skipped(storage, url):
    write = write_to(url)

    report = write.commit([write.run_task("0.0", [])])

    assert (report.rows, report.skipped) == (0, False)
