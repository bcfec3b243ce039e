"""One scheduler at any time: who it is, who comes next, and what becomes of one that slept."""

import contextlib
import os
import threading
from unittest.mock import Mock

import pytest
from django.db import OperationalError, connection

from djqueue import models
from djqueue.core.durations import to_datetime
from djqueue.core.errors import SchedulerRunningError, StorageError, StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.database import journal
from djqueue.storage.database import storage as storage_module
from djqueue.storage.database.lease import RELEASED, TTL, SchedulerLease, present_holder
from djqueue.storage.database.processes import SCHEDULER, has_died, own_process
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.holders import died_here, host_name
from djqueue.testing.clock import FakeClock
from djqueue.testing.factories import (
    QUEUE,
    an_active_job,
    claim,
    claim_ids,
    completing,
    enqueue,
    finish,
    request,
    state,
)
from djqueue.testing.waiting import together
from tests.support import eventually

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def clock():
    return FakeClock()


def a_lease(clock):
    return SchedulerLease("default", clock, "unix:///nowhere")


def row():
    return models.SchedulerLease.objects.get()


def lose_connection():
    """Have this thread's connection fail at its next use, as after a restart of the server."""
    connection.ensure_connection()
    connection.connection.close()


@pytest.fixture
def quick(monkeypatch):
    """Leases of half a second, and eyes that are as quick."""
    monkeypatch.setattr("djqueue.storage.database.lease.TTL", 500)
    monkeypatch.setattr(journal, "RENEW_EVERY", 0.1)
    monkeypatch.setattr(storage_module, "STANDBY_POLL", 0.05)


# The row.


def test_the_first_to_ask_has_it_and_the_others_have_not(clock):
    first, second = a_lease(clock), a_lease(clock)

    assert first.acquire()
    assert not second.acquire()
    assert second.present().pid == os.getpid()
    assert second.present().describe() == f"process {os.getpid()} on {os.uname().nodename}"


@pytest.mark.parametrize("host", [host_name(), "elsewhere"])
def test_the_holders_silence_while_the_database_was_away_does_not_count(clock, monkeypatch, host):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    models.SchedulerLease.objects.update(host=host)
    assert not second.acquire()
    clock.advance(TTL)
    with monkeypatch.context() as patch:
        patch.setattr(second, "present", Mock(side_effect=OperationalError("connection refused")))
        with pytest.raises(OperationalError):
            second.acquire()

    assert not second.acquire()
    clock.advance(TTL - 1)
    assert not second.acquire()
    clock.advance(1)
    assert second.acquire()


def test_it_runs_out_unless_it_is_renewed(clock):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    clock.advance(TTL - 1)
    assert not first.has_run_out()
    first.hold()
    clock.advance(TTL - 1)
    assert not second.acquire()

    clock.advance(1)

    assert first.has_run_out()
    assert second.acquire()


def test_each_holder_has_a_higher_generation(clock):
    leases = [a_lease(clock) for _ in range(3)]
    generations = []
    for lease in leases:
        assert lease.acquire()
        generations.append(row().generation)
        clock.advance(TTL)

    assert generations == [1, 2, 3]


def test_one_that_lost_it_can_neither_hold_nor_release_it(clock):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    clock.advance(TTL)
    second.acquire()

    with pytest.raises(journal.LeaseLost):
        first.hold()
    first.release()
    first.move("unix:///elsewhere")

    assert not a_lease(clock).acquire()
    assert row().address == "unix:///nowhere"
    second.hold()


def test_a_released_one_is_free_at_once(clock):
    first = a_lease(clock)
    first.acquire()
    first.release()

    assert a_lease(clock).acquire()


def test_a_holder_that_died_on_this_machine_is_not_waited_for(clock):
    first = a_lease(clock)
    first.acquire()
    models.SchedulerLease.objects.update(pid=2**22 + 1)  # more than there can be

    assert died_here(first.present())
    assert a_lease(clock).acquire()


def test_a_process_that_has_the_id_of_a_dead_holder_is_not_taken_for_it(clock):
    """As after a restart of a container, where each run has the same id."""
    first = a_lease(clock)
    first.acquire()
    assert not died_here(first.present())
    models.SchedulerLease.objects.update(host=f"{host_name()}@1")

    assert died_here(first.present())
    assert a_lease(clock).acquire()


