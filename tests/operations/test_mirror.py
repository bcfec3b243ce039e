"""The mirror keeps the tables equal to Redis."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from django.db import OperationalError, connection

from djqueue import models
from djqueue.core.errors import ConfigurationError, StorageUnavailableError
from djqueue.core.job import JobFailure
from djqueue.core.policies import Rate
from djqueue.core.states import State
from djqueue.operations.mirror import IDLE, INTERVAL, Mirror
from djqueue.operations.throttle import CopyThrottle
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.redis.changes import CHANGES, FIRST_ENTRIES, Backlog, ChangeStream, DataLostError
from djqueue.storage.tables import leaderlease
from djqueue.storage.tables.leaderlease import LeaderLeaseLostError
from djqueue.testing import factories as f
from tests.support import PATIENCE, eventually

from .looking import assert_alike, copy_all, letters, mirrored, mirrored_state, workers

pytestmark = pytest.mark.dialect
DAY = 86_400_000


@contextmanager
def running(*mirrors: Mirror) -> Iterator[None]:
    """Run mirrors in threads, which end with the block."""
    stop = threading.Event()
    threads = [threading.Thread(target=mirror.run, args=(stop,)) for mirror in mirrors]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


def warnings(caplog) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.name == "djqueue.mirror"]


# Copies.


@pytest.mark.parametrize("state", State)
def test_job_in_any_state_is_mirrored(storage, mirror, state):
    job_id = f.JOB_IN[state](storage)

    copy_all(mirror)

    assert mirrored_state(job_id) == state
    assert_alike(storage)
    assert_alike(storage, f.UPSTREAM)


def test_every_change_of_state_is_mirrored(storage, mirror):
    job_id = f.enqueue(storage, delay=60_000)
    for change in (
        lambda: storage.jobs.promote(f.QUEUE, [job_id]),
        lambda: f.finish(storage, f.retrying(f.claim_one(storage))),
        lambda: f.finish(storage, f.releasing(f.claim_one(storage), delay=1_000)),
        lambda: storage.jobs.promote(f.QUEUE, [job_id]),
        lambda: f.finish(storage, f.failing(f.claim_one(storage))),
        lambda: storage.jobs.retry(f.QUEUE, [job_id]),
        lambda: f.claim_one(storage),
    ):
        copy_all(mirror)
        assert_alike(storage)
        change()
    copy_all(mirror)
    assert_alike(storage)


def test_all_fields_of_a_job_are_mirrored(storage, mirror):
    given = {
        "priority": 7,
        "max_attempts": 9,
        "timeout": 5_000,
        "unique_key": "key",
        "concurrency_key": "concurrency_key",
        "tags": ("a", "ü"),
        "subject": "shop.order:7",
        "retention": DAY,
        "name": "shop.jobs.send",
        "payload": b"\xc4\x03\x00\xff\x01",
        "id": "an:id {ä}",
    }
    f.enqueue(storage, **given)
    claimed = f.claim_one(storage, names=["shop.jobs.send"])
    f.finish(storage, f.retrying(claimed, error=JobFailure("a.B", "no\0such", "Traceback")))
    claimed = f.claim_one(storage, names=["shop.jobs.send"])
    storage.report([f.report_of(claimed, {"done": 3}, [(5, "first"), (6, "second")])])
    f.finish(storage, f.failing(claimed, reason="timeout"))

    copy_all(mirror)

    copied, there = mirrored("an:id {ä}"), f.job(storage, "an:id {ä}")
    assert copied.history[0].error.message == "no\N{REPLACEMENT CHARACTER}such"
    assert copied._replace(history=copied.history[1:]) == there._replace(history=there.history[1:])
    assert letters() == storage.reads.dead_letters(f.QUEUE)
    row = models.Job.objects.get()
    assert (row.priority, row.unique_key, row.concurrency_key) == (7, "key", "concurrency_key")
    assert row.subject == "shop.order:7"


def test_updated_job_is_copied_again(storage, mirror):
    f.enqueue(storage, id="a")
    copy_all(mirror)

    storage.jobs.update(f.QUEUE, ["a"], 5, b"other")
    copy_all(mirror)

    row = models.Job.objects.get()
    assert (row.priority, bytes(row.payload)) == (5, b"other")
    assert_alike(storage)


def test_a_result_is_copied_and_kept_with_its_job(storage, mirror):
    job_id = f.a_completed_job(storage, result=b"\xa3yes", result_ttl=1_000)
    copy_all(mirror)

    assert mirrored(job_id).result == b"\xa3yes"
    [row] = models.JobResult.objects.all()
    assert row.expires_at == models.Job.objects.get().expires_at


def test_log_lines_and_attempts_are_appended_not_rewritten(storage, mirror):
    claimed = f.an_active_job(storage)
    storage.report([f.report_of(claimed, lines=[(1, "first"), (2, "second")])])
    f.finish(storage, f.retrying(claimed))
    copy_all(mirror)
    lines = list(models.JobLog.objects.values_list("id", flat=True))
    runs = list(models.JobAttempt.objects.values_list("id", flat=True))
    claimed = f.claim_one(storage)
    storage.report([f.report_of(claimed, lines=[(3, "third")])])
    f.finish(storage, f.retrying(claimed))
    copy_all(mirror)

    assert_alike(storage)
    assert list(models.JobLog.objects.order_by("id").values_list("id", flat=True))[:2] == lines
    assert list(models.JobAttempt.objects.order_by("id").values_list("id", flat=True))[:1] == runs


def test_log_lines_removed_from_redis_leave_the_tables(storage, mirror):
    claimed = f.an_active_job(storage)
    storage.report([f.report_of(claimed, lines=[(at, f"line {at}") for at in range(1_000)])])
    copy_all(mirror)
    storage.report([f.report_of(claimed, lines=[(at, f"line {at}") for at in range(1_000, 1_010)])])
    copy_all(mirror)

    assert_alike(storage)


def test_job_enqueued_again_with_its_id_keeps_no_old_rows(storage, mirror, clock):
    claimed = f.an_active_job(storage, id="one")
    storage.report([f.report_of(claimed, {"done": 1}, [(1, "line")])])
    f.finish(storage, f.retrying(claimed))
    f.finish(storage, f.failing(f.claim_one(storage)))
    copy_all(mirror)
    clock.advance(1)
    f.enqueue(storage, id="one", payload=b"\x01")
    copy_all(mirror)

    assert mirrored("one").history == mirrored("one").logs == ()
    assert_alike(storage)


def test_many_jobs_are_copied_in_parts(storage, mirror):
    for _ in range(3):
        f.enqueue_many(storage, 1_000)
    f.enqueue_many(storage, 20, queue="other")

    assert copy_all(mirror) == 3_020
    assert_alike(storage)
    assert_alike(storage, "other")


def test_unchanged_jobs_are_not_copied_again(storage, mirror):
    f.enqueue_many(storage, 3)
    copy_all(mirror)
    f.claim_one(storage)

    assert copy_all(mirror) == 1


def test_job_rejected_by_the_tables_does_not_block_others(storage, mirror, caplog):
    ids = f.enqueue_many(storage, 5)
    bad = f.enqueue(storage, name="half of a pair: \ud83d")
    ids += f.enqueue_many(storage, 5)

    copy_all(mirror)

    assert all(mirrored_state(job_id) for job_id in ids)
    assert mirrored_state(bad) is None
    assert [bad in line for line in warnings(caplog)] == [True]


def test_queues_of_any_name_are_mirrored(storage, mirror):
    for name in ("a}b{c", "ü:ä", "%7D"):
        f.enqueue(storage, queue=name)
    copy_all(mirror)

    for name in ("a}b{c", "ü:ä", "%7D"):
        assert_alike(storage, name)


def groups_of(queue):
    rows = models.GroupState.objects.filter(queue=queue).order_by("concurrency_key")
    return list(
        rows.values_list("concurrency_key", "concurrency", "paused", "rate_capacity", "rate_per", "weight")
    )


def test_controls_of_keys_are_mirrored(storage, mirror):
    f.enqueue(storage, concurrency_key="g")
    mirror.catch_up()
    storage.queues.set_key_limit(f.QUEUE, "g", concurrency=2, rate=Rate(5, 1_000))
    storage.queues.set_key_limit(f.QUEUE, None, concurrency=3)
    storage.queues.pause_key(f.QUEUE, "h")
    mirror.catch_up()
    assert groups_of(f.QUEUE) == [
        ("", 3, False, None, None, None),
        ("g", 2, False, 5, 1_000, None),
        ("h", None, True, None, None, None),
    ]

    storage.queues.set_key_limit(f.QUEUE, "g", rate=None, weight=7)
    storage.queues.resume_key(f.QUEUE, "h")
    mirror.catch_up()
    assert groups_of(f.QUEUE) == [("", 3, False, None, None, None), ("g", 2, False, None, None, 7)]
    storage.queues.obliterate(f.QUEUE)
    mirror.catch_up()
    assert groups_of(f.QUEUE) == []


def test_queue_controls_are_mirrored(storage, mirror):
    storage.queues.pause("emails")
    storage.queues.set_limits("images", Rate(5, 1_000), 3)
    f.enqueue(storage, queue="plain")
    copy_all(mirror)

    rows = {row.name: row for row in models.QueueState.objects.all()}
    assert rows.keys() == {"emails", "images"}
    assert rows["emails"].paused
    images = rows["images"]
    assert (images.paused, images.rate_capacity, images.rate_per, images.concurrency) == (False, 5, 1_000, 3)

    storage.queues.resume("emails")
    storage.queues.obliterate("images")
    copy_all(mirror)
    assert list(models.QueueState.objects.values_list("name", "paused")) == [("emails", False)]


def test_workers_are_mirrored_and_removed(storage, mirror, clock):
    storage.workers.register(f.worker("one", queues=("a", "b"), names=("x",)))
    storage.workers.register(f.worker("two"))
    mirror.copy_once()
    assert workers() == storage.workers.all()

    storage.workers.unregister("one")
    clock.advance(6_000)
    mirror.copy_once()
    assert [info.id for info in workers()] == ["two"]


# Leaving.


@pytest.mark.parametrize("state", [State.WAITING, State.DELAYED, State.BLOCKED])
def test_an_unfinished_job_that_is_removed_leaves_the_tables(storage, mirror, state):
    job_id = f.JOB_IN[state](storage)
    copy_all(mirror)
    storage.jobs.remove(f.QUEUE, [job_id])
    copy_all(mirror)

    assert mirrored(job_id) is None


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED, State.CANCELLED])
def test_removed_ended_job_stays_until_its_retention_ends(make_storage, make_mirror, clock, state):
    storage = make_storage(mirror={"RETENTION": 60})
    mirror = make_mirror(storage)
    job_id = f.JOB_IN[state](storage)
    copy_all(mirror)
    storage.jobs.remove(f.QUEUE, [job_id])
    copy_all(mirror)

    clock.advance(59_000)
    mirror.copy_once()
    assert mirrored_state(job_id) == state
    assert letters() == []
    clock.advance(1_001 + 5_000)
    mirror.copy_once()
    assert mirrored(job_id) is None
    assert not models.JobResult.objects.exists()


def test_an_ended_job_outlives_its_record_in_redis(make_storage, make_mirror, clock):
    storage = make_storage(mirror={"RETENTION": 60})
    mirror = make_mirror(storage)
    job_id = f.a_completed_job(storage, result_ttl=10_000)
    copy_all(mirror)
    clock.advance(10_001)
    storage.sweep()
    assert f.state(storage, job_id) is None

    clock.advance(58_000)
    copy_all(mirror)
    assert mirrored(job_id).result == f.RESULT
    clock.advance(7_000)
    copy_all(mirror)
    assert mirrored(job_id) is None


def test_only_configured_states_are_mirrored(make_storage, make_mirror):
    storage = make_storage(mirror={"STATES": ["failed", "active"]})
    mirror = make_mirror(storage)
    waiting, failed = f.enqueue(storage), f.a_failed_job(storage, priority=1)
    copy_all(mirror)
    assert mirrored_state(waiting) is None
    assert mirrored_state(failed) == State.FAILED

    claimed = f.claim_one(storage)
    copy_all(mirror)
    assert mirrored_state(waiting) == State.ACTIVE
    f.finish(storage, f.completing(claimed))
    copy_all(mirror)
    assert mirrored_state(waiting) is None
    assert not models.JobResult.objects.exists()


def test_jobs_of_an_obliterated_queue_leave_the_tables(storage, mirror):
    f.enqueue_many(storage, 3)
    done = f.a_completed_job(storage, priority=1)
    copy_all(mirror)
    storage.queues.obliterate(f.QUEUE)
    copy_all(mirror)

    assert list(models.Job.objects.values_list("job_id", flat=True)) == [done]
    assert storage.queues.names() == []
    assert mirror.has_lost(f.QUEUE)  # there is no such queue


def test_jobs_of_an_obliterated_queue_leave_when_it_is_reused_at_once(storage, mirror):
    f.enqueue_many(storage, 3)
    copy_all(mirror)
    storage.queues.obliterate(f.QUEUE)
    f.enqueue(storage)
    copy_all(mirror)

    assert_alike(storage)


# Cut off, and more than one.


def test_unacknowledged_copy_is_repeated_without_effect(storage, mirror, make_mirror, monkeypatch):
    claimed = f.an_active_job(storage)
    storage.report([f.report_of(claimed, lines=[(1, "line")])])
    mirror.copy_once()
    f.finish(storage, f.retrying(claimed))
    f.a_failed_job(storage, priority=1)
    f.a_completed_job(storage, priority=1)
    with monkeypatch.context() as patch:
        patch.setattr(ChangeStream, "acknowledge", lambda *_: None)
        assert mirror.copy_once() == 3
    assert_alike(storage)
    mirror.close()

    assert make_mirror(storage).copy_once() == 3
    assert_alike(storage)


def test_copy_with_a_failed_commit_is_repeated(storage, mirror, monkeypatch):
    mirror.copy_once()
    f.enqueue_many(storage, 3)
    copy_all(mirror)
    f.claim(storage, 3)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.tables, "write", fail_with(OperationalError("away")))
        with pytest.raises(OperationalError):
            mirror.copy_once()

    assert copy_all(mirror) == 3
    assert_alike(storage)


def fail_with(error):
    def fail(*_, **__):
        raise error

    return fail


def test_one_process_copies_at_a_time_and_the_next_takes_over(storage, mirror, make_mirror, clock):
    other = make_mirror(storage)
    f.enqueue(storage)
    assert mirror.copy_once() == 1
    f.enqueue(storage)
    assert other.copy_once() == 0

    clock.advance(leaderlease.TTL)  # as if the first one were dead
    assert other.copy_once() == 1
    f.enqueue(storage)
    assert mirror.copy_once() == 0
    other.close()
    assert mirror.copy_once() == 1
    assert_alike(storage)


def test_process_that_lost_its_lease_writes_no_old_state(storage, mirror, make_mirror, monkeypatch, clock):
    claimed = f.an_active_job(storage)
    copy_all(mirror)
    storage.report([f.report_of(claimed, 1)])
    read = ChangeStream.records

    def read_and_sleep(self, *args):
        found = read(self, *args)
        monkeypatch.setattr(ChangeStream, "records", read)
        clock.advance(leaderlease.TTL)
        f.finish(storage, f.completing(claimed))
        assert make_mirror(storage).copy_once() == 1
        assert mirrored_state(claimed.id) == State.COMPLETED
        return found

    monkeypatch.setattr(ChangeStream, "records", read_and_sleep)
    assert mirror.copy_once() == 0

    assert mirrored_state(claimed.id) == State.COMPLETED
    assert_alike(storage)


def test_tables_match_redis_after_two_mirrors_and_a_resync_run_together(storage, make_mirror):
    with running(make_mirror(storage), make_mirror(storage)):
        for round_ in range(15):
            f.enqueue_many(storage, 20)
            claims = f.claim(storage, 15)
            f.finish(storage, *map(f.completing, claims[:5]), *map(f.failing, claims[5:8]))
            if round_ % 5 == 2:
                make_mirror(storage).resync()

    assert_alike(storage)


# Gaps.


@pytest.fixture
def short(make_storage):
    """A storage whose streams keep little: nodes of a hundred entries, which go as a whole."""
    return make_storage(stream=1)


def change_much(storage, count: int = 250) -> list[str]:
    """More changes than the stream keeps."""
    return [f.enqueue(storage) for _ in range(count)]


def test_unread_trimmed_changes_are_repaired(short, make_mirror, caplog):
    mirror = make_mirror(short)
    ids = f.enqueue_many(short, 10)
    copy_all(mirror)
    short.jobs.remove(f.QUEUE, ids[:5])
    f.finish(short, *map(f.completing, f.claim(short, 3)))
    change_much(short)
    copy_all(mirror)

    assert_alike(short)
    assert "trimmed before it was read" in warnings(caplog)[0]
    f.enqueue(short)
    assert copy_all(mirror) == 1


def test_changes_trimmed_during_a_copy_are_repaired(short, make_mirror, monkeypatch):
    mirror = make_mirror(short)
    copy_all(mirror)
    f.enqueue(short)
    copy_all(mirror)
    job_id = f.enqueue(short)
    with monkeypatch.context() as patch:
        patch.setattr(mirror.tables, "write", fail_with(OperationalError("away")))
        with pytest.raises(OperationalError):
            mirror.copy_once()
    change_much(short)
    copy_all(mirror)

    assert mirrored_state(job_id) == State.WAITING
    assert_alike(short)


def test_interrupted_repair_is_repeated(short, make_mirror, monkeypatch):
    mirror = make_mirror(short)
    f.enqueue(short)
    copy_all(mirror)
    change_much(short)
    with monkeypatch.context() as patch:
        patch.setattr(ChangeStream, "pages", lambda *_: iter(()))
        patch.setattr(ChangeStream, "go_on", fail_with(StorageUnavailableError("away")))
        with pytest.raises(StorageUnavailableError):
            mirror.copy_once()
    mirror.close()
    copy_all(make_mirror(short))

    assert_alike(short)


def test_stream_within_its_length_has_no_gap(make_storage, make_mirror, caplog):
    storage = make_storage(stream=1_000)
    mirror = make_mirror(storage)
    copy_all(mirror)
    for _ in range(8):
        change_much(storage, 200)
        copy_all(mirror)

    assert_alike(storage)
    assert warnings(caplog) == []


def test_deleted_stream_is_repaired(storage, mirror, redis_server):
    f.enqueue_many(storage, 5)
    copy_all(mirror)
    f.finish(storage, *map(f.completing, f.claim(storage, 3)))
    redis_server.run("DEL", storage.keys(f.QUEUE).key("log"))
    copy_all(mirror)

    assert_alike(storage)


# Redis loses its data.


def test_jobs_lost_by_redis_stay_in_the_tables(storage, mirror, redis_server, caplog, clock):
    ids = f.enqueue_many(storage, 3, queue="lost")
    f.enqueue(storage)
    copy_all(mirror)
    redis_server.run("FLUSHALL")
    clock.advance(10)
    new = f.enqueue(storage, queue="lost")
    clock.advance(6_000)
    copy_all(mirror)

    assert set(models.Job.objects.filter(queue="lost").values_list("job_id", flat=True)) == {*ids, new}
    assert [line for line in warnings(caplog) if "3 unfinished jobs of queue 'lost'" in line]
    assert [line for line in warnings(caplog) if "1 unfinished jobs of queue 'default'" in line]


@pytest.mark.parametrize("moment", ["queues", "next", "pages", "dead_letters"])
def test_data_loss_at_any_moment_of_a_copy_is_handled(
    storage, mirror, redis_server, monkeypatch, clock, moment
):
    ids = f.enqueue_many(storage, 5)
    dead = f.a_failed_job(storage, priority=1)
    copy_all(mirror)
    f.claim(storage, 3)
    lose_after(moment, redis_server, monkeypatch)
    copy_through_losses(mirror)

    assert set(models.Job.objects.values_list("job_id", flat=True)) == {*ids, dead}
    assert len(letters()) == 1


@pytest.mark.parametrize("moment", ["queues", "next", "follow", "pages", "records", "trust", "go_on"])
def test_data_loss_at_any_moment_of_a_repair_is_handled(
    short, make_mirror, redis_server, monkeypatch, moment
):
    mirror = make_mirror(short)
    ids = f.enqueue_many(short, 5)
    copy_all(mirror)
    change_much(short)
    lose_after(moment, redis_server, monkeypatch)
    copy_through_losses(mirror)
    f.enqueue(short)
    copy_through_losses(mirror)

    assert set(ids) <= set(models.Job.objects.values_list("job_id", flat=True))


def lose_after(moment, redis_server, monkeypatch) -> None:
    """Have Redis lose its data after the next step of a mirror's."""
    step = getattr(ChangeStream, moment)

    def step_and_lose(self, *args):
        found = step(self, *args)
        if moment == "pages":
            found = iter(list(found))
        monkeypatch.setattr(ChangeStream, moment, step)
        redis_server.run("FLUSHALL")
        return found

    monkeypatch.setattr(ChangeStream, moment, step_and_lose)


