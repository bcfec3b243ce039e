"""Enqueues and the caller's transaction; ids and keys that several producers want at once."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase

from djqueue import models
from djqueue.client import Queue
from djqueue.codecs import MSGPACK, encode
from djqueue.core.errors import (
    JobNotFoundError,
    JobTimeoutError,
    OptionError,
    StorageUnavailableError,
    WaitInTransactionError,
)
from djqueue.core.states import State
from djqueue.signals import job_enqueued
from djqueue.storage import commits
from djqueue.storage.journaled import inbox as inbox_module
from djqueue.storage.journaled import journal
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    NAME,
    QUEUE,
    a_cancelled_job,
    a_completed_job,
    a_failed_job,
    a_waiting_job,
    an_active_job,
    batch,
    claim,
    claim_ids,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
    state,
)
from djqueue.testing.waiting import together
from tests import servers
from tests.support import PATIENCE, aeventually, eventually

pytestmark = pytest.mark.dialect


@contextmanager
def undone():
    """A transaction that is rolled back."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.fixture(params=["client", "scheduler"])
def producer(request, scheduler):
    """A producer in another process of the database, or in the scheduler's own, as a handler is."""
    return scheduler if request.param == "scheduler" else request.getfixturevalue("client")


@pytest.fixture
def no_poll(monkeypatch):
    """What comes, comes because of a wake-up."""
    monkeypatch.setattr(inbox_module, "POLL", 60.0)


def waiting_ids(storage):
    return [record.id for record in storage.reads.page(QUEUE, State.WAITING, 100)]


def claimed_until(scheduler, many):
    """The ids of what is claimed, in order, once there are so many: jobs are taken in one by one."""
    claimed = []
    eventually(lambda: claimed.extend(claim_ids(scheduler, 9)) or len(claimed) >= many)
    return sorted(claimed)


# Commit and rollback.


def test_rollback_removes_job(producer, scheduler):
    with undone():
        enqueue(producer, id="undone")

    assert enqueue(producer, id="done") == "done"
    assert eventually(lambda: claim_ids(scheduler, 5)) == ["done"]
    assert state(scheduler, "undone") is None


def test_job_does_not_start_before_its_transaction_commits(producer, scheduler):
    with transaction.atomic():
        job_id = enqueue(producer)
        scheduler_sees = threading.Thread(
            target=lambda: (scheduler.active.inbox.take_in(), connection.close())
        )
        scheduler_sees.start()
        scheduler_sees.join()
        assert scheduler.reads.waiting_names(QUEUE) == {}

    assert eventually(lambda: claim_ids(scheduler, 5)) == [job_id]


def test_commit_wakes_scheduler(producer, scheduler, no_poll):
    woken = threading.Event()
    scheduler.listen(None, woken.set)
    with transaction.atomic():
        job_id = enqueue(producer)
        assert not woken.is_set()

    assert woken.wait(PATIENCE)
    assert claim_ids(scheduler, 5) == [job_id]


def test_scheduler_finds_jobs_after_lost_wake_up(scheduler, client):
    client.close()  # it tells nobody
    job_id = enqueue(client)

    assert eventually(lambda: claim_ids(scheduler, 5)) == [job_id]


def test_failed_wake_up_does_not_fail_enqueue(scheduler, client, monkeypatch):
    def fails(*_):
        raise RuntimeError("no wake-up today")

    monkeypatch.setattr(client._client._remote, "tell", fails)
    with transaction.atomic():
        job_id = enqueue(client)

    assert eventually(lambda: claim_ids(scheduler, 5)) == [job_id]


def test_job_enqueued_signal_is_sent_on_commit(producer, scheduler):
    told = []

    def receiver(**said):
        told.append((said["job_id"], said["queue"]))

    queue = Queue(QUEUE, storage=producer)
    job_enqueued.connect(receiver)
    try:
        with transaction.atomic():
            queue.enqueue(id="a")
            async_to_sync(queue.aenqueue)(id="b")
            assert told == []
        assert told == [("a", QUEUE), ("b", QUEUE)]
        with undone():
            queue.enqueue(id="c")
        assert told == [("a", QUEUE), ("b", QUEUE)]
    finally:
        job_enqueued.disconnect(receiver)