def test_a_claim_of_an_earlier_process_with_this_process_id_is_over():
    own = own_process().removeprefix(SCHEDULER)
    earlier = f"{host_name()}@1/{os.getpid()}"

    assert (has_died()(own), has_died()(earlier)) == (False, True)


@pytest.mark.parametrize("host", ["elsewhere/0/pid:[1]", "elsewhere"])
def test_a_holder_on_another_machine_is_waited_for(clock, host):
    first = a_lease(clock)
    first.acquire()
    models.SchedulerLease.objects.update(pid=2**22 + 1, host=host)

    assert not died_here(first.present())
    assert not a_lease(clock).acquire()


def test_a_machine_is_known_by_its_boot_and_its_processes_namespace():
    assert host_name() == host_name()
    assert host_name().startswith(os.uname().nodename)


def test_a_clock_that_is_set_back_keeps_nobody_out_for_longer_than_that(clock):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    clock.jump(-3_600_000)
    assert not second.acquire()  # the row holds for an hour, by the clock on the wall
    first.hold()

    clock.advance(TTL)

    assert second.acquire()


def test_one_of_many_that_ask_at_once_has_it(clock):
    leases = [a_lease(clock) for _ in range(6)]

    def ask(lease):
        try:
            return lease.acquire()
        finally:
            connection.close()

    for _ in range(5):
        assert sorted(together([lambda one=lease: ask(one) for lease in leases])) == [False] * 5 + [True]
        clock.advance(TTL)


def test_what_was_read_too_late_does_not_begin_the_wait_anew(clock, monkeypatch):
    first, second, third = a_lease(clock), a_lease(clock), a_lease(clock)
    first.acquire()
    out_of_date = third.present()
    clock.advance(TTL)

    def read_slowly():
        assert second.acquire()
        return out_of_date

    monkeypatch.setattr(third, "present", read_slowly)
    assert not third.acquire()
    clock.advance(TTL)

    assert first.acquire()


# Time is the database's.


@pytest.mark.skipif("connection.vendor != 'postgresql'", reason="SQLite has no clock of its own")
def test_the_servers_clock_is_asked_and_not_this_machines(monkeypatch):
    ahead = FakeClock(now=DatabaseClock("default").now() + 3_600_000)
    monkeypatch.setattr("djqueue.storage.tables.clock.SYSTEM_CLOCK", ahead)
    clock = DatabaseClock("default")
    lease = a_lease(clock)

    assert lease.acquire()

    assert 3_590_000 < ahead.now() - clock.now() < 3_610_000
    assert row().expires_at.timestamp() * 1_000 < ahead.now() - 3_500_000


def test_every_minute_the_clock_is_compared_again(monkeypatch):
    here = FakeClock()
    monkeypatch.setattr("djqueue.storage.tables.clock.SYSTEM_CLOCK", here)
    clock = DatabaseClock("default")
    clock.measure()
    offset = clock.now() - here.now()
    here.jump(5_000)
    clock.measure()
    assert clock.now() - here.now() == offset

    here.advance(60_000)
    clock.measure()

    # An embedded database has no other clock than this machine's.
    expected = 0 if connection.vendor == "sqlite" else offset - 5_000 - 60_000
    assert abs(clock.now() - here.now() - expected) < 5_000


# Schedulers.


def test_a_second_scheduler_is_refused_where_it_is_not_to_wait(scheduler, make_storage):
    second = make_storage()
    second.role.standby = "never"

    expected = rf"process {os.getpid()} on .* is the scheduler of database 'default': stop that process first"
    with pytest.raises(SchedulerRunningError, match=expected):
        second.connect()

    assert not second.is_scheduler
    assert scheduler.is_scheduler
    assert enqueue(second) in eventually(lambda: claim_ids(scheduler, 5))


def test_a_second_process_is_refused_with_the_name_of_the_first(scheduler, start_child):
    child = start_child("contender")
    child.hears_until("ready")
    child.tell("try")

    assert child.hears().startswith(f"refused process {os.getpid()} on ")


def test_a_closed_schedulers_place_is_free(make_storage):
    for expected in (1, 2, 3):
        storage = make_storage()
        storage.role.standby = "never"
        storage.connect()
        assert row().generation == expected
        assert row().address == str(storage._server.address)
        storage.close()


