"""A scheduler that dies, between any two writes, and what its clients and the next scheduler do."""

from contextlib import ExitStack
from functools import partial
from threading import Thread

import pytest

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.states import State
from djqueue.models import OutboxJob
from djqueue.operations.relay import relay_of
from djqueue.storage.scheduler import folder
from djqueue.storage.scheduler.changes import TableChange
from djqueue.testing.factories import (
    QUEUE,
    claim,
    completing,
    counts,
    emit,
    enqueue,
    failing,
    finish,
    items_of,
    job,
    retrying,
    state,
)
from tests.support import eventually

from .crashes import answers, crash, end_lease

pytestmark = pytest.mark.scheduler

ACTIVE, COMPLETED, FAILED, WAITING = State.ACTIVE, State.COMPLETED, State.FAILED, State.WAITING


@pytest.fixture
def restarted(scheduler, client, make_storage):
    """Kills the scheduler, and returns the next one."""

    def restart():
        crash(scheduler)
        end_lease()
        return make_storage(here=True)

    return restart


def test_outcome_that_was_not_written_is_sent_again(scheduler, client, restarted, monkeypatch):
    enqueue(client, id="a", durable=True)
    scheduler.scheduler.journal.wait()
    monkeypatch.setattr(scheduler.scheduler.journal, "_is_due", lambda: False)
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    [claimed] = claim(client)
    assert finish(client, completing(claimed)) == [True]

    restarted()

    assert state(client, "a") is COMPLETED
    assert client.reads.jobs(QUEUE, ["a"])[0].attempts == 1


def test_claim_that_was_not_written_stays_with_its_worker(scheduler, client, restarted, monkeypatch):
    enqueue(client, id="a", durable=True)
    enqueue(client, id="b", durable=True)
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    [claimed] = claim(client)

    restarted()

    assert [one.id for one in claim(client, 10)] == ["b"]
    assert finish(client, completing(claimed)) == [True]


def test_job_that_was_claimed_before_it_was_written_is_not_lost(scheduler, client, restarted, monkeypatch):
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    enqueue(client, id="a", payload=b"x")
    [claimed] = claim(client)

    restarted()

    assert state(client, "a") is ACTIVE
    assert finish(client, completing(claimed)) == [True]
    assert job(client, "a").payload == b"x"


def test_outcomes_of_two_attempts_are_applied_in_order(client, restarted, make_storage, monkeypatch):
    other = make_storage()
    other.listen(None, lambda: None)
    enqueue(client, id="a", durable=True, max_attempts=3)
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    [first] = claim(client)
    finish(client, retrying(first))
    [second] = claim(other)
    finish(other, completing(second))

    restarted()

    assert state(client, "a") is COMPLETED
    assert job(client, "a").attempts == 2


def test_attempt_of_a_dead_worker_counts_as_stalled(scheduler, client, make_storage):
    enqueue(client, id="a", durable=True)
    claim(client)
    scheduler.scheduler.journal.wait()
    client.close()  # Its file is gone, as after the end of its process.
    crash(scheduler)
    end_lease()

    again = make_storage(here=True)

    assert state(again, "a") is WAITING
    assert job(again, "a").stalls == 1


def test_outcome_that_was_written_without_an_answer_is_accepted_when_sent_again(
    scheduler, client, restarted, monkeypatch
):
    enqueue(client, id="a", durable=True)
    [claimed] = claim(client)
    finished = scheduler.scheduler.finish

    def unanswered(*args):
        finished(*args)
        raise OSError("the connection broke")

    monkeypatch.setattr(scheduler.scheduler, "finish", unanswered)
    with pytest.raises(StorageUnavailableError):
        finish(client, completing(claimed))
    monkeypatch.undo()

    assert finish(client, completing(claimed)) == [True]


def test_claims_without_an_answer_return_to_the_queue(scheduler, client, monkeypatch):
    ids = [enqueue(client, id=name) for name in ("a", "b", "c")]
    finished = scheduler.scheduler.finish

    def unanswered(*args):
        finished(*args)
        raise OSError("the connection broke")

    monkeypatch.setattr(scheduler.scheduler, "finish", unanswered)
    with pytest.raises(StorageUnavailableError):
        claim(client, 3)
    monkeypatch.undo()
    assert state(client, "a") is ACTIVE

    found = claim(client, 3)

    assert [claimed.id for claimed in found] == ids
    assert {(claimed.attempts, claimed.stalls) for claimed in found} == {(1, 0)}


