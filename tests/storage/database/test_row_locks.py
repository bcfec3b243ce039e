"""Rows that other transactions have locked hold up nothing but themselves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection, connections, transaction

from djqueue import models
from djqueue.core.job import Lease
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import PENDING
from djqueue.models import hot
from djqueue.storage.database import queues, stored
from djqueue.testing.factories import QUEUE, batch, claim, claim_ids, completing
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.dialect


@pytest.fixture(autouse=True)
def _rows_are_locked() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer")


def elsewhere(call):
    """Call a function on another thread, which the caller's transaction does not concern."""

    def run():
        try:
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(PATIENCE)


def lease_of(job_id):
    return hot.ClaimedJob.objects.get(job_id=job_id).lease_until


def test_group_continues_after_its_next_job_was_locked(make):
    storage = make(policies={QUEUE: QueuePolicy(group_concurrency=1)})
    storage.enqueue([batch(ids=["a"], group="g"), batch(ids=["b"], group="g")])
    [first] = claim(storage)

    with transaction.atomic():
        assert storage.enqueue([batch(ids=["b"], group="g")])[0].status == "duplicate"
        assert elsewhere(lambda: storage.finish([completing(first)])).accepted == [True]

    eventually(lambda: claim_ids(storage) == ["b"])


def test_lease_is_renewed_beside_one_whose_job_is_locked(make):
    storage = make()
    storage.enqueue([batch(ids=["x"]), batch(ids=["y"])])
    jobs = claim(storage, 2)
    hot.ClaimedJob.objects.filter(job_id="y").update(lease_until=0)
    before = lease_of("x")

    with transaction.atomic():
        storage.enqueue([batch(ids=["x"])])
        renewals = elsewhere(lambda: storage.renew([Lease(job.queue, job.id, job.token) for job in jobs]))

    assert [renewal.held for renewal in renewals] == [True, True]
    assert (lease_of("x"), lease_of("y") > 0) == (before, True)


@pytest.mark.parametrize("force", [False, True])
def test_job_that_starts_while_its_queue_is_obliterated_leaves_no_claim(make, monkeypatch, force):
    storage = make()
    storage.enqueue([batch(ids=["a"])])
    end_active = queues._end_active

    def end(tx, queue, pks, *, force):
        if not hot.ClaimedJob.objects.exists():
            assert elsewhere(lambda: claim_ids(storage)) == ["a"]
        end_active(tx, queue, pks, force=force)

    monkeypatch.setattr(queues, "_end_active", end)
    if force:
        assert storage.queues.obliterate(QUEUE, force=True) == 1
    else:
        with pytest.raises(Exception, match="has active jobs"):
            storage.queues.obliterate(QUEUE)

    assert hot.ClaimedJob.objects.count() == models.Job.objects.count() == (0 if force else 1)
    assert not storage.queues.is_paused(QUEUE)
    assert storage.sweep().stalled == 0


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
    with storage.transactions.connections.borrow() as own, own.cursor() as cursor:
        cursor.execute("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ")

    assert storage.write(lambda tx: tx.value("SHOW transaction_isolation")) == "read committed"
