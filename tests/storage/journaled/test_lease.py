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
from djqueue.storage.journaled import journal
from djqueue.storage.journaled import storage as storage_module
from djqueue.storage.journaled.lease import RELEASED, TTL, SchedulerLease, present_holder
from djqueue.storage.journaled.processes import SCHEDULER, has_died, own_process
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
from tests.support import PATIENCE, eventually

pytestmark = [pytest.mark.dialect, pytest.mark.usefixtures("tables")]


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
    """Standbys that look at the lease often."""
    monkeypatch.setattr(storage_module, "STANDBY_POLL", 0.05)


def end(thread):
    """Wait for the end of a thread."""
    thread.join(PATIENCE)
    assert not thread.is_alive()


# The row.


def test_first_process_acquires_lease_and_others_do_not(clock):
    first, second = a_lease(clock), a_lease(clock)

    assert first.acquire()
    assert not second.acquire()
    assert second.present().pid == os.getpid()
    assert second.present().describe() == f"process {os.getpid()} on {os.uname().nodename}"


@pytest.mark.parametrize("host", [host_name(), "elsewhere"])
def test_silence_of_holder_during_database_outage_does_not_count(clock, monkeypatch, host):
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


def test_lease_expires_unless_renewed(clock):
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


def test_each_holder_has_higher_generation(clock):
    leases = [a_lease(clock) for _ in range(3)]
    generations = []
    for lease in leases:
        assert lease.acquire()
        generations.append(row().generation)
        clock.advance(TTL)

    assert generations == [1, 2, 3]


def test_former_holder_can_neither_renew_nor_release_lease(clock):
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


def test_released_lease_is_free_at_once(clock):
    first = a_lease(clock)
    first.acquire()
    first.release()

    assert a_lease(clock).acquire()


def test_holder_that_died_on_this_machine_is_not_waited_for(clock):
    first = a_lease(clock)
    first.acquire()
    models.SchedulerLease.objects.update(pid=2**22 + 1)  # more than there can be

    assert died_here(first.present())
    assert a_lease(clock).acquire()


def test_process_with_reused_id_is_not_mistaken_for_dead_holder(clock):
    """As after a restart of a container, where each run has the same id."""
    first = a_lease(clock)
    first.acquire()
    assert not died_here(first.present())
    models.SchedulerLease.objects.update(host=f"{host_name()}@1")

    assert died_here(first.present())
    assert a_lease(clock).acquire()


def test_claim_of_earlier_process_with_this_process_id_is_over():
    own = own_process().removeprefix(SCHEDULER)
    earlier = f"{host_name()}@1/{os.getpid()}"

    assert (has_died()(own), has_died()(earlier)) == (False, True)


@pytest.mark.parametrize("host", ["elsewhere/0/pid:[1]", "elsewhere"])
def test_holder_on_another_machine_is_waited_for(clock, host):
    first = a_lease(clock)
    first.acquire()
    models.SchedulerLease.objects.update(pid=2**22 + 1, host=host)

    assert not died_here(first.present())
    assert not a_lease(clock).acquire()


def test_machine_is_known_by_its_boot_and_its_processes_namespace():
    assert host_name() == host_name()
    assert host_name().startswith(os.uname().nodename)


def test_clock_set_back_does_not_extend_lease(clock):
    first, second = a_lease(clock), a_lease(clock)
    first.acquire()
    clock.jump(-3_600_000)
    assert not second.acquire()  # the row holds for an hour, by the clock on the wall
    first.hold()

    clock.advance(TTL)

    assert second.acquire()


def test_one_of_many_concurrent_processes_acquires_lease(clock):
    leases = [a_lease(clock) for _ in range(6)]

    def ask(lease):
        try:
            return lease.acquire()
        finally:
            connection.close()

    for _ in range(5):
        assert sorted(together([lambda one=lease: ask(one) for lease in leases])) == [False] * 5 + [True]
        clock.advance(TTL)