def test_a_scheduler_that_cannot_open_its_socket_gives_its_place_back(make_storage, tmp_path):
    (tmp_path / "file").touch()
    broken = make_storage(address=f"unix://{tmp_path}/{'long/' * 20}socket")
    with pytest.raises(StorageError):
        broken.connect()
    assert not broken.is_scheduler

    following = make_storage()
    following.role.standby = "never"
    following.connect()

    assert following.is_scheduler


def test_a_scheduler_whose_connection_was_lost_gives_its_place_back_when_it_closes(make_storage):
    storage = make_storage()
    storage.connect()
    lose_connection()

    storage.close()

    assert row().expires_at == to_datetime(RELEASED)


def test_a_standby_takes_over_when_the_scheduler_closes(scheduler, make_storage, quick):
    standby = make_storage()
    job_id = enqueue(scheduler)
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()
    assert not standby.is_scheduler

    scheduler.close()

    waiting.join(10)
    assert standby.is_scheduler
    assert claim_ids(standby, 5) == [job_id]


def test_a_standby_says_who_is_the_scheduler_and_how_to_work_meanwhile(
    scheduler, make_storage, quick, caplog
):
    caplog.set_level("INFO", "djqueue")
    standby = make_storage()
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()
    assert eventually(lambda: "Standing by" in caplog.text)
    scheduler.close()
    waiting.join(10)

    assert f"Standing by: process {os.getpid()} on " in caplog.text
    assert "runs no jobs until that scheduler stops" in caplog.text
    assert "start this process with --standby work" in caplog.text


def test_a_worker_process_without_a_scheduler_says_what_it_waits_for(scheduler, make_storage, quick, caplog):
    caplog.set_level("INFO", "djqueue")
    scheduler.close()
    beside = make_storage()
    beside.role.standby = "work"

    def wait():
        with contextlib.suppress(StorageError):
            beside.connect()
        connection.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert eventually(lambda: "Waiting for a scheduler" in caplog.text)
    beside.close()
    waiting.join(10)

    assert "start one with `manage.py runworkers`" in caplog.text


def test_a_worker_process_waits_for_a_scheduler_to_come(scheduler, make_storage, quick):
    scheduler.close()
    beside = make_storage()
    beside.role.standby = "work"
    waiting = threading.Thread(target=lambda: (beside.connect(), connection.close()))
    waiting.start()
    coming = make_storage()
    coming.connect()

    waiting.join(10)
    assert not waiting.is_alive()
    assert not beside.is_scheduler
    job_id = enqueue(coming)
    assert claim_ids(beside, 5) == [job_id]

    coming.close()
    beside.workers.unregister("it is forgotten by itself")


def test_a_standby_that_is_closed_stops_waiting(scheduler, make_storage, quick):
    standby = make_storage()
    errors = []

    def wait():
        try:
            standby.connect()
        except StorageError as error:
            errors.append(str(error))
        finally:
            connection.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    standby.close()
    waiting.join(10)

    assert errors == ["the storage was closed while standing by"]


def test_a_standby_takes_over_when_the_scheduler_is_killed(start_child, make_storage, quick):
    child = start_child("scheduler")
    child.hears_until("ready")
    child.tell("enqueue 1 durable=True")
    [(_, job_id)] = [line.split() for line in child.hears_until("done")]
    standby = make_storage()
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()

    child.kill()

    waiting.join(10)
    assert standby.is_scheduler
    assert claim_ids(standby, 5) == [job_id]


def test_a_scheduler_that_slept_past_its_lease_writes_nothing_more(start_child, make_storage, quick):
    child = start_child("scheduler", environment={"LEASE": "500"})
    child.hears_until("ready")
    child.tell("enqueue 3 durable=True")
    ids = [line.split()[1] for line in child.hears_until("done")]
    child.tell("claim 1")
    assert child.hears_until("done") == ids[:1]
    eventually(lambda: models.Job.objects.filter(state="active").exists())

    child.freeze()
    following = make_storage()
    following.connect()
    claimed = claim(following, 1)
    following.reads.counts(QUEUE)
    before = list(models.Job.objects.order_by("id").values())
    child.tell("enqueue 1")
    child.tell("work 5")
    child.thaw()

    child.hears_until("lost")
    # From now on it is a client like any other: it may enqueue, and work on the third job.
    known = [row["id"] for row in before[:2]]
    assert list(models.Job.objects.filter(id__in=known).order_by("id").values()) == before[:2]
    # It may still run its own job: that one has a whole lease, and the next one is claimed.
    assert [found.id for found in claimed] == ids[1:2]
    assert finish(following, completing(claimed[0])) == [True]
    child.ends()
    following.reads.counts(QUEUE)
    assert [state(following, job_id) for job_id in ids[:2]] == [State.ACTIVE, State.COMPLETED]


