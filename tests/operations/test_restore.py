"""Restoring unfinished jobs from the tables after Redis lost its data."""

from collections import Counter

import pytest

from djqueue import models
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.policies import KeyLimit, Rate
from djqueue.core.states import State
from djqueue.operations.mirrorrestore import Restoration, RestoreCounts
from djqueue.testing import factories as f
from djqueue.testing.draining import drain

from .looking import assert_alike, copy_all, mirrored, mirrored_state

HOUR = 3_600_000


@pytest.fixture
def lose(redis_server, mirror, clock):
    """Copies all there is, and then has Redis lose it."""

    def lose():
        copy_all(mirror)
        mirror.close()
        redis_server.run("FLUSHALL")
        clock.advance(10)

    return lose


def restore(mirror, queue=None, **options) -> dict[str, RestoreCounts]:
    return Restoration(mirror, **options).run(queue)


def test_every_unfinished_job_runs_once(storage, mirror, lose):
    waiting = f.enqueue_many(storage, 20)
    active = [claimed.id for claimed in f.claim(storage, 5)]
    delayed = f.enqueue(storage, delay=HOUR)
    blocked = f.enqueue(storage, depends_on=((f.QUEUE, waiting[0]),), queue="later")
    f.a_completed_job(storage, priority=1)
    f.a_failed_job(storage, priority=1)
    lose()

    reports = restore(mirror)

    assert reports[f.QUEUE].restored == {State.WAITING: 15, State.ACTIVE: 5, State.DELAYED: 1}
    assert reports["later"].restored == {State.BLOCKED: 1}
    assert f.counts(storage) == {State.WAITING: 20, State.DELAYED: 1}
    assert f.counts(storage, "later") == {State.BLOCKED: 1}
    ran = []
    drain(storage, handlers={f.NAME: lambda job: ran.append(job.id)})
    assert Counter(ran) == Counter([*waiting, blocked])
    # The blocked job, of another queue, may run as soon as its dependency has ended.
    assert [job_id for job_id in ran if job_id != blocked][:5] == active
    storage.jobs.promote(f.QUEUE, [delayed])
    drain(storage, handlers={f.NAME: lambda job: ran.append(job.id)})
    assert ran[21:] == [delayed]


def test_restored_job_keeps_its_fields(storage, mirror, lose, clock):
    given = {
        "priority": 3,
        "tags": ("a",),
        "concurrency_key": "g",
        "timeout": 5,
        "unique_key": "k",
        "lifo": True,
    }
    given["subject"] = "shop.order:7"
    run_at = clock.now() + HOUR
    batch = Batch("q", "shop.jobs.send", JobOptions(**given), [b"\xc4\x02\x00\xff"], ["an id"], run_at=run_at)
    storage.enqueue([batch])
    before = f.job(storage, "an id", "q")
    lose()
    restore(mirror)

    after = f.job(storage, "an id", "q")
    assert after == before._replace(created_at=after.created_at)
    assert storage.enqueue([f.batch(queue="q", unique_key="k")])[0].id == "an id"
    assert_alike(storage, "q")
    assert [one.id for one in storage.reads.jobs_about("shop.order:7", 9).jobs] == ["an id"]


def test_jobs_are_restored_in_order(storage, mirror, lose, clock):
    for name in ("c", "a", "b"):
        f.enqueue(storage, id=name)
        clock.advance(1)
    f.enqueue(storage, id="first", priority=1)
    lose()
    restore(mirror)

    assert f.claim_ids(storage, 4) == ["first", "c", "a", "b"]


def test_more_jobs_than_one_page_are_restored(storage, mirror, lose):
    for _ in range(3):
        f.enqueue_many(storage, 900)
    lose()

    assert restore(mirror)[f.QUEUE].restored == {State.WAITING: 2_700}
    assert f.counts(storage) == {State.WAITING: 2_700}


def test_restoring_twice_changes_nothing(storage, mirror, lose):
    f.enqueue_many(storage, 3)
    f.a_blocked_job(storage)
    lose()
    restore(mirror)
    restore(mirror)

    assert restore(mirror)[f.QUEUE] == RestoreCounts(unchanged=4)
    assert f.counts(storage) == {State.WAITING: 3, State.BLOCKED: 1}
    assert not mirror.has_lost(f.QUEUE)