class Workload:
    """Steps of a producer and a worker, and what has to hold after those that were answered."""

    def __init__(self, storage):
        self.storage = storage
        self.expected = {}
        self.held = {}

    def steps(self):
        yield from (partial(self.enqueue, f"job-{number}") for number in range(6))
        yield partial(self.claim, 4)
        yield partial(self.finish, "job-0", completing, COMPLETED)
        yield partial(self.finish, "job-1", failing, FAILED)
        yield partial(self.finish, "job-2", retrying, WAITING)
        yield self.cancel
        yield self.pause
        yield partial(self.enqueue, "job-9", delay=3_600_000)
        yield partial(self.finish, "job-3", completing, COMPLETED)

    def enqueue(self, id, **given):
        enqueue(self.storage, id=id, durable=True, max_attempts=5, **given)
        self.expected[id] = State.DELAYED if given else WAITING

    def claim(self, count):
        for claimed in claim(self.storage, count):
            self.held[claimed.id] = claimed
            self.expected[claimed.id] = ACTIVE

    def finish(self, id, outcome, ended):
        if id in self.held:
            assert finish(self.storage, outcome(self.held[id])) == [True]
            self.expected[id] = ended
            del self.held[id]

    def cancel(self):
        self.storage.jobs.cancel(QUEUE, ["job-5"])
        self.expected["job-5"] = State.CANCELLED

    def pause(self):
        self.storage.queues.hold(QUEUE, "mail", None, "the provider is down")
        self.storage.queues.pause(QUEUE)
        self.expected["paused"] = True

    def check(self):
        """Assert that everything that was answered has happened, and that attempts are still held."""
        found = dict(self.expected)
        if found.pop("paused", False):
            assert self.storage.queues.is_paused(QUEUE)
            [hold] = self.storage.reads.overview([QUEUE]).queues[0].holds
            assert (hold.name, hold.reason) == ("mail", "the provider is down")
        assert {id: state(self.storage, id) for id in found} == found
        for claimed in self.held.values():
            assert finish(self.storage, completing(claimed)) == [True]


def test_scheduler_killed_before_any_write_loses_nothing_that_was_answered(make_storage, monkeypatch):
    number, deaths = 0, 0
    apply = TableChange.apply
    monkeypatch.setattr("djqueue.storage.scheduler.client.RESTART_TIMEOUT", 0.0)
    while True:
        number += 1
        scheduler, client = make_storage(here=True), make_storage()
        client.listen(None, lambda: None)
        left, workload = number, Workload(client)

        def dying(change, dialect, scheduler=scheduler):
            nonlocal left
            left -= 1
            if not left:
                crash(scheduler)
                raise OSError("killed")
            apply(change, dialect)

        monkeypatch.setattr(TableChange, "apply", dying)
        try:
            for step in workload.steps():
                step()
            if scheduler.scheduler is not None:
                scheduler.scheduler.journal.wait()
        except StorageUnavailableError:
            deaths += 1
        has_died = scheduler.scheduler is None
        monkeypatch.setattr(TableChange, "apply", apply)
        if has_died:
            end_lease()
            scheduler = make_storage(here=True)
            eventually(lambda client=client: answers(client))
        while OutboxJob.objects.exists():
            relay_of(scheduler).relay_once()
        workload.check()
        if not has_died:
            break
        client.queues.resume(QUEUE)
        client.queues.obliterate(QUEUE, force=True)
        client.close()
        scheduler.close()
    assert deaths > 5
    assert counts(client)[COMPLETED] >= 2


def test_sweep_goes_on_while_a_client_leaves_and_another_sweep_runs(scheduler, client, monkeypatch):
    claim(client)
    is_alive, sweep = folder.is_alive, scheduler.scheduler.sweep

    def leaving(name):
        client.close()
        monkeypatch.setattr(folder, "is_alive", is_alive)
        return True

    monkeypatch.setattr(folder, "is_alive", leaving)
    sweep()  # It leaves after it was found.

    living = scheduler._folder.living

    def sweeping(holding):
        monkeypatch.setattr(scheduler._folder, "living", living)
        sweep()
        return living(holding)

    monkeypatch.setattr(scheduler._folder, "living", sweeping)
    sweep()
    assert not scheduler.scheduler._clients


def test_living_client_keeps_its_claims_where_machines_have_no_boot_id(scheduler, client, monkeypatch):
    monkeypatch.setattr("djqueue.core.procfs.host_name", lambda: "a-mac")
    enqueue(client, id="a")
    claim(client)

    scheduler.sweep()

    assert state(client, "a") is ACTIVE


def test_client_that_announces_while_others_are_adopted_keeps_its_claims(scheduler, client, monkeypatch):
    enqueue(client, id="a")
    [claimed] = claim(client)
    made = scheduler.scheduler
    claims = made._claims

    def late():
        announcing = Thread(target=made.announce, args=(client.client.name, client.client.attempts.all()))
        announcing.start()
        stack.callback(announcing.join)
        eventually(lambda: made._held)
        return claims()

    monkeypatch.setattr(made, "_claims", late)
    made._announced.clear()
    made._has_adopted = False
    with ExitStack() as stack:
        made._adopt(is_first=True)

    assert finish(client, completing(claimed)) == [True]


def test_stream_of_items_goes_on_with_the_next_scheduler(client, restarted, monkeypatch):
    enqueue(client, id="a", durable=True)
    [claimed] = claim(client)
    monkeypatch.setattr("djqueue.storage.scheduler.journal.WINDOW", 60)
    assert emit(client, claimed, b"1", b"2")

    restarted()

    assert emit(client, claimed, b"3", start=2)
    assert items_of(client, "a") == [b"1", b"2", b"3"]
