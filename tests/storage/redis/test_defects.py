"""Regression tests for ten defects that were found in another Redis-based queue."""

from threading import Event

import pytest

from djqueue import Queue, Worker
from djqueue.core.policies import DeadLetterPolicy, QueuePolicy
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import (
    QUEUE,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    job,
    lease_of,
    request,
    state,
    worker,
)
from djqueue.testing.waiting import Recorder
from tests.clocks import AheadClock
from tests.support import PATIENCE, eventually

from .mortal import Death, Mortal

LEASE = 0.4
HALF_LEASE = 150_000
"""Milliseconds: half of a lease that no busy machine lets expire."""
HOUR = 3_600_000


@pytest.fixture
def clock():
    """The storages' time."""
    return AheadClock()


@pytest.fixture
def make_storage(redis_options, clock):
    """Makes storages, as of several processes; and closes them."""
    made = []

    def make(**given):
        made.append(RedisStorage(clock=clock, **redis_options, **given))
        return made[-1]

    yield make
    for storage in made:
        storage.close()


@pytest.fixture
def storage(make_storage):
    return make_storage(lease=LEASE)


@pytest.fixture
def gate():
    """What a handler waits for."""
    opened = Event()
    yield opened
    opened.set()


def pass_leases(storage, clock, last_sign):
    """Let several leases pass and sweep, while a worker gives a sign of life in each half of one."""
    for _ in range(8):
        clock.advance(HALF_LEASE)
        since = clock.now()
        eventually(lambda since=since: last_sign() >= since, message="the worker has sent a heartbeat")
        storage.sweep()


def test_p1_result_lives_for_the_result_ttl_of_its_job(storage, clock):
    a_completed_job(storage, id="long", result_ttl=HOUR, result=b"\x01")
    a_completed_job(storage, id="short", result_ttl=300, result=b"\x02")

    clock.advance(900)
    storage.sweep()

    assert job(storage, "long").result == b"\x01"
    assert state(storage, "short") is None
    again = storage.enqueue([batch(ids=["long", "short"])])
    assert [(result.status, result.result) for result in again] == [("completed", b"\x01"), ("queued", None)]


def test_p2_job_whose_handler_returns_none_completes(make_storage):
    storage = make_storage()
    with Worker(storage, handlers={"orders": lambda job: None}, concurrency=1):
        assert Queue("orders", storage=storage).enqueue_and_wait(1, wait=PATIENCE) is None


@pytest.mark.parametrize("payload", [b"\xff\x00\x80", "text", {"n": [1, 2.5, None]}, b""])
def test_p3_payloads_arrive_unchanged(make_storage, payload):
    storage = make_storage()
    queue = Queue("orders", storage=storage)
    with Worker(storage, handlers={"orders": lambda job: job.payload}, concurrency=1):
        assert queue.enqueue_and_wait(payload, wait=PATIENCE) == payload

    assert counts(storage, "orders") == {State.COMPLETED: 1}


def test_p4_job_that_outlives_its_stopped_worker_returns_to_the_queue(make_storage, storage, gate):
    begun = Event()

    def handle(job):
        begun.set()
        gate.wait(PATIENCE)

    other = make_storage(lease=LEASE)
    job_id = enqueue(other, name="slow")
    stopped = Worker(storage, handlers={"slow": handle}, concurrency=1, shutdown_timeout=0)
    stopped.start()
    assert begun.wait(PATIENCE)
    stopped.stop()

    eventually(lambda: other.sweep() and state(other, job_id) is State.WAITING)
    [again] = claim(other, names=["slow"])
    assert again.id == job_id
    assert finish(other, completing(again)) == [True]
    assert other.enqueue([batch(ids=[job_id])])[0].status == "completed"


def test_p5_cancelled_job_does_not_run_beside_the_next_job_of_its_id(storage):
    enqueue(storage, id="a", payload=b"\x01")
    storage.jobs.cancel(QUEUE, ["a"])
    enqueue(storage, id="a", payload=b"\x02")

    claimed = claim(storage, 5)

    assert [one.payload for one in claimed] == [b"\x02"]
    assert finish(storage, *map(completing, claimed)) == [True]
    assert claim(storage, 5) == []
    assert counts(storage) == {State.COMPLETED: 1}


def test_p6_live_worker_runs_a_job_of_many_leases_once(make_storage, clock, gate):
    starts, renewals = [], []

    def handle(job):
        starts.append(job.id)
        gate.wait(PATIENCE)

    storage, other = make_storage(lease=HALF_LEASE / 500), make_storage()
    renew = storage.renew

    def renewing(leases):
        began = clock.now()
        found = renew(leases)
        renewals.append(began)
        return found

    storage.renew = renewing
    job_id = enqueue(other, name="slow", max_attempts=2)
    with Worker(storage, handlers={"slow": handle}, concurrency=2, heartbeat=0.1):
        eventually(lambda: starts)
        pass_leases(other, clock, lambda: renewals[-1] if renewals else 0)
        gate.set()
        eventually(lambda: state(other, job_id) is State.COMPLETED)

    record = job(other, job_id)
    assert starts == [job_id]
    assert (record.attempts, record.stalls) == (1, 0)


