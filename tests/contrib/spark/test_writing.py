"""Writes, on the driver and in tasks, with faults, on real storages without Spark."""

from contextlib import closing
from copy import deepcopy
from itertools import count

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.reporting import NAMED_QUEUES, WriteReport
from djqueue.contrib.spark.throttling import WriteThrottle
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError, StorageUnavailableError
from djqueue.core.policies import KEYED, QueuePolicy
from djqueue.core.states import State
from djqueue.storage.staging import ChunkMissingError, Counts
from djqueue.testing.factories import batch, claim
from tests.contrib.spark.conftest import leftovers, open_storage

QUEUE = "emails"
ROWS = 50
SIZE = 10


class Died(Exception):
    """Raised to simulate the end of a process."""


@pytest.fixture
def write(url):
    """Return a function that creates writes of one column `n`."""

    def make(**more):
        given = {"url": url, "queue": QUEUE, "job": "shop.send", "batchSize": str(SIZE), **more}
        return Write(WriteOptions.read(given), ["n"])

    return make


def rows(first=0, many=ROWS):
    return pyarrow.table({"n": range(first, first + many)}).to_batches(max_chunksize=7)


def tasks(made, parts=3):
    """Return the reports of a write's tasks, each with a copy of the write."""
    return [deepcopy(made).run_task(f"{at}.{at}", rows(at * ROWS)) for at in range(parts)]


def numbers(storage, queue=QUEUE):
    found = []
    for job in storage.reads.page(queue, State.WAITING, 10_000):
        found.append(decode(job.payload, MSGPACK)["kwargs"]["n"])
    return sorted(found)


@pytest.mark.parametrize(
    ("queues", "where"),
    [
        (0, "enqueue: 5 rows; 5 inserted (write w1)"),
        (2, "enqueue in q00, q01: 5 rows; 5 inserted (write w1)"),
        (NAMED_QUEUES, "q08, q09: 5 rows"),
        (20, "enqueue in 20 queues (q00, q01, q02, q03, q04, q05, q06, q07, q08, q09, …): 5 rows"),
    ],
)
def test_summary_lists_only_the_first_of_many_queues(queues, where):
    names = tuple(f"q{number:02}" for number in range(queues))
    counts = Counts(queued=5)

    report = WriteReport(write="w1", app="a", version=1, queues=names, rows=5, counts=counts, rejected={})

    assert where in str(report)


def test_write_enqueues_each_row_once_in_order(storage, write):
    made = write()
    told = tasks(made)
    assert numbers(storage) == []

    report = made.commit(list(reversed(told)))

    assert (report.rows, report.inserted, report.duplicates, report.rejected) == (150, 150, 0, {})
    assert [
        decode(one.payload, MSGPACK)["kwargs"]["n"] for one in claim(storage, 200, names=["shop.send"])
    ] == [*range(150)]


def test_rows_of_a_failed_attempt_of_a_repeated_task_are_not_published(storage, write):
    made = write()
    lost = deepcopy(made)
    rest = iter(rows())

    def dies():
        yield next(rest)
        yield next(rest)
        raise Died

    with pytest.raises(Died):
        lost.run_task("0.0", dies())
    told = [deepcopy(made).run_task("0.1", rows())]

    made.commit(told)

    assert numbers(storage) == [*range(ROWS)]
    assert leftovers(storage) == []


def test_failed_write_leaves_no_staged_rows(storage, write):
    made = write()
    told = tasks(made)

    made.abort(told[:1])

    assert numbers(storage) == []
    assert leftovers(storage) == []


STEPS = ("commit", "begin_all", "publish_all", "end_all", "close", "forget_all")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_write_of_a_dead_driver_is_finished_by_the_next_driver(storage, write, monkeypatch, step, when):
    named = {"txnAppId": "nightly", "txnVersion": "7"}
    made = write(**named)
    told = tasks(made)
    staging = type(storage.capabilities.staging)
    plain = getattr(staging, step)

    def dies(self, *args, **kwargs):
        if step == "publish_all":  # In the middle of it.
            plain(self, args[0][:7])
        elif when == "after":
            plain(self, *args, **kwargs)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(staging, step, dies)
        with pytest.raises(Died):
            made.commit(told)
        patch.setattr(staging, step, plain)
        made.abort(told)

    again = write(**named)
    report = again.commit(tasks(again))

    assert numbers(storage) == [*range(150)]
    assert report.inserted == 150
    assert leftovers(storage) == []


