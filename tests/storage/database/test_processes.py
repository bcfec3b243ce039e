"""Several processes on one database: wake-ups, events, claims, and deaths."""

from collections import Counter
from threading import Thread

import pytest

from djqueue import models
from djqueue.client import Queue
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.database import wake
from djqueue.testing.factories import (
    QUEUE,
    claim_ids,
    claim_one,
    completing,
    counts,
    enqueue,
    enqueue_many,
    finish,
)
from djqueue.testing.waiting import Recorder, Wakes
from tests.support import PATIENCE, eventually

from .programs import Child


@pytest.fixture
def storage(make):
    return make()


@pytest.fixture
def other(tables):
    with Child("obedient") as child:
        child.lines_until("ready")
        yield child


# Wake-ups.


def test_job_of_another_process_wakes_a_worker(storage, other):
    wakes = Wakes()
    storage.listen([QUEUE], wakes)

    other.ask("enqueue a")

    assert wakes.arrived()
    assert claim_ids(storage, 5) == ["a"]


def test_delayed_job_of_another_process_wakes_a_worker_that_sleeps_until_a_known_time(storage, other):
    wakes = Wakes()
    enqueue(storage, delay=600_000)
    storage.listen([QUEUE], wakes)
    wakes.forget()

    other.ask("enqueue a 300000")

    assert wakes.arrived()


def test_worker_process_runs_what_this_process_enqueues(make):
    storage = make(connect=False)
    with Child("worker") as worker:
        worker.lines_until("ready")
        for number in range(20):
            enqueue(storage, id=str(number))
            assert worker.line() == str(number)


def test_polling_alone_finds_the_jobs_of_another_process(make, other):
    storage = make(notify=False)
    wakes = Wakes()
    storage.listen([QUEUE], wakes)

    other.ask("enqueue a")

    assert wakes.arrived()


def test_caller_waits_for_the_result_of_a_worker_process(make):
    storage = make(connect=False)
    with Child("worker") as worker:
        worker.lines_until("ready")

        assert Queue(QUEUE, storage=storage).enqueue_and_wait("x", name="handler", wait=PATIENCE) == "result"


# Events.


def test_events_of_another_process_reach_a_subscriber_to_the_queue(make, other):
    storage, recorder = make(connect=False), Recorder()
    storage.events.subscribe(QUEUE, recorder)

    other.ask("enqueue a")
    other.ask("complete 1")
    other.ask("remove a")

    recorder.until("removed", "a")
    assert recorder.words("a") == ["enqueued", "started", "completed", "removed"]


def test_events_of_another_process_reach_a_subscriber_to_one_job(make, other):
    storage, recorder = make(connect=False), Recorder()
    storage.events.subscribe(QUEUE, recorder, "a")

    other.ask("enqueue a")
    recorder.until("enqueued")
    other.ask("begin 1")
    recorder.until("started")

    assert recorder.words() == ["enqueued", "started"]
    assert {event.id for event in recorder.events()} == {"a"}


def test_another_time_of_a_delayed_job_reaches_a_subscriber_to_it(make, other):
    storage, recorder = make(connect=False), Recorder()
    enqueue(storage, id="a", delay=3_600_000)
    storage.events.subscribe(QUEUE, recorder, "a")

    other.ask(f"reschedule a {SYSTEM_CLOCK.now() + 7_200_000}")

    recorder.until("rescheduled")
    assert recorder.words() == ["rescheduled"]


def test_events_of_another_process_arrive_after_a_handler_has_stopped_the_thread_that_follows_them(
    make, other, monkeypatch
):
    stops, create = [SystemExit("from a handler")], wake.create_connection

    def stopped_once(*arguments):
        if stops:
            raise stops.pop()
        return create(*arguments)

    monkeypatch.setattr(wake, "create_connection", stopped_once)
    storage, recorder = make(connect=False), Recorder()
    with pytest.raises(StorageUnavailableError, match="SystemExit"):
        storage.events.subscribe(QUEUE, recorder, "a")
    storage.events.subscribe(QUEUE, recorder, "a")

    other.ask("enqueue a")
    recorder.until("enqueued")


def test_items_and_the_end_reach_a_subscriber_to_one_job(make, other):
    storage, recorder = make(connect=False), Recorder()
    enqueue(storage, id="a")
    storage.events.subscribe(QUEUE, recorder, "a")

    other.ask("emit")
    recorder.until("completed")
    other.ask("remove a")
    recorder.until("removed")

    assert recorder.words() == ["started", "item", "completed", "removed"]
    [item] = [event for event in recorder.events() if event.event == "item"]
    assert item.items == 2


