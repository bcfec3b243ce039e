"""Full queues and producers of other processes, and of transactions."""

import threading
from contextlib import contextmanager, suppress

import pytest
from django.db import connection, transaction

from djqueue import models
from djqueue.core.errors import QueueFullError
from djqueue.core.queue import QueuePolicy
from djqueue.core.states import State
from djqueue.storage.tables.dialects import dialect_for
from djqueue.testing.factories import batch, claim, claim_ids, counts, enqueue, enqueue_many, state
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.dialect

SMALL, PATIENT, OLDEST_GO = "small", "patient", "oldest-go"
POLICIES = {
    SMALL: QueuePolicy(max_size=3),
    PATIENT: QueuePolicy(max_size=3, when_full="block", block_timeout=60_000),
    OLDEST_GO: QueuePolicy(max_size=3, when_full="drop_oldest"),
}


@pytest.fixture
def bounded(make_storage):
    storage = make_storage(policies=POLICIES)
    storage.connect()
    return storage


@pytest.fixture(params=["client", "scheduler"])
def producer(request, bounded, make_storage):
    return bounded if request.param == "scheduler" else make_storage(policies=POLICIES)


@contextmanager
def undone():
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def test_transaction_is_rejected_when_queue_is_full(producer, bounded):
    with transaction.atomic():
        enqueue_many(producer, 2, queue=SMALL)
        with pytest.raises(QueueFullError, match="queue 'small' is full: its MAX_SIZE allows 3"):
            producer.enqueue([batch(2, queue=SMALL)])
        enqueue(producer, queue=SMALL, id="last")

    assert eventually(lambda: counts(bounded, SMALL) == {State.WAITING: 3})
    assert state(bounded, "last", SMALL) is State.WAITING


def test_rollback_frees_capacity(producer):
    with undone():
        enqueue_many(producer, 3, queue=SMALL)

    assert len(enqueue_many(producer, 3, queue=SMALL)) == 3


@pytest.mark.parametrize("durable", [None, True, False])
def test_client_is_rejected_when_queue_is_full(bounded, make_storage, durable):
    enqueue_many(bounded, 3, queue=SMALL)
    bounded.reads.counts(SMALL)  # written
    client = make_storage(policies=POLICIES)

    with pytest.raises(QueueFullError):
        client.enqueue([batch(queue=SMALL, durable=durable)])
    with pytest.raises(QueueFullError):
        client.enqueue([batch(queue=SMALL, ids=["a"], durable=durable)])

    assert models.Job.objects.filter(queue=SMALL).count() == 3
    claim(bounded, queues=[SMALL])
    bounded.reads.counts(SMALL)
    assert enqueue(client, queue=SMALL, durable=durable)


def test_enqueue_in_transaction_does_not_wait_for_capacity(producer, bounded):
    enqueue_many(bounded, 3, queue=PATIENT)
    bounded.reads.counts(PATIENT)

    with undone(), pytest.raises(QueueFullError):
        producer.enqueue([batch(queue=PATIENT)])


@pytest.mark.parametrize("durable", [None, False])
def test_client_waits_until_queue_has_capacity(bounded, make_storage, durable):
    enqueue_many(bounded, 3, queue=PATIENT)
    bounded.reads.counts(PATIENT)
    client = make_storage(policies=POLICIES)

    def produce():
        try:
            client.enqueue([batch(queue=PATIENT, ids=["late"], durable=durable)])
        finally:
            connection.close()

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    claim(bounded, queues=[PATIENT])
    thread.join(PATIENCE)

    assert eventually(lambda: state(bounded, "late", PATIENT)) is State.WAITING


def test_many_processes_do_not_fill_queue_above_its_size(bounded, make_storage):
    full = []

    def produce():
        client = make_storage(policies=POLICIES)
        try:
            for _ in range(3):
                try:
                    enqueue(client, queue=SMALL)
                except QueueFullError:
                    full.append(True)
        finally:
            connection.close()

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(full) == 9
    assert eventually(lambda: counts(bounded, SMALL) == {State.WAITING: 3})


@contextmanager
def producing(storages):
    """Each of them enqueues jobs on a thread until it is refused so often; meanwhile nobody claims any."""

    def produce(storage):
        refused = 0
        try:
            while refused < 3:
                try:
                    enqueue(storage, queue=SMALL)
                except QueueFullError:
                    refused += 1
        finally:
            connection.close()

    threads = [threading.Thread(target=produce, args=(storage,)) for storage in storages]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def test_scheduler_and_other_processes_together_do_not_overfill_queue(bounded, make_storage):
    for _ in range(10):
        with producing([bounded, bounded, *(make_storage(policies=POLICIES) for _ in range(2))]):
            pass
        assert counts(bounded, SMALL) == {State.WAITING: 3}
        bounded.queues.obliterate(SMALL)


def test_producers_in_transactions_overfill_queue_by_its_size_at_most(bounded):
    """They see the tables, the scheduler what it has taken in: each by itself keeps to the bound."""
    # One that reads before it writes would fail on SQLite, and not wait.
    begin = dialect_for("default").transaction
    most = 0
    for _ in range(10):
        with producing([bounded]), begin(), suppress(QueueFullError):
            for _ in range(5):
                enqueue(bounded, queue=SMALL)
        eventually(lambda: not models.Job.objects.filter(inbox=True).exists())
        most = max(most, counts(bounded, SMALL)[State.WAITING])
        bounded.queues.obliterate(SMALL)

    assert 3 <= most <= 2 * 3


def test_without_scheduler_tables_are_counted(make_storage):
    clients = [make_storage(policies=POLICIES) for _ in range(3)]
    with producing(clients):
        pass

    assert models.Job.objects.filter(queue=SMALL).count() == 3


def test_enqueue_of_another_process_is_committed_when_call_returns(bounded, make_storage, monkeypatch):
    monkeypatch.setattr("djqueue.storage.journaled.journal.WINDOW", 30)
    job_id = enqueue(make_storage(policies=POLICIES), queue=SMALL)

    assert models.Job.objects.get().job_id == job_id


def test_jobs_are_dropped_when_those_of_another_process_are_taken_in(producer, bounded):
    enqueue_many(bounded, 2, queue=OLDEST_GO)
    bounded.reads.counts(OLDEST_GO)

    with transaction.atomic():
        producer.enqueue([batch(queue=OLDEST_GO, ids=["a", "b", "c", "d"])])

    assert eventually(lambda: counts(bounded, OLDEST_GO).get(State.CANCELLED) == 3)
    assert claim_ids(bounded, 9, queues=[OLDEST_GO]) == ["b", "c", "d"]
    record = bounded.reads.jobs(OLDEST_GO, ["a"])[0]
    assert (record.state, record.reason) == (State.CANCELLED, "dropped")


def test_new_scheduler_drops_oldest_jobs_of_overfull_queue(make_storage):
    first = make_storage(policies=POLICIES)
    first.connect()
    ids = enqueue_many(first, 3, queue=OLDEST_GO)
    first.close()
    second = make_storage(policies=POLICIES)
    second.connect()

    enqueue(second, queue=OLDEST_GO, id="new")

    assert claim_ids(second, 9, queues=[OLDEST_GO]) == [*ids[1:], "new"]
