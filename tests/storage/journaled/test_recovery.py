"""What a new scheduler finds, after one that ended and after one that was killed."""

from random import Random

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given, settings
from hypothesis import strategies as st

from djqueue import models
from djqueue.core.deadletters import DeadLetterPolicy
from djqueue.core.durations import to_milliseconds
from djqueue.core.job import DEAD_LETTER_REASONS, ItemMark
from djqueue.core.limiter import Rate
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.journaled import recovery
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.tables import rows
from djqueue.storage.tables.dialects import dialect_for
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    UPSTREAM,
    WORKER,
    a_blocked_job,
    a_cancelled_job,
    a_completed_job,
    a_delayed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    counts,
    emit,
    enqueue,
    enqueue_many,
    failing,
    finish,
    items_of,
    job,
    releasing,
    report_of,
    retrying,
    state,
)
from tests.support import eventually

pytestmark = pytest.mark.dialect

MINUTE = 60_000
SELF_HEALING = "self-healing"
POLICIES = {
    SELF_HEALING: QueuePolicy(dead_letters=DeadLetterPolicy(auto_retries=1, auto_retry_delay=MINUTE)),
}


class Schedulers:
    """One scheduler after the other, with one clock."""

    def __init__(self, make):
        self.clock = FakeClock()
        self._make = make
        self.storage = None
        self.again()

    def again(self):
        """The present one ends; the next one comes, and is returned."""
        if self.storage is not None:
            self.storage.close()
        self.storage = self._make(clock=self.clock, policies=POLICIES)
        self.storage.connect()
        return self.storage

    def reach(self, job_id):
        """Set the clock to the time of a job that came from a client, whose clock is the real one."""
        run_at = models.Job.objects.get(job_id=job_id).run_at
        self.clock.advance(to_milliseconds(run_at) - self.clock.now())


@pytest.fixture
def schedulers(make_storage):
    return Schedulers(make_storage)


# What waits.


def test_jobs_wait_in_same_order(schedulers):
    def fill(storage, clock):
        for at, options in enumerate(
            [{}, {"priority": 5}, {"lifo": True}, {}, {"priority": -1}, {"lifo": True, "priority": 5}, {}]
        ):
            enqueue(storage, payload=str(at).encode(), name=f"name {at % 2}", **options)
            clock.advance(1)

    twin_clock = FakeClock()
    twin = MemoryStorage(clock=twin_clock)
    fill(twin, twin_clock)
    fill(schedulers.storage, schedulers.clock)

    restarted = schedulers.again()

    names = ["name 0", "name 1"]
    expected = [claimed.payload for claimed in claim(twin, 9, names=names)]
    assert [claimed.payload for claimed in claim(restarted, 9, names=names)] == expected
    assert len(expected) == 7


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(-1, 1), st.booleans(), st.sampled_from([0, 0, 3, 50])),
        st.tuples(st.just("claim"), st.sampled_from(["complete", "retry", "release", "retry later"])),
        st.tuples(st.just("wait"), st.sampled_from([1, 10, 100])),
    ),
    max_size=25,
)


def follow(storage, clock, steps):
    for at, (operation, *arguments) in enumerate(steps):
        clock.advance(1)
        if operation == "enqueue":
            priority, lifo, delay = arguments
            enqueue(storage, payload=str(at).encode(), priority=priority, lifo=lifo, delay=delay)
        elif operation == "wait":
            clock.advance(*arguments)
            storage.sweep()
        elif claimed := claim(storage):
            outcome = {
                "complete": completing,
                "retry": retrying,
                "release": releasing,
                "retry later": lambda one: retrying(one, delay=20),
            }[arguments[0]]
            finish(storage, outcome(claimed[0]))


@pytest.mark.parametrize("examples", [10, pytest.param(100, marks=pytest.mark.thorough)])
def test_random_jobs_keep_states_and_counters_over_restart(schedulers, examples):
    @settings(max_examples=examples)
    @given(steps=STEPS)
    def check(steps):
        come_back(schedulers, steps)

    check()


