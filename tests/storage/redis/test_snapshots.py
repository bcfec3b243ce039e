"""Snapshots of Redis: a restore is all or nothing, whenever its process is killed."""

from contextlib import closing

import pytest

from djqueue.conf import HealthSettings
from djqueue.core.errors import OptionError, RestoreInProgressError, SnapshotTargetError
from djqueue.core.states import State
from djqueue.operations import healthchecks
from djqueue.operations.healthchecks import HealthRun
from djqueue.storage.redis import restore
from djqueue.storage.snapshots import JOB, SCHEDULE, Part
from djqueue.storage.tables.schedules import TableSchedules
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.snapshots import contents, read_all
from djqueue.testing.factories import (
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    completing,
    enqueue,
    finish,
    state,
)

from .mortal import Place

pytestmark = pytest.mark.redis


@pytest.fixture
def place(redis_server):
    redis_server.run("FLUSHALL")
    with closing(Place(redis_server, FakeClock(), policies=contract.POLICIES)) as place:
        yield place


def old(storage):
    """Put the jobs into the storage that a restore replaces."""
    for queue in ("mine", "both"):
        a_completed_job(storage, id="done", queue=queue)
        enqueue(storage, id="old", queue=queue, unique_key="k")
    storage.queues.pause("mine")
    return contents(read_all(storage))


def new(storage):
    """Put the jobs into a storage that are restored to another one."""
    for queue in ("theirs", "both"):
        a_failed_job(storage, id="failed", queue=queue)
        a_completed_job(storage, id="done", queue=queue, result=b"new")
        enqueue(storage, id="new", queue=queue, unique_key="k")
    enqueue(storage, id="blocked", queue="both", depends_on=(("theirs", "new"),))
    storage.queues.set_limits("theirs", concurrency=7)
    return read_all(storage)


def interrupted(storage):
    """Let the time of a killed process pass, and end its restore."""
    with storage._connections.sync() as client:
        client.delete(storage._keyspace.common.key("restore:lock"))
    with storage.snapshots._restore() as restore:
        restore.end_interrupted()


def test_killed_restore_leaves_old_or_new_data_and_can_be_repeated(place):
    parts = new(place.storage())
    wanted = contents(parts)
    ends = set()
    for storage, before, died in place.deaths(
        old, lambda mortal, _: mortal.snapshots.write(parts, replace=True)
    ):
        interrupted(storage)
        found = contents(read_all(storage))
        assert found in (before, wanted)
        ends.add("old" if found == before else "new")
        assert storage.enqueue([batch(queue="both", unique_key="k")])[0].status == "duplicate"
        if died:
            storage.snapshots.write(parts, replace=True)
            assert contents(read_all(storage)) == wanted
        storage.sweep()
        finish(storage, *map(completing, claim(storage, 5, queues=["theirs"])))
        storage.sweep()
        assert state(storage, "blocked", "both") is State.WAITING
    assert ends == {"old", "new"}


def test_restore_may_take_longer_than_its_lock(place):
    storage = place.storage()
    parts = new(place.storage())
    storage.snapshots.write([], replace=True)

    def slow():
        for part in parts:
            with storage._connections.sync() as client:
                assert not client.exists(storage._keyspace.common.key("restore:lock"))
            yield part

    storage.snapshots.write(slow())
    assert contents(read_all(storage)) == contents(parts)


def test_producers_and_workers_are_rejected_after_an_interrupted_restore(place):
    storage, other = place.storage(), place.storage()
    parts = new(storage)
    running = an_active_job(storage, queue="mine")
    restore = storage.snapshots._restore()
    with restore:
        spool = storage.snapshots._spool()
        with closing(spool):
            spool.fill(parts)
            restore.stage(spool)
        restore.decide()

        for queue in ("both", "unheard of"):
            with pytest.raises(RestoreInProgressError):
                enqueue(other, queue=queue)
        with pytest.raises(RestoreInProgressError):
            finish(other, completing(running))
        with pytest.raises(RestoreInProgressError):
            other.connect()
        with pytest.raises(RestoreInProgressError, match="another process"):
            other.snapshots.write(parts)

    with pytest.raises(SnapshotTargetError, match="not empty"):
        other.snapshots.write(parts)  # It completes the other one first.
    assert contents(read_all(other)) == contents(parts)
    assert finish(other, completing(running)) == [False]
    assert enqueue(other, queue="unheard of")


