"""Wake-ups: when other processes are notified, and what a listener is woken for."""

import threading

import pytest
from django.db import connection, connections, transaction

from djqueue import models
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.policies import LimiterPolicy, QueuePolicy
from djqueue.storage.database import events, wake
from djqueue.testing.factories import (
    QUEUE,
    claim,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    finish,
    worker,
)
from djqueue.testing.waiting import Recorder, Wakes
from tests.support import PATIENCE, eventually

on_postgresql = pytest.mark.skipif(
    "connection.vendor != 'postgresql'", reason="only PostgreSQL has notifications"
)
on_sqlite = pytest.mark.skipif("connection.vendor != 'sqlite'", reason="only SQLite's file has a version")


@pytest.fixture
def sleeper(make, monkeypatch):
    """A storage in its own name, which is woken by notifications or the file's version only."""
    monkeypatch.setattr(wake, "POLL", (3_600.0, 3_600.0))
    return make()


@pytest.fixture
def notified(tables):
    """The queues of the notifications of this database, as they come."""
    found = []
    session = connections.create_connection("default")
    with session.cursor() as cursor:
        cursor.execute(f"SELECT {wake.channel(wake.CLAIMABLE)}")
        cursor.execute(f'LISTEN "{cursor.fetchone()[0]}"')

    def read():
        found.extend(notify.payload for notify in session.connection.notifies(timeout=0))
        return found

    yield read
    session.close()


def test_listener_is_woken_by_another_storage(make, sleeper):
    wakes = Wakes()
    sleeper.listen([QUEUE], wakes)

    enqueue(make(connect=False))

    assert wakes.arrived()


def test_listener_that_has_just_started_finds_waiting_jobs(make, sleeper):
    enqueue(make(connect=False))
    wakes = Wakes()

    sleeper.listen(None, wakes)

    assert wakes.arrived()


def test_call_that_lacks_a_thread_or_a_descriptor_fails_and_the_next_one_does_not(make, monkeypatch):
    storage, recorder, wakes = make(), Recorder(), Wakes()

    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    def refuse_descriptors(*_, **__):
        raise OSError(24, "Too many open files")

    for place, refusal in (("threading.Thread.start", refuse), ("socket.socketpair", refuse_descriptors)):
        with monkeypatch.context() as patch:
            patch.setattr(place, refusal)
            with pytest.raises(StorageUnavailableError, match=r"could not start: .*Raise the limits"):
                storage.listen([QUEUE], wakes)
            with pytest.raises(StorageUnavailableError, match="could not start"):
                storage.events.subscribe(QUEUE, recorder)
            if refusal is refuse:
                with pytest.raises(StorageUnavailableError, match="'djqueue-background' could not start"):
                    enqueue(storage, durable=False)
                assert enqueue(storage, id="notified once") == "notified once"
                assert enqueue(storage, id="not notified") == "not notified"
    storage.listen([QUEUE], wakes)
    storage.events.subscribe(QUEUE, recorder)

    enqueue(make(connect=False), id="a")
    assert wakes.arrived()
    recorder.until("enqueued", "a")
    enqueue(storage, durable=False)
    eventually(lambda: models.Job.objects.count() == 4)


def test_stopped_listener_is_not_woken_by_another_storage(make, sleeper):
    left, stays = Wakes(), Wakes()
    stop = sleeper.listen([QUEUE], left)
    sleeper.listen([QUEUE], stays)
    stop()

    enqueue(make(connect=False))

    assert stays.arrived()
    assert left.count == 0


def test_listener_is_not_woken_by_another_queue_of_another_storage(make, sleeper):
    others, own = Wakes(), Wakes()
    sleeper.listen(["other"], others)
    sleeper.listen([QUEUE], own)

    enqueue(make(connect=False))

    assert own.arrived()
    assert others.count == 0


