"""A worker's process hangs up, or dies, before its scheduler has answered or has heard of it again."""

import asyncio
import os
import subprocess
import threading
import tracemalloc
from contextlib import contextmanager
from threading import Event

import pytest

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.journaled.operations import OPERATIONS
from djqueue.storage.journaled.processes import has_died
from djqueue.storage.journaled.remote import Remote
from djqueue.storage.tables.holders import host_name
from djqueue.storage.wire import pack
from djqueue.testing.factories import (
    QUEUE,
    claim_one,
    completing,
    enqueue,
    enqueue_many,
    finish,
    job,
    request,
)
from tests.support import PATIENCE, eventually

from .test_socket import Stranger, sessions


@contextmanager
def slow_answers(scheduler, monkeypatch):
    """The scheduler records ends, but answers only when the event that this yields is set."""
    active, recorded, answer = scheduler.active, Event(), Event()
    finish_written = active.finish_written

    async def slowly(*args):
        finished = await finish_written(*args)
        recorded.set()
        await asyncio.to_thread(answer.wait, PATIENCE)
        return finished

    with monkeypatch.context() as patch:
        patch.setattr(active, "finish_written", slowly)
        try:
            yield recorded, answer
        finally:
            answer.set()


def test_outcome_answered_after_worker_disconnected_is_accepted_again(scheduler, client, monkeypatch):
    enqueue(scheduler)
    held = completing(claim_one(client), b"done")
    with slow_answers(scheduler, monkeypatch) as (recorded, answer), Stranger(scheduler) as stranger:
        stranger.says(pack([1, "finish", [[held]], {}]))
        assert recorded.wait(PATIENCE)
        stranger.socket.close()
        answer.set()
        eventually(lambda: sessions(scheduler) == 1)

    assert finish(client, held) == [True]
    assert finish(client, held._replace(token=held.token + 1)) == [False]
    there = job(scheduler, held.id)
    assert (there.state, there.result, there.attempts) == (State.COMPLETED, b"done", 1)


def test_outcome_whose_answer_was_not_read_is_accepted_again(scheduler, client):
    enqueue(scheduler)
    held = completing(claim_one(client), b"done")
    with Stranger(scheduler) as stranger:
        stranger.says(pack([1, "finish", [[held]], {}]))
        eventually(lambda: job(scheduler, held.id).state is State.COMPLETED)
    eventually(lambda: sessions(scheduler) == 1)

    assert finish(client, held) == [True]


def test_answered_outcomes_keep_no_payloads_or_results_in_memory(scheduler, client):
    large = 1_000_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(20):
            enqueue(scheduler, payload=os.urandom(large))
            finish(client, completing(claim_one(client), os.urandom(large)))
        scheduler.sweep()

        eventually(lambda: tracemalloc.get_traced_memory()[0] - before < 10 * large)
    finally:
        tracemalloc.stop()


def test_claims_answered_after_worker_disconnected_are_released(scheduler, monkeypatch):
    job_id = enqueue(scheduler)
    finish_written, was_asked = scheduler.active.finish_written, threading.Event()

    with Stranger(scheduler) as stranger:

        async def hung_up_on(*args):
            finished = await finish_written(*args)
            # As after a process was stopped: the loop has not looked at the connection since.
            stranger.socket.close()
            was_asked.set()
            return finished

        monkeypatch.setattr(scheduler.active, "finish_written", hung_up_on)
        stranger.says(pack([1, "finish", [[], request(5)], {}]))
        assert was_asked.wait(PATIENCE)
        eventually(lambda: sessions(scheduler) == 0)

    there = job(scheduler, job_id)
    assert (there.state, there.attempts, there.stalls) == (State.WAITING, 0, 0)


def test_claims_answered_after_deadline_are_released(scheduler, client, monkeypatch):
    job_id = enqueue(scheduler)
    monkeypatch.setitem(OPERATIONS, "finish", OPERATIONS["finish"]._replace(deadline=3.0))

    with slow_answers(scheduler, monkeypatch) as (recorded, answer):
        with pytest.raises(StorageUnavailableError, match="did not answer 'finish'"):
            client.finish([], request(5))
        assert recorded.is_set()
        answer.set()
        eventually(lambda: job(scheduler, job_id).state is State.WAITING)

    again = claim_one(client)
    assert (again.id, again.attempts, again.stalls) == (job_id, 1, 0)