def test_jobs_known_to_redis_are_left_alone(storage, mirror):
    _, cancelled, _ = f.enqueue_many(storage, 3)
    copy_all(mirror)
    f.finish(storage, f.failing(f.claim_one(storage)))
    storage.jobs.cancel(f.QUEUE, [cancelled])
    f.finish(storage, f.completing(f.claim_one(storage)))

    assert restore(mirror) == {}
    assert f.counts(storage) == {State.FAILED: 1, State.CANCELLED: 1, State.COMPLETED: 1}


def test_one_queue_can_be_restored_alone(storage, mirror, lose):
    f.enqueue(storage, queue="one")
    f.enqueue(storage, queue="two")
    lose()

    assert restore(mirror, "one").keys() == {"one"}
    assert storage.queues.names() == ["one"]
    assert restore(mirror)["two"].restored == {State.WAITING: 1}


def test_a_dry_run_enqueues_nothing(storage, mirror, lose):
    f.enqueue_many(storage, 3)
    blocked = f.a_blocked_job(storage)
    f.enqueue(storage, depends_on=((f.QUEUE, blocked),))
    storage.queues.pause(f.QUEUE)
    lose()

    reports = restore(mirror, dry_run=True)

    assert reports[f.QUEUE].restored == {State.WAITING: 3, State.BLOCKED: 2}
    assert reports[f.UPSTREAM].restored == {State.WAITING: 1}
    assert storage.queues.names() == []


def test_a_paused_queue_stays_paused_and_a_limited_one_limited(storage, mirror, lose):
    f.enqueue_many(storage, 3)
    storage.queues.pause(f.QUEUE)
    f.enqueue_many(storage, 3, queue="limited")
    storage.queues.set_limits("limited", Rate(1, HOUR), None)
    storage.queues.hold("limited", "mail", None, "the provider is down")
    lose()
    restore(mirror)

    assert storage.queues.is_paused(f.QUEUE)
    [hold] = storage.reads.overview(["limited"]).queues[0].holds
    assert (hold.name, hold.until, hold.reason) == ("mail", None, "the provider is down")
    assert len(f.claim(storage, 5)) == 1


def test_controls_of_keys_are_restored(storage, mirror, lose):
    said = {
        "g": KeyLimit(2, rate=Rate(1, HOUR)),
        "heavy": KeyLimit(weight=3),
        "paused": KeyLimit(paused=True),
        None: KeyLimit(4),
    }
    storage.queues.set_key_limit(f.QUEUE, "g", concurrency=2, rate=Rate(1, HOUR))
    storage.queues.set_key_limit(f.QUEUE, "heavy", weight=3)
    storage.queues.pause_key(f.QUEUE, "paused")
    storage.queues.set_key_limit(f.QUEUE, None, concurrency=4)
    storage.queues.set_key_limit(f.QUEUE, "taken back", concurrency=1)
    for group in said:
        f.enqueue_many(storage, 6, concurrency_key=group or "other")
    mirror.catch_up()
    storage.queues.set_key_limit(f.QUEUE, "taken back", concurrency=None)
    lose()
    storage.queues.set_key_limit(f.QUEUE, "heavy", weight=1)  # by one who did not wait
    restore(mirror)

    assert storage.queues.key_limits(f.QUEUE) == {**said, "heavy": KeyLimit(weight=1)}
    served = Counter(one.options.concurrency_key for one in f.claim(storage, 100))
    assert served == {"g": 1, "heavy": 4, "other": 4}


def test_ended_pause_is_not_restored(storage, mirror):
    f.enqueue(storage)
    storage.queues.pause(f.QUEUE)
    copy_all(mirror)
    storage.queues.resume(f.QUEUE)
    restore(mirror)

    assert not storage.queues.is_paused(f.QUEUE)


def test_queue_used_before_its_restoration_keeps_jobs_and_pause(storage, mirror, lose):
    f.enqueue_many(storage, 3)
    storage.queues.pause(f.QUEUE)
    lose()
    new = f.enqueue(storage)
    copy_all(mirror)
    restore(mirror)

    assert storage.queues.is_paused(f.QUEUE)
    assert f.counts(storage) == {State.WAITING: 4}
    assert mirrored_state(new) == State.WAITING
    assert_alike(storage)


# Dependencies.


