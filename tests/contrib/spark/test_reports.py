"""Reports of writes, also after crashes, without Spark."""

import logging

import pyarrow
import pytest

from djqueue.contrib.spark import reporting
from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.reporting import TASKS_FAILED
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.bulkwrites import DONE, FAILED, PUBLISHING, UNFINISHED, QueueShare
from djqueue.storage.staging import CHUNKS_PER_STEP, ChunkMissingError
from djqueue.testing.factories import batch
from tests.contrib.spark.conftest import leftovers
from tests.contrib.spark.test_writing import QUEUE, ROWS, Died, numbers, rows, tasks, write

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough

__all__ = ["write"]

NAMED = {"txnAppId": "nightly", "txnVersion": "7"}


def reports(storage):
    return storage.capabilities.bulk_writes.page(100).imports


def test_write_saves_a_report(storage, write):
    made = write(**NAMED)
    told = [made.run_task(f"{at}.{at}", rows(at * ROWS), spark="app-1") for at in range(2)]
    assert reports(storage) == []

    made.commit(told)

    [found] = reports(storage)
    assert (found.write, found.app, found.version, found.state) == (made.id, "nightly", 7, DONE)
    assert (found.rows, found.inserted, found.duplicates, found.rejected) == (100, 100, 0, {})
    assert (found.queues, found.names, found.parts) == ((QUEUE,), ("shop.send",), 2)
    assert (found.spark, found.batches, found.error, found.skipped) == ("app-1", 0, "", False)
    assert found.total == QueueShare(10, 10, 100, 0, ended=True)
    assert found.user
    assert found.started_at <= found.finished_at <= found.updated_at


def test_report_counts_inserted_duplicate_and_rejected_rows(storage, url):
    storage.enqueue([batch(2, queue="b", ids=["a", "b"])])
    storage.reads.counts("b")  # Flush it, as a scheduler would.
    given = {"url": url, "queueColumn": "q", "job": "j", "idColumn": "key", "onError": "skip"}
    made = Write(WriteOptions.read(given), ["q", "key"])
    table = pyarrow.table({"q": list("bbbba"), "key": ["a", "c", None, "c", "d"]})

    made.commit([made.run_task("0.0", table.to_batches())])

    [found] = reports(storage)
    assert (found.state, found.rows, found.inserted, found.duplicates) == (DONE, 5, 2, 2)
    assert (found.rejected, found.queues) == ({"id": 1}, ("a", "b"))
    assert found.rows == found.inserted + found.duplicates + sum(found.rejected.values())


def test_jobs_have_the_tag_of_their_write_in_addition_to_their_own(storage, url):
    given = {"url": url, "queue": QUEUE, "job": "j", "tagsColumn": "t"}
    made = Write(WriteOptions.read(given), ["t", "n"])
    table = pyarrow.table({"t": [["x", "y"], ["z"]], "n": [1, 2]})
    made.commit([made.run_task("0.0", table.to_batches())])

    [found] = reports(storage)

    tags = sorted(job.options.tags for job in storage.reads.page(QUEUE, State.WAITING, 10))
    assert tags == [("x", "y", found.tag), ("z", found.tag)]
    assert found.tag == f"import:{made.id}"


def test_report_exists_before_the_jobs_and_shows_progress(storage, write, monkeypatch):
    made = write(batchSize="1")
    told = [made.run_task("0.0", rows(many=CHUNKS_PER_STEP + 6))]
    staging, seen = type(storage.capabilities.staging), []
    plain = staging.publish_all
    monkeypatch.setattr(reporting, "SAVE_EVERY", 0)

    def publish(self, chunks):
        [found] = reports(storage)
        seen.append((found.state, found.total.published, found.total.chunks, found.inserted))
        return plain(self, chunks)

    monkeypatch.setattr(staging, "publish_all", publish)

    made.commit(told)

    assert seen == [
        (PUBLISHING, 0, CHUNKS_PER_STEP + 6, 0),
        (PUBLISHING, CHUNKS_PER_STEP, CHUNKS_PER_STEP + 6, CHUNKS_PER_STEP),
    ]


@pytest.mark.parametrize("step", ["begin_all", "publish_all", "end_all"])
def test_unfinished_report_is_done_after_the_next_driver_finishes_the_write(
    storage, write, monkeypatch, step
):
    first = write(**NAMED)
    told = tasks(first)
    with monkeypatch.context() as patch:
        fail(patch, storage, step)
        with pytest.raises(Died):
            first.commit(told)
        first.abort(told)
    left = storage.capabilities.bulk_writes.get(first.id)
    assert (left.state, left.error) == (UNFINISHED, "Died: in the midst of it")

    again = write(**NAMED)
    again.commit(tasks(again))

    mine, theirs = (
        storage.capabilities.bulk_writes.get(again.id),
        storage.capabilities.bulk_writes.get(first.id),
    )
    assert (theirs.state, theirs.error, theirs.inserted) == (DONE, "", 3 * ROWS)
    assert (mine.state, mine.rows, mine.inserted) == (DONE, 3 * ROWS, 3 * ROWS)
    assert (mine.resumed, mine.skipped) == (first.id, step == "end_all")
    assert theirs.total == QueueShare(15, 15, 3 * ROWS, 0, ended=True)
    assert {job.options.tags for job in storage.reads.page(QUEUE, State.WAITING, 1_000)} == {(theirs.tag,)}


