"""Snapshots of the SQL storage."""

import threading
from contextlib import closing

import pytest
from django.apps import apps
from django.db import connection, transaction

from djqueue import models
from djqueue.core.job import Lease
from djqueue.core.policies import QueuePolicy, Rate
from djqueue.core.states import State
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.database.snapshots import CLEARED
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.case import LATER, SELF_HEALING, SOON
from djqueue.testing.contract.snapshots import contents, fill, order, read_all
from djqueue.testing.factories import (
    QUEUE,
    a_completed_job,
    a_failed_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    failing,
    finish,
    job,
    releasing,
    state,
)

from .test_conformance import OnAClock


class TestSnapshots(OnAClock, contract.SnapshotsContract):
    """The part of the contract."""


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def storage(tables, clock):
    with closing(DatabaseStorage(clock=clock, policies=contract.POLICIES)) as storage:
        storage.connect()
        yield storage


@pytest.fixture
def memory(clock):
    with closing(MemoryStorage(clock=clock, policies=contract.POLICIES)) as storage:
        yield storage


def restore(storage, parts=None):
    """Write a snapshot, by default the storage's own, over everything."""
    return storage.snapshots.write(read_all(storage) if parts is None else parts, replace=True)


def sums():
    """Return the numbers of jobs by queue and state, counted in the tables."""
    found = {}
    for queue, there in models.Job.objects.values_list("queue", "state"):
        found[queue, there] = found.get((queue, there), 0) + 1
    return found


# Other storages.


def without_modes(parts):
    """Return the records of a snapshot without the modes of groups, which not every storage records."""
    return {
        key: {name: value for name, value in record.items() if name != "key_mode"}
        for key, record in contents(parts).items()
    }


def test_snapshot_moves_between_storages(storage, memory):
    fill(memory)
    before = read_all(memory)

    storage.snapshots.write(before)

    after = read_all(storage)
    assert without_modes(after) == without_modes(before)
    assert order(after) == order(before)
    memory.snapshots.write(after, replace=True)
    again = read_all(memory)
    assert without_modes(again) == without_modes(before)
    assert order(again) == order(before)
    while expected := [one.id for one in claim(memory, 1, queues=(QUEUE,))]:
        assert [one.id for one in claim(storage, 1, queues=(QUEUE,))] == expected


# One moment.


def test_snapshot_reads_one_moment(storage):
    ids = enqueue_many(storage, 30)
    [first, *_] = ids

    with storage.snapshots.read(page=10) as parts:
        read = [next(parts)]
        enqueue(storage, id="late")
        storage.jobs.remove(QUEUE, ids[20:])
        storage.jobs.cancel(QUEUE, [first])
        read += parts

    records = {key[2]: record for key, record in contents(read).items() if key[0] == "job"}
    assert sorted(records) == sorted(ids)
    assert {record["state"] for record in records.values()} == {"waiting"}


def test_snapshot_is_read_in_a_transaction_without_its_changes(storage):
    enqueue(storage, id="there")

    with transaction.atomic():
        enqueue(storage, id="uncommitted")
        ids = [key[2] for key in contents(read_all(storage)) if key[0] == "job"]

    assert ids == ["there"]


def test_restore_of_a_rolled_back_transaction_changes_nothing(storage):
    enqueue(storage, id="old")

    with transaction.atomic():
        storage.snapshots.write([], replace=True)
        assert state(storage, "old") is None
        transaction.set_rollback(True)

    assert state(storage, "old") is State.WAITING
    assert storage.reads.counts(QUEUE)[State.WAITING] == 1


def test_job_enqueued_during_a_restore_is_added_to_what_it_restored(storage):
    enqueue_many(storage, 20)
    parts = read_all(storage)
    enqueued = threading.Event()

    def produce():
        try:
            enqueue(storage, id="meanwhile")
            enqueued.set()
        finally:
            connection.close()

    producer = threading.Thread(target=produce)
    with transaction.atomic():
        storage.snapshots.write(parts, replace=True)
        producer.start()
        assert not enqueued.wait(0.2)
    producer.join(30)

    assert enqueued.is_set()
    assert storage.reads.counts(QUEUE)[State.WAITING] == 21


# Order.


def test_released_and_first_jobs_keep_their_order(storage):
    enqueue(storage, id="plain")
    early = an_active_job(storage, id="released early", priority=1)
    late = an_active_job(storage, id="released late", priority=1)
    finish(storage, releasing(early))
    storage.jobs.update(QUEUE, ["released early"], priority=0)
    enqueue(storage, id="front", lifo=True)
    finish(storage, releasing(late))
    before = order(read_all(storage))

    restore(storage)
    restore(storage)

    assert order(read_all(storage)) == before


def test_held_jobs_of_a_group_keep_their_order(storage):
    queue = "pairs"
    ids = enqueue_many(storage, 6, queue=queue, concurrency_key="g")
    enqueue(storage, id="front", queue=queue, concurrency_key="g", lifo=True)
    before = order(read_all(storage))

    restore(storage)

    assert order(read_all(storage)) == before
    found = []
    while claimed := claim(storage, 1, queues=(queue,)):
        found.append(claimed[0].id)
        finish(storage, completing(claimed[0]))
    assert sorted(found) == sorted([*ids, "front"])


def test_restored_group_is_held_back_by_its_own_settings(storage):
    enqueue_many(storage, 4, concurrency_key="g")
    enqueue_many(storage, 4, concurrency_key="paused")
    storage.queues.set_key_limit(QUEUE, "g", concurrency=3, weight=2, rate=Rate(5, 60_000))
    storage.queues.pause_key(QUEUE, "paused")
    before = models.ReadyJob.objects.count()

    restore(storage)

    assert models.ReadyJob.objects.count() == before == 2
    assert models.HeldJob.objects.count() == 6


