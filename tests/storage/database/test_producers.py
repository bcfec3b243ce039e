"""What a producer in another process is told, and what becomes of its jobs, while the tables are behind."""

import os
import signal
import threading

import pytest
from django.db import connection

from djqueue.client import Queue
from djqueue.core.errors import JobFailedError
from djqueue.core.states import State
from djqueue.runtime import Worker
from djqueue.storage.database import recovery
from djqueue.testing.factories import (
    QUEUE,
    batch,
    claim,
    completing,
    counts,
    enqueue,
    failing,
    finish,
    state,
)

ROUNDS = 20


@pytest.fixture
def unheard(scheduler, monkeypatch):
    """A scheduler that does not hear of new rows before it looks for them."""
    monkeypatch.setattr(scheduler.active.inbox, "take_in", lambda: 0)


def test_who_waits_again_with_the_same_unique_key_has_the_job_run_again(scheduler, client):
    queue = Queue(QUEUE, storage=client)
    with Worker(scheduler, [QUEUE], {"handler": lambda job: job.payload}, connect=False):
        returned = [
            queue.enqueue_and_wait(number, name="handler", unique_key="k", wait=30)
            for number in range(ROUNDS)
        ]

    assert returned == list(range(ROUNDS))


def test_who_waits_again_with_the_id_of_a_failed_job_is_told_of_its_own(scheduler, client):
    def fail(job):
        raise ValueError(f"number {job.payload}")

    queue = Queue(QUEUE, storage=client)
    messages = []
    with Worker(scheduler, [QUEUE], {"handler": fail}, connect=False):
        for number in range(ROUNDS):
            with pytest.raises(JobFailedError) as failure:
                queue.enqueue_and_wait(number, name="handler", id="k", max_attempts=1, wait=30)
            messages.append(failure.value.error_message)

    assert messages == [f"number {number}" for number in range(ROUNDS)]


def test_an_id_is_free_as_soon_as_its_job_is_cancelled(scheduler, client):
    for _ in range(ROUNDS):
        assert client.enqueue([batch(ids=["a"], delay=60_000)])[0].status == "queued"
        assert client.jobs.cancel(QUEUE, ["a"])[0].status == "cancelled"


def test_an_id_that_comes_twice_in_a_call_is_one_job_though_that_has_ended(scheduler, client, monkeypatch):
    monkeypatch.setattr(type(scheduler.active), "settled", lambda *_: [State.FAILED])

    answers = client.enqueue([batch(2, ids=["a", "a"])])

    assert [answer.status for answer in answers] == ["queued", "duplicate"]


def test_an_id_is_taken_as_soon_as_its_job_is_retried(scheduler, client):
    enqueue(scheduler, id="a")
    finish(client, failing(*claim(client)))

    assert client.jobs.retry(QUEUE, ["a"]) == ["retried"]

    assert client.enqueue([batch(ids=["a"])])[0].status == "duplicate"
    finish(client, completing(*claim(client)))
    assert counts(scheduler) == {State.COMPLETED: 1}


@pytest.mark.usefixtures("unheard")
def test_a_new_job_with_the_id_of_a_failed_one_is_there_before_it_is_taken_in(scheduler, client):
    enqueue(scheduler, id="a")
    finish(scheduler, failing(*claim(scheduler)))
    assert counts(scheduler) == {State.FAILED: 1}

    enqueue(client, id="a")

    assert state(scheduler, "a") is State.WAITING


@pytest.mark.usefixtures("unheard")
def test_a_new_job_with_the_id_of_a_failed_one_is_cancelled_before_it_is_taken_in(scheduler, client):
    enqueue(scheduler, id="a")
    finish(scheduler, failing(*claim(scheduler)))
    assert counts(scheduler) == {State.FAILED: 1}

    enqueue(client, id="a")

    assert client.jobs.cancel(QUEUE, ["a"])[0].status == "cancelled"
    assert claim(scheduler) == []


@pytest.mark.usefixtures("unheard")
def test_a_job_that_was_retried_while_its_id_was_enqueued_keeps_its_row(scheduler, client):
    enqueue(scheduler, id="a", payload=b"first")
    finish(scheduler, failing(*claim(scheduler)))
    assert counts(scheduler) == {State.FAILED: 1}
    enqueue(client, id="a", payload=b"second")
    assert scheduler.active.engine.jobs.retry(QUEUE, ["a"]) == ["retried"]

    type(scheduler.active.inbox).take_in(scheduler.active.inbox)

    [claimed] = claim(scheduler, 9)
    assert claimed.payload == b"first"
    finish(scheduler, completing(claimed))
    assert counts(scheduler) == {State.COMPLETED: 1}
    record = client.reads.jobs(QUEUE, ["a"])[0]
    assert (record.payload, [attempt.outcome for attempt in record.history]) == (b"first", ["failed"])


def test_a_row_that_was_taken_in_since_it_was_read_is_not_taken_in_again(scheduler, client, monkeypatch):
    succeeding, overtaken = recovery.succeeding, []

    def be_overtaken(*args):
        found = succeeding(*args)
        if found and not overtaken:
            overtaken.append(found)
            scheduler.active.inbox.take_in()
            finish(scheduler, failing(claim(scheduler)[0]))
            assert counts(scheduler) == {State.FAILED: 1}
            scheduler.active.inbox.take_in()
        return found

    monkeypatch.setattr(recovery, "succeeding", be_overtaken)
    enqueue(scheduler, id="a")
    finish(scheduler, failing(claim(scheduler)[0]))
    assert counts(scheduler) == {State.FAILED: 1}
    with scheduler.active.inbox.lock:  # before the thread that watches it
        enqueue(client, id="a")
        found = state(scheduler, "a")

    assert overtaken
    assert found is State.FAILED
    assert claim(scheduler) == []


def test_a_scheduler_that_is_stopped_holds_up_a_producer_for_a_moment_only(start_child, client):
    child = start_child("scheduler")
    assert child.hears() == "ready"
    enqueue(client, id="a", delay=60_000)
    assert client.reads.states(QUEUE, ["a"]) == [State.DELAYED]
    os.kill(child.pid, signal.SIGSTOP)
    try:
        answers = [client.enqueue([batch(ids=["a"])])[0].status for _ in range(ROUNDS)]
    finally:
        os.kill(child.pid, signal.SIGCONT)

    assert answers == ["duplicate"] * ROUNDS


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="one writer at a time is SQLite's")
@pytest.mark.parametrize("place", range(1, 5))
def test_the_result_is_read_of_a_job_that_completes_between_two_statements(scheduler, client, place):
    job_id = enqueue(scheduler)
    claimed = claim(scheduler, 1)[0]
    scheduler.active.gate.flush()
    reads = []

    def complete_in_between(execute, sql, *args):
        if sql.startswith("SELECT"):
            reads.append(sql)
            if len(reads) == place:
                threading.Thread(target=complete).start()
                assert is_written.wait(20)
        return execute(sql, *args)

    is_written = threading.Event()

    def complete():
        finish(scheduler, completing(claimed, b"whole"))
        scheduler.active.gate.flush()
        connection.close()
        is_written.set()

    with connection.execute_wrapper(complete_in_between):
        answer = client.enqueue([batch(ids=[job_id])])[0]

    assert is_written.is_set() or len(reads) < place
    assert len(reads) > 1
    assert (answer.status, answer.result) in {("duplicate", None), ("completed", b"whole")}
