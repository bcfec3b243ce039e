"""Concurrent and repeated writes: of the same name, of another version, or to other queues."""

from contextlib import closing
from functools import partial

import pyarrow
import pytest

from djqueue.codecs import MSGPACK, decode
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.storage import staging
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.database.staging import SqlStaging
from djqueue.storage.staging import ChunkMissingError
from djqueue.testing.factories import claim
from djqueue.testing.waiting import together
from tests.contrib.spark.conftest import leftovers, open_storage

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough

QUEUE = "emails"
ROWS = 40
SIZE = 10
NAMED = {"txnAppId": "nightly", "txnVersion": "7"}


class Died(Exception):
    """Raised to simulate the end of a process."""


@pytest.fixture
def write(url):
    """Return a function that creates writes of the columns `q` and `n`, to one queue or to those of `q`."""

    def make(**more):
        given = {"url": url, "job": "shop.send", "batchSize": str(SIZE), **more}
        if "queueColumn" not in given:
            given["queue"] = QUEUE
        return Write(WriteOptions.read(given), ["q", "n"])

    return make


def staged(made, first=0, many=ROWS, queues=(QUEUE,), part="0.0"):
    """Return the report of a task that stages rows of these queues."""
    names = [queue for queue in queues for _ in range(many)]
    table = pyarrow.table({"q": names, "n": range(first, first + many * len(queues))})
    return [made.run_task(part, table.to_batches(max_chunksize=SIZE))]


def numbers(storage, queue=QUEUE):
    jobs = storage.reads.page(queue, State.WAITING, 10_000)
    return sorted(decode(job.payload, MSGPACK)["kwargs"]["n"] for job in jobs)


def dies(storage, monkeypatch, step, commit, done=0):
    """The driver dies at a step of its commit, after so many chunks of it."""
    staging = type(storage.capabilities.staging)
    plain = getattr(staging, step)

    def died(self, some, *args):
        if done:
            plain(self, some[:done], *args)
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(staging, step, died)
        with pytest.raises(Died):
            commit()


def test_rerun_of_an_earlier_version_keeps_a_committed_later_version(storage, write, monkeypatch):
    later = write(**NAMED)
    tasks = staged(later)
    dies(storage, monkeypatch, "begin_all", lambda: later.commit(tasks))

    earlier = write(txnAppId="nightly", txnVersion="6")
    report = earlier.commit(staged(earlier, ROWS, part="0.1"))
    assert (report.skipped, report.inserted) == (True, 0)

    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()
    assert numbers(storage) == [*range(ROWS)]