def copy_through_losses(mirror) -> None:
    for _ in range(3):
        with suppress(DataLostError):
            copy_all(mirror)


def test_jobs_lost_by_redis_stay_across_a_gap(short, make_mirror, redis_server, clock):
    mirror = make_mirror(short)
    lost = f.enqueue(short)
    copy_all(mirror)
    redis_server.run("FLUSHALL")
    clock.advance(10)
    removed = f.enqueue(short)
    copy_all(mirror)
    short.jobs.remove(f.QUEUE, [removed])
    change_much(short)
    copy_all(mirror)

    assert mirrored_state(lost) == State.WAITING
    assert mirrored_state(removed) is None


def test_jobs_missing_from_restored_redis_data_stay_in_the_tables(storage, mirror, redis_server, caplog):
    again = f.enqueue(storage)
    copy_all(mirror)
    redis_server.run("SAVE")
    f.finish(storage, f.completing(f.claim_one(storage)))
    lost, done = f.enqueue(storage), f.a_completed_job(storage, priority=1)
    copy_all(mirror)
    redis_server.stop()
    redis_server.start()
    new = f.enqueue(storage)
    copy_all(mirror)

    states = {job_id: mirrored_state(job_id) for job_id in (again, lost, done, new)}
    assert states == {again: "waiting", lost: "waiting", done: "completed", new: "waiting"}
    assert ["1 unfinished jobs" in line for line in warnings(caplog)] == [True]
    assert mirror.has_lost(f.QUEUE)


