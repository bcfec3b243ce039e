"""Faults of processes, connections and servers: no job is lost, and none runs twice at the same time.

`DJQUEUE_TEST_KILLS=10000` makes a soak of the first tests.
"""

import asyncio
import os
import time
from contextlib import ExitStack, contextmanager
from random import Random
from threading import Event, Thread

import pytest
import redis

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import (
    DELAY,
    ENDINGS,
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    lease_of,
    request,
    state,
    worker,
)
from djqueue.testing.waiting import Recorder, Wakes
from tests import servers
from tests.clocks import AheadClock
from tests.support import PATIENCE, eventually

from .conftest import BUSY
from .programs import FAR, LEASE, NEAR, Child

pytestmark = pytest.mark.redis

KILLS = int(os.environ.get("DJQUEUE_TEST_KILLS", "10"))
"""Of workers, in each test of those."""
BOTH = (NEAR, FAR)
DAYS = 24 * 3_600_000
ENDED = {State.COMPLETED, State.FAILED, State.CANCELLED}
EMPTY_IN_THE_END = "w z asides due parks out unmet ttl lease uniq uniqttl deps outbox"


@pytest.fixture
def moments(request):
    """Random moments, the same ones for the same seed of the test run."""
    return Random(request.config.getoption("randomly_seed", 0))


@pytest.fixture
def open_storage():
    """Makes storages, and closes them."""
    made = []

    def make(server, **given):
        made.append(RedisStorage(**{**server.options, **BUSY, "LEASE": LEASE, **given}))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


def wait(seconds):
    """Let a random time pass, whatever happens meanwhile."""
    Event().wait(seconds)


def nodes_of(server):
    return (getattr(server, "sentinels", None) and [server.master]) or getattr(server, "nodes", [server])


def keys_of(server):
    """All keys, each with the milliseconds for which it lasts; -1 is for ever."""
    found = {}
    for node in nodes_of(server):
        with redis.Redis(port=node.port, protocol=2) as client:
            found.update({key.decode("latin-1"): client.pttl(key) for key in client.scan_iter(count=1_000)})
    return found


def work_off(storage, queues=BOTH):
    """Complete whatever there is, until all has ended."""

    def is_done():
        storage.sweep()
        for queue in queues:
            storage.jobs.promote(
                queue, [record.id for record in storage.reads.page(queue, State.DELAYED, 1_000)]
            )
        while claimed := claim(storage, 50, queues=queues, worker="last"):
            assert all(finish(storage, *map(completing, claimed)))
        return all(set(counts(storage, queue)) <= ENDED for queue in queues)

    eventually(is_done, message="all jobs have ended")


def assert_exact(storage, queue):
    """What the counters, the indexes and a look at every job say is one and the same."""
    records = storage.reads.page(queue, None, 1_000_000)
    found = dict.fromkeys(State, 0)
    for record in records:
        found[record.state] += 1
    assert storage.reads.counts(queue) == found
    assert len({record.id for record in records}) == len(records)
    client, keys = storage._connections.sync(), storage.keys(queue)
    assert client.zcard(keys.key("lease")) == found[State.ACTIVE]
    assert client.zcard(keys.key("dead")) == client.hlen(keys.key("dead_letters")) == found[State.FAILED]
    assert {letter.id for letter in storage.reads.dead_letters(queue)} == {
        record.id for record in records if record.state is State.FAILED
    }
    assert client.zcard(keys.key("finished")) == sum(found[one] for one in ENDED)
    for record in records:
        runs_that_count = [attempt for attempt in record.history if attempt.outcome != "released"]
        running_or_done = record.state in (State.ACTIVE, State.COMPLETED)
        assert record.attempts == len(runs_that_count) + running_or_done, record
        assert record.failures + record.stalls <= record.attempts, record
        assert (record.result is not None) == (record.state is State.COMPLETED), record