def test_part_that_expired_while_its_task_ran_is_not_published(storage, write, monkeypatch):
    made = write(**NAMED)
    staging = type(storage.capabilities.staging)
    plain, calls = staging.stage_all, []

    def expires(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            storage.capabilities.staging.forget(QUEUE, made.app, made.id)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(staging, "stage_all", expires)
    monkeypatch.setattr("djqueue.contrib.spark.writing.CHUNKS_TOGETHER", 1)

    with pytest.raises(ChunkMissingError, match="Run the task again"):
        staged(made)

    assert len(calls) == 2
    again = made.commit(staged(made, part="0.1"))
    assert again.inserted == ROWS
    assert numbers(storage) == [*range(ROWS)]


def test_rerun_with_the_same_write_id_publishes_the_rows_of_one_run(storage, write, monkeypatch):
    first = write(writeId="tonight", **NAMED)
    tasks = staged(first)
    dies(storage, monkeypatch, "publish_all", lambda: first.commit(tasks), done=2)

    again = write(writeId="tonight", **NAMED)
    again.commit(staged(again, 1_000, 2 * ROWS))

    assert numbers(storage) == [*range(ROWS)]


def test_rows_staged_by_a_dead_run_with_the_same_write_id_are_not_published(storage, write):
    first = write(writeId="tonight", **NAMED)
    staged(first)

    again = write(writeId="tonight", **NAMED)
    assert again.commit(staged(again, 1_000)).inserted == ROWS

    assert numbers(storage) == [*range(1_000, 1_000 + ROWS)]


def test_write_id_of_another_write_is_rejected(storage, write):
    first = write(writeId="tonight", **NAMED)
    first.commit(staged(first))
    alone = write(writeId="alone")
    alone.commit(staged(alone, ROWS))

    with pytest.raises(OptionError, match=r"writeId: 'tonight' already names a write \(txnAppId 'nightly'"):
        write(writeId="tonight", txnAppId="nightly", txnVersion="8")
    for used in ("tonight", "alone"):
        with pytest.raises(OptionError, match="give each write a writeId of its own, or leave writeId out"):
            write(writeId=used)

    again = write(writeId="tonight", **NAMED)
    report = again.commit(staged(again, 1_000))
    assert (report.write, report.skipped) == ("tonight", True)
    assert numbers(storage) == [*range(2 * ROWS)]


def test_failed_write_can_be_repeated_with_its_write_id(storage, write):
    first = write(writeId="tonight")
    first.abort(staged(first))

    again = write(writeId="tonight")
    assert again.commit(staged(again, 1_000)).inserted == ROWS

    assert numbers(storage) == [*range(1_000, 1_000 + ROWS)]
    assert storage.capabilities.bulk_writes.get("tonight").state == "done"


def test_sweep_completes_the_report_of_a_write_with_a_write_id(storage, write, monkeypatch):
    made = write(writeId="to:night")
    tasks = staged(made)
    dies(storage, monkeypatch, "publish_all", lambda: made.commit(tasks), done=2)

    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()

    assert numbers(storage) == [*range(ROWS)]
    report = storage.capabilities.bulk_writes.get("to:night")
    assert (report.app, report.state, report.inserted) == ("to:night", "done", ROWS)


def test_writes_to_one_and_to_many_queues_are_independent_under_one_name(storage, write, monkeypatch):
    first = write(**NAMED)
    first.commit(staged(first))

    second = write(queueColumn="q", **NAMED)
    report = second.commit(staged(second, 1_000, queues=[QUEUE, "sms"]))

    assert (report.inserted, report.skipped) == (2 * ROWS, False)
    assert numbers(storage) == [*range(ROWS), *range(1_000, 1_000 + ROWS)]
    again = [write(**NAMED), write(queueColumn="q", **NAMED)]
    assert [made.commit(staged(made, 2_000)).skipped for made in again] == [True, True]
    assert len(numbers(storage)) == 2 * ROWS
    assert leftovers(storage) == []


def test_write_to_many_queues_does_not_finish_an_open_write_to_one_queue(storage, write, monkeypatch):
    first = write(**NAMED)
    tasks = staged(first)
    dies(storage, monkeypatch, "publish_all", lambda: first.commit(tasks), done=2)

    later = write(queueColumn="q", txnAppId="nightly", txnVersion="8")
    assert later.commit(staged(later, 1_000)).inserted == ROWS
    first.abort(tasks)
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.sweep()

    assert numbers(storage) == [*range(ROWS), *range(1_000, 1_000 + ROWS)]
    assert leftovers(storage) == []


def test_sweep_respects_the_maximum_queue_depth(storage, write, monkeypatch):
    made = write(maxQueueDepth="20", **NAMED)
    tasks = staged(made, many=100)
    dies(storage, monkeypatch, "publish_all", lambda: made.commit(tasks))
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)

    depths = []
    while storage.reads.counts(QUEUE)[State.ACTIVE] < 100:
        storage.sweep()
        depths.append(storage.reads.counts(QUEUE)[State.WAITING])
        claim(storage, SIZE // 2, queues=(QUEUE,), names=["shop.send"])
        assert len(depths) < 100

    assert 20 <= max(depths) < 20 + SIZE, depths
    assert storage.capabilities.bulk_writes.get(made.id).state == "done"


def test_sweep_that_waits_for_queue_depth_renews_the_staged_rows(storage, write, monkeypatch):
    full = write(writeId="full")
    full.commit(staged(full, many=20))
    waiting = write(maxQueueDepth="20", **NAMED)
    dies(storage, monkeypatch, "begin_all", partial(waiting.commit, staged(waiting)))
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    monkeypatch.setattr("djqueue.storage.staging.RENEW_EVERY", -1)
    staging = type(storage.capabilities.staging)
    plain, begun = staging.begin_all, []

    def counted(self, manifests, lifetime):
        found = plain(self, manifests, lifetime)
        begun.extend((one.status, one.manifest.queue) for one in found)
        return found

    monkeypatch.setattr(staging, "begin_all", counted)
    for _ in range(3):
        storage.sweep()

    assert begun[0] == ("new", QUEUE)
    assert len(begun) >= 3
    assert set(begun[1:]) == {("resumed", QUEUE)}
    assert storage.reads.counts(QUEUE)[State.WAITING] == 20


def test_sweep_publishes_other_writes_while_some_queues_are_full(storage, write, monkeypatch):
    monkeypatch.setattr("djqueue.storage.staging.PLANS_PER_SWEEP", 3)
    full = write(writeId="full")
    full.commit(staged(full, many=20))
    for number in range(staging.PLANS_PER_SWEEP):
        waiting = write(maxQueueDepth="20", txnAppId=f"waiting-{number}", txnVersion="1")
        dies(storage, monkeypatch, "begin_all", partial(waiting.commit, staged(waiting)))
    free = write(queueColumn="q", **NAMED)
    dies(storage, monkeypatch, "publish_all", partial(free.commit, staged(free, 1_000, queues=("free",))))
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)

    for _ in range(2):
        storage.sweep()

    assert numbers(storage, "free") == [*range(1_000, 1_000 + ROWS)]
    assert numbers(storage) == [*range(20)]


