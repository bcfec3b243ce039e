"""One process sweeps, another one soon takes its place, and jobs of killed processes wait for no lease."""

import os
import signal
from contextlib import contextmanager

import pytest

from djqueue import models
from djqueue.core.errors import StorageError
from djqueue.core.procfs import host_name, start_mark
from djqueue.core.states import State
from djqueue.storage.database import workers
from djqueue.storage.tables.leaderlease import TTL
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import QUEUE, WORKER, claim_one, completing, enqueue, finish, state, worker
from tests.support import eventually

from .programs import Child


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pair(make, clock):
    """Two processes, as far as the database can tell."""
    return make(clock=clock), make(clock=clock)


def sweeps(storage, clock):
    """Return whether a round of maintenance starts a delayed job that is due."""
    id = enqueue(storage, delay=1)
    clock.advance(1)
    storage.maintain()
    found = state(storage, id) is State.WAITING
    storage.jobs.remove(QUEUE, [id])
    return found


@contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def leader_pid():
    return models.LeaderLeaseRow.objects.get(name=workers.LEADER).pid


# Who leads.


def test_one_process_sweeps_and_the_others_do_not(pair, clock):
    first, second = pair

    assert [sweeps(storage, clock) for storage in (first, second, first)] == [True, False, True]


def test_explicit_sweep_needs_no_leadership(pair, clock):
    first, second = pair
    first.maintain()
    enqueue(second, delay=1)
    clock.advance(1)

    assert second.sweep().promoted == 1


def test_leader_that_resigns_is_replaced_at_once(pair, clock):
    first, second = pair
    assert sweeps(first, clock)
    first.resign()

    assert sweeps(second, clock)
    assert not sweeps(first, clock)


def test_resigning_without_leading_changes_nothing(pair, clock):
    first, second = pair
    assert sweeps(first, clock)
    second.resign()

    assert not sweeps(second, clock)
    assert sweeps(first, clock)


def test_leader_that_died_on_this_machine_is_replaced_at_once(pair, clock):
    first, second = pair
    assert sweeps(first, clock)
    models.LeaderLeaseRow.objects.filter(name=workers.LEADER).update(host=f"{host_name()}@1")

    assert sweeps(second, clock)


def test_silent_leader_is_replaced_when_its_lease_ends_and_then_follows(pair, clock):
    first, second = pair
    assert sweeps(first, clock)
    clock.advance(TTL - 2)
    assert not sweeps(second, clock)
    clock.advance(1)

    assert sweeps(second, clock)
    assert not sweeps(first, clock)