def come_back(schedulers, steps):
    storage = schedulers.again()
    storage.queues.obliterate(QUEUE)
    twin_clock = FakeClock(schedulers.clock.now())
    twin = MemoryStorage(clock=twin_clock)
    follow(twin, twin_clock, steps)
    follow(storage, schedulers.clock, steps)

    restarted = schedulers.again()

    def told(one):
        one.sweep()
        records = one.reads.page(QUEUE, None, 100)
        return sorted(
            (r.payload, r.state, r.attempts, r.failures, r.stalls, r.run_at, r.result, r.history)
            for r in records
        )

    assert told(restarted) == told(twin)
    assert counts(restarted) == counts(twin)


def test_released_job_is_first_again_after_restart(schedulers):
    ids = enqueue_many(schedulers.storage, 3)
    schedulers.clock.advance(10)
    claimed = claim(schedulers.storage, 2)
    finish(schedulers.storage, *map(releasing, claimed))

    assert claim_ids(schedulers.again(), 9) == ids


def test_delayed_jobs_are_due_at_same_time_after_restart(schedulers):
    first = a_delayed_job(schedulers.storage, delay=MINUTE)
    second = a_delayed_job(schedulers.storage, delay=3 * MINUTE)
    schedulers.clock.advance(2 * MINUTE)

    restarted = schedulers.again()

    assert (state(restarted, first), state(restarted, second)) == (State.WAITING, State.DELAYED)
    assert claim_ids(restarted, 5) == [first]
    schedulers.clock.advance(MINUTE)
    assert claim_ids(restarted, 5) == [second]


def test_unique_keys_are_kept_for_requested_time(schedulers):
    kept = enqueue(schedulers.storage, unique_key="kept")
    brief = enqueue(schedulers.storage, unique_key="brief", unique_ttl=MINUTE)
    active = an_active_job(schedulers.storage, queue="other", unique_key="active").id
    schedulers.clock.advance(MINUTE)

    restarted = schedulers.again()

    [again] = restarted.enqueue([batch(unique_key="kept")])
    assert (again.status, again.id) == ("duplicate", kept)
    assert enqueue(restarted, unique_key="brief") != brief
    [again] = restarted.enqueue([batch(queue="other", unique_key="active")])
    assert (again.status, again.id, again.existing_state) == ("duplicate", active, State.WAITING)


def test_job_that_was_interrupted_gives_way_to_its_successor(schedulers):
    storage = schedulers.storage
    claimed = an_active_job(storage, unique_key="k")
    schedulers.clock.advance(1)
    next_one = enqueue(storage, unique_key="k", on_duplicate="keep_last_if_active")
    assert state(storage, next_one) is State.BLOCKED

    restarted = schedulers.again()

    assert (job(restarted, claimed.id).state, job(restarted, claimed.id).reason) == (
        State.CANCELLED,
        "replaced",
    )
    [again] = restarted.enqueue([batch(unique_key="k")])
    assert (again.status, again.id) == ("duplicate", next_one)
    assert claim_ids(restarted, 5) == [next_one]


def test_successor_of_ended_job_starts_after_restart(schedulers):
    storage = schedulers.storage
    claimed = an_active_job(storage, unique_key="k")
    next_one = enqueue(storage, unique_key="k", on_duplicate="keep_last_if_active")
    storage.reads.counts(QUEUE)
    models.Job.objects.filter(job_id=claimed.id).update(state="completed")

    restarted = schedulers.again()

    assert claim_ids(restarted, 5) == [next_one]


def test_groups_go_on_one_by_one_in_order(schedulers):
    storage = schedulers.storage
    ids = [enqueue(storage, group=group) for group in ("a", "b", "a", "a")]
    assert claim_ids(storage) == ids[:1]

    restarted = schedulers.again()

    first = [*claim(restarted, 9), *claim(restarted, 9)]
    assert [one.id for one in first] == [ids[0], ids[1]]
    finish(restarted, *map(completing, first))
    assert claim_ids(restarted, 9) == [ids[2]]


def test_job_whose_ttl_is_over_is_dead_letter(schedulers):
    brief = enqueue(schedulers.storage, ttl=MINUTE)
    lasting = enqueue(schedulers.storage, ttl=3 * MINUTE)
    schedulers.clock.advance(2 * MINUTE)

    restarted = schedulers.again()

    assert claim_ids(restarted, 5) == [lasting]
    assert [(letter.id, letter.reason) for letter in restarted.reads.dead_letters(QUEUE)] == [
        (brief, "ttl_expired")
    ]


