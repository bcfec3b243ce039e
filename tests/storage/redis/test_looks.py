"""Queue names and queue states that claims cache, which hide no job."""

from collections import Counter
from contextlib import closing
from threading import Event

import pytest

from djqueue.core.job import ClaimRequest
from djqueue.core.policies import LimiterPolicy, QueuePolicy
from djqueue.storage.redis import RedisStorage, keyspace
from djqueue.storage.redis.claiming import LOOK_SOON
from djqueue.testing.factories import NAME, completing, enqueue, enqueue_many
from tests.support import PATIENCE

from .conftest import BUSY


@pytest.fixture(autouse=True)
def fresh_names(monkeypatch):
    """Keep the names of the queues for longer than a test takes on a busy machine."""
    monkeypatch.setattr(keyspace, "NAMES_TTL", 600)


@pytest.fixture
def worker(redis_url):
    with closing(RedisStorage(url=redis_url, **BUSY)) as storage:
        yield storage


@pytest.fixture
def producer(redis_url):
    with closing(RedisStorage(url=redis_url, **BUSY)) as storage:
        yield storage


def limited_storage(url, queues, concurrency=5):
    """Return a storage in which queues share a limiter."""
    policies = {queue: QueuePolicy(limiter="shared") for queue in queues}
    limiters = {"shared": LimiterPolicy(concurrency=concurrency)}
    return RedisStorage(url=url, **BUSY, policies=policies, limiters=limiters)


def claim(storage, slots=1):
    """Claim from all queues; return the number of jobs by queue."""
    request = ClaimRequest("w", slots, frozenset({NAME}))
    return Counter(job.queue for job in storage.finish([], request).claims.jobs)


def listings(server):
    """Return how often the names of the queues were listed."""
    return server.run("INFO", "commandstats").get("cmdstat_smembers", {"calls": 0})["calls"]


def commands(server, name):
    """Return how often a command was called."""
    return server.run("INFO", "commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"]


def script_calls(server):
    """Return how often a script was called."""
    return commands(server, "evalsha") + commands(server, "eval")


def looks(server):
    """Return how often the length of a list was read, as looks at queues do."""
    return server.run("INFO", "commandstats").get("cmdstat_llen", {"calls": 0})["calls"]


def test_worker_with_a_subscription_lists_queue_names_once(worker, producer, redis_server):
    enqueue_many(producer, 20, queue="one")
    unsubscribe = worker.listen(None, lambda: None)
    assert claim(worker) == {"one": 1}
    before = listings(redis_server)

    for _ in range(10):
        assert claim(worker) == {"one": 1}

    assert listings(redis_server) == before
    unsubscribe()
    claim(worker)
    assert listings(redis_server) == before + 1


def test_queue_names_are_listed_again_after_a_while(worker, producer, redis_server, monkeypatch):
    monkeypatch.setattr(keyspace, "NAMES_TTL", 0)
    enqueue_many(producer, 3, queue="one")
    unsubscribe = worker.listen(None, lambda: None)
    claim(worker)
    before = listings(redis_server)

    claim(worker)

    assert listings(redis_server) == before + 1
    unsubscribe()


def test_job_of_a_new_queue_is_claimed_after_its_wake_up(worker, producer):
    woken = Event()
    enqueue(producer, queue="one")
    unsubscribe = worker.listen(None, woken.set)
    assert claim(worker) == {"one": 1}
    assert claim(worker) == {}
    woken.clear()

    enqueue(producer, queue="two")

    assert woken.wait(PATIENCE)
    assert claim(worker) == {"two": 1}
    unsubscribe()


def test_new_queue_of_the_same_process_is_claimed_from_at_once(worker):
    unsubscribe = worker.listen(None, lambda: None)
    enqueue(worker, queue="one")
    assert claim(worker) == {"one": 1}

    enqueue(worker, queue="two")

    assert claim(worker) == {"two": 1}
    unsubscribe()


def test_claim_with_free_slots_looks_at_other_queues(worker, producer):
    enqueue_many(producer, 3, queue="one")
    enqueue(producer, queue="two")
    assert sum(claim(worker, 4).values()) == 4  # The look is remembered from here on: both had jobs.
    enqueue_many(producer, 2, queue="one")
    claim(worker)
    enqueue_many(producer, 2, queue="two")

    assert claim(worker, 3) == {"one": 1, "two": 2}


def test_queues_take_turns_between_two_looks(worker, producer, redis_server):
    enqueue_many(producer, 20, queue="one")
    enqueue_many(producer, 20, queue="two")

    found = sum((claim(worker) for _ in range(20)), Counter())

    assert found["one"] > 5
    assert found["two"] > 5
    assert found.total() == 20