def test_earlier_version_is_finished_before_the_next_version(storage, write, monkeypatch):
    first = write(**NAMED)
    told = tasks(first)
    with monkeypatch.context() as patch:
        fail(patch, storage, "publish_all")
        with pytest.raises(Died):
            first.commit(told)

    following = write(txnAppId="nightly", txnVersion="8")
    following.commit(tasks(following))

    mine, theirs = (
        storage.capabilities.bulk_writes.get(following.id),
        storage.capabilities.bulk_writes.get(first.id),
    )
    assert (theirs.state, theirs.inserted) == (DONE, 3 * ROWS)
    assert (mine.state, mine.inserted, mine.resumed) == (DONE, 3 * ROWS, "")
    assert len(numbers(storage)) == 6 * ROWS


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step", ["commit", "keep 1", "begin_all", "publish_all", "end_all", "keep 2", "forget_all", "close"]
)
def test_sweep_completes_the_report_of_a_killed_driver(storage, write, monkeypatch, step, moment):
    made = write(**NAMED)
    told = tasks(made)
    made.run_task("0.9", rows())  # An attempt that failed after it had staged its rows.
    with monkeypatch.context() as patch:
        kill(patch, storage, step, moment)
        with pytest.raises(Killed):
            made.commit(told)
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)

    storage.sweep()

    if (step, moment) == ("commit", "before"):
        assert (numbers(storage), reports(storage)) == ([], [])
        return
    assert numbers(storage) == [*range(3 * ROWS)]
    [found] = reports(storage)
    assert (found.write, found.app, found.version, found.state) == (made.id, "nightly", 7, DONE)
    assert (found.rows, found.inserted, found.queues) == (3 * ROWS, 3 * ROWS, (QUEUE,))
    assert leftovers(storage) == []


def test_report_of_a_killed_driver_is_completed_by_the_next_driver(storage, write, monkeypatch):
    first = write(**NAMED)
    told = tasks(first)
    with monkeypatch.context() as patch:
        fail(patch, storage, "publish_all", Killed)
        with pytest.raises(Killed):
            first.commit(told)
    left = storage.capabilities.bulk_writes.get(first.id)
    assert left.state == PUBLISHING
    assert left.state_at(left.updated_at + 3_600_000) == UNFINISHED

    again = write(**NAMED)
    again.commit(tasks(again))

    assert storage.capabilities.bulk_writes.get(first.id).state == DONE


@pytest.mark.parametrize("shared", [True, False])
def test_write_killed_before_its_first_report_is_reported_by_the_next_driver(
    storage, write, monkeypatch, shared
):
    named = {**NAMED, **({"writeId": "tonight"} if shared else {})}
    first = write(**named)
    told = tasks(first)
    with monkeypatch.context() as patch:
        kill(patch, storage, "commit", "after")
        with pytest.raises(Killed):
            first.commit(told)

    again = write(**named)
    again.commit(tasks(again))

    for name in (first.report, again.report):
        found = storage.capabilities.bulk_writes.get(name)
        assert (found.state, found.rows, found.inserted) == (DONE, 3 * ROWS, 3 * ROWS)
    assert (found.names, found.parts) == (("shop.send",), 3)


def test_published_version_is_reported_as_skipped(storage, write):
    for _ in range(2):
        made = write(**NAMED)
        made.commit(tasks(made))

    found = storage.capabilities.bulk_writes.get(made.id)
    assert (found.state, found.skipped, found.queues) == (DONE, True, (QUEUE,))


def test_write_with_failed_tasks_is_reported_as_failed(storage, write):
    made = write()
    told = tasks(made)

    made.abort(told[:1])

    found = storage.capabilities.bulk_writes.get(made.id)
    assert (found.state, found.error, found.queues) == (FAILED, TASKS_FAILED, (QUEUE,))
    assert found.started_at <= found.finished_at == found.updated_at


def test_write_with_missing_chunks_is_reported_as_failed(storage, write):
    made = write()
    told = tasks(made)
    storage.capabilities.staging.forget(QUEUE, made.app, made.id)

    with pytest.raises(StorageError):
        made.commit(told)

    found = storage.capabilities.bulk_writes.get(made.id)
    assert found.state == FAILED
    assert "are missing: they expired" in found.error


