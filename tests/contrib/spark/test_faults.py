"""Writes whose staged rows, publications or names are lost, rolled back or reused, without Spark."""

from contextlib import closing
from itertools import product

import psycopg
import pyarrow
import pytest

from djqueue.contrib.spark.options import WriteOptions
from djqueue.contrib.spark.writing import Write
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.bulkwrites import RedisStaging
from djqueue.storage.staging import ChunkMissingError
from tests.contrib.spark.cluster.checks import QUEUE, are_once
from tests.contrib.spark.conftest import leftovers, open_storage

# The lane of Spark runs them when the code of bulk writes has changed.
pytestmark = pytest.mark.thorough

NAMED = {"txnAppId": "nightly", "txnVersion": "7"}
ROWS = 1_000
"""Rows of a task: more chunks than one step publishes."""


def write_to(url, **more):
    given = {"url": url, "queue": QUEUE, "job": "shop.send", "batchSize": "10", **more}
    return Write(WriteOptions.read(given), ["n"])


def task(write, number, rows, after=(None, None)):
    """Run a task. after: the number of a batch and what happens after it."""

    def batches():
        for at, batch in enumerate(pyarrow.table({"n": rows}).to_batches(max_chunksize=10)):
            yield batch
            if at == after[0]:
                after[1]()

    return write.run_task(f"{number}.{number}", batches())


@pytest.fixture
def redis_storage(redis_url):
    with closing(RedisStorage(url=redis_url)) as storage:
        yield storage


def test_task_whose_first_rows_are_lost_fails_and_can_be_repeated(redis_storage, redis_server):
    write = write_to(redis_server.url)
    with redis_server.client() as client, pytest.raises(ChunkMissingError, match=r"part '0\.0.*are missing"):
        task(write, 0, range(3 * ROWS), (200, client.flushall))

    again = task(write, 0, range(3 * ROWS))

    assert write.commit([again]).inserted == 3 * ROWS
    are_once(redis_storage, range(3 * ROWS))


def test_task_whose_first_rows_have_expired_fails(storage, url):
    staging, write = storage.capabilities.staging, write_to(url)

    def expire():
        assert staging.forget_all([QUEUE], write.app, write.id) == 1

    with pytest.raises(ChunkMissingError, match="stageTtl"):
        task(write, 0, range(3 * ROWS), (200, expire))


def test_write_publishes_nothing_if_rows_of_a_finished_task_are_lost(redis_storage, redis_server):
    write = write_to(redis_server.url)
    tasks = [task(write, number, range(number * ROWS, (number + 1) * ROWS)) for number in range(2)]
    with redis_server.client() as client:
        [last] = client.keys("*:stage:*:1.1")
        client.hdel(last, "0")

    with pytest.raises(ChunkMissingError):
        write.commit(tasks)

    are_once(redis_storage, [])
    assert redis_storage.capabilities.bulk_writes.get(write.id).state == "failed"


def rolled_back(client, call):
    """Make a call whose effects the server loses after its response, as in a failover."""
    before = [(key, client.dump(key), client.pttl(key)) for key in client.keys("*")]
    answer = call()
    client.flushall()
    for key, value, lifetime in before:
        client.restore(key, max(lifetime, 0), value)
    return answer


@pytest.mark.parametrize(
    ("step", "call"), [("publish_all", 2), ("publish_all", 1), ("begin_all", 1), ("commit", 1)]
)
def test_step_lost_in_a_failover_is_repeated(redis_storage, redis_server, monkeypatch, step, call):
    write = write_to(redis_server.url)
    tasks = [task(write, 0, range(2 * ROWS))]
    plain, calls = getattr(RedisStaging, step), []

    def lost(*args, **kwargs):
        calls.append(step)
        if len(calls) != call:
            return plain(*args, **kwargs)
        with redis_server.client() as client:
            return rolled_back(client, lambda: plain(*args, **kwargs))

    monkeypatch.setattr(RedisStaging, step, lost)

    assert write.commit(tasks).inserted == 2 * ROWS

    assert len(calls) >= call
    are_once(redis_storage, range(2 * ROWS))
    report = redis_storage.capabilities.bulk_writes.get(write.id)
    assert (report.state, report.inserted) == ("done", 2 * ROWS)