def test_a_scheduler_that_lost_its_place_says_so_to_everybody(scheduler, make_storage, monkeypatch):
    lost = threading.Event()
    scheduler.role.on_lost = lost.set
    claimed = an_active_job(scheduler)
    scheduler.reads.counts(QUEUE)
    client = make_storage()
    assert client.claim(request_of_nothing()).jobs == []
    models.SchedulerLease.objects.update(generation=99)

    enqueue(scheduler)

    assert lost.wait(10)
    deposed = scheduler._deposed
    for action in (
        lambda: enqueue(deposed),
        lambda: claim(deposed),
        lambda: finish(deposed, completing(claimed)),
        lambda: deposed.jobs.cancel(QUEUE, [claimed.id]),
        lambda: deposed.jobs.retry(QUEUE, [claimed.id]),
        lambda: deposed.jobs.remove(QUEUE, [claimed.id]),
        lambda: deposed.queues.pause(QUEUE),
        deposed.sweep,
    ):
        with pytest.raises(journal.LeaseLost, match="Another process has become the scheduler"):
            action()
    with pytest.raises(StorageUnavailableError):
        eventually(lambda: client.claim(request_of_nothing()) and None, timeout=5)
    scheduler.close()
    assert enqueue(scheduler)  # as any producer, for whoever is the scheduler


def request_of_nothing():
    return request(names=["nobody's"])


def test_what_a_lost_scheduler_leaves_behind_is_not_its_successors_socket(make_storage):
    first = make_storage()
    first.connect()
    models.SchedulerLease.objects.update(expires_at=0)
    second = make_storage()
    second.connect()

    eventually(lambda: not first.is_scheduler, message="it notices that it lost its place")
    first.close()

    client = make_storage()
    enqueue(client, durable=False)
    assert claim_ids(client, 5)


def test_one_of_many_processes_is_the_scheduler_at_any_time(start_child):
    children = [start_child("contender") for _ in range(5)]
    for child in children:
        child.hears_until("ready")
    generations = []
    for _ in range(4):
        for child in children:
            child.tell("try")
        said = {child: child.hears() for child in children}
        holders = [child for child, line in said.items() if line.startswith("scheduler")]
        assert len(holders) == 1, list(said.values())
        assert sum(line.startswith("refused") for line in said.values()) == 4
        generations.append(int(said[holders[0]].split()[1]))
        holders[0].tell("close")
        assert holders[0].hears() == "closed"

    assert generations == sorted(set(generations))


def test_a_killed_scheduler_is_followed_at_once_by_one_of_many(start_child):
    children = [start_child("contender") for _ in range(4)]
    for child in children:
        child.hears_until("ready")
    generations = []
    while children:
        for child in children:
            child.tell("try")
        said = {child: child.hears() for child in children}
        [holder] = [child for child, line in said.items() if line.startswith("scheduler")]
        generations.append(int(said[holder].split()[1]))
        holder.kill()
        children.remove(holder)

    assert generations == [1, 2, 3, 4]


# Clocks that are set.


@pytest.mark.parametrize("step", [-3_600_000, 3_600_000])
def test_a_clock_that_is_set_costs_a_living_scheduler_nothing(clock, step):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    assert not second.acquire()
    clock.jump(step)

    assert not second.acquire()
    assert present_holder("default", clock.now()) is not None
    for _ in range(5):
        clock.advance(TTL // 2)
        first.hold()
        assert not second.acquire()


@pytest.mark.parametrize("step", [-3_600_000, 3_600_000])
def test_a_scheduler_that_is_silent_for_its_lease_is_replaced_whatever_the_clock_says(clock, step):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    assert not second.acquire()
    clock.jump(step)
    clock.advance(TTL - 1)
    assert not second.acquire()

    clock.advance(1)

    assert second.acquire()
    with pytest.raises(journal.LeaseLost):
        first.hold()
