"""What a producer in another process is told, and what becomes of its jobs, while the tables are behind."""

import threading

import pytest
from django.db import connection

from djqueue.client import Queue
from djqueue.core.errors import JobFailedError
from djqueue.core.states import State
from djqueue.runtime import Worker
from djqueue.storage.journaled import recovery
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
from tests.support import PATIENCE

pytestmark = pytest.mark.dialect

ROUNDS = 5


@pytest.fixture
def unheard(scheduler, monkeypatch):
    """A scheduler that does not hear of new rows before it looks for them."""
    monkeypatch.setattr(scheduler.active.inbox, "take_in", lambda: 0)


def test_repeated_enqueue_and_wait_with_unique_key_runs_job_again(scheduler, client):
    queue = Queue(QUEUE, storage=client)
    with Worker(scheduler, [QUEUE], {"handler": lambda job: job.payload}, connect=False):
        returned = [
            queue.enqueue_and_wait(number, name="handler", unique_key="k", wait=PATIENCE)
            for number in range(ROUNDS)
        ]

    assert returned == list(range(ROUNDS))


def test_repeated_enqueue_and_wait_with_failed_id_returns_own_error(scheduler, client):
    def fail(job):
        raise ValueError(f"number {job.payload}")

    queue = Queue(QUEUE, storage=client)
    messages = []
    with Worker(scheduler, [QUEUE], {"handler": fail}, connect=False):
        for number in range(ROUNDS):
            with pytest.raises(JobFailedError) as failure:
                queue.enqueue_and_wait(number, name="handler", id="k", max_attempts=1, wait=PATIENCE)
            messages.append(failure.value.error_message)

    assert messages == [f"number {number}" for number in range(ROUNDS)]


def test_id_is_free_as_soon_as_its_job_is_cancelled(scheduler, client):
    for _ in range(ROUNDS):
        assert client.enqueue([batch(ids=["a"], delay=60_000)])[0].status == "queued"
        assert client.jobs.cancel(QUEUE, ["a"])[0].status == "cancelled"


def test_duplicate_id_in_one_call_is_one_job_after_job_has_ended(scheduler, client, monkeypatch):
    monkeypatch.setattr(type(scheduler.active), "settled", lambda *_: [State.FAILED])

    answers = client.enqueue([batch(2, ids=["a", "a"])])

    assert [answer.status for answer in answers] == ["queued", "duplicate"]


def test_id_is_taken_as_soon_as_its_job_is_retried(scheduler, client):
    enqueue(scheduler, id="a")
    finish(client, failing(*claim(client)))

    assert client.jobs.retry(QUEUE, ["a"]) == ["retried"]

    assert client.enqueue([batch(ids=["a"])])[0].status == "duplicate"
    finish(client, completing(*claim(client)))
    assert counts(scheduler) == {State.COMPLETED: 1}


@pytest.mark.usefixtures("unheard")
def test_new_job_with_failed_id_is_visible_before_scheduler_reads_inbox(scheduler, client):
    enqueue(scheduler, id="a")
    finish(scheduler, failing(*claim(scheduler)))
    assert counts(scheduler) == {State.FAILED: 1}

    enqueue(client, id="a")

    assert state(scheduler, "a") is State.WAITING


@pytest.mark.usefixtures("unheard")
def test_new_job_with_failed_id_is_cancelled_before_scheduler_reads_inbox(scheduler, client):
    enqueue(scheduler, id="a")
    finish(scheduler, failing(*claim(scheduler)))
    assert counts(scheduler) == {State.FAILED: 1}

    enqueue(client, id="a")

    assert client.jobs.cancel(QUEUE, ["a"])[0].status == "cancelled"
    assert claim(scheduler) == []


@pytest.mark.usefixtures("unheard")
def test_job_that_was_retried_while_its_id_was_enqueued_keeps_its_row(scheduler, client):
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


def test_inbox_row_is_taken_in_once_under_concurrent_reads(scheduler, client, monkeypatch):
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


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="one writer at a time is SQLite's")
@pytest.mark.parametrize("place", range(1, 5))
def test_result_of_job_that_completes_between_two_statements_is_read(scheduler, client, place):
    job_id = enqueue(scheduler)
    claimed = claim(scheduler, 1)[0]
    scheduler.active.gate.flush()
    reads = []

    def complete_in_between(execute, sql, *args):
        if sql.startswith("SELECT"):
            reads.append(sql)
            if len(reads) == place:
                threading.Thread(target=complete).start()
                assert is_written.wait(PATIENCE)
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