@pytest.mark.parametrize("job_id", [None, "a"])
def test_no_event_arrives_twice(make, other, job_id):
    storage, recorder = make(), Recorder()
    storage.events.subscribe(QUEUE, recorder, job_id)

    enqueue(storage, id="a")
    claimed = claim_one(storage)
    finish(storage, completing(claimed))
    other.ask("remove a")
    recorder.until("removed", "a")

    assert recorder.words("a") == ["enqueued", "started", "completed", "removed"]


def test_two_storages_of_one_process_share_events(make):
    mine, other, recorder = make(), make(connect=False), Recorder()
    mine.events.subscribe(QUEUE, recorder)

    enqueue(other, id="a")

    recorder.until("enqueued", "a")
    assert recorder.words() == ["enqueued"]


def test_subscription_to_one_job_costs_other_processes_nothing(make, other):
    storage, recorder = make(connect=False), Recorder()
    storage.events.subscribe(QUEUE, recorder, "a")
    other.ask("enqueue a")
    recorder.until("enqueued")

    assert not models.ObservedQueue.objects.exists()
    assert not models.JobEvent.objects.exists()


def test_subscription_to_a_queue_does_not_use_the_queue(make):
    storage = make()
    storage.events.subscribe("not-yet", Recorder())

    assert storage.queues.names() == []
    assert [row.name for row in models.ObservedQueue.objects.all()] == ["not-yet"]


def test_queue_stays_observed_while_it_has_subscribers(make):
    storage = make()
    stop = storage.events.subscribe(QUEUE, Recorder())
    models.ObservedQueue.objects.update(until=0)
    storage.events._renewed[QUEUE] -= 10_000

    eventually(lambda: models.ObservedQueue.objects.filter(until__gt=0).exists())

    stop()
    assert not storage.events.has_subscribers(QUEUE)


def test_no_event_is_missed_after_the_subscription(make):
    """Transactions that are open at that time either end before it, or write their events."""
    storage = make(connect=False)
    with Child("producer") as producer:
        producer.lines_until("started")
        recorder = Recorder()
        storage.events.subscribe(QUEUE, recorder)
        before = set(models.Job.objects.values_list("job_id", flat=True))
        recorder.until("enqueued")
        producer.tell("stop")
        count = int(producer.line())

    missing = {f"job-{number}" for number in range(count)} - before
    recorder.until_true(lambda: missing <= {event.id for event in recorder.events()}, "all later events")
    assert max(Counter(event.id for event in recorder.events()).values()) == 1


def test_old_events_are_removed(make, other):
    storage, recorder = make(), Recorder()
    storage.events.subscribe(QUEUE, recorder)
    other.ask("enqueue a")
    recorder.until("enqueued", "a")
    models.JobEvent.objects.update(at=0)

    storage.sweep()

    assert not models.JobEvent.objects.exists()


def test_thread_ends_some_time_after_the_last_subscription(make, monkeypatch):
    monkeypatch.setattr(wake, "LINGER", 0.0)
    storage = make(connect=False)
    stop = storage.events.subscribe(QUEUE, Recorder())
    thread = storage.follower._run.thread
    stop()

    thread.join(PATIENCE)

    assert not thread.is_alive()


# Claims.


def test_two_processes_take_no_job_twice(make):
    storage = make(connect=False)
    ids = enqueue_many(storage, 2_000)
    with Child("claimer", 7) as one, Child("claimer", 13) as two:
        for child in (one, two):
            child.lines_until("ready")
        taken = {one: [], two: []}
        threads = [Thread(target=lambda child=child: taken[child].extend(child.ask("go"))) for child in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert Counter(taken[one] + taken[two]) == Counter(ids)
    assert taken[one]
    assert taken[two]
    assert counts(storage)[State.COMPLETED] == 2_000


# Deaths and forks.


def test_transaction_of_a_killed_process_leaves_nothing(make):
    storage = make()
    with Child("interrupted") as child:
        assert child.line() == "inside"
        child.kill()

        assert enqueue(storage, id="after") == "after"

    assert counts(storage)[State.WAITING] == 1
    assert models.Job.objects.count() == 1


def test_forked_child_has_connections_of_its_own(make):
    storage = make(connect=False)
    with Child("forker") as child:
        lines = [child.line(), child.line()]

    assert lines == ["child False", "parent True 0"]
    assert claim_ids(storage, 5) == ["before", "child", "parent"]


def test_buffered_jobs_are_written_at_exit(make):
    storage = make(connect=False)
    with Child("buffered") as child:
        assert child.line() == "enqueued"
        assert child.finish() == 0

    assert counts(storage)[State.WAITING] == 3