def test_savepoints_take_their_own_jobs_only(producer, scheduler):
    with transaction.atomic():
        before = enqueue(producer)
        with undone():
            gone = enqueue(producer)
        with transaction.atomic():
            inside = enqueue(producer)
        after = enqueue(producer)

    kept = [before, inside, after]
    assert eventually(lambda: sorted(waiting_ids(scheduler)) == sorted(kept))
    assert eventually(lambda: len(scheduler.reads.page(QUEUE, None, 9)) == 3)
    assert claimed_until(scheduler, 3) == sorted(kept)
    assert state(scheduler, gone) is None


def test_enqueue_and_wait_in_transaction_is_rejected_at_once(producer, scheduler):
    queue = Queue(QUEUE, storage=producer)
    with transaction.atomic():
        with pytest.raises(WaitInTransactionError, match=r"on_commit.*durable=False"):
            queue.enqueue_and_wait(id="a", wait=600)
        with pytest.raises(WaitInTransactionError):
            async_to_sync(queue.aenqueue_and_wait)(id="a", wait=600)

    assert state(producer, "a") is None


def test_waiting_for_result_of_open_transaction_is_rejected_at_once(producer, scheduler):
    queue = Queue(QUEUE, storage=producer)
    with transaction.atomic():
        result = queue.enqueue()
        [many] = queue.enqueue_many([1])
        asynchronous = async_to_sync(queue.aenqueue)()
        for each in (result, many, asynchronous):
            with pytest.raises(WaitInTransactionError, match=r"still open.*on_commit.*durable=False"):
                each.wait(600)
            with pytest.raises(WaitInTransactionError):
                async_to_sync(each.await_)(600)
        with pytest.raises(WaitInTransactionError):
            list(queue.stream(result.id, wait=600))
        assert result.refresh().existing_state in (None, State.WAITING)

    with pytest.raises(JobTimeoutError):
        result.wait(0)


def test_result_of_committed_or_rolled_back_enqueue_can_be_awaited_in_later_transaction(producer, scheduler):
    queue = Queue(QUEUE, storage=producer)
    before = queue.enqueue()
    with transaction.atomic():
        with pytest.raises(JobTimeoutError):
            before.wait(0)
        with undone():
            gone = queue.enqueue()
        with pytest.raises(JobNotFoundError):
            gone.wait(0)
        apart = queue.enqueue(durable=False)
        with pytest.raises(JobTimeoutError):
            apart.wait(0)


def test_job_outside_of_transaction_can_be_awaited_inside(producer, scheduler):
    queue = Queue(QUEUE, storage=producer)
    with transaction.atomic(), pytest.raises(JobTimeoutError):
        queue.enqueue_and_wait(id="a", durable=False, wait=0)

    assert state(scheduler, "a") is State.WAITING


def test_durable_false_enqueue_ignores_transaction(producer, scheduler):
    with undone():
        job_id = enqueue(producer, durable=False)

    assert eventually(lambda: claim_ids(scheduler, 5)) == [job_id]


def test_job_that_joins_transaction_needs_no_callback_to_be_enqueued_on_commit(producer, scheduler):
    queue = Queue(QUEUE, storage=producer, enqueue_on_commit=True)
    with undone():
        assert queue.enqueue(1).status == "queued"
    assert waiting_ids(scheduler) == []
    with transaction.atomic():
        result = queue.enqueue(1, name=NAME)
        assert result.status == "queued"

    assert claimed_until(scheduler, 1) == [result.id]


@pytest.fixture
def other(tmp_path, monkeypatch):
    """The alias of another database, which the storage does not use."""
    given = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "other.sqlite3")}
    monkeypatch.setitem(
        connections.databases, "other", connections.configure_settings({"default": given})["default"]
    )
    made = connections["other"]

    def connect():
        # Django's tests permit only the databases that they set up.
        if made.connection is None:
            made.connect()

    monkeypatch.setattr(made, "ensure_connection", connect)
    yield "other"
    made.close()
    del connections["other"]