def test_queue_settings_survive_restart(schedulers):
    storage = schedulers.storage
    for queue in ("paused", "limited", "rated", "resumed"):
        enqueue_many(storage, 5, queue=queue)
    storage.queues.pause("paused")
    storage.queues.pause("resumed")
    storage.queues.resume("resumed")
    storage.queues.set_limits("limited", None, 2)
    storage.queues.set_limits("rated", Rate(3, MINUTE), None)

    restarted = schedulers.again()

    assert restarted.queues.is_paused("paused")
    claimed = {queue: len(claim(restarted, 9, queues=[queue])) for queue in restarted.queues.names()}
    assert claimed == {"paused": 0, "limited": 2, "rated": 3, "resumed": 5}


# What was running.


def test_interrupted_job_waits_again_with_stall_counted(schedulers):
    claimed = an_active_job(schedulers.storage, max_attempts=1)
    schedulers.storage.report([report_of(claimed, {"done": 3}, [(5, "begun")])])
    schedulers.clock.advance(1_000)

    restarted = schedulers.again()

    record = job(restarted, claimed.id)
    assert (record.state, record.attempts, record.failures, record.stalls) == (State.WAITING, 1, 0, 1)
    assert [(a.attempt, a.worker, a.outcome) for a in record.history] == [(1, WORKER, "stalled")]
    assert (record.progress, record.logs) == ({"done": 3}, ((5, "begun"),))
    assert finish(restarted, completing(claimed)) == [False]
    again = claim_one(restarted)
    assert (again.id, again.attempts, again.stalls) == (claimed.id, 2, 1)
    assert again.token > claimed.token


def test_interrupted_runs_items_are_dropped(schedulers):
    claimed = an_active_job(schedulers.storage)
    assert emit(schedulers.storage, claimed, b"one", b"two")

    restarted = schedulers.again()

    assert items_of(restarted, claimed.id) == []
    assert job(restarted, claimed.id).items == 0
    again = claim_one(restarted)
    assert not emit(restarted, claimed, b"three", start=2)
    assert emit(restarted, again, b"new")
    restarted.sweep()
    assert [bytes(row.item) for row in models.JobItem.objects.all()] == [b"new"]


@pytest.mark.parametrize("how", [completing, failing])
def test_items_of_ended_job_survive_restart(schedulers, how):
    claimed = an_active_job(schedulers.storage)
    items = [b"%d" % number for number in range(250)]
    emit(schedulers.storage, claimed, *items)
    finish(schedulers.storage, how(claimed))
    schedulers.storage.sweep()
    assert items_of(schedulers.storage, claimed.id) == items

    restarted = schedulers.again()

    assert items_of(restarted, claimed.id) == items
    assert job(restarted, claimed.id).items == 250
    assert restarted.jobs.remove(QUEUE, [claimed.id]) == [True]
    assert models.JobItem.objects.count() == 0


def test_dead_letter_retried_after_restart_starts_over(schedulers):
    claimed = an_active_job(schedulers.storage)
    emit(schedulers.storage, claimed, b"one", b"two")
    finish(schedulers.storage, failing(claimed))
    restarted = schedulers.again()

    assert restarted.jobs.retry(QUEUE, [claimed.id]) == ["retried"]

    assert items_of(restarted, claimed.id) == []
    emit(restarted, claim_one(restarted), b"new")
    restarted.sweep()
    assert [bytes(row.item) for row in models.JobItem.objects.all()] == [b"new"]


def test_items_whose_results_time_is_over_leave_tables(schedulers):
    claimed = an_active_job(schedulers.storage, result_ttl=MINUTE, retention=10 * MINUTE)
    emit(schedulers.storage, claimed, b"one")
    finish(schedulers.storage, completing(claimed))
    schedulers.storage.sweep()
    assert models.JobItem.objects.count() == 1

    schedulers.clock.advance(MINUTE + 1)
    schedulers.storage.sweep()

    assert models.JobItem.objects.count() == 0
    assert job(schedulers.storage, claimed.id).items == 1