def test_published_version_enqueues_nothing_again(storage, write):
    for version, first in (("7", False), ("7", True), ("6", True)):
        made = write(txnAppId="nightly", txnVersion=version)
        report = made.commit(tasks(made))
        assert report.skipped is first
        assert ("nothing enqueued: version" in str(report)) is first
        assert ("150 inserted" in str(report)) is not first
    assert numbers(storage) == [*range(150)]
    assert leftovers(storage) == []

    made = write(txnAppId="nightly", txnVersion="8")
    assert not made.commit(tasks(made)).skipped
    assert len(numbers(storage)) == 300


def test_error_for_an_expired_partial_write_names_the_remedy(storage, write, monkeypatch):
    dies_amid_publish(storage, write, monkeypatch)

    def gone(self, chunks):
        raise ChunkMissingError("chunk 0 is missing")

    monkeypatch.setattr(type(storage.capabilities.staging), "publish_all", gone)
    again = write(txnAppId="nightly", txnVersion="7")
    with pytest.raises(ChunkMissingError, match=r"chunk 0 is missing.*a txnAppId other than 'nightly'"):
        again.commit(tasks(again))
    assert len(numbers(storage)) == 7 * SIZE


def test_write_without_remaining_rows_does_not_block_the_next(storage, write, monkeypatch):
    made = write(txnAppId="nightly", txnVersion="7")
    told = tasks(made)
    dies_at("begin_all", storage, monkeypatch, lambda: made.commit(told))
    storage.capabilities.staging.forget(QUEUE, made.app, made.id)

    again = write(txnAppId="nightly", txnVersion="7")
    assert again.commit(tasks(again)).inserted == 150

    assert numbers(storage) == [*range(150)]
    assert leftovers(storage) == []


@pytest.mark.parametrize("named", [{}, {"txnAppId": "nightly", "txnVersion": "7"}])
def test_sweep_publishes_the_write_of_a_silent_driver(storage, write, monkeypatch, named):
    made = dies_amid_publish(storage, write, monkeypatch, **named)

    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()

    assert numbers(storage) == [*range(150)]
    assert leftovers(storage) == []
    report = storage.capabilities.bulk_writes.get(made.id)
    assert (report.state, report.inserted, report.error) == ("done", 150, "")


def test_sweep_does_not_publish_the_write_of_a_live_driver(storage, write, monkeypatch):
    dies_amid_publish(storage, write, monkeypatch)

    storage.sweep()

    assert len(numbers(storage)) == 7 * SIZE


def test_sweep_and_slow_driver_publish_each_row_once(storage, write, monkeypatch):
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    staging = type(storage.capabilities.staging)
    plain = staging.publish_all

    def slow(self, chunks):
        found = plain(self, chunks[:7])
        with monkeypatch.context() as patch:
            patch.setattr(staging, "publish_all", plain)
            storage.sweep()
        return [*found, *plain(self, chunks[7:])]

    made = write()
    told = tasks(made)
    monkeypatch.setattr(staging, "publish_all", slow)

    assert made.commit(told).inserted == 150

    assert numbers(storage) == [*range(150)]


def test_sweep_removes_a_write_without_remaining_rows(storage, write, monkeypatch):
    made = write()
    told = tasks(made)
    dies_at("begin_all", storage, monkeypatch, lambda: made.commit(told))
    storage.capabilities.staging.forget(QUEUE, made.app, made.id)

    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()

    assert numbers(storage) == []
    report = storage.capabilities.bulk_writes.get(made.id)
    assert (report.state, report.error[:17]) == ("failed", "ChunkMissingError")
    assert storage.capabilities.staging.adopt(-1, 10) == []


def test_unnamed_write_that_fails_before_its_first_job_is_withdrawn(storage, write, monkeypatch):
    made = write()
    told = tasks(made)
    dies_at("publish_all", storage, monkeypatch, lambda: made.commit(told))
    made.abort(told)

    withdrawn = storage.capabilities.bulk_writes.get(made.id)
    assert (withdrawn.state, withdrawn.inserted) == ("failed", 0)
    assert withdrawn.error
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()
    again = write()
    again.commit(tasks(again))

    assert numbers(storage) == [*range(150)]
    assert leftovers(storage) == []


