"""Writes during failovers of Redis with Sentinel: reported jobs exist afterwards."""

import os
import signal
from contextlib import closing

import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.bulkwrites import RedisStaging
from djqueue.storage.staging import ChunkMissingError
from tests.contrib.spark.cluster.checks import QUEUE, are_once
from tests.contrib.spark.conftest import leftovers
from tests.servers import RedisSentinel

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
NAMED = {"txnAppId": "nightly", "txnVersion": "7"}
ROWS = 200


@pytest.fixture(scope="module")
def sentinels():
    with RedisSentinel() as group:
        yield group


@pytest.fixture
def storage(sentinels):
    sentinels.clean()
    with closing(RedisStorage(url=sentinels.url)) as storage:
        yield storage


def staged(url, **more):
    given = {"url": url, "queue": QUEUE, "job": "shop.send", "batchSize": "10", **more}
    write = Write(WriteOptions.read(given), ["n"])
    return write, [write.run_task("0.0", pyarrow.table({"n": range(ROWS)}).to_batches(max_chunksize=10))]


def lose_what_follows(group, monkeypatch, first):
    """Have the master lose all that is written from this step on: it dies when the plan is closed."""
    replica, process = group.replica, group.master.run("INFO", "server")["process_id"]
    begins, close = getattr(RedisStaging, first), RedisStaging.close
    cut, died = [], []

    def begin(staging, *args, **kwargs):
        if not cut:
            cut.append(replica.run("REPLICAOF", "127.0.0.1", 1))
        return begins(staging, *args, **kwargs)

    def die(staging, *args, **kwargs):
        close(staging, *args, **kwargs)
        if not died:
            died.append(os.kill(process, signal.SIGKILL))

    monkeypatch.setattr(RedisStaging, first, begin)
    monkeypatch.setattr(RedisStaging, "close", die)


@pytest.mark.parametrize(
    ("first", "named"),
    [
        pytest.param("commit", NAMED, marks=pytest.mark.thorough, id="commit-named"),
        pytest.param("commit", {}, marks=pytest.mark.thorough, id="commit-unnamed"),
        pytest.param("publish_all", NAMED, id="publish_all-named"),
        pytest.param("publish_all", {}, marks=pytest.mark.thorough, id="publish_all-unnamed"),
    ],
)
def test_write_lost_in_a_failover_before_its_report_is_published_again(
    storage, sentinels, monkeypatch, first, named
):
    write, tasks = staged(sentinels.url, **named)
    lose_what_follows(sentinels, monkeypatch, first)

    report = write.commit(tasks)

    assert (report.inserted, report.skipped) == (ROWS, False)
    sentinels.settle()
    are_once(storage, range(ROWS))
    saved = storage.capabilities.bulk_writes.get(write.id)
    assert (saved.state, saved.inserted) == ("done", ROWS)
    assert leftovers(storage) == []


def test_write_fails_if_a_failover_loses_its_staged_rows(storage, sentinels, monkeypatch):
    lose_what_follows(sentinels, monkeypatch, "stage_all")
    write, tasks = staged(sentinels.url, **NAMED)

    with pytest.raises(ChunkMissingError) as caught:
        write.commit(tasks)

    assert caught.value.__notes__ == ["No row of this write was enqueued: write all of them again."]
    sentinels.settle()
    are_once(storage, [])
    assert storage.capabilities.bulk_writes.get(write.id).state == "failed"
    write, tasks = staged(sentinels.url, **NAMED)
    assert write.commit(tasks).inserted == ROWS
    are_once(storage, range(ROWS))


def test_write_succeeds_without_a_replica_and_logs_a_warning(storage, sentinels, caplog):
    sentinels.replica.stop()
    write, tasks = staged(sentinels.url)

    assert write.commit(tasks).inserted == ROWS

    assert f"No replica confirmed write {write.id}" in caplog.text
    are_once(storage, range(ROWS))
