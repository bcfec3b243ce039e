"""Retention bounds on Redis: byte counters, and removal of surplus records in steps."""

from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue.core.policies import Keep, KeepOfJob, KeepResults, QueuePolicy, Retention
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage, sweeping
from djqueue.testing import factories as f
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES
from djqueue.testing.contract.case import MEASURED, bounded
from tests.storage.measured import sums, walk

from .conftest import BUSY

KEPT = 100
QUEUE = "bounded"


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def make(redis_options, clock):
    made = []

    def make(retention, **given):
        policies = {QUEUE: QueuePolicy(retention=retention)}
        made.append(RedisStorage(policies=policies, clock=clock, **redis_options, **given))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def raw(storage, command, name, *arguments):
    client = storage._connections.sync()
    return client.execute_command(command, storage.keys(QUEUE).key(name), *arguments)


def counters(storage, queue):
    counts = storage._connections.sync().hgetall(storage.keys(queue).key("meta"))
    letters = {"completed": b"Bc", "cancelled": b"Bx", "failed": b"Bf", "results": b"Br"}
    return {name: int(counts.get(letter, 0)) for name, letter in letters.items()}


def held(storage):
    client, keys = storage._connections.sync(), storage.keys(MEASURED)
    entries = client.zrange(keys.key("holds"), 0, -1)
    return {entry.split(b"\0")[0].decode() for entry in entries}


@given(st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_byte_counters_equal_the_sums_after_random_operations(redis_server, seed):
    redis_server.clean()
    clock = FakeClock()
    with closing(RedisStorage(policies=POLICIES, clock=clock, **BUSY, **redis_server.options)) as storage:
        for _ in walk(storage, seed, clock.advance, 80):
            assert counters(storage, MEASURED) == sums(storage, held(storage))
        keys, client = storage.keys(MEASURED), storage._connections.sync()
        ended = sum(storage.reads.counts(MEASURED)[state] for state in ("completed", "cancelled", "failed"))
        assert client.hlen(keys.key("sizes")) == ended
        storage.queues.obliterate(MEASURED, force=True)
        left = [client.exists(keys.key(name)) for name in ("sizes", "results", "details", "count")]
        assert left == [0, 0, 0, 0]


def test_queue_without_bounds_stores_no_sizes(make):
    storage = make(Retention())
    bounded(storage, QUEUE)
    f.a_completed_job(storage, queue=QUEUE)
    f.a_failed_job(storage, queue=QUEUE)

    assert [raw(storage, "EXISTS", name) for name in ("sizes", "results", "details")] == [0, 0, 0]
    assert raw(storage, "HMGET", "meta", "bounds", "bytes") == [None, None]
    assert set(counters(storage, QUEUE).values()) == {0}


def test_removed_bounds_leave_no_sizes_or_counters(make):
    first = make(Retention(completed=Keep(bytes=1_000), logs=KeepOfJob(age=1_000)))
    bounded(first, QUEUE)
    f.a_completed_job(first, queue=QUEUE, id="a")
    assert raw(first, "EXISTS", "sizes") == 1

    second = make(Retention())
    second.sweep()

    assert [raw(second, "EXISTS", name) for name in ("sizes", "results")] == [0, 0]
    assert set(counters(second, QUEUE).values()) == {0}
    second.jobs.remove(QUEUE, ["a"])
    assert raw(second, "EXISTS", "details") == 0


@pytest.mark.parametrize("thousands", [10, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("bound", [Keep(count=KEPT), Keep(bytes=KEPT * 20)])
def test_sweep_removes_a_large_surplus_in_steps_while_other_jobs_run(make, monkeypatch, bound, thousands):
    monkeypatch.setattr(sweeping, "EXPIRED", 500 * thousands)
    storage = make(Retention(completed=bound))
    bounded(storage, QUEUE)
    for _ in range(thousands):
        f.enqueue_many(storage, 1_000, queue=QUEUE, payloads=[b"0123456789"] * 1_000)
        f.finish(storage, *(f.completing(one, b"0123456789") for one in f.claim(storage, 1_000)))
    most, calls, ran = 0, 0, 0
    run = storage._roundtrips._one

    def look(call):
        nonlocal most, calls, ran
        if getattr(call, "script", None) is not None and call.script.name == "expire":
            calls += 1
            most = max(most, len(call.keys) // 2)
            if calls % 10 == 0:
                # In between, another worker's job comes and ends.
                f.a_completed_job(other, queue="other")
                ran += 1
        return run(call)

    other = make(Retention())
    monkeypatch.setattr(storage._roundtrips, "_one", look)
    rounds = 0
    while any(storage.sweep()):
        rounds += 1

    assert storage.reads.counts(QUEUE)[State.COMPLETED] == KEPT
    assert most <= sweeping.SWEEP
    enough = 2 * thousands - 1  # of SWEEP records each
    assert (calls >= enough, ran >= enough // 10, rounds) == (True, True, 2)


def test_one_sweep_removes_many_expired_results_attempts_and_log_lines(make, clock):
    storage = make(Retention(results=KeepResults(age=50, bytes=10**9), logs=KeepOfJob(age=50)))
    bounded(storage, QUEUE)
    f.enqueue_many(storage, 1_500, queue=QUEUE)
    claimed = f.claim(storage, 1_500)
    storage.report([f.report_of(one, None, [(1, "line")]) for one in claimed])
    f.finish(storage, *map(f.completing, claimed))
    clock.advance(51)

    storage.sweep()

    assert [raw(storage, "EXISTS", name) for name in ("results", "details")] == [0, 0]
    assert counters(storage, QUEUE)["results"] == 0
    records = storage.reads.jobs(QUEUE, [one.id for one in claimed])
    assert {(record.result, record.logs) for record in records} == {(None, ())}