def test_enqueue_on_commit_waits_for_commit_of_named_database(producer, scheduler, other):
    queue = Queue(QUEUE, storage=producer, enqueue_on_commit=other)
    with transaction.atomic(using=other):
        result = queue.enqueue(1, name=NAME)
        assert result.status == "deferred"
        with transaction.atomic():
            # The storage's own database commits meanwhile.
            assert queue.enqueue(2, name=NAME, enqueue_on_commit=True).status == "queued"
        assert state(scheduler, result.id) is None

    assert result.refresh().existing_state is State.WAITING
    assert len(claimed_until(scheduler, 2)) == 2


def test_enqueue_on_commit_drops_job_on_rollback_of_named_database(producer, scheduler, other):
    queue = Queue(QUEUE, storage=producer, enqueue_on_commit=other)
    with transaction.atomic(using=other):
        result = queue.enqueue(1)
        transaction.set_rollback(True, using=other)

    assert result.job() is None
    assert waiting_ids(scheduler) == []


def test_commit_of_another_database_enqueues_into_open_transaction_of_storage(producer, scheduler, other):
    queue = Queue(QUEUE, storage=producer, enqueue_on_commit=other)
    with transaction.atomic():
        with transaction.atomic(using=other):
            result = queue.enqueue(1)
        assert producer.capabilities.transactions.uncommitted_in(QUEUE, result.id) == "default"
        transaction.set_rollback(True)

    assert waiting_ids(scheduler) == []


def test_job_may_depend_on_one_of_same_transaction(producer, scheduler):
    with transaction.atomic():
        first = enqueue(producer)
        second = enqueue(producer, depends_on=((QUEUE, first),))

    eventually(
        lambda: state(scheduler, second) is State.BLOCKED and scheduler.reads.counts(QUEUE)[State.BLOCKED]
    )
    [claimed] = claim(scheduler, 5)
    assert claimed.id == first
    finish(scheduler, completing(claimed))
    assert claim_ids(scheduler, 5) == [second]


@pytest.mark.parametrize("durable", [None, False])
def test_job_may_depend_on_one_that_journal_has_not_written(producer, scheduler, monkeypatch, durable):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    first = enqueue(scheduler)

    with transaction.atomic():
        second = enqueue(producer, depends_on=((QUEUE, first),), durable=durable)

    monkeypatch.setattr(journal, "WINDOW", 0.01)
    assert eventually(lambda: state(scheduler, second)) is State.BLOCKED


def test_job_cannot_depend_on_unknown_job(producer):
    with pytest.raises(OptionError, match="queue 'default' has no job 'nowhere'"), transaction.atomic():
        enqueue(producer, depends_on=((QUEUE, "nowhere"),))

    assert models.Job.objects.count() == 0