@on_sqlite
@on_sqlite
def test_refused_claim_does_not_change_the_file(make):
    storage = make(
        policies={QUEUE: QueuePolicy(limiter="one")}, limiters={"one": LimiterPolicy(concurrency=1)}
    )
    enqueue_many(storage, 2)
    assert len(claim(storage, 2)) == 1
    assert claim(storage) == []
    with connection.cursor() as cursor:
        before = cursor.execute("PRAGMA data_version").fetchone()
        assert claim(storage) == []
        assert cursor.execute("PRAGMA data_version").fetchone() == before


def test_listener_is_not_woken_when_no_job_waits(make, sleeper):
    producer, wakes, recorder = make(connect=False), Wakes(), Recorder()
    enqueue(producer)
    claimed = claim_one(producer)
    sleeper.listen([QUEUE], wakes)
    sleeper.events.subscribe(QUEUE, recorder)
    wakes.forget()

    finish(producer, completing(claimed))
    recorder.until("completed")  # The thread has looked.

    assert wakes.count == 0


def test_rolled_back_transaction_wakes_nobody(make, sleeper):
    producer, wakes = make(connect=False), Wakes()
    sleeper.listen([QUEUE], wakes)
    with transaction.atomic():
        enqueue(producer, id="undone")
        transaction.set_rollback(True)

    recorder = Recorder()
    sleeper.events.subscribe(QUEUE, recorder)
    assert wakes.count == 0
    enqueue(producer, id="done")

    assert wakes.arrived()
    recorder.until("enqueued", "done")
    assert recorder.words() == ["enqueued"]


def test_transaction_wakes_after_its_commit(make, sleeper):
    producer, wakes = make(connect=False), Wakes()
    sleeper.listen([QUEUE], wakes)
    with transaction.atomic():
        enqueue(producer)
        assert wakes.count == 0

    assert wakes.arrived()


@on_postgresql
def test_burst_of_jobs_notifies_once_and_once_more_at_its_end(make, notified, monkeypatch):
    monkeypatch.setattr(wake, "NOTIFY_EVERY", 0.5)
    producer = make(connect=False)

    for _ in range(10):
        enqueue(producer)

    eventually(lambda: len(notified()) >= 2)
    assert notified() == [QUEUE, QUEUE]


@on_postgresql
def test_each_queue_is_notified(make, notified):
    producer = make(connect=False)

    for queue in ("a", "b", "c"):
        enqueue(producer, queue=queue)

    eventually(lambda: notified() == ["a", "b", "c"])


@on_postgresql
def test_storage_that_polls_sends_no_notifications(make, notified):
    silent, loud = make(connect=False, notify=False), make(connect=False)

    enqueue(silent)
    enqueue(loud, queue="fence")

    eventually(lambda: notified() == ["fence"])


@on_postgresql
def test_listening_connection_is_replaced_with_a_wake_up(make, sleeper, caplog):
    producer, wakes = make(connect=False), Wakes()
    sleeper.listen([QUEUE], wakes)
    eventually(is_listening)
    with transaction.atomic():
        # Committed while nobody listens.
        enqueue(producer)
        connection.cursor().execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'djqueue' AND datname = current_database()"
        )

    assert wakes.arrived()
    assert "Could not follow the changes" in caplog.text


