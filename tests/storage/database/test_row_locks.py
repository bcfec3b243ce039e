"""Rows that other transactions have locked hold up nothing but themselves."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
from django.db import connection, transaction

from djqueue import models
from djqueue.core.job import Lease
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import PENDING, State
from djqueue.models import hot
from djqueue.storage.database import queues, stored
from djqueue.storage.database.claim import ClaimCall
from djqueue.storage.database.transaction import Tx, key_lock
from djqueue.testing.factories import (
    QUEUE,
    batch,
    claim,
    claim_ids,
    completing,
    emission_of,
    enqueue_many,
    failing,
    releasing,
    report_of,
    request,
    retrying,
)
from djqueue.testing.waiting import together
from tests.support import PATIENCE, elsewhere, eventually

pytestmark = pytest.mark.dialect


@pytest.fixture(autouse=True)
def _rows_are_locked() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer")


def lease_of(job_id):
    return hot.ClaimedJob.objects.get(job_id=job_id).lease_until


def test_group_continues_after_its_next_job_was_locked(make):
    storage = make(policies={QUEUE: QueuePolicy(key_concurrency=1)})
    storage.enqueue([batch(ids=["a"], concurrency_key="g"), batch(ids=["b"], concurrency_key="g")])
    [first] = claim(storage)

    with transaction.atomic():
        assert storage.jobs.update(QUEUE, ["b"], payload=b"new") == [True]
        assert elsewhere(lambda: storage.finish([completing(first)])).accepted == [True]

    eventually(lambda: claim_ids(storage) == ["b"])


def test_lease_is_renewed_beside_one_whose_job_is_locked(make):
    storage = make()
    storage.enqueue([batch(ids=["x"]), batch(ids=["y"])])
    jobs = claim(storage, 2)
    hot.ClaimedJob.objects.filter(job_id="y").update(lease_until=0)
    before = lease_of("x")

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, ["x"])
        renewals = elsewhere(lambda: storage.renew([Lease(job.queue, job.id, job.token) for job in jobs]))

    assert [renewal.held for renewal in renewals] == [True, True]
    assert (lease_of("x"), lease_of("y") > 0) == (before, True)


@pytest.mark.parametrize("force", [False, True])
def test_job_that_starts_while_its_queue_is_obliterated_leaves_no_claim(make, monkeypatch, force):
    storage = make()
    storage.enqueue([batch(ids=["a"])])
    stop = queues._stop

    def stop_after_a_start(tx, queue):
        assert elsewhere(lambda: claim_ids(storage)) == ["a"]
        stop(tx, queue)

    monkeypatch.setattr(queues, "_stop", stop_after_a_start)
    if force:
        assert storage.queues.obliterate(QUEUE, force=True) == 1
    else:
        with pytest.raises(Exception, match="has active jobs"):
            storage.queues.obliterate(QUEUE)

    assert hot.ClaimedJob.objects.count() == models.Job.objects.count() == (0 if force else 1)
    assert not storage.queues.is_paused(QUEUE)
    assert storage.sweep().stalled == 0


@pytest.mark.parametrize("force", [False, True])
def test_obliterate_finds_a_job_whose_claim_ends_between_two_looks(make, monkeypatch, force):
    storage = make()
    storage.enqueue([batch(ids=["a"])])
    take, rows = ClaimCall._take, Tx.rows
    has_begun, may_go_on = Event(), Event()

    def slow_take(*given):
        has_begun.set()
        assert may_go_on.wait(PATIENCE)
        return take(*given)

    monkeypatch.setattr(ClaimCall, "_take", slow_take)
    with ThreadPoolExecutor(1) as pool:
        claiming = pool.submit(end, storage, slots=1)
        assert has_begun.wait(PATIENCE)

        def rows_before_the_claim_ends(tx, statement, *parameters):
            found = rows(tx, statement, *parameters)
            if State.ACTIVE in parameters and not may_go_on.is_set():
                may_go_on.set()
                claiming.result(PATIENCE)
            return found

        monkeypatch.setattr(Tx, "rows", rows_before_the_claim_ends)
        if force:
            assert storage.queues.obliterate(QUEUE, force=True) == 1
        else:
            with pytest.raises(Exception, match="has active jobs"):
                storage.queues.obliterate(QUEUE)

    assert hot.ClaimedJob.objects.count() == models.Job.objects.count() == (0 if force else 1)


def test_clean_goes_on_behind_jobs_that_have_started_meanwhile(make, monkeypatch):
    storage = make()
    storage.enqueue([batch(ids=["a", "b", "c"])])
    monkeypatch.setattr(queues, "LIMIT", 1)
    by_keys = stored.by_keys

    def by_keys_after_a_claim(tx, pks, **given):
        if not hot.ClaimedJob.objects.exists():
            assert elsewhere(lambda: claim_ids(storage)) == ["a"]
        return by_keys(tx, pks, **given)

    monkeypatch.setattr(stored, "by_keys", by_keys_after_a_claim)

    assert storage.queues.clean(QUEUE, PENDING, 2**53) == 2


def test_transactions_of_the_storage_are_read_committed(make):
    storage = make()
    with storage.database.connections.borrow() as own, own.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    assert storage.database.write(lambda tx: tx.value("SHOW transaction_isolation")) == "read committed"


def end(storage, *outcomes, slots=0):
    """Report outcomes and claim as a worker does, on a connection of its own."""
    return elsewhere(lambda: asyncio.run(storage.afinish(outcomes, request(slots))))


CHANGES = {
    "cancel": lambda storage: storage.jobs.cancel(QUEUE, ["a"])[0].status == "cancelled",
    "reschedule": lambda storage: storage.jobs.reschedule(QUEUE, ["a"], 2**53)[0],
    "move": lambda storage: storage.jobs.move(QUEUE, ["a"], "other")[0] == "moved",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_job_that_arrives_during_a_change_is_not_changed_without_its_lock(make, monkeypatch, change):
    storage = make()
    by_ids, arrived = stored.by_ids, []

    def by_ids_before_the_job_arrives(*given, **options):
        found = by_ids(*given, **options)
        if not arrived:
            arrived.append(True)
            elsewhere(lambda: storage.enqueue([batch(ids=["a"])]))
        return found

    monkeypatch.setattr(stored, "by_ids", by_ids_before_the_job_arrives)

    assert not change(storage)
    assert claim_ids(storage) == ["a"]


LOCKS = {
    "depends_on": lambda storage, id: storage.enqueue([batch(depends_on=((QUEUE, id),))]),
    "cancel": lambda storage, id: storage.jobs.cancel(QUEUE, [id]),
    "remove": lambda storage, id: storage.jobs.remove(QUEUE, [id]),
}


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
def test_claim_skips_a_job_that_a_caller_has_locked_and_finds_it_soon(make, lock):
    storage = make()
    storage.enqueue([batch(ids=["a", "b", "c"])])

    with transaction.atomic():
        lock(storage, "a")
        claims = end(storage, slots=2).claims
        assert [job.id for job in claims.jobs] == ["b", "c"]
        claims = end(storage, slots=2).claims
        assert (claims.jobs, claims.wait is not None) == ([], True)
        assert claims.wait <= stored.LOCKED_AGAIN
        transaction.set_rollback(True)

    assert claim_ids(storage, 2) == ["a"]


def test_claim_without_locked_jobs_waits_for_a_wake_up(make):
    storage = make()
    storage.enqueue([batch(ids=["a"])])

    assert storage.claim(request(2)).wait is None
    assert storage.claim(request(2)).wait is None


@pytest.mark.parametrize("lock", LOCKS.values(), ids=LOCKS)
@pytest.mark.parametrize("ending", [completing, retrying])
def test_outcome_of_a_locked_job_does_not_hold_up_the_others(make, lock, ending):
    storage = make()
    storage.enqueue([batch(ids=["a", "b", "c"])])
    first, second = claim(storage, 2)

    with transaction.atomic():
        lock(storage, "a")
        finished = end(storage, ending(first), ending(second), slots=1)
        assert finished.accepted == [None, True]
        assert [job.id for job in finished.claims.jobs] == ["c"]
        assert end(storage, ending(first)).accepted == [None]
        transaction.set_rollback(True)

    assert end(storage, ending(first), ending(second)).accepted == [True, False]


def test_reports_of_a_locked_job_do_not_hold_up_those_of_others(make):
    storage = make()
    enqueue_many(storage, 2)
    first, second = claim(storage, 2)
    stale = second._replace(token=second.token + 1)

    def report_all():
        reports = [report_of(job, 50, [(1, "half")]) for job in (first, second, stale)]
        items = [emission_of(job, 0, b"\xc0") for job in (first, second, stale)]
        return list(storage.report(reports)), list(storage.emit(items))

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, [first.id])
        assert elsewhere(report_all) == ([None, True, False], [None, True, False])

    assert report_all() == ([True, True, False], [True, True, False])
    assert models.JobLog.objects.filter(job_id=first.id).count() == 1


def test_stale_outcome_is_refused_beside_a_locked_one(make):
    storage = make()
    storage.enqueue([batch(ids=["a", "b"])])
    first, second = claim(storage, 2)
    storage.finish([releasing(second)])

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, ["a"])
        assert end(storage, completing(first), completing(second)).accepted == [None, False]


def test_duplicate_id_locks_nothing(make):
    storage = make()
    storage.enqueue([batch(ids=["a", "b"])])
    [first] = claim(storage)

    with transaction.atomic():
        results = storage.enqueue([batch(ids=["a", "b"])])
        assert [result.status for result in results] == ["duplicate"] * 2
        finished = end(storage, completing(first), slots=1)

    assert finished.accepted == [True]
    assert [job.id for job in finished.claims.jobs] == ["b"]


def test_duplicate_of_a_unique_key_locks_nothing(make):
    storage = make()
    storage.enqueue([batch(ids=["a"], unique_key="k"), batch(ids=["b"], unique_key="l")])
    [first] = claim(storage)

    with transaction.atomic():
        results = storage.enqueue([batch(unique_key="k"), batch(unique_key="l")])
        assert [(result.id, result.status) for result in results] == [("a", "duplicate"), ("b", "duplicate")]
        finished = end(storage, completing(first), slots=1)

    assert finished.accepted == [True]
    assert [job.id for job in finished.claims.jobs] == ["b"]


def test_outcome_waits_for_no_unique_key_that_a_caller_has_locked(make):
    storage = make()
    storage.enqueue([batch(ids=["a"], unique_key="k"), batch(ids=["b"])])
    first, second = claim(storage, 2)
    with transaction.atomic():
        storage.database.write(lambda tx: tx.lock(key_lock(QUEUE, "k")))
        assert end(storage, completing(first), completing(second)).accepted == [None, True]

    assert end(storage, completing(first)).accepted == [True]


def a_session_waits():
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted")
        return cursor.fetchone()


@pytest.mark.parametrize("outcome", [completing, failing])
def test_end_of_a_job_locks_the_next_one_of_its_unique_key_before_the_key(make, outcome):
    storage = make()
    storage.enqueue([batch(ids=["a"], unique_key="k")])
    [first] = claim(storage)
    storage.enqueue([batch(ids=["b"], unique_key="k", on_duplicate="keep_last_if_active")])

    with ThreadPoolExecutor() as threads:
        with transaction.atomic():
            storage.jobs.update(QUEUE, ["b"], payload=b"new")
            finished = threads.submit(elsewhere, lambda: storage.finish([outcome(first)]))
            eventually(a_session_waits)
            # The end holds no key for which a change of the next job would wait.
            assert storage.database.write(lambda tx: tx.try_lock([key_lock(QUEUE, "k")])) == set()
        assert finished.result(PATIENCE).accepted == [True]
    assert claim_ids(storage) == ["b"]


def test_outcome_of_a_job_waits_for_no_locked_dependent(make):
    storage = make()
    storage.enqueue([batch(ids=["a", "b"])])
    storage.enqueue([batch(ids=["next"], depends_on=((QUEUE, "a"),))])
    first, second = claim(storage, 2)

    with transaction.atomic():
        storage.jobs.update(QUEUE, ["next"], payload=b"new")
        finished = end(storage, completing(first), completing(second), slots=1)

    assert (finished.accepted, finished.claims.jobs) == ([None, True], [])
    assert end(storage, completing(first), slots=1).accepted == [True]


def test_claim_does_not_wait_for_a_group_that_a_caller_has_locked(make):
    storage = make()
    storage.enqueue(
        [
            batch(ids=["a"], concurrency_key="g"),
            batch(ids=["b"], concurrency_key="h"),
            batch(ids=["c"], concurrency_key="z"),
        ]
    )
    [first] = claim(storage)

    with transaction.atomic():
        storage.enqueue([batch(ids=["d"], concurrency_key="h")])
        # It holds the lock of the finished job's group: to wait for another one could be a deadlock.
        finished = end(storage, completing(first), slots=1)
        assert finished.accepted == [True]
        assert [job.id for job in finished.claims.jobs] == ["c"]
        claims = end(storage, slots=1).claims
        assert (claims.jobs, claims.wait is not None) == ([], True)

    assert claim_ids(storage, 2) == ["b"]


def test_claim_serves_other_queues_while_a_caller_has_locked_the_limits_of_one(make):
    storage = make()
    enqueue_many(storage, 1, queue="limited")
    enqueue_many(storage, 1, queue="other")
    storage.queues.set_limits("limited", None, 2)

    with transaction.atomic():
        storage.queues.set_limits("limited", None, 1)
        [job] = end(storage, slots=2).claims.jobs
        assert job.queue == "other"

    assert [job.queue for job in end(storage, slots=2).claims.jobs] == ["limited"]


def test_first_use_of_a_queue_in_an_open_transaction_blocks_no_other(make):
    storage, other = make(), make()

    with transaction.atomic():
        enqueue_many(storage, 1, queue="new")
        elsewhere(lambda: enqueue_many(other, 1, queue="new"))
        transaction.set_rollback(True)

    assert len(claim(storage, 2, queues=["new"])) == 1
    enqueue_many(other, 1, queue="new")
    assert "new" in storage.queues.names()
    assert models.GroupState.objects.filter(queue="new", concurrency_key="").count() == 1


def test_claim_leaves_ready_jobs_of_a_locked_group_as_they_are(make):
    storage = make()
    storage.enqueue([batch(ids=["a"], concurrency_key="g")])
    row = "SELECT xmin::text FROM djqueue_ready"

    with transaction.atomic():
        storage.enqueue([batch(ids=["b"], concurrency_key="g")])
        before = storage.database.read(lambda tx: tx.value(row))
        claims = end(storage, slots=2).claims
        after = elsewhere(lambda: storage.database.read(lambda tx: tx.value(row)))

    assert (claims.jobs, claims.wait) == ([], 50)
    assert before == after
    assert claim_ids(storage, 5) == ["a"]


def test_job_that_another_one_comes_to_depend_on_keeps_its_lease(make):
    storage = make()
    storage.enqueue([batch(ids=["x"])])
    jobs = claim(storage)
    hot.ClaimedJob.objects.update(lease_until=1)

    with transaction.atomic():
        storage.enqueue([batch(depends_on=((QUEUE, "x"),))])
        [renewal] = elsewhere(lambda: storage.renew([Lease(job.queue, job.id, job.token) for job in jobs]))

    assert renewal.held
    assert lease_of("x") > 1


def test_overdue_lease_of_a_locked_job_does_not_hold_up_the_others(make):
    storage = make()
    storage.enqueue([batch(ids=["x", "y"])])
    jobs = claim(storage, 2)
    hot.ClaimedJob.objects.update(lease_until=1)

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, ["x"])
        renewals = elsewhere(lambda: storage.renew([Lease(job.queue, job.id, job.token) for job in jobs]))
        assert (lease_of("x"), lease_of("y") > 1) == (1, True)

    assert [renewal.held for renewal in renewals] == [True, True]


def test_renewal_of_an_overdue_lease_waits_for_a_slow_sweep_that_takes_it_back(make, monkeypatch):
    storage, other = make(), make()
    enqueue_many(storage, 1)
    [job] = claim(storage)
    hot.ClaimedJob.objects.update(lease_until=1)
    is_taken, has_waited = Event(), Event()
    flush, write = Tx.flush, storage.database.transactions.write_unless_locked

    def slow_flush(tx):
        if tx.database is other.database and not hot.ClaimedJob.objects.exists():
            is_taken.set()
            has_waited.wait(PATIENCE)
        flush(tx)

    monkeypatch.setattr(Tx, "flush", slow_flush)
    monkeypatch.setattr(
        storage.database.transactions, "write_unless_locked", lambda work: (write(work), has_waited.set())[0]
    )
    with ThreadPoolExecutor(1) as pool:
        sweep = pool.submit(other.sweep)
        assert is_taken.wait(PATIENCE)
        renewals = storage.renew([Lease(job.queue, job.id, job.token)])
        sweep.result(PATIENCE)

    assert [renewal.held for renewal in renewals] == [False]


def test_overdue_lease_of_a_locked_job_does_not_let_short_ones_expire(make, monkeypatch):
    storage = make(policies={QUEUE: QueuePolicy(lease=1_000)})
    enqueue_many(storage, 2)
    first, second = claim(storage, 2)
    leases = [Lease(job.queue, job.id, job.token) for job in (first, second)]
    hot.ClaimedJob.objects.filter(job_id=first.id).update(lease_until=1)
    calls, write = [], storage.database.transactions.write_unless_locked
    monkeypatch.setattr(
        storage.database.transactions, "write_unless_locked", lambda work: (calls.append(1), write(work))[1]
    )

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, [first.id])
        renewals = elsewhere(lambda: storage.renew(leases))

    assert [renewal.held for renewal in renewals] == [True, True]
    assert len(calls) == 1  # It takes a quarter of the other lease.


@pytest.mark.parametrize("share", ["concurrency_key", "unique_key"])
def test_two_calls_enqueue_in_opposite_orders_without_a_deadlock(make, share):
    storage = make(timeout=PATIENCE)
    storage.enqueue([batch()])
    names = [f"name-{number}" for number in range(100)]

    def enqueue_all(order):
        with transaction.atomic():
            for _ in range(3):
                storage.enqueue([batch(**{share: name}) for name in order])

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(elsewhere, partial(enqueue_all, order)) for order in (names, names[::-1])]
        for call in calls:
            call.result(PATIENCE)

    assert models.Job.objects.count() == 1 + (600 if share == "concurrency_key" else 100)


def test_locked_dependent_of_an_expired_job_does_not_hold_up_claims(make):
    storage = make()
    storage.enqueue([batch(ids=["late"], ttl=1, priority=1), batch(ids=["c", "d"])])
    storage.enqueue([batch(ids=["next"], depends_on=((QUEUE, "late"),))])
    eventually(lambda: storage.clock.now() > storage.reads.jobs(QUEUE, ["late"])[0].created_at + 1)

    with transaction.atomic():
        storage.jobs.update(QUEUE, ["next"], payload=b"new")
        assert [job.id for job in end(storage, slots=2).claims.jobs] == ["c", "d"]
        elsewhere(storage.sweep)

    storage.sweep()
    assert [storage.reads.states(QUEUE, [id])[0] for id in ("late", "next")] == [State.FAILED] * 2


def test_locked_expired_job_does_not_hold_up_others(make):
    storage = make(timeout=0.3)
    storage.enqueue([batch(ids=["a", "b"], ttl=1, delay=2**40)])
    eventually(lambda: storage.clock.now() > storage.reads.jobs(QUEUE, ["b"])[0].created_at + 1)

    with transaction.atomic():
        storage.jobs.update(QUEUE, ["a"], payload=b"new")
        elsewhere(storage.sweep)
        assert elsewhere(lambda: storage.reads.states(QUEUE, ["a", "b"])) == [State.DELAYED, State.FAILED]

    storage.sweep()
    assert storage.reads.states(QUEUE, ["a"]) == [State.FAILED]


def test_calls_with_the_same_ids_in_opposite_orders_do_not_end_each_other(make):
    storage = make()
    storage.enqueue([batch()])
    ids = [f"id-{number:03}" for number in range(200)]

    def enqueue(order):
        chunks = [batch(ids=order[start : start + 5]) for start in range(0, len(order), 5)]
        return sum(result.status == "queued" for result in storage.enqueue(chunks))

    added = together([partial(enqueue, order) for _ in range(3) for order in (ids, ids[::-1])])

    assert sum(added) == len(ids)
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush(), pg_stat_clear_snapshot()")
        cursor.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        assert cursor.fetchone() == (0,)