def test_unwritten_job_keeps_its_id_and_its_key(scheduler, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    enqueue(scheduler, id="a")
    owner = enqueue(scheduler, unique_key="k")

    with transaction.atomic():
        [same_id] = scheduler.enqueue([batch(ids=["a"])])
        [same_key] = scheduler.enqueue([batch(unique_key="k")])

    assert (same_id.status, same_id.existing_state) == ("duplicate", State.WAITING)
    assert (same_key.status, same_key.id) == ("duplicate", owner)


def test_enqueue_in_broken_transaction_raises_error(producer):
    with undone():
        with pytest.raises(DatabaseError), transaction.atomic(savepoint=False):
            models.Job.objects.raw("SELECT nothing FROM nowhere")[0]
        with pytest.raises(TransactionManagementError):
            enqueue(producer)

    assert models.Job.objects.count() == 0


def test_counts_in_transaction_have_its_own_jobs(scheduler, client):
    with transaction.atomic():
        enqueue(client)

        assert client.reads.counts(QUEUE)[State.WAITING] == 1
        assert client.reads.waiting_names(QUEUE) == {"handler": 1}


# What tests of projects do.


def test_jobs_exist_until_end_of_test_case(client):
    with undone():
        job_id = enqueue(client)
        assert state(client, job_id) is State.WAITING
        assert client.reads.counts(QUEUE)[State.WAITING] == 1
        assert client.jobs.cancel(QUEUE, [job_id])[0].status == "cancelled"
        assert state(client, job_id) is State.CANCELLED

    assert models.Job.objects.count() == 0
    assert models.SchedulerLease.objects.count() == 0


def test_failed_wake_up_after_commit_is_logged(tables, caplog):
    def fail():
        raise OSError("no scheduler")

    with transaction.atomic():
        commits.note("default", [], fail)

    assert "Error calling AfterCommit in on_commit()" in caplog.text


def test_captured_on_commit_callbacks_wake_scheduler(scheduler, client, no_poll):
    told = []
    original = client._client._remote.tell
    client._client._remote.tell = lambda operation: told.append(original(operation))
    with undone(), TestCase.captureOnCommitCallbacks(execute=True) as callbacks:
        enqueue(client)

    assert len(callbacks) == 1
    assert told == [True]


# Coroutines.


@pytest.fixture
def aclient(scheduler, client):
    return client


async def test_coroutine_enqueues(scheduler, aclient):
    [mine] = await aclient.aenqueue([batch(durable=True)])
    [its] = await scheduler.aenqueue([batch()])

    await aeventually(lambda: sync_to_async(lambda: len(waiting_ids(scheduler)) == 2)())
    assert {mine.status, its.status} == {"queued"}


async def test_hundred_coroutines_enqueue_durably_at_once(scheduler):
    answers = await asyncio.gather(*(scheduler.aenqueue([batch(durable=True)]) for _ in range(100)))

    written = await sync_to_async(models.Job.objects.count)()
    assert written == 100
    assert len({result.id for [result] in answers}) == 100


def test_coroutine_called_in_transaction_is_part_of_it(producer, scheduler):
    with undone():
        async_to_sync(producer.aenqueue)([batch(ids=["undone"])])
        [fresh] = async_to_sync(producer.aenqueue)([batch()])

    done = enqueue(producer)
    assert eventually(lambda: claim_ids(scheduler, 5)) == [done]
    assert state(scheduler, fresh.id) is None


# Ids.


def test_id_of_completed_job_answers_with_its_result(producer, scheduler):
    a_completed_job(scheduler, id="a", result=b"42")
    scheduler.reads.counts(QUEUE)

    for inside in (False, True):
        with transaction.atomic() if inside else threading.Lock():
            [result] = producer.enqueue([batch(ids=["a"])])
        assert (result.status, result.existing_state, result.result) == ("completed", State.COMPLETED, b"42")
    assert claim(scheduler, 5) == []


@pytest.mark.parametrize("ended", [a_failed_job, a_cancelled_job])
def test_id_of_job_that_failed_or_was_cancelled_is_enqueued_again(producer, scheduler, ended):
    ended(scheduler, id="a", payload=b"old")
    scheduler.reads.counts(QUEUE)

    with transaction.atomic():
        [result] = producer.enqueue([batch(ids=["a"], payloads=[b"new"])])

    assert result.status == "queued"
    [claimed] = eventually(lambda: claim(scheduler, 5))
    assert (claimed.id, claimed.payload, claimed.attempts) == ("a", b"new", 1)
    assert finish(scheduler, completing(claimed)) == [True]
    scheduler.reads.counts(QUEUE)
    assert models.Job.objects.count() == models.JobResult.objects.count() == 1
    assert models.DeadLetter.objects.count() == models.JobAttempt.objects.count() == 0


def test_rollback_leaves_failed_job_as_it_was(producer, scheduler):
    a_failed_job(scheduler, id="a")
    scheduler.reads.counts(QUEUE)

    with undone():
        producer.enqueue([batch(ids=["a"])])

    assert scheduler.jobs.retry(QUEUE, ["a"]) == ["retried"]
    assert claim_ids(scheduler, 5) == ["a"]
    assert models.Job.objects.count() == 1


def test_same_id_twice_in_one_call_is_one_job(producer, scheduler):
    answers = producer.enqueue([batch(ids=["a", "b", "a"]), batch(ids=["b"])])

    assert [answer.status for answer in answers] == ["queued", "queued", "duplicate", "duplicate"]
    assert claimed_until(scheduler, 2) == ["a", "b"]


def test_failed_job_that_was_enqueued_again_survives_end_of_its_dead_letter(scheduler, client, monkeypatch):
    """Its row took the place of the old one's, which the scheduler is just about to delete."""
    a_failed_job(scheduler, id="a", payload=b"old")
    scheduler.reads.counts(QUEUE)
    monkeypatch.setattr(inbox_module.Inbox, "take_in", lambda _: 0)
    eventually(lambda: models.DeadLetter.objects.count())
    enqueue(client, id="a", payload=b"new")

    # As the sweep does when a dead letter's time is over:
    scheduler.active.engine.jobs.remove(QUEUE, ["a"])
    scheduler.reads.counts(QUEUE)
    monkeypatch.undo()

    [claimed] = eventually(lambda: claim(scheduler, 5))
    assert claimed.payload == b"new"


def test_row_is_taken_in_once_however_fast_its_job_ends(scheduler, client, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)  # the row looks new for as long
    enqueue(client, id="a", max_attempts=1)
    [claimed] = eventually(lambda: claim(scheduler, 5))
    scheduler.finish([completing(claimed)._replace(kind="fail", reason="explicit_fail")])

    enqueue(client, id="b")  # the scheduler looks again

    assert eventually(lambda: claim_ids(scheduler, 5)) == ["b"]
    assert state(scheduler, "a") is State.FAILED


def test_job_in_inbox_can_be_changed_before_it_is_taken_in(scheduler, monkeypatch, client):
    monkeypatch.setattr(inbox_module.Inbox, "take_in", lambda _: 0)
    ids = [enqueue(client, delay=delay) for delay in (None, 60_000, 60_000, None, None)]
    later = scheduler.active._clock.now() + 60_000

    assert scheduler.jobs.cancel(QUEUE, ids[:1])[0].status == "cancelled"
    assert scheduler.jobs.promote(QUEUE, ids[1:2]) == [True]
    assert scheduler.jobs.reschedule(QUEUE, ids[2:3], later) == [True]
    assert scheduler.jobs.remove(QUEUE, ids[3:4]) == [True]
    [again] = scheduler.enqueue([batch(ids=ids[4:])])

    assert again.status == "duplicate"
    monkeypatch.undo()
    assert claimed_until(scheduler, 2) == sorted([ids[1], ids[4]])
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())
    found = [record.state if (record := scheduler.reads.jobs(QUEUE, [one])[0]) else None for one in ids]
    assert found == [State.CANCELLED, State.ACTIVE, State.DELAYED, None, State.ACTIVE]