def test_p7_job_is_claimed_again_after_its_worker_dies_at_any_command_of_the_claim(make_storage, clock):
    for commands in range(1, 10):
        other = make_storage()
        job_id = enqueue(other, id=f"job-{commands}")
        dying = make_storage()
        exchange = dying._roundtrips._exchange
        exchange.ask = Mortal(exchange.ask, commands)
        try:
            claimed = claim(dying, 5)
        except Death:
            claimed = []
        clock.advance(HOUR)
        other.sweep()

        [again] = claim(other, 5)
        assert again.id == job_id
        assert again.stalls in (0, 1)
        assert finish(other, *map(completing, claimed)) == [False] * len(claimed)
        assert finish(other, completing(again)) == [True]
        assert other.enqueue([batch(ids=[job_id])])[0].status == "completed"
    assert claimed, "the last one has lived"


def test_p8_id_of_a_failed_job_can_be_used_again(storage):
    a_failed_job(storage, id="a")

    [result] = storage.enqueue([batch(ids=["a"])])

    assert result.status == "queued"
    assert storage.reads.dead_letters(QUEUE) == []
    assert claim_ids(storage, 5) == ["a"]


def test_dead_letters_with_taken_unique_keys_do_not_block_other_automatic_retries(
    make_storage, clock, monkeypatch
):
    monkeypatch.setattr("djqueue.storage.redis.sweeping.SWEEP", 5)
    healing = DeadLetterPolicy(auto_retries=1, auto_retry_delay=HOUR)
    storage = make_storage(policies={QUEUE: QueuePolicy(dead_letters=healing)})
    storage.enqueue([batch(ids=[f"old-{at}"], unique_key=f"{at}") for at in range(7)])
    finish(storage, *map(failing, claim(storage, 7)))
    clock.advance(1)
    a_failed_job(storage, id="free")
    storage.enqueue([batch(ids=[f"new-{at}"], unique_key=f"{at}") for at in range(7)])

    clock.advance(HOUR)

    assert [storage.sweep().retried for _ in range(3)] == [0, 1, 0]
    assert state(storage, "free") is State.WAITING
    assert all(letter.next_retry_at > clock.now() for letter in storage.reads.dead_letters(QUEUE))
    storage.jobs.cancel(QUEUE, ["new-0"])
    clock.advance(HOUR)
    storage.sweep()
    assert state(storage, "old-0") is State.WAITING


@pytest.mark.parametrize("queue", ["user:42", "a::b:", "{q:other}:jobs", "=a", "*", "ключ 🗝"])
def test_p9_ids_and_queue_names_may_contain_any_characters(storage, queue):
    recorder = Recorder()
    storage.events.subscribe(queue, recorder)
    enqueue(storage, id="user:42", queue=queue)
    [claimed] = claim(storage, 5, queues=[queue])
    assert storage.renew([lease_of(claimed)])[0].held
    finish(storage, completing(claimed))

    recorder.until("completed")
    words = ["enqueued", "started", "completed"]
    assert [(event.id, event.event) for event in recorder.events()] == [("user:42", word) for word in words]
    assert counts(storage, queue) == {State.COMPLETED: 1}
    assert counts(storage, "other") == {}


def test_p9_stalled_job_with_a_colon_in_its_id_is_recovered(storage, clock):
    an_active_job(storage, id="user:42")

    clock.advance(HOUR)

    assert storage.sweep().stalled == 1
    assert claim_ids(storage) == ["user:42"]


def test_p10_worker_with_heartbeats_stays_registered_when_another_expires(storage, clock):
    storage.workers.register(worker("silent"))
    for _ in range(5):
        clock.advance(20_000)
        storage.workers.register(worker("steady"))
    enqueue(storage)
    storage.claim(request(worker="steady"))
    storage.workers.register(worker("new"))

    assert sorted(info.id for info in storage.workers.all()) == ["new", "steady"]


def test_p10_idle_worker_stays_registered(make_storage, storage, clock):
    other = make_storage()
    with Worker(storage, handlers={"orders": print}, concurrency=1, worker_id="idle", heartbeat=0.1):
        eventually(other.workers.all)
        pass_leases(other, clock, lambda: max((info.seen_at for info in other.workers.all()), default=0))
        assert [info.id for info in other.workers.all()] == ["idle"]

    assert other.workers.all() == []