def test_leader_keeps_its_lease_as_long_as_it_sweeps(pair, clock):
    first, second = pair
    for _ in range(5):
        assert sweeps(first, clock)
        clock.advance(TTL // 2)
        assert not sweeps(second, clock)


def test_worker_of_the_process_that_leads_says_so(pair, clock):
    first, second = pair
    first.workers.register(worker("here", pid=os.getpid()))
    first.workers.register(worker("elsewhere", host="another", pid=os.getpid() + 1))
    assert [info.leads for info in second.workers.all()] == [False, False]

    first.maintain()
    assert [(info.id, info.leads) for info in second.workers.all()] == [("elsewhere", False), ("here", True)]

    clock.advance(TTL)
    assert not any(info.leads for info in second.workers.all())


# Killed workers.


def test_jobs_of_a_killed_process_are_taken_back_in_the_next_round(make):
    storage = make()
    enqueue(storage, id="a")
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
        child.ask("begin 1")
        storage.maintain()
        assert state(storage, "a") is State.ACTIVE
        child.kill()

        storage.maintain()

    assert state(storage, "a") is State.WAITING
    assert storage.workers.all() == []


def test_jobs_of_a_killed_process_are_given_up_by_processes_that_do_not_lead(pair):
    first, second = pair
    first.maintain()
    enqueue(first, id="a")
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
        child.ask("begin 1")
    second.maintain()
    assert state(first, "a") is State.ACTIVE

    assert first.sweep().stalled == 1


@pytest.mark.parametrize("process", ["", "elsewhere/12345678/pid:[1]@1", "{here}0@1"])
def test_processes_of_other_machines_and_boots_are_left_to_their_leases(make, process):
    storage = make()
    enqueue(storage, id="a")
    storage.workers.register(worker(WORKER, pid=2**22 + 1))
    claim_one(storage)
    models.WorkerState.objects.update(process=process.format(here=host_name()))

    storage.maintain()

    assert state(storage, "a") is State.ACTIVE
    assert len(storage.workers.all()) == 1


def test_frozen_process_keeps_its_jobs_for_their_lease(make):
    storage = make()
    enqueue(storage, id="a")
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
        child.ask("begin 1")
        with stopped(child.process.pid):
            storage.maintain()

            assert state(storage, "a") is State.ACTIVE


def test_worker_that_took_the_name_of_a_killed_one_keeps_its_jobs(make):
    storage = make()
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
    storage.workers.register(worker(WORKER, pid=os.getpid()))
    enqueue(storage, id="a")
    claimed = claim_one(storage)

    storage.maintain()

    assert finish(storage, completing(claimed)) == [True]


def test_jobs_of_a_killed_worker_are_given_up_when_its_successor_takes_its_name(make):
    storage = make()
    enqueue(storage, id="a")
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
        child.ask("begin 1")
    storage.workers.register(worker(WORKER, pid=os.getpid(), started_at=1))

    storage.maintain()

    assert state(storage, "a") is State.WAITING


def test_second_live_worker_of_an_id_is_refused_and_the_first_keeps_its_jobs(make):
    storage = make()
    enqueue(storage, id="a")
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("register")
        child.ask("begin 1")

        with pytest.raises(StorageError, match=f"in use by process {child.process.pid} on host"):
            storage.workers.register(worker(WORKER, pid=os.getpid(), started_at=1))

        storage.maintain()
        assert [info.pid for info in storage.workers.all()] == [child.process.pid]
        assert state(storage, "a") is State.ACTIVE


def test_id_of_a_silent_worker_of_another_machine_is_free_after_two_heartbeats(make, clock):
    storage = make(clock=clock)
    storage.workers.register(worker(WORKER, pid=os.getpid(), heartbeat=5_000))
    models.WorkerState.objects.update(process="elsewhere/12345678/pid:[1]@1")
    successor = worker(WORKER, pid=os.getpid(), started_at=1)
    with pytest.raises(StorageError):
        storage.workers.register(successor)

    clock.advance(10_000)
    storage.workers.register(successor)

    assert [info.started_at for info in storage.workers.all()] == [1]


def test_row_of_a_worker_names_its_process(make):
    storage = make()
    storage.workers.register(worker(WORKER, pid=os.getpid()))

    assert models.WorkerState.objects.get().process == host_name() + start_mark(os.getpid())


# Real leaders.


@pytest.fixture
def leading(tables):
    """A process that leads."""
    with Child("obedient") as child:
        child.lines_until("ready")
        child.ask("maintain")
        yield child


def test_killed_leader_is_replaced_in_the_next_round(make, leading):
    storage = make()
    storage.maintain()
    assert leader_pid() == leading.process.pid
    leading.kill()

    storage.maintain()

    assert leader_pid() == os.getpid()


@pytest.mark.slow
@pytest.mark.thorough
def test_frozen_leader_is_replaced_within_its_lease_and_does_no_harm_when_it_wakes_up(make, leading):
    storage = make()
    with stopped(leading.process.pid):
        enqueue(storage, id="a", delay=1)
        eventually(lambda: (storage.maintain(), state(storage, "a") is State.WAITING)[1], 2 * TTL / 1_000)
        claimed = claim_one(storage)

    leading.ask("sweep")
    leading.ask("maintain")

    assert leader_pid() == os.getpid()
    assert finish(storage, completing(claimed)) == [True]


def test_leader_whose_sweep_fails_lets_another_process_lead(pair, clock, monkeypatch):
    first, second = pair
    first.maintain()
    monkeypatch.setattr(first, "sweep", lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        first.maintain()

    assert sweeps(second, clock)