def is_listening():
    """Whether a thread has looked for claimable jobs, after it had begun to listen."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM pg_stat_activity "
            "WHERE application_name = 'djqueue' AND datname = current_database() "
            "AND query LIKE 'SELECT q.name%'"
        )
        return cursor.fetchone() is not None


def test_outage_of_the_listening_connection_is_logged_once(make, monkeypatch, caplog):
    failures = iter(range(4))
    connect = wake.create_connection

    def reconnect(*arguments):
        if next(failures, None) is not None:
            raise StorageUnavailableError("away")
        return connect(*arguments)

    monkeypatch.setattr(wake, "create_connection", reconnect)
    monkeypatch.setattr(wake, "RETRY", (0.001, 0.01))
    storage, wakes = make(connect=False), Wakes()
    enqueue(storage)

    storage.listen([QUEUE], wakes)

    assert wakes.arrived()
    assert caplog.text.count("Could not follow the changes") == 1


def test_subscription_without_the_database_is_refused(make, monkeypatch):
    def unreachable(*_):
        raise StorageUnavailableError("away")

    storage = make(connect=False)
    monkeypatch.setattr(wake, "create_connection", unreachable)

    with pytest.raises(StorageUnavailableError, match="away"):
        storage.events.subscribe(QUEUE, Recorder())
    assert not storage.events.has_subscribers(QUEUE)


def test_subscriber_may_subscribe_and_enqueue(make):
    storage, producer, second = make(connect=False), make(connect=False), Recorder()

    def first(event):
        if event.id == "a":
            storage.events.subscribe(QUEUE, second, "b")
            enqueue(storage, id="b")

    storage.events.subscribe(QUEUE, first)
    enqueue(producer, id="a")

    second.until("enqueued", "b")


def test_subscription_in_a_transaction_does_not_wait_for_it(make):
    storage, producer, recorder = make(connect=False), make(connect=False), Recorder()
    with transaction.atomic():
        enqueue(producer, id="a")
        storage.events.subscribe(QUEUE, recorder)
    eventually(lambda: not storage.events._unconfirmed())

    enqueue(producer, id="b")

    recorder.until("enqueued", "b")


@on_postgresql
def test_event_of_an_earlier_id_that_commits_later_is_delivered(make):
    """Ids are taken before the commit, and so not in its order."""
    storage, producer, recorder = make(connect=False), make(connect=False), Recorder()
    enqueue(producer, id="first")  # Records that the queue is used.
    storage.events.subscribe(QUEUE, recorder)
    taken, may_commit = threading.Event(), threading.Event()

    def slow():
        try:
            with transaction.atomic():
                enqueue(producer, id="slow")
                taken.set()
                may_commit.wait(PATIENCE)
        finally:
            connection.close()

    thread = threading.Thread(target=slow)
    thread.start()
    assert taken.wait(PATIENCE)
    enqueue(producer, id="quick")
    recorder.until("enqueued", "quick")
    may_commit.set()
    thread.join()

    recorder.until("enqueued", "slow")
    assert recorder.words("quick") == ["enqueued"]


@on_postgresql
def test_subscription_waits_for_transactions_that_do_not_know_of_it(make, monkeypatch):
    monkeypatch.setattr(events, "WRITERS_TIMEOUT", PATIENCE)
    storage, producer, recorder = make(connect=False), make(connect=False), Recorder()
    enqueue(producer, id="before")
    began, may_commit, subscribed = threading.Event(), threading.Event(), threading.Event()

    def slow():
        try:
            with transaction.atomic():
                enqueue(producer, id="slow")
                began.set()
                may_commit.wait(PATIENCE)
        finally:
            connection.close()

    def subscribe():
        storage.events.subscribe(QUEUE, recorder)
        subscribed.set()

    threads = [threading.Thread(target=slow), threading.Thread(target=subscribe)]
    threads[0].start()
    assert began.wait(PATIENCE)
    threads[1].start()
    eventually(lambda: any(barrier.writers for barrier in storage.events._barriers))
    assert not subscribed.is_set()
    may_commit.set()
    for thread in threads:
        thread.join()

    assert subscribed.is_set()


def test_many_events_are_read_in_pages(make, monkeypatch):
    monkeypatch.setattr(events, "PAGE", 7)
    storage, producer, recorder = make(connect=False), make(connect=False), Recorder()
    storage.events.subscribe(QUEUE, recorder)

    ids = enqueue_many(producer, 50)

    recorder.until_true(lambda: recorder.count("enqueued") == 50, "all events")
    assert [event.id for event in recorder.events()] == ids


def test_worker_is_woken_by_a_command_of_another_storage(make):
    storage, woken = make(), threading.Event()
    storage.workers.register(worker("w1"))
    storage.workers.on_command("w1", woken.set)

    assert make(connect=False).workers.control("w1", "dump") == "asked"

    assert woken.wait(PATIENCE)