def test_idle_worker_claims_from_the_queue_of_a_wake_up_without_a_look(worker, producer, redis_server):
    woken = Event()
    enqueue_many(producer, 1, queue="one")
    enqueue_many(producer, 1, queue="two")
    unsubscribe = worker.listen(None, woken.set)
    assert claim(worker, 3).total() == 2
    assert claim(worker, 3).total() == 0
    woken.clear()
    enqueue(producer, queue="two")
    assert woken.wait(PATIENCE)
    before = script_calls(redis_server)

    finished = worker.finish([], ClaimRequest("w", 3, frozenset({NAME})))

    assert [job.queue for job in finished.claims.jobs] == ["two"]
    assert finished.claims.wait == LOOK_SOON
    assert script_calls(redis_server) == before + 1
    enqueue(producer, queue="one")
    assert claim(worker, 3) == {"one": 1}
    assert script_calls(redis_server) >= before + 4
    unsubscribe()


def test_next_claim_finds_the_job_of_a_queue_without_a_wake_up(worker, producer):
    woken = Event()
    enqueue_many(producer, 1, queue="one")
    enqueue_many(producer, 1, queue="two")
    unsubscribe = worker.listen(["two"], woken.set)
    assert claim(worker, 3).total() == 2
    assert claim(worker, 3).total() == 0
    woken.clear()
    enqueue(producer, queue="one")
    enqueue(producer, queue="two")
    assert woken.wait(PATIENCE)

    assert claim(worker, 3) == {"two": 1}
    assert claim(worker, 3) == {"one": 1}
    unsubscribe()


def test_wake_ups_do_not_starve_other_queues(worker, producer):
    woken = Event()
    enqueue_many(producer, 20, queue="one")
    enqueue(producer, queue="two")
    unsubscribe = worker.listen(None, woken.set)
    found = Counter()

    for _ in range(10):
        woken.clear()
        enqueue(producer, queue="two")
        assert woken.wait(PATIENCE)
        found += claim(worker)

    assert found["one"] >= 4
    unsubscribe()


def test_worker_finishes_jobs_before_looking_at_other_queues(worker, producer, redis_server):
    enqueue_many(producer, 2, queue="one")
    enqueue_many(producer, 1, queue="two")
    request = ClaimRequest("w", 9, frozenset({NAME}))
    jobs = worker.finish([], request).claims.jobs
    assert len(jobs) == 3
    enqueue(producer, queue="two")
    before = script_calls(redis_server)

    finished = worker.finish([completing(job) for job in jobs if job.queue == "one"], request)

    # One call that reports and claims, one look at the other queue, and one claim from it.
    assert finished.accepted == [True, True]
    assert [job.queue for job in finished.claims.jobs] == ["two"]
    assert script_calls(redis_server) == before + 3


def test_idle_worker_stops_waiting_for_a_limiter_when_its_queue_is_empty(redis_url, monkeypatch):
    monkeypatch.setattr("djqueue.storage.redis.claiming.LOOK_FRESH", 0)
    queues = ["one", "two"]
    request = ClaimRequest("w", 3, frozenset({NAME}))
    with closing(limited_storage(redis_url, queues, 1)) as worker:
        ids = {queue: enqueue(worker, queue=queue) for queue in queues}
        [job] = worker.finish([], request).claims.jobs
        [other] = set(queues) - {job.queue}
        assert other in worker.limiters.state("shared").waiting
        worker.jobs.cancel(other, [ids[other]])

        assert worker.finish([completing(job)], request).claims.jobs == []

        assert worker.limiters.state("shared").waiting == ()


@pytest.mark.parametrize("limited", [(), ("one",), ("one", "two")], ids=len)
def test_worker_with_one_slot_takes_turns_between_queues(redis_url, producer, monkeypatch, limited):
    monkeypatch.setattr("djqueue.storage.redis.claiming.LOOK_FRESH", 0)
    enqueue_many(producer, 20, queue="one")
    enqueue_many(producer, 20, queue="two")
    request = ClaimRequest("w", 1, frozenset({NAME}))
    found, jobs = Counter(), []

    with closing(limited_storage(redis_url, limited)) as worker:
        for _ in range(20):
            finished = worker.finish([completing(job) for job in jobs], request)
            assert finished.accepted == [True] * len(jobs)
            jobs = finished.claims.jobs
            found.update(job.queue for job in jobs)

    assert found["one"] > 5
    assert found["two"] > 5


def test_one_look_serves_several_claims(worker, producer, redis_server, monkeypatch):
    monkeypatch.setattr("djqueue.storage.redis.claiming.LOOK_FRESH", 60)
    enqueue_many(producer, 20, queue="one")
    enqueue_many(producer, 20, queue="two")
    claim(worker)
    before = looks(redis_server)

    for _ in range(10):
        claim(worker)

    one_look_each = looks(redis_server) - before
    monkeypatch.setattr("djqueue.storage.redis.claiming.LOOK_FRESH", 0)
    before = looks(redis_server)
    for _ in range(10):
        claim(worker)
    assert looks(redis_server) - before == one_look_each + 20