def test_without_scheduler_items_are_read_in_tables(schedulers, make_storage):
    claimed = an_active_job(schedulers.storage)
    emit(schedulers.storage, claimed, b"one", b"two")
    finish(schedulers.storage, completing(claimed))
    schedulers.storage.close()
    client = make_storage(clock=schedulers.clock, policies=POLICIES)

    assert items_of(client, claimed.id) == [b"one", b"two"]
    assert client.reads.items(QUEUE, [ItemMark("nobody")]) == [None]
    assert client.jobs.remove(QUEUE, [claimed.id]) == [True]
    assert models.JobItem.objects.count() == 0


def test_interrupted_jobs_are_claimed_before_new_jobs(schedulers):
    ids = enqueue_many(schedulers.storage, 5)
    schedulers.clock.advance(5)
    claim(schedulers.storage, 2)

    restarted = schedulers.again()

    assert [one for _ in range(3) for one in claim_ids(restarted, 9)] == ids


def test_job_that_was_interrupted_too_often_is_dead_letter(schedulers):
    claimed = an_active_job(schedulers.storage, max_stalls=2)
    for _ in range(2):
        assert claim_ids(schedulers.again()) == [claimed.id]

    restarted = schedulers.again()

    [letter] = restarted.reads.dead_letters(QUEUE)
    assert (letter.id, letter.reason) == (claimed.id, "worker_lost")
    record = job(restarted, claimed.id)
    assert (record.state, record.stalls, record.attempts) == (State.FAILED, 3, 3)
    assert record.error.message.startswith(f"stalled 3 times, last on {WORKER}: ")
    assert record.error.message.count(f" on {WORKER}, started ") == 3
    assert [attempt.outcome for attempt in record.history] == ["stalled"] * 3
    restarted.reads.counts(QUEUE)
    assert [letter.job_id for letter in models.DeadLetter.objects.all()] == [claimed.id]

    third = schedulers.again()
    assert len(third.reads.dead_letters(QUEUE)) == 1
    assert third.jobs.retry(QUEUE, [claimed.id]) == ["retried"]
    assert claim_one(third).stalls == 0


def test_job_interrupted_too_often_is_retried_by_auto_retry_policy(schedulers):
    claimed = an_active_job(schedulers.storage, queue=SELF_HEALING, max_stalls=0)
    restarted = schedulers.again()
    assert restarted.reads.dead_letters(SELF_HEALING)[0].next_retry_at == schedulers.clock.now() + MINUTE

    schedulers.clock.advance(MINUTE)
    restarted.sweep()

    assert claim_ids(restarted, queues=[SELF_HEALING]) == [claimed.id]


def test_active_job_with_cancel_request_is_cancelled_after_restart(schedulers):
    claimed = an_active_job(schedulers.storage)
    dependent = enqueue(schedulers.storage, depends_on=((QUEUE, claimed.id),))
    assert schedulers.storage.jobs.cancel(QUEUE, [claimed.id])[0].status == "requested"

    restarted = schedulers.again()

    record = job(restarted, claimed.id)
    assert (record.state, record.reason, record.stalls) == (State.CANCELLED, "cancelled", 0)
    assert state(restarted, dependent) is State.FAILED
    assert claim(restarted, 5) == []
    assert state(schedulers.again(), claimed.id) is State.CANCELLED


# What has ended.


def test_dead_letters_keep_all_fields_over_restart(schedulers):
    storage = schedulers.storage
    ids = [a_failed_job(storage, reason=reason) for reason in DEAD_LETTER_REASONS]
    healing = a_failed_job(storage, queue=SELF_HEALING)
    before = [storage.reads.dead_letters(QUEUE), storage.reads.dead_letters(SELF_HEALING)]
    records = storage.reads.jobs(QUEUE, ids)

    restarted = schedulers.again()

    assert [restarted.reads.dead_letters(QUEUE), restarted.reads.dead_letters(SELF_HEALING)] == before
    assert restarted.reads.jobs(QUEUE, ids) == records
    assert counts(restarted) == {State.FAILED: len(DEAD_LETTER_REASONS)}
    schedulers.clock.advance(MINUTE)
    restarted.sweep()
    assert state(restarted, healing, SELF_HEALING) is State.WAITING


def test_dead_letter_expires_at_same_time_after_restart(schedulers):
    job_id = a_failed_job(schedulers.storage)
    [letter] = schedulers.storage.reads.dead_letters(QUEUE)
    schedulers.clock.advance(letter.expires_at - schedulers.clock.now())

    restarted = schedulers.again()
    restarted.sweep()

    assert state(restarted, job_id) is None
    assert models.Job.objects.count() == models.DeadLetter.objects.count() == 0