def assert_all_has_ended_once(storage, queued):
    """Every job that a producer was told of has one end; nothing of its way there is left; ids are free."""
    for queue in BOTH:
        assert_exact(storage, queue)
        client, keys = storage._connections.sync(), storage.keys(queue)
        assert [name for name in EMPTY_IN_THE_END.split() if client.exists(keys.key(name))] == []
        assert storage.reads.waiting_names(queue) == {}
    for queue, job_id in queued:
        there = [one for name in BOTH if (one := state(storage, job_id, name)) is not None]
        assert there, f"job {job_id} of {queue} is lost"
        assert set(there) <= ENDED
    for name in BOTH:
        some = sorted({record.id for record in storage.reads.page(name, None, 50)})
        for result in storage.enqueue([batch(ids=some, queue=name)]):
            assert result.status in ("completed", "queued")
    work_off(storage)


def assert_nothing_is_left(server, open_storage):
    """When the time of all records is over they are gone, and with the queues all keys."""
    later = open_storage(server, clock=AheadClock(30 * DAYS))
    for queue in BOTH:
        eventually(lambda queue=queue: later.sweep() and not counts(later, queue))
    left = {key: lasts for key, lasts in keys_of(server).items() if key.startswith("{q:")}
    names = {key.split("}:")[1].split(":")[0] for key in left}
    assert names <= {"meta", "inbox", "sequence", "log", "m", "metrics", "r", "version"}
    assert [key for key, lasts in left.items() if key.endswith(":version") and lasts < 0] == []
    for queue in BOTH:
        later.queues.obliterate(queue)
    left = keys_of(server)
    assert [key for key, lasts in left.items() if lasts < 0] == []
    names = {key.split("}:")[1].split(":")[0] for key in left}
    # Buckets of metrics go by their own time: who is a month ahead does not know their names.
    assert names <= {"inbox", "sequence", "m", "metrics", "r", "heartbeats", "version", "workers"}


@contextmanager
def workers(server, moments, many=2):
    """Workers that die and are replaced at random moments: `die()` makes one; what they were told of."""
    queued = []
    with Child("nursery", server.url) as nursery:
        assert nursery.hears() == ["ready"]

        def note(line):
            assert line[0] == "queued", f"a worker has ended by itself: {line}"
            queued.append((line[1], line[2]))

        def obeys(*words):
            nursery.tell(*words)
            while (line := nursery.hears()) != ["done"]:
                note(line)

        def born():
            obeys("fork", moments.randrange(10**9))

        def die():
            wait(moments.uniform(0.002, 0.06))
            obeys("kill", moments.randrange(100))
            born()

        for _ in range(many):
            born()
        yield die, queued
        for line in nursery.told():
            note(line)


# Processes.


@pytest.mark.parametrize("kind", ["redis_server", pytest.param("redis_cluster", marks=pytest.mark.thorough)])
@pytest.mark.slow
def test_killed_workers_lose_no_job_and_block_no_id(request, kind, open_storage, moments):
    server = request.getfixturevalue(kind)
    server.clean()
    storage = open_storage(server)
    queued = [(NEAR, job_id) for job_id in enqueue_many(storage, 100, queue=NEAR)]
    with workers(server, moments) as (die, told):
        for _ in range(KILLS):
            die()
        while not told:  # On a busy machine, each may have died before its first job.
            wait(1)
            die()
    queued += told

    work_off(storage)

    assert len(queued) > 100
    assert_all_has_ended_once(storage, queued)
    assert_nothing_is_left(server, open_storage)