def lose_steps(monkeypatch, redis_server, before, after):
    """Have the server lose, once, all changes from before the first of these steps until after the last."""
    kept, lost = [], []
    first, last = getattr(RedisStaging, before), getattr(RedisStaging, after)

    def keep(*args, **kwargs):
        if not kept:
            with redis_server.client() as client:
                kept.extend((key, client.dump(key), client.pttl(key)) for key in client.keys("*"))
        return first(*args, **kwargs) if before != after else lose(*args, **kwargs)

    def lose(*args, **kwargs):
        answer = last(*args, **kwargs)
        if not lost:
            with redis_server.client() as client:
                client.flushall()
                for key, value, lifetime in kept:
                    client.restore(key, max(lifetime, 0), value)
            lost.append(after)
        return answer

    monkeypatch.setattr(RedisStaging, after, lose)
    monkeypatch.setattr(RedisStaging, before, keep)
    return lost


TYPICAL = {(("begin_all", "end_all"), 3), (("publish_all", "mark"), 3), (("end_all", "forget_all"), 3)}


@pytest.mark.parametrize(
    ("before", "after", "queues"),
    [
        pytest.param(*steps, queues, marks=() if (steps, queues) in TYPICAL else pytest.mark.thorough)
        for steps in product(("begin_all", "publish_all", "end_all"), ("end_all", "mark", "forget_all"))
        for queues in (1, 3)
    ],
)
def test_steps_lost_in_a_failover_before_the_plan_is_closed_are_repeated(
    redis_storage, redis_server, monkeypatch, before, after, queues
):
    given = {"url": redis_server.url, "queueColumn": "q", "job": "shop.send", "batchSize": "10"}
    write = Write(WriteOptions.read(given), ["q", "n"])
    rows = pyarrow.table({"q": [f"{QUEUE}-{n % queues}" for n in range(ROWS)], "n": range(ROWS)})
    tasks = [write.run_task("0.0", rows.to_batches(max_chunksize=100))]
    lost = lose_steps(monkeypatch, redis_server, before, after)

    assert write.commit(tasks).inserted == ROWS

    assert lost == [after]
    for n in range(queues):
        are_once(redis_storage, range(n, ROWS, queues), f"{QUEUE}-{n}")
    report = redis_storage.capabilities.bulk_writes.get(write.id)
    assert (report.state, report.inserted) == ("done", ROWS)
    assert leftovers(redis_storage) == []


def test_steps_of_a_sweep_lost_in_a_failover_are_repeated_by_the_next_sweep(
    redis_storage, redis_server, monkeypatch
):
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    write = write_to(redis_server.url)
    tasks = [task(write, 0, range(ROWS))]
    redis_storage.capabilities.staging.commit(write._plan(tasks, 0, is_batch=False))  # Then the driver dies.
    lost = lose_steps(monkeypatch, redis_server, "publish_all", "end_all")

    for _ in range(3):
        redis_storage.sweep()

    assert lost == ["end_all"]
    are_once(redis_storage, range(ROWS))
    report = redis_storage.capabilities.bulk_writes.get(write.id)
    assert (report.state, report.inserted) == ("done", ROWS)
    assert leftovers(redis_storage) == []


def test_sweep_does_not_wait_for_a_driver_frozen_in_a_transaction(postgresql_url, monkeypatch, caplog):
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    write = write_to(postgresql_url)
    plan = write._plan([task(write, 0, range(50))], 0, is_batch=False)
    with closing(open_storage(postgresql_url)) as storage, psycopg.connect(postgresql_url) as frozen:
        storage.capabilities.staging.commit(plan)
        for table in ("djqueue_staged_part", "djqueue_staged_write"):
            frozen.execute(f"SELECT * FROM {table} FOR UPDATE")
            storage.sweep()
            frozen.rollback()
            assert sum(storage.reads.counts(QUEUE).values()) == 0
        assert "lock timeout" in caplog.text

        for _ in range(2):
            storage.sweep()

        are_once(storage, range(50))