def test_ended_jobs_can_be_read_and_keep_their_ids(schedulers):
    completed = a_completed_job(schedulers.storage, id="completed", result=b"42")
    cancelled = a_cancelled_job(schedulers.storage, id="cancelled")
    before = schedulers.storage.reads.jobs(QUEUE, [completed, cancelled])

    restarted = schedulers.again()

    assert restarted.reads.jobs(QUEUE, [completed, cancelled]) == before
    answers = restarted.enqueue([batch(ids=[completed, cancelled])])
    assert [(answer.status, answer.result) for answer in answers] == [("completed", b"42"), ("queued", None)]


# What waits for others.


def test_blocked_job_keeps_waiting_for_unfinished_dependencies(schedulers):
    blocked = a_blocked_job(schedulers.storage)

    restarted = schedulers.again()

    assert state(restarted, blocked) is State.BLOCKED
    finish(restarted, completing(claim_one(restarted, queues=[UPSTREAM])))
    assert claim_ids(restarted, 5) == [blocked]


def left_blocked(dependent):
    """The rows of a scheduler that died after the end of a dependency, before it told the dependent."""
    models.Job.objects.filter(job_id=dependent).update(
        state="blocked", finished_at=None, reason="", error_type="", error_message=""
    )
    models.DeadLetter.objects.filter(job_id=dependent).delete()


@pytest.mark.parametrize(
    ("ending", "policy", "expected"),
    [
        (completing, "fail", State.WAITING),
        (failing, "fail", State.FAILED),
        (failing, "cancel", State.CANCELLED),
        (failing, "ignore", State.WAITING),
        (failing, "wait", State.BLOCKED),
        (None, "fail", State.FAILED),
        (None, "ignore", State.WAITING),
    ],
)
def test_blocked_job_continues_if_dependency_ended_before_scheduler_was_killed(
    schedulers, ending, policy, expected
):
    storage = schedulers.storage
    first = enqueue(storage, queue=UPSTREAM)
    dependent = enqueue(storage, depends_on=((UPSTREAM, first),), on_dependency_failure=policy)
    if ending is None:
        storage.jobs.cancel(UPSTREAM, [first])
    else:
        finish(storage, ending(claim_one(storage, queues=[UPSTREAM])))
    storage.close()
    left_blocked(dependent)

    restarted = schedulers.again()

    assert state(restarted, dependent) is expected
    if expected is State.BLOCKED:
        assert restarted.jobs.retry(UPSTREAM, [first]) == ["retried"]
        finish(restarted, completing(claim_one(restarted, queues=[UPSTREAM])))
        assert claim_ids(restarted, 5) == [dependent]


def test_dependency_whose_record_is_gone_has_completed(schedulers):
    first = a_completed_job(schedulers.storage, queue=UPSTREAM)
    dependent = enqueue(schedulers.storage, depends_on=((UPSTREAM, first),))
    schedulers.storage.jobs.remove(UPSTREAM, [first])
    schedulers.storage.close()
    left_blocked(dependent)

    assert claim_ids(schedulers.again(), 5) == [dependent]


def test_chain_of_blocked_jobs_is_restored_for_any_order_of_its_rows(schedulers, client, monkeypatch):
    monkeypatch.setattr(recovery, "PAGE", 2)
    storage = schedulers.storage
    for at in range(8):
        enqueue(storage, id=str(at), depends_on=((QUEUE, str(at - 1)),) if at else ())
    # Enqueued again, its row is the last; the others go on waiting for it.
    storage.jobs.cancel(QUEUE, ["0"])
    storage.close()
    models.Job.objects.exclude(job_id="0").update(state="blocked", finished_at=None, reason="")
    models.DeadLetter.objects.all().delete()
    enqueue(client, id="0")

    restarted = schedulers.again()
    schedulers.reach("0")

    ran = []
    while claimed := claim(restarted, 5):
        ran += [one.id for one in claimed]
        finish(restarted, *map(completing, claimed))
    assert ran == [str(at) for at in range(8)]


# Jobs that nobody had taken in.