# What is kept.


REPLACED = {"djqueue_queue_state", "djqueue_tally", "djqueue_cron_job"}
"""Tables that a restore changes, but does not merely empty."""
UNTOUCHED = {
    "djqueue_annotation",
    "djqueue_audit_event",
    "djqueue_backup_state",
    "djqueue_bulk_operation",
    "djqueue_dashboard",
    "djqueue_error_group",
    "djqueue_event",
    "djqueue_metric_bucket",
    "djqueue_observed",
    "djqueue_outbox_job",
    "djqueue_payload_version",
    "djqueue_leader_lease",
    "djqueue_worker_state",
}
"""Tables of what is not part of a snapshot."""


def test_every_table_is_part_of_a_restore_or_left_alone():
    tables = {model._meta.db_table for model in apps.get_app_config("djqueue").get_models()}

    assert tables == {*CLEARED, *REPLACED, *UNTOUCHED}


def test_restored_counts_are_those_of_the_jobs(storage):
    fill(storage)
    storage.sweep()

    restore(storage)

    for queue in storage.queues.names():
        counts = storage.reads.counts(queue)
        assert {(queue, one.value): number for one, number in counts.items() if number} == {
            key: number for key, number in sums().items() if key[0] == queue
        }


def test_restore_changes_no_total(storage):
    a_completed_job(storage)
    parts = read_all(storage)
    total = sum(models.QueueTally.objects.values_list("completed", flat=True))

    restore(storage, [])
    restore(storage, parts)

    assert sum(models.QueueTally.objects.values_list("completed", flat=True)) == total == 1


def test_automatic_retries_are_restored(storage, clock):
    finish(storage, failing(an_active_job(storage, id="tried", queue=SELF_HEALING, max_attempts=1)))
    clock.advance(SOON)
    storage.sweep()
    assert state(storage, "tried", SELF_HEALING) is State.WAITING

    restore(storage)
    finish(storage, failing(claim_one(storage, queues=[SELF_HEALING])))

    [letter] = storage.reads.dead_letters(SELF_HEALING)
    assert letter.retries == 1


def test_restored_ttl_ends_jobs_that_have_neither_started_nor_been_retried(storage, clock):
    for name in ("expires", "started", "retried"):
        enqueue(storage, id=name, ttl=LATER, max_stalls=3)
    storage.jobs.reschedule(QUEUE, ["expires"], clock.now() + 2 * LATER)
    claim(storage, 1)
    models.Job.objects.filter(job_id="retried").update(error_type="Error", expires_at=None)

    restore(storage)
    clock.advance(LATER)
    storage.sweep()

    assert state(storage, "expires") is State.FAILED
    assert state(storage, "started") is state(storage, "retried") is State.WAITING


def test_restored_records_are_kept_for_the_jobs_that_read_them(storage, clock):
    a_completed_job(storage, id="read", result=b"result", result_ttl=SOON, retention=SOON)
    enqueue(storage, id="reader", depends_on=((QUEUE, "read"),), delay=10 * SOON)
    assert state(storage, "reader") is State.DELAYED

    restore(storage)
    clock.advance(2 * SOON)
    storage.sweep()

    assert job(storage, "read").result == b"result"
    storage.jobs.cancel(QUEUE, ["reader"])
    storage.sweep()
    assert state(storage, "read") is None


def test_dependents_of_an_interrupted_job_that_fails_end_with_it(storage):
    an_active_job(storage, id="active", max_stalls=0)
    enqueue(storage, id="fails", depends_on=((QUEUE, "active"),))
    enqueue(storage, id="fails, too", depends_on=((QUEUE, "fails"),))
    enqueue(storage, id="waits", depends_on=((QUEUE, "active"),), on_dependency_failure="wait")
    enqueue(storage, id="runs", depends_on=((QUEUE, "active"),), on_dependency_failure="ignore")

    restore(storage)

    assert state(storage, "fails") is state(storage, "fails, too") is State.FAILED
    assert state(storage, "waits") is State.BLOCKED
    assert claim_ids(storage, 5) == ["runs"]
    assert storage.jobs.retry(QUEUE, ["active"]) == ["retried"]
    finish(storage, completing(claim_one(storage)))
    assert claim_ids(storage, 5) == ["waits"]


def test_lease_of_a_claim_before_the_restore_is_not_renewed(storage):
    claimed = an_active_job(storage, id="running")

    restore(storage)

    [renewal] = storage.renew([Lease(QUEUE, "running", claimed.token)])
    assert not renewal.held
    assert claim_one(storage).token != claimed.token


def test_limits_of_the_policy_are_not_part_of_a_snapshot(tables, clock):
    with closing(DatabaseStorage(clock=clock, policies={QUEUE: QueuePolicy(concurrency=2)})) as storage:
        storage.queues.set_limits(QUEUE, concurrency=5)
        assert not storage.snapshots.is_empty()
        storage.queues.set_limits(QUEUE, concurrency=2)
        assert storage.snapshots.is_empty()


def test_restored_unique_key_of_an_ended_job_is_free(storage):
    a_failed_job(storage, id="failed", unique_key="k")

    restore(storage)

    assert [one.status for one in storage.enqueue([batch(unique_key="k")])] == ["queued"]
    assert storage.jobs.retry(QUEUE, ["failed"]) == ["unique_key_taken"]