def test_job_is_not_taken_in_before_its_dependency(scheduler, monkeypatch, client):
    monkeypatch.setattr(inbox_module.Inbox, "take_in", lambda _: 0)
    first = enqueue(client)
    second = enqueue(client, depends_on=((QUEUE, first),))
    third = enqueue(client, depends_on=((QUEUE, second),))

    assert scheduler.jobs.promote(QUEUE, [third]) == [False]  # it has to know it for that

    ran = []
    while claimed := claim(scheduler, 5):
        ran += [one.id for one in claimed]
        finish(scheduler, *map(completing, claimed))
    assert ran == [first, second, third]


@pytest.mark.parametrize("word", ["queued", "cancelled"])
def test_subscriber_may_call_storage_from_event_handler(scheduler, client, word):
    asked = []

    def ask(event):
        if event.event == word:
            scheduler.reads.counts(QUEUE)
            scheduler.reads.page(QUEUE, None, 5)
            scheduler.enqueue([batch(queue="other", ids=[event.id], durable=True)])
            asked.append(event.id)

    scheduler.events.subscribe(QUEUE, ask)
    job_id = enqueue(client, id="a")
    eventually(lambda: scheduler.reads.waiting_names(QUEUE))
    scheduler.jobs.cancel(QUEUE, [job_id])

    eventually(lambda: asked == [job_id])
    assert claim_ids(scheduler, 5, queues=["other"]) == [job_id]