def test_jobs_enqueued_without_scheduler_are_taken_in(schedulers, client):
    before = enqueue(schedulers.storage)
    schedulers.storage.close()
    waiting, delayed = enqueue(client), enqueue(client, delay=10 * 365 * 24 * 60 * MINUTE)
    key = enqueue(client, unique_key="k")
    [twice] = client.enqueue([batch(unique_key="k")])
    blocked = enqueue(client, depends_on=((QUEUE, waiting), (QUEUE, before)))

    restarted = schedulers.again()

    # The client's clock is the real one: to these schedulers its jobs come from the future.
    assert twice.id == key
    schedulers.reach(blocked)
    claimed = claim(restarted, 9)
    assert [one.id for one in claimed] == [before, waiting, key]
    assert (state(restarted, delayed), state(restarted, blocked)) == (State.DELAYED, State.BLOCKED)
    finish(restarted, *map(completing, claimed))
    assert claim_ids(restarted, 9) == [blocked]
    restarted.reads.counts(QUEUE)
    assert not models.Job.objects.filter(inbox=True).exists()


# Size.


def test_loading_in_pages_loses_no_rows(schedulers, monkeypatch):
    monkeypatch.setattr(recovery, "PAGE", 7)
    random = Random(1)
    expected = {}
    for at in range(120):
        make = random.choice([enqueue, a_delayed_job, a_failed_job, a_completed_job])
        made = make(schedulers.storage, queue=f"queue {at % 5}", id=str(at), name=f"name {at}")
        expected[made] = state(schedulers.storage, made, f"queue {at % 5}")

    restarted = schedulers.again()

    found = {made: state(restarted, made, f"queue {int(made) % 5}") for made in expected}
    assert found == expected
    assert sum(len(restarted.reads.dead_letters(f"queue {at}")) for at in range(5)) == [
        *found.values()
    ].count("failed")


@pytest.mark.parametrize("count", [6_000, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_many_jobs_are_loaded_by_few_statements(schedulers, count):
    schedulers.storage.close()
    untouched = ("handler", "waiting", 0, b"x" * 100, "text/plain", b"\x80", None, None, None)
    many = [(QUEUE, f"{at:06}", *untouched, at, at, False) for at in range(count)]
    dialect_for("default").insert(models.Job, rows.NEW_JOB, many, constants=rows.UNTOUCHED)

    with CaptureQueriesContext(connection) as statements:
        restarted = schedulers.again()

    assert len(statements) < 100
    assert claim_ids(restarted, 30_000) == [row[1] for row in many]


# A scheduler that was killed.


def test_changes_written_by_killed_scheduler_are_kept(start_child, make_storage):
    child = start_child("scheduler")
    child.hears_until("ready")
    said = {}
    for command in ("enqueue 3 durable=True", "claim 1", "enqueue 1 id=durable durable=True", "claim 2"):
        child.tell(command)
        said[command] = [line.split()[-1] for line in child.hears_until("done")]
    child.tell(f"cancel {said['claim 2'][0]}")
    assert child.hears() == "requested"
    ids = said["enqueue 3 durable=True"]
    assert [*said["claim 1"], *said["claim 2"]] == ids
    eventually(lambda: models.Job.objects.filter(state="active").count() == 3)
    eventually(lambda: models.Job.objects.filter(reason="cancel_requested").count() == 1)

    child.kill()
    restarted = make_storage()
    restarted.role.standby = "never"
    restarted.connect()

    cancelled = said["claim 2"][0]
    assert state(restarted, cancelled) is State.CANCELLED
    claimed = [one for _ in range(9) for one in claim(restarted, 9)]
    assert {one.id for one in claimed[:2]} == {one for one in ids if one != cancelled}
    assert [one.id for one in claimed[2:]] == ["durable"]
    assert [one.stalls for one in claimed] == [1, 1, 0]
    assert {attempt.worker for one in claimed[:2] for attempt in job(restarted, one.id).history} == {WORKER}


def test_pause_does_not_keep_limits_of_settings(make_storage):
    first = make_storage(policies={QUEUE: QueuePolicy(concurrency=2)})
    first.connect()
    first.queues.pause(QUEUE)
    first.queues.resume(QUEUE)
    first.close()

    again = make_storage(policies={QUEUE: QueuePolicy(concurrency=5)})
    again.connect()
    enqueue_many(again, 9)

    assert len(claim(again, slots=9)) == 5