def test_blocked_jobs_are_restored_with_their_dependencies(storage, mirror, lose):
    first = f.enqueue(storage, queue="b")
    second = f.enqueue(storage, queue="a", depends_on=(("b", first),))
    third = f.enqueue(storage, queue="c", depends_on=(("a", second), ("b", first)))
    lose()
    restore(mirror)

    ran = []
    drain(storage, handlers={f.NAME: lambda job: ran.append(job.id)})
    assert ran == [first, second, third]


def test_completed_dependency_does_not_block_a_restored_job(storage, mirror, lose):
    done, open_ = f.enqueue_many(storage, 2, queue="b")
    blocked = f.enqueue(storage, depends_on=(("b", done), ("b", open_)))
    f.finish(storage, f.completing(f.claim_one(storage, queues=["b"])))
    lose()
    restore(mirror)

    assert f.state(storage, blocked) == State.BLOCKED
    drain(storage, handlers={f.NAME: lambda job: None})
    assert f.state(storage, blocked) == State.COMPLETED


@pytest.mark.parametrize("rule", ["fail", "wait"])
def test_job_with_a_failed_dependency_is_rejected(storage, mirror, lose, rule):
    upstream = f.enqueue(storage, queue="b")
    other = f.enqueue(storage, queue="b")
    f.enqueue(storage, depends_on=(("b", upstream), ("b", other)), on_dependency_failure=rule)
    lose()
    models.Job.objects.filter(job_id=upstream).update(state="failed")

    report = restore(mirror)[f.QUEUE]

    assert report == RestoreCounts(refused=Counter({"depends on a job that is failed": 1}))


def test_failed_dependency_can_be_ignored(storage, mirror, lose):
    upstream = f.enqueue(storage, queue="b")
    blocked = f.enqueue(storage, depends_on=(("b", upstream),), on_dependency_failure="ignore")
    lose()
    models.Job.objects.filter(job_id=upstream).update(state="failed")
    restore(mirror)

    assert f.state(storage, blocked) == State.WAITING


def test_job_with_an_unknown_dependency_is_rejected(storage, mirror, lose):
    upstream = f.enqueue(storage, queue="b")
    f.enqueue(storage, depends_on=(("b", upstream),))
    lose()
    assert restore(mirror, f.QUEUE)[f.QUEUE].refused == {"depends on a job that was not restored": 1}
    models.Job.objects.filter(job_id=upstream).delete()

    assert restore(mirror)[f.QUEUE].refused == {
        "depends on a job that is neither in Redis nor in the tables": 1
    }
    assert mirror.has_lost(f.QUEUE)


# Times and keys.


def test_expired_job_is_rejected_and_others_keep_their_remaining_ttl(storage, mirror, lose, clock):
    f.enqueue(storage, ttl=1_000)
    f.enqueue(storage, ttl=HOUR, id="long")
    started = f.an_active_job(storage, ttl=1_000, priority=1)
    copy_all(mirror)
    clock.advance(2_000)
    lose()

    report = restore(mirror)[f.QUEUE]

    assert report.refused == {"its TTL has expired": 1}
    assert 0 < f.job(storage, "long").options.ttl <= HOUR - 2_000
    assert f.job(storage, started.id).options.ttl is None


def test_taken_unique_key_keeps_its_new_owner(storage, mirror, lose):
    f.enqueue(storage, unique_key="k")
    lose()
    new = f.enqueue(storage, unique_key="k")

    report = restore(mirror)[f.QUEUE]

    assert report.refused == {"its unique key is in use by another job": 1}
    assert (report.unchanged, f.counts(storage)) == (1, {State.WAITING: 1})
    assert storage.enqueue([f.batch(unique_key="k")])[0].id == new


def test_expired_unique_key_is_not_taken_again(storage, mirror, lose, clock):
    first = f.enqueue(storage, unique_key="k", unique_ttl=1_000)
    clock.advance(1_001)
    second = f.enqueue(storage, unique_key="k", unique_ttl=HOUR)
    lose()
    restore(mirror)

    assert f.job(storage, first).options.unique_key is None
    assert storage.enqueue([f.batch(unique_key="k")])[0].id == second


def test_failed_jobs_are_not_restored_and_stay_in_the_tables(storage, mirror, lose):
    failed = f.a_failed_job(storage)
    lose()

    assert restore(mirror) == {}
    assert mirrored(failed).error == f.ERROR
    assert models.DeadLetter.objects.get().job_id == failed