def test_withdrawn_write_is_reported_as_failed(storage, write, monkeypatch):
    made = write(maxRetries="0")
    told = tasks(made)
    with monkeypatch.context() as patch:
        fail(patch, storage, "begin_all", StorageUnavailableError)
        with pytest.raises(StorageUnavailableError) as raised:
            made.commit(told)
    assert "Spark withdraws it now" in raised.value.__notes__[0]

    made.abort(told)

    found = storage.capabilities.bulk_writes.get(made.id)
    assert (found.state, found.inserted) == (FAILED, 0)
    assert "in the midst of it" in found.error
    assert storage.capabilities.staging.adopt(-1, 10) == []


def test_dry_run_saves_no_report(storage, write):
    made = write(dryRun="true")
    made.commit(tasks(made))
    made.abort([])

    assert reports(storage) == []


def test_batches_of_a_stream_share_one_report(storage, url):
    for version in (0, 1, 1, 0):
        commit_batch(url, version)

    [found] = reports(storage)
    assert (found.write, found.state, found.version, found.batches) == ("stream-q1", DONE, 1, 2)
    assert (found.rows, found.inserted, found.skipped) == (2 * ROWS, 2 * ROWS, False)
    assert {job.options.tags for job in storage.reads.page(QUEUE, State.WAITING, 1_000)} == {(found.tag,)}


@pytest.mark.parametrize("first", [True, False])
def test_interrupted_batch_of_a_stream_is_counted_once(storage, url, monkeypatch, first):
    if not first:
        commit_batch(url, 0)
    with monkeypatch.context() as patch:
        fail(patch, storage, "publish_all")
        with pytest.raises(Died):
            commit_batch(url, 1)
    [left] = reports(storage)
    assert (left.state, left.rows) == (UNFINISHED, 0 if first else ROWS)

    commit_batch(url, 1)

    [found] = reports(storage)
    batches = 1 if first else 2
    assert (found.state, found.batches, found.error) == (DONE, batches, "")
    assert found.rows == found.inserted == len(numbers(storage)) == batches * ROWS


@pytest.mark.parametrize(("first", "state"), [(True, FAILED), (False, UNFINISHED)])
def test_report_of_a_stream_keeps_earlier_batches_if_a_batch_is_lost(storage, url, monkeypatch, first, state):
    if not first:
        commit_batch(url, 0)

    def lost(*args):
        raise ChunkMissingError("they expired")

    monkeypatch.setattr(type(storage.capabilities.staging), "begin_all", lost)
    with pytest.raises(ChunkMissingError):
        commit_batch(url, 1)

    [found] = reports(storage)
    assert (found.state, found.rows) == (state, 0 if first else ROWS)
    assert "they expired" in found.error


def test_write_succeeds_if_its_report_cannot_be_saved(storage, write, monkeypatch, caplog):
    def refuses(self, report):
        raise StorageError("no room")

    monkeypatch.setattr(type(storage.capabilities.bulk_writes), "keep", refuses)
    made = write()
    with caplog.at_level(logging.WARNING, "djqueue.spark"):
        made.commit(tasks(made))

    assert numbers(storage) == [*range(3 * ROWS)]
    assert (
        f"Could not save the report of write {made.id}; the write itself is not affected: no room"
        in caplog.text
    )


class Killed(BaseException):
    """Raised to simulate SIGKILL: no handler of errors runs."""


def kill(patch, storage, step, moment):
    """Kill the process before or after a step: a method of the staging area, or the nth save of a report."""
    name, _, number = step.partition(" ")
    owner = type(storage.capabilities.bulk_writes if number else storage.capabilities.staging)
    plain, calls = getattr(owner, name), []

    def killed(self, *args, **kwargs):
        calls.append(args)
        if number and len(calls) < int(number):
            return plain(self, *args, **kwargs)
        if moment == "after":
            plain(self, *args, **kwargs)
        raise Killed

    patch.setattr(owner, name, killed)


def commit_batch(url, version):
    """Write a micro-batch, as `source` does."""
    made = Write(WriteOptions.read({"url": url, "queue": QUEUE, "job": "j", "batchSize": "10"}), ["n"])
    made.app = made.report = "stream-q1"
    made.commit([made.run_task("0.0", rows(version * ROWS))], version)


def fail(patch, storage, step, kind=Died):
    """Make a step in the middle of a publication fail."""
    staging = type(storage.capabilities.staging)
    plain = getattr(staging, step)

    def fails(self, *args, **kwargs):
        plain(self, args[0][:7]) if step == "publish_all" else plain(self, *args, **kwargs)
        raise kind("in the midst of it")

    patch.setattr(staging, step, fails)
