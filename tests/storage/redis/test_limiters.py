"""Limiters on Redis: permits of processes that die between any two commands."""

from contextlib import closing
from random import Random

import pytest
import redis

from djqueue.core.policies import LimiterPolicy, QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.limits import PERMIT_GRACE
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    ENDINGS,
    QUEUE,
    an_active_job,
    claim,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    lease_of,
    request,
    worker,
)

from .conftest import BUSY
from .mortal import Death, Place

LIMITER, MOST, LEASE = "stripe", 3, 1_000
QUEUES = ("charges", "refunds")
POLICIES = {queue: QueuePolicy(limiter=LIMITER, lease=LEASE) for queue in QUEUES}
LIMITERS = {LIMITER: LimiterPolicy(concurrency=MOST)}
LASTS = LEASE + 2 * 1_000 * BUSY["TIMEOUT"] + PERMIT_GRACE
"""Milliseconds after which every permit of a process that is no more is free."""


@pytest.fixture(params=["single", pytest.param("cluster", marks=pytest.mark.thorough)])
def servers(request):
    """The servers, which are empty."""
    if request.param == "single":
        request.getfixturevalue("redis_options")
        return request.getfixturevalue("redis_server")
    request.getfixturevalue("cluster_options")
    return request.getfixturevalue("redis_cluster")


@pytest.fixture
def place(servers):
    with closing(Place(servers, FakeClock(), policies=POLICIES, limiters=LIMITERS)) as made:
        yield made


@pytest.fixture
def storage(place):
    return place.storage()


def active(storage):
    found = [record for queue in QUEUES for record in storage.reads.page(queue, State.ACTIVE, 100)]
    return sum(record.options.weight for record in found)


def keys_of(servers):
    """What there is of limiters, each key with whether it lasts."""
    found = {}
    for node in getattr(servers, "nodes", [servers]):
        with redis.Redis(port=node.port, protocol=2) as client:
            for key in client.scan_iter("{limiter:*", count=1_000):
                found[key.decode().split("}:")[1].split(":")[0]] = client.ttl(key) < 0
    return found


def assert_all_is_freed(place, storage):
    """When the leases of the dead are over all jobs run, and nothing is left of them."""
    place.clock.advance(LEASE + 1)
    storage.sweep()
    assert active(storage) == 0
    place.clock.advance(LASTS)
    while claimed := claim(storage, 10):
        assert active(storage) <= storage.limiters.state(LIMITER).used <= MOST
        finish(storage, *map(completing, claimed))
    assert all(set(counts(storage, queue)) == {State.COMPLETED} for queue in QUEUES)
    assert storage.limiters.state(LIMITER) == (None, MOST, 0, None, ())


def prepare(storage):
    for queue in QUEUES:
        enqueue_many(storage, 3, queue=queue)
        enqueue_many(storage, 2, queue=queue, weight=2)


def act(storage, _):
    claimed = claim(storage, 5, queues=QUEUES[:1])
    storage.renew(list(map(lease_of, claimed)))
    answer = storage.finish([completing(claimed[0])], request(5, queues=QUEUES[1:]))
    claimed += answer.claims.jobs
    answer = storage.finish(list(map(completing, claimed[1:])), request(5, queues=QUEUES[:1]))
    finish(storage, *map(ENDINGS["release"], answer.claims.jobs))
    claim(storage, 5)


