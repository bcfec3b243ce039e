"""No caller waits longer than its deadline, whatever becomes of the scheduler or of the database."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connection

from djqueue import models
from djqueue.client import Queue
from djqueue.core.deadline import within
from djqueue.core.errors import ConfigurationError, JobTimeoutError, StorageUnavailableError
from djqueue.core.job import Claimed, EnqueueResult
from djqueue.core.states import State
from djqueue.storage.journaled import JournaledStorage, lease
from djqueue.storage.journaled.journal import BACKLOG
from djqueue.storage.journaled.remote import READ_TIMEOUT
from djqueue.testing.factories import QUEUE, batch, enqueue, request, worker
from djqueue.testing.waiting import Wakes
from tests.proxies import SlowProxy
from tests.support import PATIENCE, eventually

from .children import Child
from .conftest import MakeStorage, StartChild

SLACK = 20
"""Seconds that a busy machine may add. The calls bounded here took 30 s or more without a deadline."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + SLACK, f"it took {took:.1f} s"


@pytest.fixture(autouse=True)
def patience() -> None:
    """Leave the product's deadlines as they are."""


def enqueued(storage: JournaledStorage, **options: Any) -> EnqueueResult:
    """Enqueue a job, again if that exceeds the short time limit of a storage, which enqueues nothing then."""

    def attempt() -> list[EnqueueResult]:
        try:
            return storage.enqueue([batch(**options)])
        except StorageUnavailableError:
            return []

    return eventually(attempt)[0]


@pytest.fixture
def client(make_storage: MakeStorage) -> JournaledStorage:
    """A client that may take longer to write to the tables than by default."""
    return make_storage(timeout=5)


@pytest.fixture
def frozen(start_child: StartChild, client: JournaledStorage) -> Child:
    """A scheduler in another process that is stopped by SIGSTOP, and that `client` is connected to."""
    child = start_child("scheduler")
    assert child.hears() == "ready"
    eventually(client._client.reaches_scheduler)
    child.freeze()
    return child


def test_reads_fall_back_to_tables_when_scheduler_hangs(client: JournaledStorage, frozen: Child) -> None:
    job_id = enqueue(client)
    for read in (
        lambda: client.reads.jobs(QUEUE, [job_id]),
        lambda: client.reads.states(QUEUE, [job_id]),
        lambda: client.reads.overview().queues,
        lambda: client.reads.explain(QUEUE, job_id),
        lambda: client.reads.groups(QUEUE, 10),
        lambda: client.reads.flow(QUEUE, job_id),
        lambda: client.reads.diagnostics().lines,
    ):
        with at_most(READ_TIMEOUT):
            assert read()
    assert client.reads.states(QUEUE, [job_id]) == [State.WAITING]


def test_change_version_is_given_up_like_read_when_scheduler_hangs(
    client: JournaledStorage, frozen: Child
) -> None:
    with at_most(READ_TIMEOUT):
        assert client.reads.change_version() is None
    with at_most(0):
        for _ in range(100):
            assert client.reads.change_version() is None


def test_after_one_missed_deadline_reads_do_not_wait_at_all(client: JournaledStorage, frozen: Child) -> None:
    job_id = enqueue(client)
    client.reads.overview()
    assert client.outage is not None
    with at_most(0):
        for _ in range(50):
            client.reads.overview()
            client.reads.states(QUEUE, [job_id])
    assert client.outage is not None