def test_obliterate_removes_jobs_in_inbox(scheduler, client, monkeypatch):
    monkeypatch.setattr(inbox_module, "POLL", 60.0)
    client.close()  # it tells nobody
    enqueue_many(client, 3)

    assert scheduler.queues.obliterate(QUEUE) == 3
    assert models.Job.objects.count() == 0


def test_inbox_of_several_pages_is_taken_in_in_order(scheduler, client, monkeypatch):
    monkeypatch.setattr(inbox_module, "PAGE", 10)
    ids = enqueue_many(client, 35)

    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {"handler": 35})
    assert claim_ids(scheduler, 50) == ids
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())


# Several producers at once.


def answers_of(children):
    """(status, id) of what each child says up to "done"."""
    return [[tuple(line.split()) for line in child.hears_until("done")] for child in children]


def one_job_each(answers, scheduler):
    """Each id is one job, that one producer was told is queued."""
    queued = [result.id for found in answers for result in found if result.status == "queued"]
    assert len(queued) == len(set(queued))
    eventually(lambda: len(waiting_ids(scheduler)) == len(queued))
    eventually(lambda: scheduler.reads.waiting_names(QUEUE).get("handler") == len(queued))
    assert sorted(claim_ids(scheduler, 1_000)) == sorted(queued)
    assert scheduler.reads.counts(QUEUE)[State.CANCELLED] == 0
    return queued


def test_one_id_from_many_threads_is_one_job(make_storage, scheduler):
    clients = [make_storage() for _ in range(4)]
    ids = [f"id {at}" for at in range(10)]

    def enqueue_all(storage):
        try:
            return [storage.enqueue([batch(ids=[job_id], payloads=[b"same"])])[0] for job_id in ids]
        finally:
            connection.close()

    answers = together([lambda c=c: enqueue_all(c) for c in clients])

    assert sorted(one_job_each(answers, scheduler)) == sorted(ids)


def test_one_id_from_scheduler_and_from_others_is_one_job(client, scheduler):
    ids = [f"id {at}" for at in range(30)]

    def enqueue_all(storage):
        try:
            return [storage.enqueue([batch(ids=[job_id])])[0].status for job_id in ids]
        finally:
            connection.close()

    together([lambda c=c: enqueue_all(c) for c in (client, scheduler)])
    eventually(lambda: not models.Job.objects.filter(inbox=True).exists())

    claimed = claim(scheduler, 100)
    assert sorted(one.id for one in claimed) == sorted(ids)
    assert all(finish(scheduler, *map(completing, claimed)))
    assert scheduler.reads.counts(QUEUE)[State.COMPLETED] == 30
    assert claim(scheduler, 5) == []


def test_one_failed_id_enqueued_again_by_many_threads_is_one_job(make_storage, scheduler):
    ids = [a_failed_job(scheduler, id=f"id {at}") for at in range(10)]
    scheduler.reads.counts(QUEUE)
    clients = [make_storage() for _ in range(4)]

    def enqueue_all(storage):
        try:
            return storage.enqueue([batch(ids=[job_id]) for job_id in ids])
        finally:
            connection.close()

    answers = together([lambda c=c: enqueue_all(c) for c in clients])

    assert sorted(one_job_each(answers, scheduler)) == sorted(ids)


def test_one_unique_key_from_many_threads_is_one_job(make_storage, scheduler):
    clients = [make_storage() for _ in range(4)]

    def enqueue_all(storage):
        try:
            return [storage.enqueue([batch(unique_key=f"key {at}")])[0] for at in range(10)]
        finally:
            connection.close()

    answers = together([lambda c=c: enqueue_all(c) for c in clients])

    assert len(one_job_each(answers, scheduler)) == 10