# Resync.


def test_resync_makes_the_tables_equal_to_redis(storage, mirror, redis_server):
    for priority, state in enumerate(State):
        f.JOB_IN[state](storage, priority=priority)
    f.enqueue_many(storage, 5, queue="lost")
    f.enqueue_many(storage, 5)
    copy_all(mirror)
    models.Job.objects.filter(queue=f.QUEUE, state="waiting").update(state="active", payload=b"?")
    models.DeadLetter.objects.all().delete()
    models.Job.objects.filter(state="blocked").delete()
    redis_server.run("DEL", storage.keys("lost").key("jobs"))
    seen = []

    mirror.resync(progress=lambda *counts: seen.append(counts))

    assert_alike(storage)
    assert not models.Job.objects.filter(queue="lost").exists()
    assert (f.QUEUE, 12, 0) in seen
    assert ("lost", 0, 5) in seen


def test_resync_of_one_queue_leaves_the_others_alone(storage, mirror):
    f.enqueue(storage)
    f.enqueue(storage, queue="other")
    copy_all(mirror)
    models.Job.objects.all().delete()
    mirror.resync("other")

    assert [row.queue for row in models.Job.objects.all()] == ["other"]


def test_resync_removes_jobs_lost_by_redis(storage, mirror, redis_server):
    f.enqueue_many(storage, 3)
    f.enqueue_many(storage, 3, queue="other")
    copy_all(mirror)
    redis_server.run("FLUSHALL")
    f.enqueue(storage)
    mirror.resync()

    assert_alike(storage)
    assert not models.Job.objects.filter(queue="other").exists()
    assert not mirror.has_lost(f.QUEUE)


