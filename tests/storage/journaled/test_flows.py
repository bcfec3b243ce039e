"""Flows and the database: all of one or nothing, for producers anywhere, and after a crash."""

from dataclasses import replace

import pytest
from django.db import transaction

from djqueue import models
from djqueue.core.errors import OptionError
from djqueue.core.states import State
from djqueue.storage.journaled import journal
from djqueue.testing.contract.flows import FLOW, a_flow, worked_off
from djqueue.testing.factories import QUEUE, UPSTREAM, batch, enqueue, state
from tests.support import eventually

pytestmark = pytest.mark.dialect

DONE = [{"a", "b"}, {"c"}, {"d"}]


@pytest.fixture(params=["client", "scheduler"])
def producer(request, scheduler):
    """A producer in another process of the database, or in the scheduler's own."""
    return scheduler if request.param == "scheduler" else request.getfixturevalue("client")


def outside_of_transactions():
    """The flow of a producer that asks the scheduler over its socket."""
    return [one._replace(options=replace(one.options, durable=False)) for one in a_flow()]


def in_tables():
    return {(row.queue, row.job_id): row.state for row in models.Job.objects.all()}


def done(scheduler):
    """What has been worked off, once all of it has arrived."""
    rounds = []
    eventually(lambda: rounds.extend(worked_off(scheduler)) or len(rounds) == len(DONE))
    return rounds


def test_flow_is_part_of_callers_transaction(producer, scheduler):
    with transaction.atomic():
        producer.enqueue(a_flow())
        assert worked_off(scheduler) == []

    assert done(scheduler) == DONE


def test_rollback_removes_whole_flow(producer, scheduler):
    with transaction.atomic():
        producer.enqueue(a_flow())
        transaction.set_rollback(True)

    scheduler.sweep()
    assert in_tables() == {}
    assert [state(scheduler, job_id, queue) for queue, job_id in FLOW] == [None] * 4


def test_flow_of_client_is_written_to_tables_at_once(client):
    client.enqueue(a_flow())

    assert in_tables() == {
        (UPSTREAM, "a"): "waiting",
        (UPSTREAM, "b"): "waiting",
        (QUEUE, "c"): "blocked",
        ("downstream", "d"): "blocked",
    }


def test_flow_reaches_scheduler_over_its_socket(client, scheduler):
    with transaction.atomic():
        answers = client.enqueue(outside_of_transactions())
        assert [(answer.queue, answer.id) for answer in answers] == FLOW
        assert state(scheduler, "c") is State.BLOCKED
        transaction.set_rollback(True)

    assert worked_off(scheduler) == DONE


def test_non_durable_flow_is_written_to_tables_without_scheduler(client):
    client.enqueue(outside_of_transactions())

    assert len(in_tables()) == 4


def test_flow_with_unknown_dependency_writes_nothing(producer):
    last = batch(ids=["d"], depends_on=((QUEUE, "nobody"),))

    with pytest.raises(OptionError, match="nobody"):
        producer.enqueue([*a_flow()[:2], last])

    assert in_tables() == {}


def test_part_of_flow_is_completed_by_another_process(client, scheduler):
    scheduler.enqueue(a_flow()[:2])
    scheduler.sweep()  # what is written, the others know

    answers = client.enqueue(a_flow())

    assert [answer.status for answer in answers] == ["duplicate"] * 3 + ["queued"]
    assert done(scheduler) == DONE


def test_flow_is_written_in_one_transaction(scheduler, monkeypatch):
    """However full the buffer is, and however long the flow takes."""
    monkeypatch.setattr(journal, "WINDOW_JOBS", 1)
    monkeypatch.setattr(journal, "WINDOW", 0.0)
    write, written = journal.DatabaseJournal._write, []

    def noting(self, buffer):
        written.append(set(buffer.inserts))
        write(self, buffer)

    monkeypatch.setattr(journal.DatabaseJournal, "_write", noting)
    for number in range(20):
        flow = [batch(ids=[f"{number}/0"])]
        for step in range(1, 10):
            flow.append(batch(ids=[f"{number}/{step}"], depends_on=((QUEUE, f"{number}/{step - 1}"),)))
        scheduler.enqueue(flow)
    scheduler.sweep()

    assert sum(map(len, written)) == 200
    assert all(len(inserts) % 10 == 0 for inserts in written)


def test_flow_that_cannot_be_written_is_taken_back(scheduler, monkeypatch):
    def fails(self, buffer):
        raise OSError("no space left")

    enqueue(scheduler, id="before")
    with monkeypatch.context() as broken:
        broken.setattr(journal.DatabaseJournal, "_write", fails)
        durable = [one._replace(options=replace(one.options, durable=True)) for one in a_flow()]
        with pytest.raises(Exception, match="nothing was enqueued"):
            scheduler.enqueue(durable)

    assert [state(scheduler, job_id, queue) for queue, job_id in FLOW] == [None] * 4
    assert scheduler.reads.dead_letters(QUEUE) == []
    scheduler.sweep()
    assert in_tables() == {(QUEUE, "before"): "waiting"}


def test_flow_continues_with_next_scheduler(make_storage, scheduler):
    scheduler.enqueue(a_flow())
    scheduler.close()
    assert set(in_tables().values()) == {"waiting", "blocked"}

    with_the_next = make_storage()
    with_the_next.connect()

    assert worked_off(with_the_next) == DONE


def test_enqueue_of_flow_does_not_deadlock_with_durable_enqueue_of_subscriber(scheduler, monkeypatch):
    """As a subscriber that enqueues durably would: it is told while the flow is being noted."""
    monkeypatch.setattr(journal, "PATIENCE", 600.0)
    scheduler.events.subscribe(UPSTREAM, lambda event: enqueue(scheduler, queue="other", durable=True))

    scheduler.enqueue(a_flow())

    assert len(scheduler.reads.page("other", State.WAITING, 10)) == 2


@pytest.mark.parametrize("policy", ["fail", "cancel", "ignore"])
def test_removal_of_job_and_outcome_of_its_dependents_are_written_together(scheduler, monkeypatch, policy):
    """Else the next scheduler would take it for one that has completed."""
    ids = [str(number) for number in range(20)]
    scheduler.enqueue([batch(ids=ids, queue=UPSTREAM)])
    for number in ids:
        needs = ((UPSTREAM, number),)
        scheduler.enqueue([batch(ids=[number], depends_on=needs, on_dependency_failure=policy)])
    scheduler.sweep()
    monkeypatch.setattr(journal, "WINDOW_JOBS", 1)
    monkeypatch.setattr(journal, "WINDOW", 0.0)
    write, written = journal.DatabaseJournal._write, []

    def noting(self, buffer):
        written.append(({row[1] for row in buffer.deletes}, {key[1] for key in buffer.updates}))
        write(self, buffer)

    monkeypatch.setattr(journal.DatabaseJournal, "_write", noting)
    for number in ids:
        scheduler.jobs.remove(UPSTREAM, [number])

    assert [deleted for deleted, _ in written if deleted] == [{number} for number in ids]
    assert all(deleted == updated for deleted, updated in written)