def test_unique_key_taken_by_two_processes_belongs_to_first(scheduler, client, monkeypatch):
    monkeypatch.setattr(journal, "WINDOW", 60.0)
    owner = enqueue(scheduler, unique_key="k")
    late = enqueue(client, unique_key="k")  # cannot know it: nothing is written yet

    assert eventually(lambda: state(scheduler, late) is State.CANCELLED)
    assert claim_ids(scheduler, 5) == [owner]
    assert scheduler.reads.jobs(QUEUE, [late])[0].reason == "duplicate"


@pytest.mark.parametrize("policy", ["replace", "debounce", "keep_last_if_active"])
def test_another_process_replaces_job_on_commit(scheduler, client, policy):
    old = enqueue(scheduler, unique_key="k")
    scheduler.reads.counts(QUEUE)  # written
    with undone():
        client.enqueue([batch(unique_key="k", on_duplicate=policy)])
    assert state(scheduler, old) is State.WAITING

    with transaction.atomic():
        [answer] = client.enqueue([batch(ids=["new"], unique_key="k", on_duplicate=policy)])

    assert (answer.status, answer.replaced) == ("queued", old)
    assert eventually(lambda: state(scheduler, old) is State.CANCELLED)
    assert scheduler.reads.jobs(QUEUE, [old])[0].reason == "replaced"
    assert claim_ids(scheduler, 5) == ["new"]


def test_job_of_client_follows_active_job_with_same_key(scheduler, client):
    claimed = an_active_job(scheduler, unique_key="k")
    scheduler.reads.counts(QUEUE)
    answers = [
        client.enqueue([batch(ids=[job_id], unique_key="k", on_duplicate=policy)])[0]
        for job_id, policy in [("a", "keep_last_if_active"), ("b", "keep_last_if_active"), ("c", "replace")]
    ]

    assert [(answer.id, answer.status, answer.replaced) for answer in answers] == [
        ("a", "queued", None),
        ("b", "queued", "a"),
        (claimed.id, "duplicate", None),
    ]
    assert eventually(lambda: state(scheduler, "b") is State.BLOCKED)
    assert state(scheduler, "a") is State.CANCELLED
    finish(scheduler, completing(claimed))
    assert claim_ids(scheduler, 5) == ["b"]


def test_concurrent_replacements_leave_one_job(scheduler, start_child):
    children = [start_child("client") for _ in range(3)]
    for child in children:
        child.hears_until("ready")
    for child in children:
        child.tell("enqueue 5 unique_key=k on_duplicate=replace")

    for answers in answers_of(children):
        assert [status for status, _ in answers] == ["queued"] * 5

    eventually(lambda: counts(scheduler).get(State.CANCELLED) == 14)
    assert counts(scheduler) == {State.CANCELLED: 14, State.WAITING: 1}


def test_job_that_is_taken_in_late_does_not_replace_newer_one(scheduler, client):
    client._client._inserter._clock = FakeClock(scheduler.active._clock.now() - 60_000)
    newer = enqueue(scheduler, unique_key="k")
    scheduler.reads.counts(QUEUE)

    late = enqueue(client, unique_key="k", on_duplicate="replace")

    assert eventually(lambda: state(scheduler, late) is State.CANCELLED)
    assert scheduler.reads.jobs(QUEUE, [late])[0].reason == "replaced"
    assert claim_ids(scheduler, 5) == [newer]


def test_producer_whose_clock_is_ahead_has_its_jobs_run_now(scheduler, client):
    client._client._inserter._clock = FakeClock(scheduler.active._clock.now() + 60_000)
    waiting, delayed = enqueue(client), enqueue(client, delay=60_000)

    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {"handler": 1})
    assert claim_ids(scheduler, 5) == [waiting]
    assert state(scheduler, delayed) is State.DELAYED