def test_resync_takes_and_releases_the_lease(storage, mirror, make_mirror):
    f.enqueue(storage)
    copy_all(mirror)
    other = make_mirror(storage)
    refused = []

    def progress(*_):
        f.enqueue(storage)
        refused.append(mirror.copy_once())

    other.resync(progress=progress)
    copy_all(mirror)

    assert set(refused) == {0}
    assert_alike(storage)


def test_resync_overtaken_by_another_raises_an_error(storage, mirror, make_mirror):
    f.enqueue_many(storage, 3)

    with pytest.raises(LeaderLeaseLostError):
        mirror.resync(progress=lambda *_: make_mirror(storage).resync())


# The thread.


@pytest.mark.parametrize(
    ("where", "name", "error"),
    [
        (Mirror, "copy_once", OperationalError("the database is away")),
        (ChangeStream, "next", StorageUnavailableError("Redis is away")),
        (ChangeStream, "queues", RuntimeError("a defect")),
    ],
)
def test_mirror_thread_survives_outages_and_logs_them_once(
    storage, mirror, monkeypatch, caplog, where, name, error
):
    monkeypatch.setattr("djqueue.operations.mirror.FIRST_RETRY", 0.01)
    monkeypatch.setattr("djqueue.operations.mirror.LAST_RETRY", 0.01)
    f.enqueue(storage)
    calls = []
    intact = getattr(where, name)

    def fail(*_):
        calls.append(1)
        raise error

    monkeypatch.setattr(where, name, fail)
    with running(mirror):
        eventually(lambda: len(calls) > 3)
        monkeypatch.setattr(where, name, intact)
        eventually(lambda: "Mirroring resumed." in warnings(caplog))

    assert_alike(storage)
    said = [entry for entry in caplog.records if entry.name == "djqueue.mirror"]
    assert [entry.levelno for entry in said] == [logging.WARNING] * 2
    assert str(error) in said[0].getMessage()
    assert bool(said[0].exc_info) is isinstance(error, RuntimeError)