@pytest.mark.slow
def test_worker_that_resumes_after_its_lease_is_rejected(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    enqueue(storage, id="a")
    with Child("holder", redis_server.url) as worker:
        worker.hears()
        assert worker.asked("claim") == ["a"]
        worker.freeze()

        eventually(lambda: storage.sweep().stalled == 1)
        again = claim_one(storage, worker="another")
        worker.thaw()

        assert worker.asked("renew") == ["False"]
        assert worker.asked("report") == ["False"]
        assert worker.asked("finish") == ["False"]
        record = job(storage, "a")
        assert (record.state, record.worker, record.progress, record.logs) == (
            State.ACTIVE,
            "another",
            None,
            (),
        )
    assert finish(storage, completing(again, b"\x01")) == [True]
    assert job(storage, "a").result == b"\x01"


@pytest.mark.parametrize("offset", [600, -600])
@pytest.mark.slow
def test_wrong_clocks_of_clients_have_no_effect(redis_options, redis_server, open_storage, offset):
    lease = 5 * PATIENCE
    storage = open_storage(redis_server, LEASE=lease)
    with Child("holder", redis_server.url, lease, offset) as other:
        other.hears()
        claimed = an_active_job(storage, id="mine")
        assert other.asked("maintain") == ["0"] * 5, "its clock says that the lease is over"
        assert storage.renew([lease_of(claimed)])[0].held

        assert other.asked("enqueue", "id=theirs", "delay=60000") == ["theirs"]
        delayed = job(storage, "theirs")
        assert delayed.run_at - delayed.created_at == 60_000
        assert delayed.created_at - job(storage, "mine").created_at < 300_000
        assert claim_ids(storage, 5) == []
        assert other.asked("claim") == []

        other.asked("enqueue", "id=now", "ttl=60000")
        assert other.asked("claim") == ["now"]
        assert job(storage, "now").started_at - claimed.created_at < 300_000
        storage.workers.register(worker("mine"))
        assert sorted(other.asked("register")) == sorted(["mine", f"holder{offset}"])
        assert len(storage.workers.all()) == 2
        assert other.asked("finish") == ["True"]


# Connections.


def kill_clients(server, kind):
    with server.client() as client:
        return client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


def test_killed_connections_lose_no_job_and_no_subscription(
    redis_options, redis_server, open_storage, moments
):
    storage, wakes, recorder = open_storage(redis_server), Wakes(), Recorder()
    storage.events.subscribe(NEAR, recorder)
    storage.listen(None, wakes)
    over, queued, done = Event(), [], []

    def produce():
        while not over.is_set():
            queued.extend((NEAR, result.id) for result in storage.enqueue([batch(3, queue=NEAR)]))

    def consume():
        while producer.is_alive() or len(done) < len(queued):
            claimed = claim(storage, 5, queues=[NEAR])
            done.extend(one.id for one in claimed)
            assert all(finish(storage, *map(completing, claimed)))

    producer = Thread(target=produce)
    threads = [producer, Thread(target=consume)]
    for thread in threads:
        thread.start()
    try:
        for number in range(12):
            wait(moments.uniform(0, 0.03))
            kill_clients(redis_server, ("normal", "pubsub")[number % 3 == 2])
    finally:
        over.set()
        for thread in threads:
            thread.join()

    assert sorted(done) == sorted(job_id for _, job_id in queued)
    assert counts(storage, NEAR) == {State.COMPLETED: len(queued)}
    wakes.forget()
    last = []
    eventually(
        lambda: last.append(enqueue(storage, queue=NEAR)) or {*last} & {e.id for e in recorder.events()}
    )
    assert wakes.arrived()


async def test_killed_connections_of_an_event_loop_lose_no_job(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    for number in range(10):
        [result] = await storage.aenqueue([batch(ids=[f"{number}"])])
        assert result.status == "queued"
        kill_clients(redis_server, "normal")
        ended = await storage.afinish([], request(1))
        kill_clients(redis_server, "normal")
        assert (await storage.afinish(list(map(completing, ended.claims.jobs)))).accepted == [True]

    assert counts(storage) == {State.COMPLETED: 10}


@pytest.mark.parametrize("many", [1, 5])
def test_flushed_scripts_are_loaded_again(redis_options, redis_server, open_storage, many):
    storage = open_storage(redis_server)
    for _ in range(3):
        redis_server.run("SCRIPT", "FLUSH")
        storage.enqueue([batch(2) for _ in range(many)])
        redis_server.run("SCRIPT", "FLUSH")
        claimed = claim(storage, 2 * many)
        redis_server.run("SCRIPT", "FLUSH")
        assert finish(storage, *map(completing, claimed)) == [True] * 2 * many

    assert counts(storage) == {State.COMPLETED: 6 * many}


def test_enqueue_waits_for_a_busy_server(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    redis_server.run("CONFIG", "SET", "busy-reply-threshold", 10)

    def dawdle():
        with suppress_errors(), redis_server.client() as client:
            client.eval("while true do end", 0)

    busy = Thread(target=dawdle)
    busy.start()
    eventually(lambda: is_busy(redis_server))
    waiting = Thread(target=enqueue, args=(storage,), kwargs={"id": "a"})
    waiting.start()
    kill_script(redis_server)
    busy.join()
    waiting.join()

    assert claim_ids(storage) == ["a"]
    redis_server.run("CONFIG", "SET", "busy-reply-threshold", 5_000)


def test_enqueue_waits_for_a_server_with_too_few_replicas(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    with replicas_missing(redis_server):
        waiting = Thread(target=enqueue, args=(storage,), kwargs={"id": "a"})
        waiting.start()
        wait(0.3)
        assert waiting.is_alive()
    waiting.join()

    assert claim_ids(storage) == ["a"]


def test_enqueue_fails_at_the_timeout_of_a_server_with_too_few_replicas(
    redis_options, redis_server, open_storage
):
    storage, patient = open_storage(redis_server, TIMEOUT=1), open_storage(redis_server)
    enqueue(patient, id="a")
    eventually(lambda: not isinstance(attempt(storage, id="b"), StorageUnavailableError))
    with replicas_missing(redis_server):
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError, match=r"accepts no writes: .*min-replicas-to-write"):
            enqueue(storage, id="c")
        assert 0.5 < time.monotonic() - begun < PATIENCE / 2

    assert claim_ids(patient, 5) == ["a", "b"]


async def test_async_enqueue_waits_for_a_server_with_too_few_replicas(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server)
    with replicas_missing(redis_server):
        waiting = asyncio.create_task(storage.aenqueue([batch(ids=["a"])]))
        assert await asyncio.wait({waiting}, timeout=0.3) == (set(), {waiting})
    await waiting

    assert claim_ids(storage) == ["a"]


@contextmanager
def replicas_missing(server):
    server.run("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        yield
    finally:
        server.run("CONFIG", "SET", "min-replicas-to-write", 0)


@contextmanager
def suppress_errors():
    try:
        yield
    except redis.RedisError:
        pass


def is_busy(server):
    try:
        server.run("GET", "key")
    except redis.ResponseError as error:
        return "BUSY" in str(error) or "busy" in str(error)
    return False


def kill_script(server):
    server.run("SCRIPT", "KILL")


# Servers.


@pytest.mark.slow
def test_killed_server_with_an_append_only_file_loses_no_job(open_storage, moments):
    with servers.RedisServer(appendonly=True) as server:
        server.stop_signal = "KILL"
        storage = open_storage(server)
        queued = [(NEAR, job_id) for job_id in enqueue_many(storage, 50, queue=NEAR)]
        with workers(server, moments) as (die, told):
            for _ in range(3):
                die()
                server.stop()
                server.start()
                die()
        queued += told

        work_off(storage)

        assert_all_has_ended_once(storage, queued)
        assert_nothing_is_left(server, open_storage)
        storage.close()


@pytest.mark.slow
def test_failover_loses_no_replicated_job(sentinel_options, redis_sentinel, open_storage, moments):
    storage = open_storage(redis_sentinel)
    queued = [(NEAR, job_id) for job_id in enqueue_many(storage, 200, queue=NEAR)]
    redis_sentinel.master.run("WAIT", 1, 5_000)
    eventually(lambda: redis_sentinel._is_settled())
    with workers(redis_sentinel, moments) as (die, _):
        die()
        redis_sentinel.fail_over()
        die()

    work_off(storage)

    assert_all_has_ended_once(storage, queued)
    assert_nothing_is_left(redis_sentinel, open_storage)


@pytest.mark.slow
def test_moving_slots_lose_no_job(cluster_options, redis_cluster, open_storage, moments):
    storage = open_storage(redis_cluster)
    queued = [(NEAR, job_id) for job_id in enqueue_many(storage, 100, queue=NEAR)]
    with workers(redis_cluster, moments) as (die, told):
        homes = {queue: redis_cluster.node_of(f"{{q:{queue}}}") for queue in BOTH}
        places = [(queue, redis_cluster.other_than(home)) for queue, home in homes.items()]
        for queue, target in [*places, *homes.items()]:
            with redis_cluster.moving_slot(f"{{q:{queue}}}", target):
                die()
    queued += told

    work_off(storage)

    assert_all_has_ended_once(storage, queued)
    assert_nothing_is_left(redis_cluster, open_storage)


def test_token_lost_in_a_failover_is_not_issued_again(redis_options, redis_server, open_storage):
    """As a failover to a replica does that has not heard of the last claim."""
    storage = open_storage(redis_server, LEASE=30)
    enqueue_many(storage, 2)
    claim_one(storage)
    with redis.Redis(port=redis_server.port, protocol=2) as client:
        replica = {key: client.dump(key) for key in client.scan_iter()}
        lost = claim_one(storage)
        client.flushall()
        for key, value in replica.items():
            client.restore(key, 0, value)

    again = claim_one(open_storage(redis_server, LEASE=30), worker="another")

    assert again.id == lost.id
    assert finish(storage, completing(lost)) == [False]
    assert finish(storage, completing(again)) == [True]


@pytest.mark.parametrize("away", ["stopped", "frozen"])
def test_enqueue_fails_in_time_while_the_server_is_unavailable(
    redis_options, redis_server, open_storage, away
):
    storage = open_storage(redis_server, TIMEOUT=0.5)
    eventually(lambda: not isinstance(attempt(storage), StorageUnavailableError))

    with absent(redis_server, away):
        begun = time.monotonic()
        with pytest.raises(StorageUnavailableError, match="Is it running") as refused:
            enqueue(storage)
        assert time.monotonic() - begun < PATIENCE / 2
        assert f"127.0.0.1:{redis_server.port}" in str(refused.value)

    eventually(lambda: not isinstance(attempt(storage), StorageUnavailableError))


@contextmanager
def absent(server, how):
    if how == "frozen":
        with server.frozen():
            yield
    else:
        server.stop()
        try:
            yield
        finally:
            server.start()


def attempt(storage, **given):
    try:
        return enqueue(storage, **given)
    except StorageUnavailableError as error:
        return error


# Lost keys.


def test_active_jobs_with_deleted_leases_run_again(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    held = [an_active_job(storage) for _ in range(3)]
    redis_server.run("DEL", "{q:default}:lease")

    eventually(lambda: storage.sweep() and counts(storage) == {State.WAITING: 3})

    # Each is claimed alone, as it has a stall; which one first depends on the milliseconds of their claims.
    again = [claim_ids(storage, 5, worker=f"worker-{n}") for n in range(3)]
    assert sorted(again) == sorted([one.id] for one in held)
    assert finish(storage, *map(completing, held)) == [False] * 3
    assert {record.stalls for record in storage.reads.page(QUEUE, State.ACTIVE, 5)} == {1}


def test_job_with_a_deleted_result_can_be_read_and_replaced(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    a_completed_job(storage, id="a")
    redis_server.run("DEL", "{q:default}:r:a")

    assert job(storage, "a").result is None
    [result] = storage.enqueue([batch(ids=["a"])])
    assert (result.status, result.result) == ("completed", None)
    assert storage.jobs.remove(QUEUE, ["a"]) == [True]
    assert enqueue(storage, id="a") == "a"


@pytest.mark.parametrize("key", ["jobs", "dead_letters", "uniq", "meta", "dead", "hist"])
def test_deleted_key_fails_no_call(redis_options, redis_server, open_storage, key):
    storage = open_storage(redis_server)
    a_failed_job(storage, id="dead")
    held = an_active_job(storage, id="held", unique_key="key")
    enqueue(storage, id="waiting", unique_key="other")
    redis_server.run("DEL", f"{{q:default}}:{key}")

    assert storage.jobs.retry(QUEUE, ["dead"]) in (["retried"], ["not_found"])
    [first, second] = storage.enqueue(
        [batch(ids=["a"], unique_key="key"), batch(ids=["b"], unique_key="other")]
    )
    assert {first.status, second.status} <= {"queued", "duplicate"}
    assert (first.status == "queued") == (key in ("jobs", "uniq"))
    assert finish(storage, completing(held)) in ([True], [False])
    storage.sweep()
    assert claim_ids(storage, 9)


async def test_abandoned_call_leaves_no_reply_for_the_next_call(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    await storage.aenqueue([batch(ids=["first"])])
    with redis_server.frozen(), pytest.raises(TimeoutError):
        await asyncio.wait_for(storage.aenqueue([batch(ids=["given-up"])]), 0.1)

    for number in range(3):
        [result] = await storage.aenqueue([batch(ids=[f"{number}"])])
        assert (result.status, result.id) == ("queued", f"{number}")
    assert (await storage.aenqueue([batch(ids=["given-up"])]))[0].id == "given-up"
    assert counts(storage) == {State.WAITING: 5}


def test_memory_returns_to_its_former_size_after_many_jobs(redis_options, redis_server, open_storage):
    clock = AheadClock()
    storage = open_storage(redis_server, clock=clock, MIRROR=False)

    def round_of_jobs():
        ids = enqueue_many(storage, 2_000, queue=NEAR)
        storage.queues.set_key_limit(NEAR, "g", concurrency=3, rate=Rate(5, 20), weight=2)
        enqueue_many(storage, 300, queue=NEAR, priority=2, concurrency_key="g")
        enqueue_many(storage, 300, queue=NEAR, delay=DELAY, ttl=5)
        enqueue_many(storage, 300, queue=FAR, depends_on=((NEAR, ids[-1]),))
        storage.jobs.cancel(NEAR, ids[:300])
        for kind in (*ENDINGS.values(), completing):
            claimed = claim(storage, 250, queues=[NEAR])
            finish(storage, *map(kind, claimed))
        work_off(storage)

    def forget():
        clock.advance(30 * DAYS)
        eventually(lambda: storage.sweep() and not counts(storage, NEAR) and not counts(storage, FAR))
        for queue in BOTH:
            storage.queues.obliterate(queue)
        for key in keys_of(redis_server):
            if ":sequence:" in key or key.endswith(":inbox") or ":r:" in key or ":metrics:" in key:
                redis_server.run("DEL", key)
        return sorted(keys_of(redis_server)), used(redis_server)

    round_of_jobs()
    left, before = forget()
    round_of_jobs()
    left_again, after = forget()

    assert (left, left_again) == ([], [])
    assert abs(after - before) < 200_000


def used(server):
    server.run("MEMORY", "PURGE")
    with server.client() as client:
        return client.info("memory")["used_memory"]


def test_cancelled_jobs_before_a_waiting_job_do_not_hide_the_waiting_job(
    redis_options, redis_server, open_storage
):
    storage = open_storage(redis_server)
    ids = enqueue_many(storage, 50)
    storage.jobs.cancel(QUEUE, ids[:49])

    assert claim_ids(storage, 1) == ids[49:]


def test_ended_job_cannot_be_finished_or_renewed(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    a_cancelled_job(storage, id="x")
    held = an_active_job(storage, id="a")
    finish(storage, failing(held))

    assert finish(storage, completing(held)) == [False]
    assert storage.renew([lease_of(held)])[0].held is False
    assert counts(storage) == {State.CANCELLED: 1, State.FAILED: 1}


def test_stale_idle_connections_fail_no_call(open_storage):
    with servers.RedisServer() as server:
        storage = open_storage(server)
        with ExitStack() as at_once:
            for _ in range(8):
                at_once.enter_context(storage._roundtrips._exchange.connection())
        server.stop()
        server.start()

        assert enqueue(storage, id="a") == "a"
        storage.close()


def test_jobs_of_a_full_server_can_be_finished_and_claimed(redis_options, redis_server, open_storage):
    storage = open_storage(redis_server)
    enqueue_many(storage, 3)
    claimed = claim_one(storage)
    with redis_server.client() as client:
        client.config_set("maxmemory", 1_000)
        try:
            with pytest.raises(StorageUnavailableError, match="out of memory"):
                enqueue(storage)
            assert storage.renew([lease_of(claimed)])[0].held
            assert finish(storage, completing(claimed)) == [True]
            assert len(claim(storage, 5)) == 2
            storage.sweep()
        finally:
            client.config_set("maxmemory", 0)

    assert counts(storage) == {State.COMPLETED: 1, State.ACTIVE: 2}


def test_queue_is_listed_before_its_first_job_is_stored(redis_options, redis_server, open_storage):
    """Also if another process has obliterated it, and this one dies right after the enqueue."""
    storage, other = open_storage(redis_server), open_storage(redis_server)
    enqueue(storage)
    other.queues.obliterate(QUEUE)
    listed = []
    plain = storage._roundtrips._exchange.ask

    def ask(words):
        listed.append(other.queues.names())
        return plain(words)

    storage._roundtrips._exchange.ask = ask
    enqueue(storage)

    assert QUEUE in listed[-1]
    assert other.queues.names() == [QUEUE]