def test_ids_and_keys_from_several_processes_are_one_job_each(scheduler, start_child):
    children = [start_child("client") for _ in range(3)]
    for child in children:
        child.hears_until("ready")
    for round_number in range(5):
        for child in children:
            child.tell(f"enqueue 1 id=round-{round_number}")
        for child in children:
            child.tell(f"enqueue 1 unique_key=key-{round_number}")

    queued = Counter()
    for _ in range(10):
        for answers in answers_of(children):
            queued.update(job_id for status, job_id in answers if status == "queued")

    assert len(queued) == 10
    assert set(queued.values()) == {1}
    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {"handler": 10})
    assert sorted(claim_ids(scheduler, 50)) == sorted(queued)
    assert [child.ends() for child in children] == [0, 0, 0]


# A database that is away.


@pytest.mark.parametrize("operation", ["enqueue", "aenqueue", "claim", "counts", "cancel", "connect"])
def test_error_for_missing_tables_names_database_and_migrate(
    operation, other_database, make_any_storage, tmp_path
):
    storage = make_any_storage(database=other_database(f"sqlite://{tmp_path}/empty.sqlite3"))
    actions = {
        "enqueue": lambda: storage.enqueue([batch()]),
        "aenqueue": lambda: async_to_sync(storage.aenqueue)([batch()]),
        "claim": lambda: claim(storage),
        "counts": lambda: storage.reads.counts(QUEUE),
        "cancel": lambda: storage.jobs.cancel(QUEUE, ["a"]),
        "connect": storage.connect,
    }

    with pytest.raises(
        StorageUnavailableError, match=r"'other_0'.*no such table.*manage\.py migrate"
    ) as caught:
        actions[operation]()

    assert caught.value.__cause__ is not None


@pytest.fixture
def own_server():
    """A PostgreSQL of the test's own, that it may stop."""
    with servers.PostgresServer() as server:
        yield server


def test_restart_of_database_server_loses_no_job(own_server, other_database, make_any_storage, monkeypatch):
    monkeypatch.setattr(journal, "LAST_RETRY", 0.5)
    alias = other_database(own_server.create_database())
    call_command("migrate", database=alias, verbosity=0)
    scheduler, client = make_any_storage(database=alias), make_any_storage(database=alias)
    scheduler.connect()
    there = [enqueue(client), enqueue(scheduler, durable=True)]
    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {"handler": 2})
    assert len(claim_ids(scheduler, 5)) == 2

    own_server.stop()

    with pytest.raises(StorageUnavailableError, match=f"{alias!r}.*none of the jobs was enqueued"):
        enqueue(client, id="lost")
    with pytest.raises(StorageUnavailableError, match=f"{alias!r}.*nothing was enqueued"):
        enqueue(scheduler, durable=True)
    with pytest.raises(StorageUnavailableError, match=f"{alias!r}"):
        scheduler.sweep()
    buffered = enqueue(scheduler)

    own_server.start()

    late = enqueue(client)
    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {"handler": 2})
    assert sorted(claim_ids(scheduler, 5)) == sorted([buffered, late])
    eventually(lambda: scheduler.reads.counts(QUEUE)[State.ACTIVE] == 4)
    scheduler.sweep()
    written = models.Job.objects.using(alias).values_list("job_id", flat=True)
    assert sorted(written) == sorted([*there, buffered, late])


def test_waiting_caller_in_another_process_gets_its_result(scheduler, start_child):
    child = start_child("waiter")
    child.hears_until("ready")
    child.tell("20")
    [claimed] = eventually(lambda: claim(scheduler, 5))
    finish(scheduler, completing(claimed, encode("answer", MSGPACK)))

    assert child.hears() == "answer"


def test_queue_api_works_on_client(scheduler, client):
    queue = Queue(QUEUE, storage=client)
    job_id = queue.enqueue({"n": 1}, id="a").id

    assert queue.get_job(job_id).state == "waiting"
    assert eventually(lambda: queue.counts()["waiting"] == 1)
    assert a_waiting_job(client, id="b") == "b"
    eventually(lambda: scheduler.reads.waiting_names(QUEUE) == {QUEUE: 1, "handler": 1})
    assert client.reads.waiting_names(QUEUE) == {QUEUE: 1, "handler": 1}