def test_duplicates_in_many_queues_are_found_in_few_transactions(storage, url, monkeypatch):
    queues = [f"queue-{number}" for number in range(128)]
    table = pyarrow.table({"q": queues, "id": ["same"] * len(queues)})
    if isinstance(storage, DatabaseStorage):
        plain, calls = SqlStaging._enqueue, []

        def counted(self, batches, size):
            calls.append(len(batches))
            return plain(self, batches, size)

        monkeypatch.setattr(SqlStaging, "_enqueue", counted)
    counts = []
    for version in ("1", "2"):
        given = {"url": url, "queueColumn": "q", "job": "shop.send", "idColumn": "id"}
        made = Write(WriteOptions.read({**given, "txnAppId": "nightly", "txnVersion": version}), ["q", "id"])
        report = made.commit([made.run_task("0.0", table.to_batches())])
        counts.append((report.inserted, report.duplicates))

    assert counts == [(len(queues), 0), (0, len(queues))]
    if isinstance(storage, DatabaseStorage):
        assert sum(calls) == 2 * len(queues)
        assert len(calls) <= 4


def test_concurrent_writes_with_the_same_unique_keys_do_not_deadlock(postgresql_url):
    keys = [f"key-{number}" for number in range(100)]
    given = {"url": postgresql_url, "queue": QUEUE, "job": "shop.send", "uniqueKeyColumn": "key"}
    loads = []
    for app, some in (("up", keys), ("down", keys[::-1])):
        named = {"txnAppId": app, "txnVersion": "1", "maxRetries": "0"}
        made = Write(WriteOptions.read({**given, **named}), ["key"])
        loads.append((made, [made.run_task("0.0", pyarrow.table({"key": some}).to_batches())]))

    reports = together([lambda made=made, tasks=tasks: made.commit(tasks) for made, tasks in loads])

    assert sorted(report.inserted for report in reports) == [0, len(keys)]
    assert sorted(report.duplicates for report in reports) == [0, len(keys)]


def test_concurrent_writes_with_ids_in_opposite_order_enqueue_each_job_once(postgresql_url):
    ids = [f"id-{number}" for number in range(2_000)]
    given = {"url": postgresql_url, "queue": QUEUE, "job": "shop.send", "idColumn": "id"}
    loads = []
    for app, some in (("up", ids), ("down", ids[::-1])):
        made = Write(WriteOptions.read({**given, "txnAppId": app, "txnVersion": "1"}), ["id"])
        loads.append((made, [made.run_task("0.0", pyarrow.table({"id": some}).to_batches())]))

    reports = together([lambda made=made, tasks=tasks: made.commit(tasks) for made, tasks in loads])

    assert sum(report.inserted for report in reports) == len(ids)
    assert sum(report.duplicates for report in reports) == len(ids)


@pytest.mark.parametrize("when_full", ["reject", "block"])
def test_sweep_publishes_chunks_larger_than_the_queue(url, storage, write, monkeypatch, when_full):
    made = write(**NAMED)
    dies(storage, monkeypatch, "publish_all", partial(made.commit, staged(made)))
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    storage.close()
    policy = QueuePolicy(max_size=SIZE // 2, when_full=when_full)

    with closing(open_storage(url, policies={QUEUE: policy})) as owner:
        depths = []
        while owner.reads.counts(QUEUE)[State.ACTIVE] < ROWS:
            owner.sweep()
            depths.append(owner.reads.counts(QUEUE)[State.WAITING])
            claim(owner, SIZE, queues=(QUEUE,), names=["shop.send"])
            assert len(depths) < 20

        assert max(depths) == SIZE
        assert owner.capabilities.bulk_writes.get(made.id).state == "done"