def test_outdated_observation_does_not_restart_wait_for_lease(clock, monkeypatch):
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
def test_lease_uses_clock_of_database_server(monkeypatch):
    ahead = FakeClock(now=DatabaseClock("default").now() + 3_600_000)
    monkeypatch.setattr("djqueue.storage.tables.clock.SYSTEM_CLOCK", ahead)
    clock = DatabaseClock("default")
    lease = a_lease(clock)

    assert lease.acquire()

    assert 3_000_000 < ahead.now() - clock.now() < 4_200_000
    assert row().expires_at.timestamp() * 1_000 < ahead.now() - 3_000_000


def test_every_minute_clock_is_compared_again(monkeypatch):
    here = FakeClock()
    monkeypatch.setattr("djqueue.storage.tables.clock.SYSTEM_CLOCK", here)
    clock = DatabaseClock("default")
    clock.measure()
    before = clock.now()
    here.advance(59_000)
    clock.measure()
    assert clock.now() == before + 59_000

    here.advance(1_000)
    clock.measure()

    # An embedded database has no other clock than this machine's.
    expected = before + (60_000 if connection.vendor == "sqlite" else 0)
    assert abs(clock.now() - expected) < 30_000


# Schedulers.


def test_second_scheduler_is_rejected_with_standby_never(scheduler, make_storage):
    second = make_storage()
    second.role.standby = "never"

    expected = rf"process {os.getpid()} on .* is the scheduler of database 'default': stop that process first"
    with pytest.raises(SchedulerRunningError, match=expected):
        second.connect()

    assert not second.is_scheduler
    assert scheduler.is_scheduler
    assert enqueue(second) in eventually(lambda: claim_ids(scheduler, 5))


def test_second_process_is_rejected_with_name_of_first(scheduler, start_child):
    child = start_child("contender")
    child.hears_until("ready")
    child.tell("try")

    assert child.hears().startswith(f"refused process {os.getpid()} on ")


def test_closed_scheduler_releases_lease(make_storage):
    for expected in (1, 2, 3):
        storage = make_storage()
        storage.role.standby = "never"
        storage.connect()
        assert row().generation == expected
        assert row().address == str(storage._server.address)
        storage.close()


def test_scheduler_that_cannot_open_socket_releases_lease(make_storage, tmp_path):
    (tmp_path / "file").touch()
    broken = make_storage(address=f"unix://{tmp_path}/{'long/' * 20}socket")
    with pytest.raises(StorageError):
        broken.connect()
    assert not broken.is_scheduler

    following = make_storage()
    following.role.standby = "never"
    following.connect()

    assert following.is_scheduler


def test_scheduler_releases_lease_on_close_after_lost_connection(make_storage):
    storage = make_storage()
    storage.connect()
    lose_connection()

    storage.close()

    assert row().expires_at == to_datetime(RELEASED)


def test_standby_takes_over_when_scheduler_closes(scheduler, make_storage, quick):
    standby = make_storage()
    job_id = enqueue(scheduler)
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()
    assert not standby.is_scheduler

    scheduler.close()

    end(waiting)
    assert standby.is_scheduler
    assert claim_ids(standby, 5) == [job_id]


def test_standby_logs_scheduler_and_standby_work_option(scheduler, make_storage, quick, caplog):
    caplog.set_level("INFO", "djqueue")
    standby = make_storage()
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()
    assert eventually(lambda: "Standing by" in caplog.text)
    scheduler.close()
    end(waiting)

    assert f"Standing by: process {os.getpid()} on " in caplog.text
    assert "runs no jobs until that scheduler stops" in caplog.text
    assert "start this process with --standby work" in caplog.text


def test_worker_process_logs_that_it_waits_for_scheduler(scheduler, make_storage, quick, caplog):
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
    end(waiting)

    assert "start one with `manage.py runworkers`" in caplog.text


