"""Groups on Redis: the stored group mode, and the cost of claims beside many waiting jobs."""

from contextlib import closing

import pytest
import redis

from djqueue.core.errors import ConfigurationError
from djqueue.core.policies import QueuePolicy, Rate
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, claim, claim_one, enqueue, enqueue_many

from .conftest import BUSY


@pytest.fixture
def make(redis_url):
    opened = []

    def make(mode="optional"):
        opened.append(RedisStorage(url=redis_url, **BUSY, policies={QUEUE: QueuePolicy(key_mode=mode)}))
        return opened[-1]

    yield make
    for storage in opened:
        storage.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("keyed", "optional"),
        ("keyed", "global"),
        ("global", "keyed"),
        ("optional", "keyed"),
        ("optional", "global"),
    ],
)
def test_process_configured_for_another_key_mode_is_rejected(make, first, second):
    enqueue(make(first), concurrency_key="g")
    message = f"'{QUEUE}'.*'{first}'.*'{second}'"

    with pytest.raises(ConfigurationError, match=message):
        make(second).connect()
    with pytest.raises(ConfigurationError, match=message):
        enqueue(make(second), concurrency_key="g")
    with pytest.raises(ConfigurationError, match=message):
        claim(make(second))
    assert len(claim(make(first), 10)) == 1


def test_worker_may_start_before_the_first_job_of_a_queue(make):
    worker = make("keyed")
    worker.connect()
    assert claim(worker) == []

    enqueue(worker, concurrency_key="g")

    with pytest.raises(ConfigurationError):
        make("global").connect()
    assert len(claim(worker)) == 1


def test_obliterated_queue_may_have_another_key_mode(make):
    first, second = make("keyed"), make("global")
    enqueue(first, concurrency_key="g")
    first.queues.obliterate(QUEUE)

    enqueue(second)
    with pytest.raises(ConfigurationError):
        enqueue(make("keyed"), concurrency_key="g")


def test_claim_costs_the_same_however_many_jobs_of_another_group_wait(make, redis_url):
    storage = make()
    with closing(redis.Redis.from_url(redis_url)) as server:

        def commands_of_a_claim():
            enqueue(storage, concurrency_key=f"small:{len(done)}")
            server.config_resetstat()
            done.append(claim_one(storage))
            found = server.info("commandstats")
            return {name: entry["calls"] for name, entry in found.items() if "config" not in name}

        done = []
        enqueue_many(storage, 2, concurrency_key="big")
        claim(storage)
        commands_of_a_claim()
        before = commands_of_a_claim()
        enqueue_many(storage, 3_000, concurrency_key="big")
        after = commands_of_a_claim()

    assert before == after


def test_queue_without_a_key_mode_gets_the_mode_of_its_next_use(make, redis_url):
    enqueue(make(), concurrency_key="g")
    with closing(redis.Redis.from_url(redis_url)) as server:
        server.hdel(f"{{q:{QUEUE}}}:meta", "mode")

    assert len(claim(make("keyed"))) == 1
    with pytest.raises(ConfigurationError, match=r"'keyed'.*'optional'"):
        enqueue(make(), concurrency_key="g")


def test_claim_from_an_empty_queue_stores_nothing(make, redis_url):
    assert claim(make("keyed"), queues=[QUEUE]) == []

    with closing(redis.Redis.from_url(redis_url)) as server:
        assert server.keys(f"{{q:{QUEUE}}}:meta") == []
    assert len(enqueue_many(make("optional"), 2)) == 2


def test_process_configured_for_another_key_mode_cannot_move_a_job(make):
    enqueue(make("keyed"), concurrency_key="g")
    other = make("global")
    enqueue(other, queue="another", concurrency_key="g", id="moving")

    with pytest.raises(ConfigurationError, match=f"'{QUEUE}'.*'keyed'.*'global'"):
        other.jobs.move("another", ["moving"], QUEUE)


def test_key_rate_buckets_are_removed_when_the_rate_has_refilled(redis_url):
    clock = FakeClock()
    policies = {QUEUE: QueuePolicy(key_concurrency=5, key_rate=Rate(3, 1_000))}
    with (
        closing(RedisStorage(url=redis_url, **BUSY, policies=policies, clock=clock)) as storage,
        closing(redis.Redis.from_url(redis_url)) as server,
    ):
        ids = [job_id for group in "ab" for job_id in enqueue_many(storage, 5, concurrency_key=group)]
        assert len(claim(storage, 20)) == 6
        prefix = f"{{q:{QUEUE}}}:"
        assert server.zcard(prefix + "rates") == server.zcard(prefix + "due") == 2
        storage.jobs.cancel(QUEUE, ids)
        assert server.exists(prefix + "due") == 0
        clock.advance(1_000)
        storage.sweep()

        assert server.exists(prefix + "rates") == 0
        assert server.hget(prefix + "count", "r") is None


def test_clock_set_back_does_not_delay_a_group(redis_url):
    clock = FakeClock()
    policies = {QUEUE: QueuePolicy(key_concurrency=5, key_rate=Rate(1, 1_000))}
    with closing(RedisStorage(url=redis_url, **BUSY, policies=policies, clock=clock)) as storage:
        ids = enqueue_many(storage, 2, concurrency_key="g")
        claim(storage, 10)
        clock.jump(-3_600_000)
        storage.queues.set_key_limit(QUEUE, "g", weight=2)
        clock.advance(1_000)

        assert [one.id for one in claim(storage, 10)] == ids[1:]