@pytest.mark.parametrize("named", [NAMED, {}])
def test_write_that_stops_during_publication_is_unfinished(redis_storage, redis_server, monkeypatch, named):
    write = write_to(redis_server.url, **named)
    tasks = [task(write, 0, range(ROWS // 5))]
    plain = RedisStaging.publish_all

    def evicted(staging, chunks):
        with redis_server.client() as client:
            for part in client.keys("*:stage:*:0.0"):
                client.hdel(part, "15")
        return plain(staging, chunks)

    monkeypatch.setattr(RedisStaging, "publish_all", evicted)

    with pytest.raises(ChunkMissingError):
        write.commit(tasks)
    write.abort(tasks)

    assert sum(redis_storage.reads.counts(QUEUE).values()) == ROWS // 5 - 10
    assert redis_storage.capabilities.bulk_writes.get(write.id).state == "unfinished"


def test_frozen_driver_is_skipped_after_a_later_version_was_published(storage, url, monkeypatch):
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    write = write_to(url, **NAMED)
    tasks = [task(write, 0, range(ROWS))]
    kind = type(storage.capabilities.staging)
    plain, others = kind.publish_all, []

    def frozen(staging, chunks):
        if len(others) == 0:
            others.append(None)
            for _ in range(3):
                storage.sweep()
            later = write_to(url, **NAMED | {"txnVersion": "8"})
            assert later.commit([task(later, 0, range(ROWS, 2 * ROWS))]).inserted == ROWS
        return plain(staging, chunks)

    monkeypatch.setattr(kind, "publish_all", frozen)

    report = write.commit(tasks)

    assert report.skipped
    are_once(storage, range(2 * ROWS))
    saved = storage.capabilities.bulk_writes.get(write.id)
    assert (saved.state, saved.inserted) == ("done", ROWS)
    assert leftovers(storage) == []


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("begin_all", marks=pytest.mark.thorough),
        "publish_all",
        "end_all",
        pytest.param("forget_all", marks=pytest.mark.thorough),
        pytest.param("close", marks=pytest.mark.thorough),
    ],
)
def test_frozen_driver_reports_its_jobs_after_a_sweep_published_them(storage, url, monkeypatch, step):
    monkeypatch.setattr("djqueue.storage.staging.TAKEOVER_AFTER", -1)
    write = write_to(url, **NAMED)
    tasks = [task(write, 0, range(ROWS))]
    kind = type(storage.capabilities.staging)
    plain, sweeps = getattr(kind, step), []

    def frozen(staging, *args, **kwargs):
        if not sweeps:
            sweeps.append(None)
            for _ in range(3):
                storage.sweep()
        return plain(staging, *args, **kwargs)

    monkeypatch.setattr(kind, step, frozen)

    report = write.commit(tasks)

    assert (report.inserted, report.skipped) == (ROWS, False)
    are_once(storage, range(ROWS))
    saved = storage.capabilities.bulk_writes.get(write.id)
    assert (saved.state, saved.inserted, saved.skipped) == ("done", ROWS, False)
    assert leftovers(storage) == []


def test_named_write_can_be_repeated_with_its_write_id(storage, url):
    for skipped in (False, True):
        write = write_to(url, writeId="tonight", **NAMED)
        report = write.commit([task(write, 0, range(50))])
        assert (report.inserted, report.skipped) == (50, skipped)

    are_once(storage, range(50))
    assert leftovers(storage) == []


def test_write_id_of_a_failed_write_can_be_reused(storage, url):
    failed = write_to(url, writeId="tonight")
    failed.abort([task(failed, 0, range(50))])
    write = write_to(url, writeId="tonight")

    assert write.commit([task(write, 0, range(50))]).inserted == 50

    are_once(storage, range(50))
    assert storage.capabilities.bulk_writes.get("tonight").state == "done"