# Processes that die.


@pytest.fixture
def helper(start_child):
    child = start_child("client")
    child.hears_until("ready")
    return child


@pytest.fixture
def first(start_child):
    """A scheduler in another process."""
    child = start_child("scheduler")
    child.hears_until("ready")
    return child


def test_jobs_of_worker_that_dies_before_reconnecting_wait_again_at_once(first, helper, make_storage):
    first.tell("enqueue 3")
    first.hears_until("done")
    helper.tell("claim 3")
    held = helper.hears_until("done")
    first.kill()
    storage = make_storage()
    storage.connect()
    storage.sweep()
    assert [job(storage, job_id).state for job_id in held] == [State.ACTIVE] * 3

    helper.kill()
    storage.sweep()

    there = [job(storage, job_id) for job_id in held]
    assert [(one.state, one.stalls) for one in there] == [(State.WAITING, 1)] * 3


def test_jobs_of_killed_worker_wait_again_after_disconnect(scheduler, helper):
    enqueue_many(scheduler, 2)
    helper.tell("claim 2")
    held = helper.hears_until("done")
    scheduler.sweep()
    assert [job(scheduler, job_id).state for job_id in held] == [State.ACTIVE] * 2

    helper.kill()
    eventually(lambda: sessions(scheduler) == 0)
    scheduler.sweep()

    there = [job(scheduler, job_id) for job_id in held]
    assert [(one.state, one.stalls) for one in there] == [(State.WAITING, 1)] * 2


def test_outcome_sent_by_dead_worker_counts(scheduler, helper, monkeypatch):
    job_id = enqueue(scheduler)
    helper.tell("claim 1")
    assert helper.hears_until("done") == [job_id]
    there = scheduler.active.engine.reads.jobs(QUEUE, [job_id])[0]
    [token] = [token for place in scheduler.active.engine.context.processing for token in place.active]
    asked, go_on = Event(), Event()
    finish_written = scheduler.active.finish_written

    async def later(*args):
        asked.set()
        await asyncio.to_thread(go_on.wait, PATIENCE)
        return await finish_written(*args)

    monkeypatch.setattr(scheduler.active, "finish_written", later)
    helper.tell(f"finish {job_id} {token}")
    assert asked.wait(PATIENCE)
    helper.kill()
    scheduler.sweep()
    assert (there.state, job(scheduler, job_id).state) == (State.ACTIVE, State.ACTIVE)

    go_on.set()

    eventually(lambda: job(scheduler, job_id).state is State.COMPLETED)
    scheduler.sweep()
    assert job(scheduler, job_id).stalls == 0


def test_reused_process_id_does_not_identify_earlier_process():
    own = os.getpid()

    assert has_died()(f"{host_name()}@1/{own}")
    assert not has_died()(f"{host_name()}/{own}")
    assert not has_died()(f"another/12345678/pid:[1]@1/{own}")
    assert not has_died()("remote/another")


def test_zombie_process_counts_as_dead():
    with subprocess.Popen(["true"]) as process:
        eventually(lambda: has_died()(f"{host_name()}/{process.pid}"))


def test_closing_does_not_wait_for_database_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djqueue.storage.journaled.remote.READ_TIMEOUT", 0.1)
    asked, released, refused = threading.Event(), threading.Event(), threading.Event()

    def address() -> None:
        asked.set()
        released.wait(PATIENCE)

    remote = Remote(address, None, leave=lambda: None)

    def call() -> None:
        with pytest.raises(StorageUnavailableError, match="is closed"):
            remote.call("ping")
        refused.set()

    thread = threading.Thread(target=call)
    thread.start()
    assert asked.wait(PATIENCE)
    closing = threading.Thread(target=remote.close)
    closing.start()
    closing.join(PATIENCE)
    is_closed = not closing.is_alive()
    released.set()
    thread.join(PATIENCE)

    assert is_closed
    assert refused.is_set()