def test_mirror_thread_survives_an_outage_of_hours(storage, mirror, monkeypatch, caplog):
    monkeypatch.setattr("djqueue.operations.mirror.FIRST_RETRY", 0.0)
    monkeypatch.setattr("djqueue.operations.mirror.LAST_RETRY", 0.0)
    f.enqueue(storage)
    intact, failures = Mirror.copy_once, iter(range(1_100))

    def fail(mirror):
        if next(failures, None) is None:
            return intact(mirror)
        raise StorageUnavailableError("Redis is away")

    monkeypatch.setattr(Mirror, "copy_once", fail)
    with running(mirror):
        eventually(lambda: "Mirroring resumed." in warnings(caplog))

    assert_alike(storage)


def test_stopped_mirror_thread_copies_the_rest_and_releases_the_lease(storage, mirror, make_mirror):
    f.enqueue_many(storage, 2_500)
    stop = threading.Event()
    stop.set()
    mirror.run(stop)

    assert_alike(storage)
    f.enqueue(storage)
    assert make_mirror(storage).copy_once() == 1


def test_mirror_thread_waits_longer_while_nothing_changes(storage, mirror, monkeypatch):
    stop, waits = threading.Event(), []

    def wait(_: CopyThrottle, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            stop.set()

    monkeypatch.setattr(CopyThrottle, "wait", wait)
    f.enqueue(storage)
    copy_all(mirror)
    f.enqueue(storage)
    mirror.run(stop)

    changing, idle = waits
    assert 0 <= changing <= INTERVAL
    assert INTERVAL < idle <= IDLE


def test_mirror_thread_does_not_wait_while_changes_are_left(storage, mirror, monkeypatch):
    stop, waits = threading.Event(), []

    def wait(_: CopyThrottle, seconds: float) -> None:
        waits.append(models.Job.objects.count())
        stop.set()

    monkeypatch.setattr(CopyThrottle, "wait", wait)
    copy_all(mirror)
    for _ in range(FIRST_ENTRIES + 10):
        f.enqueue(storage)
    mirror.run(stop)

    assert waits == [FIRST_ENTRIES + 10]


def test_a_read_takes_more_small_changes_and_fewer_large_ones(storage, mirror):
    changes = mirror._changes

    def read() -> tuple[int, bool]:
        reading = changes._read(f.QUEUE, None)
        changes.acknowledge(f.QUEUE, reading.entries)
        return len(reading.entries), reading.is_full

    def enqueue_one_by_one(count: int) -> None:
        for _ in range(count):
            f.enqueue(storage)

    f.enqueue(storage)
    copy_all(mirror)
    enqueue_one_by_one(FIRST_ENTRIES + 250)
    assert [read(), read()] == [(FIRST_ENTRIES, True), (250, False)]
    storage.enqueue([f.batch(payloads=[b"x"] * CHANGES), f.batch(payloads=[b"x"] * CHANGES)])
    assert read()[1] is False
    enqueue_one_by_one(FIRST_ENTRIES + 50)
    assert read() == (FIRST_ENTRIES, True)


def test_a_round_reads_all_changes_and_copies_each_job_once(storage, mirror, monkeypatch):
    monkeypatch.setattr("djqueue.storage.redis.changes.FIRST_ENTRIES", 20)
    f.enqueue(storage)
    copy_all(mirror)
    for _ in range(30):
        f.enqueue(storage)
        f.finish(storage, f.completing(f.claim_one(storage)))

    assert mirror.copy_once() == 31  # with the one that has waited
    assert_alike(storage)
    assert mirror.copy_once() == 0


def test_a_round_reads_no_more_than_a_number_of_changes(storage, mirror, monkeypatch):
    monkeypatch.setattr("djqueue.storage.redis.changes.FIRST_ENTRIES", 20)
    monkeypatch.setattr("djqueue.storage.redis.changes.ROUND", 30)
    f.enqueue(storage)
    copy_all(mirror)
    for _ in range(70):
        f.enqueue(storage)

    assert mirror.copy_once() < 70
    copy_all(mirror)
    assert_alike(storage)


def test_changes_that_were_read_but_not_acknowledged_come_before_new_ones(storage, mirror, make_mirror):
    f.enqueue(storage)
    copy_all(mirror)
    ids = [f.enqueue(storage) for _ in range(FIRST_ENTRIES)]
    assert mirror._changes.next(f.QUEUE).ids == ids  # by a process that dies now
    mirror.close()
    ids += [f.enqueue(storage) for _ in range(3)]

    other = make_mirror(storage)
    assert other._changes.next(f.QUEUE).ids == ids
    assert copy_all(other) == len(ids)
    assert_alike(storage)


def test_data_loss_while_changes_are_read_is_detected(storage, mirror, monkeypatch, redis_server):
    monkeypatch.setattr("djqueue.storage.redis.changes.FIRST_ENTRIES", 20)
    ids = f.enqueue_many(storage, 3)
    copy_all(mirror)
    for _ in range(30):
        f.enqueue(storage)
    read = ChangeStream._read

    def read_and_lose(self, *args):
        found = read(self, *args)
        monkeypatch.setattr(ChangeStream, "_read", read)
        redis_server.run("FLUSHALL")
        return found

    monkeypatch.setattr(ChangeStream, "_read", read_and_lose)
    with pytest.raises(DataLostError):
        mirror.copy_once()
    copy_through_losses(mirror)
    assert set(ids) <= set(models.Job.objects.values_list("job_id", flat=True))


def test_a_backlog_counts_entries_until_they_are_acknowledged(storage, mirror):
    changes = mirror._changes
    assert changes.backlogs() == {}
    storage.enqueue([f.batch(payloads=[b"x"] * 100)])
    [backlog] = changes.backlogs().values()
    assert (backlog.added, backlog.waiting, backlog.changes) == (1, 0, 100)  # nobody follows it
    copy_all(mirror)
    for _ in range(3):
        storage.enqueue([f.batch(payloads=[b"x"] * 20)])

    assert changes.backlogs()[f.QUEUE] == (4, 3, 40)
    reading = changes.next(f.QUEUE)
    assert changes.backlogs()[f.QUEUE] == (4, 3, 40)
    changes.acknowledge(f.QUEUE, reading.entries)
    assert changes.backlogs()[f.QUEUE] == (4, 0, 40)


def test_mirror_thread_waits_while_many_jobs_change(storage, mirror, monkeypatch, clock):
    monkeypatch.setattr("djqueue.operations.throttle.BUSY_RATE", 100)
    monkeypatch.setattr("djqueue.operations.throttle.SUSPECT_COUNT", 0)
    f.enqueue(storage)
    copy_all(mirror)
    added, looks = [0], []

    def backlogs(_):
        looks.append(models.Job.objects.count())
        if len(looks) == 2:
            f.enqueue_many(storage, 10)
        added[0] += 1_000 if len(looks) < 5 else 0
        clock.advance(200)
        return {f.QUEUE: Backlog(added[0], 0, 1.0)}

    monkeypatch.setattr(ChangeStream, "backlogs", backlogs)
    with running(mirror):
        eventually(lambda: len(looks) >= 5)
        eventually(lambda: models.Job.objects.count() == 11)

    assert looks[:5] == [1] * 5
    assert_alike(storage)


def test_mirror_thread_copies_before_its_maximum_lag_while_many_jobs_change(
    make_storage, make_mirror, monkeypatch, clock
):
    monkeypatch.setattr("djqueue.operations.throttle.SUSPECT_COUNT", 0)
    storage = make_storage(mirror={"MAX_LAG": 3})
    mirror = make_mirror(storage)
    f.enqueue(storage)
    copy_all(mirror)
    began, looks = clock.monotonic(), []

    def backlogs(_):
        looks.append((clock.monotonic() - began, models.Job.objects.count()))
        if len(looks) == 2:
            f.enqueue_many(storage, 10)
        clock.advance(500)
        return {f.QUEUE: Backlog(len(looks) * 100_000, 0, 1.0)}

    monkeypatch.setattr(ChangeStream, "backlogs", backlogs)
    with running(mirror):
        eventually(lambda: models.Job.objects.count() == 11)

    waited = [age for age, count in looks if count == 1]
    assert len(waited) > 2
    assert max(waited) < 3_000 + 1_000


def test_mirror_thread_stopped_while_waiting_copies_the_rest(storage, mirror, monkeypatch, clock):
    monkeypatch.setattr("djqueue.operations.throttle.SUSPECT_COUNT", 0)
    f.enqueue(storage)
    copy_all(mirror)
    waiting, looks = threading.Event(), []

    def backlogs(_):
        looks.append(models.Job.objects.count())
        if len(looks) == 2:
            f.enqueue_many(storage, 10)
        elif len(looks) == 3:
            waiting.set()
        if len(looks) < 3:
            clock.advance(200)  # Later, no look is due: the thread only waits.
        return {f.QUEUE: Backlog(len(looks) * 1_000_000, 0, 1.0)}

    monkeypatch.setattr(ChangeStream, "backlogs", backlogs)
    with running(mirror):
        assert waiting.wait(PATIENCE)

    assert set(looks) == {1}
    assert_alike(storage)


def test_ids_of_a_large_batch_survive_the_stream(storage, mirror):
    letters = "abcdefghijklmnop"
    alike = [f"1{one}{other}" for one in letters for other in letters]
    batches = [
        alike,
        [f"{one}-x" for one in range(1_000, 1_300)],
        # Joined, these could be read as ids of three characters, too.
        [*(f"2{one}{other}" for one in letters for other in letters), "2", "22222", "2zz"],
        [str(number) for number in range(3, 303)],
    ]
    f.enqueue(storage)
    copy_all(mirror)
    for ids in batches:
        storage.enqueue([f.batch(ids=ids)])
        reading = mirror._changes.next(f.QUEUE)
        mirror._changes.acknowledge(f.QUEUE, reading.entries)
        assert reading.ids == ids


def test_storage_without_a_change_stream_is_rejected(make_storage):
    for storage in (MemoryStorage(), make_storage(mirror=False), make_storage(stream=0)):
        with pytest.raises(ConfigurationError, match="has no change stream to mirror"):
            Mirror(storage, "default")


# A cluster.


@pytest.mark.slow
def test_the_queues_of_a_cluster_are_mirrored(make_storage, make_mirror, redis_cluster):
    redis_cluster.clean()
    storage = make_storage(url=redis_cluster.url)
    mirror = make_mirror(storage)
    names = [f"queue {number}" for number in range(6)]
    for name in names:
        f.enqueue_many(storage, 5, queue=name)
        f.a_failed_job(storage, queue=name, priority=1)
    copy_all(mirror)
    for name in names:
        f.finish(storage, f.completing(f.claim_one(storage, queues=[name])))
    copy_all(mirror)

    for name in names:
        assert_alike(storage, name)


@pytest.mark.slow
def test_jobs_of_a_node_that_returned_empty_stay_in_the_tables(make_storage, make_mirror, redis_cluster):
    redis_cluster.clean()
    storage = make_storage(url=redis_cluster.url)
    mirror = make_mirror(storage)
    common = redis_cluster.node_of("{djqueue}")
    name = next(f"q{n}" for n in range(99) if redis_cluster.node_of(f"{{q:q{n}}}") is not common)
    f.enqueue_many(storage, 5, queue=name)
    copy_all(mirror)
    redis_cluster.node_of(f"{{q:{name}}}").run("FLUSHALL")
    f.enqueue(storage, queue=name)
    copy_all(mirror)

    assert models.Job.objects.filter(queue=name).count() == 6
    storage.queues.obliterate(name)
    copy_all(mirror)
    assert models.Job.objects.filter(queue=name).count() == 0


# The version of the rows.


def test_each_change_of_mirrored_rows_changes_their_version(storage, mirror):
    assert leaderlease.version("default") is None
    seen = []
    f.enqueue(storage, id="a")
    for change in (
        lambda: None,
        lambda: f.enqueue(storage, id="b"),
        lambda: storage.jobs.cancel(f.QUEUE, ["a"]),
        lambda: storage.jobs.remove(f.QUEUE, ["a"]),
    ):
        change()
        copy_all(mirror)
        seen.append(leaderlease.version("default"))
    assert len(set(seen)) == len(seen)


def test_the_version_of_mirrored_rows_stays_while_nothing_is_copied(storage, mirror, clock):
    f.enqueue(storage, id="a")
    mirror.copy_once()
    known = leaderlease.version("default")
    for _ in range(3):
        clock.advance(leaderlease.RENEW_EVERY + 2_000)
        mirror.copy_once()
    assert leaderlease.version("default") == known


def test_changes_of_mirrored_rows_in_one_millisecond_have_different_versions(storage, clock, tables):
    mine = leaderlease.LeaderLease("default", clock, "mirror")
    assert mine.acquire()
    seen = [leaderlease.version("default")]
    for _ in range(3):
        mine.renew(changes_jobs=True)
        seen.append(leaderlease.version("default"))
    clock.jump(-60_000)
    mine.renew(changes_jobs=True)
    seen.append(leaderlease.version("default"))
    assert len(set(seen)) == len(seen)


def test_waiting_copy_detects_that_a_resync_took_its_lease(
    make_storage, make_mirror, monkeypatch, clock, caplog
):
    monkeypatch.setattr("djqueue.operations.throttle.SUSPECT_COUNT", 0)
    monkeypatch.setattr("djqueue.operations.mirror.JOBS_PER_TRANSACTION", 5)
    storage = make_storage(mirror={"MAX_LAG": 3_600})
    mirror = make_mirror(storage)
    f.enqueue(storage)
    copy_all(mirror)
    f.enqueue_many(storage, 20)
    looks, numbers = [], []

    def backlogs(_):
        looks.append(models.Job.objects.count())
        clock.advance(4_000)
        # Many jobs change after the first transaction of a copy.
        is_copying = 1 < looks[-1] < 21
        if is_copying and not numbers:
            numbers.append(mirror._lease.number)
            f.enqueue(storage)
            make_mirror(storage).resync()
        return {f.QUEUE: Backlog(len(looks) * 1_000_000 if is_copying else 0, 0, 1.0)}

    monkeypatch.setattr(ChangeStream, "backlogs", backlogs)
    with running(mirror):
        eventually(lambda: numbers and mirror._number > numbers[0])

    assert_alike(storage)
    assert warnings(caplog) == []


@pytest.mark.skipif(connection.vendor != "sqlite", reason="only SQLite has settings of a connection")
def test_mirror_thread_prepares_its_connection_when_it_waits_after_an_error(
    storage, mirror, monkeypatch, clock
):
    monkeypatch.setattr("djqueue.operations.mirror.FIRST_RETRY", 0.01)
    monkeypatch.setattr("djqueue.operations.throttle.SUSPECT_COUNT", 0)
    f.enqueue(storage)
    copy_all(mirror)
    looks, levels = [], []
    failed = threading.Event()

    def backlogs(_):
        looks.append(1)
        clock.advance(4_000 if failed.is_set() else 200)
        if len(looks) == 2:
            # The round after this look fails, and the next one begins with a wait.
            monkeypatch.setattr(ChangeStream, "queues", fail)
        elif len(looks) == 4:
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA synchronous")
                levels.append(cursor.fetchone()[0])
        return {f.QUEUE: Backlog(len(looks) * 100_000 * failed.is_set(), 0, 1.0)}

    queues = ChangeStream.queues

    def fail(_):
        monkeypatch.setattr(ChangeStream, "queues", queues)
        failed.set()
        raise StorageUnavailableError("Redis is away")

    monkeypatch.setattr(ChangeStream, "backlogs", backlogs)
    with running(mirror):
        eventually(lambda: levels)

    assert levels == [1]