def test_probe_whose_thread_cannot_start_is_given_up(
    client: JournaledStorage, frozen: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.reads.overview()
    assert client.outage is not None

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(StorageUnavailableError, match="can't start new thread"):
            client._client._remote.call("queues.is_paused", QUEUE)
    frozen.thaw()

    eventually(lambda: _is_done(lambda: client._client._remote.call("queues.is_paused", QUEUE)))
    assert client.outage is None


def test_client_uses_scheduler_again_after_it_resumes(client: JournaledStorage, frozen: Child) -> None:
    client.reads.overview()
    assert client.outage is not None
    frozen.thaw()

    def is_back() -> bool:
        return not client.reads.overview().capped

    eventually(is_back)
    assert client.outage is None


def test_changes_end_with_error_when_scheduler_hangs(client: JournaledStorage, frozen: Child) -> None:
    job_id = enqueue(client)
    for change in (
        lambda: client.queues.pause(QUEUE),
        lambda: client.jobs.cancel(QUEUE, [job_id]),
        lambda: client.jobs.promote(QUEUE, [job_id]),
    ):
        with at_most(5.5), pytest.raises(StorageUnavailableError, match="scheduler"):
            change()
    assert client.reads.states(QUEUE, [job_id]) == [State.WAITING]


def test_client_makes_changes_once_lease_of_hanging_scheduler_has_expired(
    client: JournaledStorage, frozen: Child
) -> None:
    job_id = enqueue(client)
    models.SchedulerLease.objects.update(expires_at=0)
    with at_most(5.5):
        client.jobs.cancel(QUEUE, [job_id])
    assert client.reads.states(QUEUE, [job_id]) == [State.CANCELLED]


def test_job_that_hanging_scheduler_does_not_accept_is_written_to_tables(
    client: JournaledStorage, frozen: Child
) -> None:
    with at_most(5):
        first = enqueue(client, durable=False)
    with at_most(0.5):
        second = enqueue(client, durable=False)
    assert client.reads.states(QUEUE, [first, second]) == [State.WAITING, State.WAITING]
    frozen.thaw()

    def both_are_taken_once() -> bool:
        counted = client.reads.overview()
        return not counted.capped and [found.counts.get(State.WAITING) for found in counted.queues] == [2]

    eventually(both_are_taken_once)


def test_hanging_scheduler_delays_producer_only_once(
    start_child: StartChild, client: JournaledStorage
) -> None:
    child = start_child("scheduler")
    assert child.hears() == "ready"
    enqueue(client, id="a", delay=60_000)
    assert client.reads.states(QUEUE, ["a"]) == [State.DELAYED]
    child.freeze()

    with at_most(5):
        answers = [client.enqueue([batch(ids=["a"])])[0].status for _ in range(100)]

    assert answers == ["duplicate"] * 100


@pytest.mark.parametrize("wait", [0.3, pytest.param(3, marks=pytest.mark.thorough)])
def test_enqueue_and_wait_ends_at_its_own_deadline(
    client: JournaledStorage, frozen: Child, wait: float
) -> None:
    queue = Queue(QUEUE, storage=client)
    with at_most(wait), pytest.raises(JobTimeoutError):
        queue.enqueue_and_wait(None, name="nothing", wait=wait)
    assert client.reads.counts(QUEUE)[State.WAITING] == 1


async def test_aenqueue_and_wait_ends_at_its_own_deadline(client: JournaledStorage, frozen: Child) -> None:
    queue = Queue(QUEUE, storage=client)
    with at_most(1), pytest.raises(JobTimeoutError):
        await queue.aenqueue_and_wait(None, name="nothing", wait=1)


def test_callers_of_many_threads_wait_for_one_deadline_together(
    client: JournaledStorage, frozen: Child
) -> None:
    def pause() -> None:
        with pytest.raises(StorageUnavailableError):
            client.queues.pause(QUEUE)
        connection.close()

    threads = [threading.Thread(target=pause) for _ in range(8)]
    with at_most(5.5):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_worker_process_leaves_hanging_scheduler_for_its_successor(
    client: JournaledStorage, frozen: Child, start_child: StartChild
) -> None:
    """Without a call: the connection that carries a helper's subscriptions is watched by itself."""
    claimed: list[Claimed] = []
    client.listen([QUEUE], Wakes())
    models.SchedulerLease.objects.update(expires_at=0)
    successor = start_child("scheduler")
    assert successor.hears() == "ready"
    eventually(lambda: client._client._remote.connected and client.outage is None)
    eventually(lambda: _is_done(lambda: client.workers.register(worker())))
    enqueue(client)
    eventually(lambda: _is_done(lambda: claimed.extend(client.claim(request()).jobs)) and claimed)


def test_client_disconnects_from_process_that_lost_scheduler_lease(
    make_storage: MakeStorage, client: JournaledStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_storage()
    scheduler.connect()
    eventually(client._client.reaches_scheduler)
    monkeypatch.setattr(lease.SchedulerLease, "has_run_out", lambda self: True)
    assert not client._client.reaches_scheduler()
    assert not client._client._remote.connected


def test_changes_wait_for_slow_scheduler_and_reads_do_not(
    make_storage: MakeStorage, client: JournaledStorage
) -> None:
    scheduler = make_storage(address="tcp://127.0.0.1:0", token="secret")
    scheduler.connect()
    assert scheduler._server is not None
    slow = make_storage(token="secret", timeout=5)
    with SlowProxy(scheduler._server.address.port, delay=1.0) as proxy:
        models.SchedulerLease.objects.update(address=f"tcp://127.0.0.1:{proxy.port}")
        job_id = enqueue(slow)
        with at_most(READ_TIMEOUT):
            assert [row.name for row in slow.reads.overview().queues] == [QUEUE]
        # What was asked before is answered before, a second each.
        eventually(lambda: _is_done(lambda: slow.queues.pause(QUEUE)))
        assert scheduler.queues.is_paused(QUEUE)
        with at_most(READ_TIMEOUT):
            assert slow.reads.states(QUEUE, [job_id]) == [State.WAITING]
        slow.close()


def test_unresponsive_network_is_treated_like_hanging_scheduler(
    make_storage: MakeStorage, client: JournaledStorage
) -> None:
    scheduler = make_storage(address="tcp://127.0.0.1:0", token="secret")
    scheduler.connect()
    assert scheduler._server is not None
    lost = make_storage(token="secret", timeout=5)
    with SlowProxy(scheduler._server.address.port) as proxy:
        models.SchedulerLease.objects.update(address=f"tcp://127.0.0.1:{proxy.port}")
        eventually(lambda: _is_done(lambda: lost.queues.pause(QUEUE)))
        proxy.swallow()
        with at_most(5.5), pytest.raises(StorageUnavailableError, match="scheduler"):
            lost.queues.resume(QUEUE)
        with at_most(READ_TIMEOUT):
            assert lost.reads.overview().queues
        lost.close()


@pytest.mark.skipif("connection.vendor != 'sqlite'")
def test_enqueue_waits_for_lock_of_another_process_no_longer_than_timeout(
    make_storage: MakeStorage,
) -> None:
    storage = make_storage(timeout=0.5)
    connection.ensure_connection()
    connection.connection.execute("PRAGMA busy_timeout=20000")
    with closing(sqlite3.connect(connection.settings_dict["NAME"], uri=True)) as other:
        other.execute("BEGIN IMMEDIATE")
        with at_most(0.5), pytest.raises(StorageUnavailableError, match="locked"):
            storage.enqueue([batch()])
        other.rollback()
    assert enqueued(storage).status == "queued"
    assert connection.connection.execute("PRAGMA busy_timeout").fetchone() == (20_000,)


@pytest.mark.skipif("connection.vendor != 'sqlite'")
@pytest.mark.parametrize("is_async", [False, True])
def test_durable_enqueue_of_scheduler_itself_ends_in_time_too(
    make_storage: MakeStorage, is_async: bool
) -> None:
    storage = make_storage(timeout=0.5)
    storage.connect()
    enqueued(storage)  # the queue is known from here on
    enqueue_it = async_to_sync(storage.aenqueue) if is_async else storage.enqueue
    with closing(sqlite3.connect(connection.settings_dict["NAME"], uri=True)) as other:
        other.execute("BEGIN IMMEDIATE")
        with at_most(0.5), pytest.raises(StorageUnavailableError, match="nothing was enqueued"):
            enqueue_it([batch(durable=True)])
        other.rollback()
    assert enqueued(storage, durable=True).status == "queued"
    assert storage.reads.counts(QUEUE)[State.WAITING] == 2


@pytest.mark.skipif("connection.vendor != 'sqlite'")
def test_change_waits_for_lock_of_another_process_no_longer_than_timeout(
    make_storage: MakeStorage,
) -> None:
    storage = make_storage(timeout=0.5)
    connection.ensure_connection()
    connection.connection.execute("PRAGMA busy_timeout=20000")
    with closing(sqlite3.connect(connection.settings_dict["NAME"], uri=True)) as other:
        other.execute("BEGIN IMMEDIATE")
        with at_most(1), pytest.raises(StorageUnavailableError, match="locked"):
            storage.queues.pause(QUEUE)
        other.rollback()


@pytest.mark.skipif("connection.vendor != 'sqlite'")
def test_error_for_unwritten_queue_change_states_that_change_is_in_effect(
    make_storage: MakeStorage,
) -> None:
    storage = make_storage()
    storage.connect()
    enqueued(storage)
    storage.reads.counts(QUEUE)
    with closing(sqlite3.connect(connection.settings_dict["NAME"], uri=True)) as other:
        other.execute("BEGIN IMMEDIATE")
        for change, is_paused in (
            (storage.queues.pause, True),
            (storage.queues.resume, False),
            (storage.queues.pause, True),
        ):
            with (
                within(0.3),
                pytest.raises(StorageUnavailableError, match="is in effect, and will be written"),
            ):
                change(QUEUE)
            assert storage.queues.is_paused(QUEUE) is is_paused
        other.rollback()
    eventually(lambda: models.QueueState.objects.filter(name=QUEUE, paused=True).exists())


def test_shorter_deadline_of_caller_applies(client: JournaledStorage, frozen: Child) -> None:
    with at_most(0.1), within(0.1), pytest.raises(StorageUnavailableError):
        client.queues.pause(QUEUE)
    assert client.outage is None  # so short a deadline says nothing about the scheduler


@pytest.mark.parametrize("timeout", [0, -1, 61, "2", True])
def test_invalid_timeout_is_rejected(make_storage: MakeStorage, timeout: object) -> None:
    with pytest.raises(ConfigurationError, match="TIMEOUT"):
        make_storage(timeout=timeout)


def _is_done(change: Callable[[], object]) -> bool:
    try:
        with at_most(7):
            change()
    except StorageUnavailableError:
        return False
    return True


@pytest.fixture
def locked_out(make_storage: MakeStorage) -> Iterator[JournaledStorage]:
    """A scheduler with TIMEOUT 0.5 whose journal is full while another process holds SQLite's write lock."""
    storage = make_storage(timeout=0.5)
    storage.connect()
    enqueued(storage)
    with closing(sqlite3.connect(connection.settings_dict["NAME"], uri=True)) as other:
        other.execute("BEGIN IMMEDIATE")
        with at_most(1), pytest.raises(StorageUnavailableError, match="nothing was enqueued"):
            storage.enqueue([batch(BACKLOG + 200)])
        yield storage
        other.rollback()
        storage.active.journal.sync()
    assert enqueued(storage).status == "queued"
    assert storage.reads.counts(QUEUE)[State.WAITING] == 2


@pytest.mark.skipif("connection.vendor != 'sqlite'")
@pytest.mark.parametrize("is_async", [False, True])
def test_enqueue_into_full_journal_ends_at_its_timeout(locked_out: JournaledStorage, is_async: bool) -> None:
    enqueue_it = async_to_sync(locked_out.aenqueue) if is_async else locked_out.enqueue
    with at_most(0.5), pytest.raises(StorageUnavailableError, match=r"for 0\.5 s; another"):
        enqueue_it([batch()])


@pytest.mark.skipif("connection.vendor != 'sqlite'")
async def test_enqueue_on_loop_into_full_journal_ends_at_its_timeout(
    locked_out: JournaledStorage,
) -> None:
    with at_most(0.5), pytest.raises(StorageUnavailableError, match=r"for 0\.5 s; another"):
        await locked_out.active._enqueue_soon([batch()])


@pytest.mark.skipif("connection.vendor != 'sqlite'")
@pytest.mark.parametrize("change", ["replace_payload", "move", "retry"])
def test_changes_that_wait_for_full_journal_end_at_timeout(locked_out: JournaledStorage, change: str) -> None:
    arguments = {
        "replace_payload": (QUEUE, "0", b"new", b"old"),
        "move": (QUEUE, ["0"], "other"),
        "retry": (QUEUE, ["0"]),
    }[change]
    with at_most(0.5), pytest.raises(StorageUnavailableError, match=r"for 0\.5 s; another"):
        getattr(locked_out.jobs, change)(*arguments)