def test_process_death_between_any_two_commands_loses_no_permit_forever(place):
    for storage, _, _ in place.deaths(prepare, act):
        assert active(storage) <= storage.limiters.state(LIMITER).used <= MOST
        claim(storage, 10)
        assert active(storage) <= storage.limiters.state(LIMITER).used <= MOST

        assert_all_is_freed(place, storage)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 8))]
)
def test_limiter_allows_no_more_active_jobs_than_permits_when_processes_die(place, seed):
    random = Random(seed)
    storage, processes = place.storage(), [place.mortal() for _ in range(3)]
    held = [[] for _ in processes]
    prepare(storage)
    for _ in range(60):
        number = random.randrange(len(processes))
        process = processes[number]
        process.lives(random.randint(1, 12))
        queue = random.choice(QUEUES)
        ending, held[number] = held[number][:2], held[number][2:]
        try:
            if random.random() < 0.3:
                process.storage.renew(list(map(lease_of, ending)))
                held[number] += ending
            else:
                ends = [ENDINGS[random.choice(list(ENDINGS))](one) for one in ending]
                answer = process.storage.finish(ends, request(random.randint(1, 4), queues=[queue]))
                held[number] += answer.claims.jobs
        except Death:
            held[number] = []
        assert active(storage) <= storage.limiters.state(LIMITER).used
        assert active(storage) <= MOST + 1, "one that weighs more than is free runs alone"
        if random.random() < 0.2:
            place.clock.advance(random.choice([100, LEASE // 2]))
            storage.sweep()
        enqueue(storage, queue=queue, weight=random.choice([1, 1, 2]))
    for queue in QUEUES:
        storage.queues.clean(queue, frozenset(State) - {State.ACTIVE}, storage._roundtrips._clock.now() + 1)
        enqueue(storage, queue=queue)

    assert_all_is_freed(place, storage)


def test_idle_limiter_leaves_only_overrides_without_expiry(servers, storage):
    storage.limiters.set(LIMITER, Rate(100), MOST)
    for queue in QUEUES:
        enqueue_many(storage, 9, queue=queue)
        enqueue(storage, queue=queue, weight=2)
    while claimed := claim(storage, 5):
        finish(storage, *map(completing, claimed))
    claim(storage, 5, queues=QUEUES[:1])

    assert keys_of(servers) == {"sequence": False, "bucket": False, "overrides": True}
    storage.limiters.set(LIMITER, None, MOST)
    assert keys_of(servers) == {"sequence": False, "bucket": False}


def test_permits_of_an_unused_limiter_expire(servers, storage):
    enqueue(storage, queue=QUEUES[0], weight=2)
    claim_one(storage)
    storage.limiters.state(LIMITER)

    assert keys_of(servers) == {"sequence": False, "permits": False, "weights": False}


def test_finish_that_overtakes_its_claim_releases_the_permit(storage):
    claimed = an_active_job(storage, queue=QUEUES[0])
    late = list(storage._limits._collected(LIMITER))
    finish(storage, completing(claimed))

    for entry in late:
        storage._limits._owe(LIMITER, entry)

    assert storage.limiters.state(LIMITER).used == 0


def test_finish_and_claim_without_a_limiter_is_one_command(redis_options, redis_server):
    with closing(RedisStorage(policies=POLICIES, limiters=LIMITERS, **redis_options)) as storage:
        enqueue_many(storage, 9)
        claimed = claim(storage, 2, queues=[QUEUE])
        asked = []
        ask = storage._roundtrips._exchange.ask
        storage._roundtrips._exchange.ask = lambda words: asked.append(words) or ask(words)

        storage.finish(list(map(completing, claimed)), request(2, queues=[QUEUE]))
        assert len(asked) == 1


def test_finish_and_claim_with_a_limiter_makes_two_round_trips(storage):
    enqueue_many(storage, 30, queue=QUEUES[0])
    claimed = claim(storage, MOST, queues=QUEUES[:1])
    asked = []
    ask = storage._roundtrips._exchange.ask
    storage._roundtrips._exchange.ask = lambda words: asked.append(words) or ask(words)
    for number in range(1, 5):
        claimed = storage.finish(list(map(completing, claimed)), request(MOST, queues=QUEUES[:1])).claims.jobs
        assert (len(claimed), len(asked)) == (MOST, 2 * number)


def test_limiter_overrides_replace_the_limits_of_the_settings(place):
    one, other = place.storage(), place.storage()
    assert other.limiters.state(LIMITER).concurrency == MOST

    one.limiters.set(LIMITER, Rate(7, 60_000), None)
    assert other.limiters.state(LIMITER) == (Rate(7, 60_000), None, 0, 7, ())
    one.limiters.set(LIMITER, None, None)
    assert other.limiters.state(LIMITER)[:2] == (None, None)


def test_unavailable_limiter_loses_no_outcome(place, servers, monkeypatch):
    storage = place.storage()
    claimed = an_active_job(storage, queue=QUEUES[0])
    storage.limiters.state(LIMITER)
    ask = storage._roundtrips._exchange.ask

    def failing(words):
        if any(b"{limiter:" in word for word in words if isinstance(word, bytes)):
            raise redis.ResponseError("ERR no")
        return ask(words)

    with monkeypatch.context() as patches:
        patches.setattr(storage._roundtrips._exchange, "ask", failing)
        assert finish(storage, completing(claimed)) == [True]

    assert storage.limiters.state(LIMITER).used == 0


def test_another_process_sees_the_permit_holders_of_the_latest_claim(place, storage):
    storage.workers.register(worker())
    enqueue_many(storage, MOST, queue="charges")
    waiting = enqueue(storage, queue="refunds")
    claimed = claim(storage, MOST, queues=["charges"])

    found = place.storage().reads.explain("refunds", waiting)

    assert (found.verdict, found.limit, found.free) == ("limiter_full", MOST, 0)
    assert {(one.queue, one.id) for one in found.holders} == {("charges", one.id) for one in claimed}