def test_unnamed_write_adopted_by_a_sweep_is_not_withdrawn(storage, write, monkeypatch):
    made = write()
    told = tasks(made)
    dies_at("publish_all", storage, monkeypatch, lambda: made.commit(told))
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    assert [plan.write for plan in storage.capabilities.staging.adopt(-1, 10)] == [made.id]

    made.abort(told)

    assert storage.capabilities.bulk_writes.get(made.id).state == "unfinished"
    storage.sweep()
    assert numbers(storage) == [*range(150)]
    assert storage.capabilities.bulk_writes.get(made.id).state == "done"
    assert leftovers(storage) == []


def test_incomplete_write_is_abandoned_after_a_week_and_never_published_twice(storage, write, monkeypatch):
    made = dies_amid_publish(storage, write, monkeypatch)
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    staging = type(storage.capabilities.staging)

    def gone(self, chunks):
        raise ChunkMissingError("chunk 0 is missing")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish_all", gone)
        storage.sweep()
        assert storage.capabilities.staging.adopt(-1, 10) == [], "it is left for a week"
        patch.setattr(staging, "leave", lambda self, plan: True)  # The week is over.
        again = write(txnAppId="nightly", txnVersion="7")
        told = tasks(again)
        with pytest.raises(ChunkMissingError):
            again.commit(told)
        again.abort(told)
        storage.sweep()

    left = storage.capabilities.bulk_writes.get(made.id)
    assert (left.state, left.inserted) == ("unfinished", 7 * SIZE)
    assert "chunk 0 is missing. The rest was given up" in left.error
    again = write(txnAppId="nightly", txnVersion="7")
    report = again.commit(tasks(again))
    assert (report.skipped, report.inserted, len(numbers(storage))) == (True, 7 * SIZE, 7 * SIZE)
    later = write(txnAppId="nightly", txnVersion="8")
    assert later.commit(tasks(later)).inserted == 150
    assert leftovers(storage) == []


def test_second_frame_with_a_published_name_is_skipped(storage, write):
    named = {"txnAppId": "nightly", "txnVersion": "7"}
    first, second = write(**named), write(**named, job="shop.other")
    first.commit([first.run_task("0.0", rows())])

    assert second.commit([second.run_task("0.0", rows(ROWS))]).skipped
    assert numbers(storage) == [*range(ROWS)]


def dies_amid_publish(storage, write, monkeypatch, **named):
    """Publish seven chunks, and die. Returns the write."""
    made = write(**(named or {"txnAppId": "nightly", "txnVersion": "7"}))
    told = tasks(made)
    staging = type(storage.capabilities.staging)
    plain = staging.publish_all

    def dies(self, chunks):
        plain(self, chunks[:7])
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(staging, "publish_all", dies)
        with pytest.raises(Died):
            made.commit(told)
    return made


def died(*_args):
    raise Died


def dies_at(step, storage, monkeypatch, commit):
    """The driver dies at a step of its commit."""
    with monkeypatch.context() as patch:
        patch.setattr(type(storage.capabilities.staging), step, died)
        with pytest.raises(Died):
            commit()


def test_write_can_enqueue_to_several_queues(storage, url):
    options = WriteOptions.read({"url": url, "queueColumn": "q", "job": "j", "batchSize": "3"})
    made = Write(options, ["q", "n"])
    table = pyarrow.table({"q": ["a", "b"] * 10, "n": range(20)})

    report = made.commit([made.run_task("0.0", table.to_batches())])

    assert (report.queues, report.inserted) == (("a", "b"), 20)
    assert numbers(storage, "a") == [*range(0, 20, 2)]
    assert numbers(storage, "b") == [*range(1, 20, 2)]


def test_task_stages_chunks_of_many_queues_in_few_calls(storage, url, monkeypatch):
    made = Write(WriteOptions.read({"url": url, "queueColumn": "q", "jobColumn": "j"}), ["q", "j", "n"])
    with closing(made.storage()) as one:
        place = type(one.capabilities.staging)
    plain, calls = place.stage_all, []

    def counted(self, write, part, chunks, *more):
        calls.append(len(chunks))
        return plain(self, write, part, chunks, *more)

    monkeypatch.setattr(place, "stage_all", counted)
    rows = pyarrow.table(
        {
            "q": [f"q{number % 125}" for number in range(500)],
            "j": ["even" if number % 250 < 125 else "odd" for number in range(500)],
            "n": list(range(500)),
        }
    )

    report = made.commit([made.run_task("0.0", rows.to_batches())])

    assert report.inserted == 500
    assert sum(calls) == 250
    assert len(calls) == 3
    assert {storage.reads.counts(f"q{number}")[State.WAITING] for number in range(125)} == {4}
    assert leftovers(storage) == []


