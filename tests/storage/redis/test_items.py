"""Stream items on Redis: no item outlives its job or its result."""

from contextlib import closing

import pytest

from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    an_active_job,
    cancelling,
    claim_one,
    completing,
    counts,
    emit,
    failing,
    finish,
    job,
    retrying,
)

DAY = 86_400_000


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def storage(redis_options, clock):
    with closing(RedisStorage(clock=clock, **redis_options)) as made:
        yield made


@pytest.fixture
def key_of(storage):
    """(type, entries, seconds until it expires) of the key of a job's items; None without one."""
    client = storage._connections.sync()

    def find(job_id="a"):
        key = storage.keys(QUEUE).items(job_id)
        if not client.exists(key):
            return None
        return client.type(key), client.llen(key), client.ttl(key)

    return find


def a_run(storage, **options):
    run = an_active_job(storage, id="a", **options)
    assert emit(storage, run, b"one", b"two")
    return run


def test_plain_job_with_items_is_completed_with_a_marker(storage, key_of):
    run = a_run(storage)
    assert key_of() == (b"list", 2, -1)

    assert finish(storage, completing(run)) == [True]

    assert counts(storage) == {State.COMPLETED: 1}
    kind, many, ttl = key_of()
    assert (kind, many) == (b"list", 2)
    assert 3_500 < ttl <= 3_600


def test_items_expire_with_the_result(storage, key_of):
    finish(storage, completing(a_run(storage, result_ttl=60_000, retention=DAY)))

    assert 50 < key_of()[2] <= 60


def test_items_of_a_permanent_result_do_not_expire(storage, key_of):
    finish(storage, completing(a_run(storage, result_ttl=None)))

    assert key_of() == (b"list", 2, -1)


def test_completion_without_items_deletes_the_items_of_earlier_attempts(storage, key_of):
    finish(storage, retrying(a_run(storage)))
    finish(storage, completing(claim_one(storage)))

    assert key_of() is None
    assert job(storage, "a").items == 0


def test_first_item_of_an_attempt_replaces_the_items_of_earlier_attempts(storage, key_of):
    finish(storage, retrying(a_run(storage)))

    emit(storage, claim_one(storage), b"three")

    assert key_of() == (b"list", 1, -1)


@pytest.mark.parametrize("how", [completing, failing, cancelling])
def test_items_are_deleted_with_the_job(storage, key_of, how, clock):
    finish(storage, how(a_run(storage)))

    clock.advance(365 * DAY)
    storage.sweep()

    assert counts(storage) == {}
    assert key_of() is None


def test_jobs_with_and_without_items_are_deleted_together(storage, key_of, clock):
    for number in range(20):
        finish(storage, completing(an_active_job(storage, id=str(number))))
    finish(storage, completing(a_run(storage)))

    clock.advance(DAY)
    storage.sweep()

    assert counts(storage) == {}
    assert key_of() is None


@pytest.mark.parametrize("how", [completing, failing, cancelling, retrying, None])
def test_items_are_deleted_with_the_queue(storage, key_of, how):
    run = a_run(storage)
    if how is not None:
        finish(storage, how(run))

    storage.queues.obliterate(QUEUE, force=True)

    assert key_of() is None
    client, version = storage._connections.sync(), storage.keys(QUEUE).key("version")
    left = {key for key in client.keys("*") if b":sequence:" not in key}
    assert left <= {storage.keys(QUEUE).key(name) for name in ("meta", "inbox")} | {version}
    assert client.pttl(version) != -1  # it expires, if it is there


def test_moved_job_leaves_no_items_behind(storage, key_of):
    finish(storage, retrying(a_run(storage)))

    storage.jobs.move(QUEUE, ["a"], "other")

    assert key_of() is None


def test_new_job_has_no_items_of_an_obliterated_queue(storage, key_of):
    client = storage._connections.sync()
    client.rpush(storage.keys(QUEUE).items("a"), b"left behind")

    a_run(storage)

    assert key_of() == (b"list", 2, -1)