def test_killed_restore_fails_the_health_check(place, monkeypatch):
    storage, other = place.storage(), place.storage()
    restore = storage.snapshots._restore()
    with closing(storage.snapshots._spool()) as spool:
        spool.fill(new(storage))
        with restore:
            restore.stage(spool)
            assert not other.snapshots.was_interrupted()
        # The lock of a killed process expires.
    assert other.snapshots.was_interrupted()
    monkeypatch.setattr(healthchecks, "get_storage", lambda: other)
    monkeypatch.setattr(healthchecks, "is_mirrored", lambda _: False)  # The mirror needs a database.
    report = HealthRun(HealthSettings()).report()
    failed = {check.name: check for check in report.checks if check.status == "failed"}
    assert list(failed) == ["restore"], failed
    assert "interrupted" in failed["restore"].findings[0].text

    other.snapshots.write([], replace=True)
    assert not other.snapshots.was_interrupted()


def test_snapshot_read_sees_old_or_new_data_during_a_restore(place):
    storage, other = place.storage(), place.storage()
    parts = new(storage)
    restore = storage.snapshots._restore()
    with restore, closing(storage.snapshots._spool()) as spool:
        spool.fill(parts)
        queues = restore.stage(spool)
        assert contents(read_all(other)) == contents(parts)  # It can still be undone.
        restore.decide()
        with pytest.raises(RestoreInProgressError, match="restore a backup again"):
            read_all(other)
        restore.publish(queues)
    assert contents(read_all(other)) == contents(parts)


def test_snapshot_read_fails_if_a_restore_replaced_the_data(place):
    storage, other = place.storage(), place.storage()
    parts = new(storage)
    with other.snapshots.read() as begun:
        assert next(begun)
        storage.snapshots.write(parts, replace=True)
        with pytest.raises(RestoreInProgressError, match="try again"):
            list(begun)


def test_snapshot_contains_the_jobs_of_a_killed_move_once(place):
    def prepare(storage):
        return [enqueue(storage, id=name, queue="mine") for name in "abc"]

    def act(storage, ids):
        storage.jobs.move("mine", ids, "theirs")

    for storage, ids, _ in place.deaths(prepare, act):
        found = [record["id"] for part in read_all(storage) if part.kind == JOB for record in part.records]
        assert sorted(found) == ids


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "values", [{"enabled": "what"}, {"every": "x"}, {"next_run_at": 2**62}, {"name": "twice"}]
)
def test_invalid_schedules_of_a_snapshot_change_nothing(place, values):
    storage = place.storage()
    before = old(storage)
    storage.snapshots.schedules = TableSchedules()
    twice = {"name": "twice", "queue": "mine", "job_name": "job", "schedule": "0 6 * * *"}
    schedules = Part(SCHEDULE, "", [twice, {**twice, "name": "invalid", **values}])

    with pytest.raises(OptionError, match="snapshot: the schedules are invalid"):
        storage.snapshots.write([schedules], replace=True)

    assert contents(read_all(storage)) == before
    storage.snapshots.write([schedules._replace(records=[twice])], replace=True)
    assert [*contents(read_all(storage))] == [(SCHEDULE, "", "twice")]


def test_restore_chunks_are_bounded_in_bytes(place, monkeypatch):
    storage = place.storage()
    for number in range(12):
        enqueue(storage, id=f"{number}", payload=b"x" * 1_000)
    monkeypatch.setattr(restore, "CHUNK_BYTES", 3_000)
    parts = read_all(storage)

    storage.snapshots.write(parts, replace=True)

    assert [job.id for job in claim(storage, 20)] == [f"{number}" for number in range(12)]