def test_inserted_duplicate_and_rejected_rows_add_up(storage, url):
    storage.enqueue([batch(2, queue=QUEUE, ids=["a", "b"])])
    given = {"url": url, "queue": QUEUE, "job": "j", "idColumn": "key", "onError": "skip"}
    made = Write(WriteOptions.read(given), ["key"])

    report = made.commit(
        [made.run_task("0.0", pyarrow.table({"key": ["a", "c", None, "c", "d"]}).to_batches())]
    )

    assert (report.rows, report.inserted, report.duplicates, report.rejected) == (5, 2, 2, {"id": 1})


def test_dry_run_writes_nothing(storage, write):
    made = write(dryRun="true")
    report = made.commit(tasks(made))

    assert (report.rows, report.inserted) == (150, 0)
    assert storage.queues.names() == []
    assert leftovers(storage) == []


def test_queue_with_required_keys_is_checked_before_tasks_start(url, write):
    policies = {QUEUE: QueuePolicy(key_mode=KEYED)}
    with closing(open_storage(url, policies=policies)) as owner:
        owner.enqueue([batch(1, queue=QUEUE, concurrency_key="g")])

    with pytest.raises(
        OptionError, match=r"concurrencyKey: required for jobs of queue 'emails'.*concurrencyKeyColumn"
    ):
        write()


def test_queue_with_required_keys_accepts_jobs_with_keys(url):
    given = {"url": url, "queue": QUEUE, "job": "j", "concurrencyKeyColumn": "n"}
    with closing(open_storage(url, policies={QUEUE: QueuePolicy(key_mode=KEYED)})) as owner:
        owner.enqueue([batch(1, queue=QUEUE, concurrency_key="g")])

        made = Write(WriteOptions.read(given), ["n"])
        report = made.commit([made.run_task("0.0", pyarrow.table({"n": ["a", "b"]}).to_batches())])

    assert report.inserted == 2


def test_error_for_an_unreachable_server_does_not_contain_the_password():
    given = {"url": "redis://:hunter2@127.0.0.1:1/0", "queue": QUEUE, "job": "j"}

    with pytest.raises(StorageUnavailableError) as raised:
        Write(WriteOptions.read(given), ["n"])

    assert "127.0.0.1" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("url", ["mysql://x/y", "nowhere", "redis:/x"])
def test_unknown_url_schemes_are_rejected(url):
    with pytest.raises(OptionError, match=r"^url: "):
        Write(WriteOptions.read({"url": url, "queue": QUEUE, "job": "j"}), ["n"])


def paced(storage, url, naps, **more):
    ticks = count()
    options = WriteOptions.read({"url": url, "queue": QUEUE, "job": "j", **more})
    return WriteThrottle(options, storage, clock=lambda: next(ticks) / 10, sleep=naps.append)


def test_write_waits_while_the_queue_exceeds_its_depth(storage, url):
    storage.enqueue([batch(5, queue=QUEUE)])
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            claim(storage, 2, queues=[QUEUE])

    options = WriteOptions.read({"url": url, "queue": QUEUE, "job": "j", "maxQueueDepth": "4"})
    WriteThrottle(options, storage, sleep=nap).wait(QUEUE, 1)

    assert naps == [0.05, 0.1, 0.2]


def test_write_fails_after_the_backpressure_timeout(storage, url):
    storage.enqueue([batch(5, queue=QUEUE)])

    with pytest.raises(StorageUnavailableError, match="maxQueueDepth=4 jobs, for backpressureTimeout=1 s"):
        paced(storage, url, [], maxQueueDepth="4", backpressureTimeout="1").wait(QUEUE, 1)


def test_write_respects_its_rate_limit(storage, url):
    naps = []
    pace = paced(storage, url, naps, rateLimit="10")

    for _ in range(3):
        pace.wait(QUEUE, 20)

    assert naps == pytest.approx([1.9, 3.8])