def test_worker_process_waits_for_scheduler(scheduler, make_storage, quick):
    scheduler.close()
    beside = make_storage()
    beside.role.standby = "work"
    waiting = threading.Thread(target=lambda: (beside.connect(), connection.close()))
    waiting.start()
    coming = make_storage()
    coming.connect()

    end(waiting)
    assert not beside.is_scheduler
    job_id = enqueue(coming)
    assert claim_ids(beside, 5) == [job_id]

    coming.close()
    beside.workers.unregister("it is forgotten by itself")


def test_standby_that_is_closed_stops_waiting(scheduler, make_storage, quick):
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
    end(waiting)

    assert errors == ["the storage was closed while standing by"]


def test_standby_takes_over_when_scheduler_is_killed(start_child, make_storage, quick):
    child = start_child("scheduler")
    child.hears_until("ready")
    child.tell("enqueue 1 durable=True")
    [(_, job_id)] = [line.split() for line in child.hears_until("done")]
    standby = make_storage()
    waiting = threading.Thread(target=lambda: (standby.connect(), connection.close()))
    waiting.start()

    child.kill()

    end(waiting)
    assert standby.is_scheduler
    assert claim_ids(standby, 5) == [job_id]


def test_scheduler_frozen_beyond_its_lease_writes_nothing_more(start_child, make_storage, quick):
    child = start_child("scheduler", environment={"LEASE": "1"})
    child.hears_until("ready")
    child.tell("enqueue 3 durable=True")
    ids = [line.split()[1] for line in child.hears_until("done")]
    child.tell("claim 1")
    assert child.hears_until("done") == ids[:1]
    eventually(lambda: models.Job.objects.filter(state="active").exists())

    child.freeze()
    following = make_storage(scheduler_lease=1)
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


def test_scheduler_that_lost_its_lease_rejects_all_changes(scheduler, make_storage, monkeypatch):
    lost = threading.Event()
    scheduler.role.on_lost = lost.set
    claimed = an_active_job(scheduler)
    scheduler.reads.counts(QUEUE)
    client = make_storage()
    assert client.claim(request_of_nothing()).jobs == []
    models.SchedulerLease.objects.update(generation=99)

    enqueue(scheduler)

    assert lost.wait(PATIENCE)
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
        eventually(lambda: client.claim(request_of_nothing()) and None)
    scheduler.close()
    assert enqueue(scheduler)  # as any producer, for whoever is the scheduler


def request_of_nothing():
    return request(names=["nobody's"])


def test_closing_former_scheduler_keeps_socket_of_successor(make_storage):
    first = make_storage(scheduler_lease=1)
    first.connect()
    models.SchedulerLease.objects.update(expires_at=0)
    second = make_storage()
    second.connect()

    eventually(lambda: not first.is_scheduler, message="it notices that it lost its place")
    first.close()

    client = make_storage()
    enqueue(client, durable=False)
    assert claim_ids(client, 5)


def test_one_of_many_processes_is_scheduler_at_any_time(start_child):
    """Each one in turn is closed, or killed and followed at once by another."""
    children = [start_child("contender") for _ in range(3)]
    for child in children:
        child.hears_until("ready")
    generations = []
    for is_killed in (False, True, False, True, True):
        for child in children:
            child.tell("try")
        said = {child: child.hears() for child in children}
        [holder] = [child for child, line in said.items() if line.startswith("scheduler")]
        assert sum(line.startswith("refused") for line in said.values()) == len(children) - 1
        generations.append(int(said[holder].split()[1]))
        if is_killed:
            holder.kill()
            children.remove(holder)
        else:
            holder.tell("close")
            assert holder.hears() == "closed"

    assert generations == [1, 2, 3, 4, 5]


# Clocks that are set.


@pytest.mark.parametrize("step", [-3_600_000, 3_600_000])
def test_live_scheduler_keeps_lease_when_clock_is_set(clock, step):
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
def test_silent_scheduler_is_replaced_after_its_lease_when_clock_is_set(clock, step):
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
