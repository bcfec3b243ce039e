"""Calls end in time while another session has locked a table."""

import asyncio
import time
from contextlib import contextmanager
from threading import Event, Thread

import pytest
from django.db import connection, connections, transaction

from djqueue import Queue
from djqueue.core.deadlines import within
from djqueue.core.errors import ResultTimeoutError, StorageUnavailableError
from djqueue.core.states import State
from djqueue.testing.factories import QUEUE, batch, claim, completing, enqueue, enqueue_many, request
from tests.support import PATIENCE, elsewhere, eventually

pytestmark = pytest.mark.dialect
SHORT = 0.3
"""Seconds for which the calls wait for locks."""
TABLES = [
    *("job", "ready", "delayed", "claim", "dependency", "unique_key", "tally", "queue_state", "group_state"),
    *(
        "dead_letter",
        "worker_state",
        "job_result",
        "job_attempt",
        "held",
        "event",
        "observed",
        "limiter_state",
    ),
]
CALLS = {
    "enqueue": lambda storage: storage.enqueue([batch(unique_key="k", delay=1_000)]),
    "enqueue many": lambda storage: enqueue_many(storage, 20),
    "cancel": lambda storage: storage.jobs.cancel(QUEUE, ["a"]),
    "retry": lambda storage: storage.jobs.retry(QUEUE, ["a"]),
    "pause": lambda storage: storage.queues.pause(QUEUE),
    "is paused": lambda storage: storage.queues.is_paused(QUEUE),
    "counts": lambda storage: storage.reads.counts(QUEUE),
    "job": lambda storage: storage.reads.jobs(QUEUE, ["a"]),
    "page": lambda storage: storage.reads.page(QUEUE, None, 10),
    "overview": lambda storage: storage.reads.overview(None),
    "dead letters": lambda storage: storage.reads.dead_letters(QUEUE),
    "workers": lambda storage: storage.workers.all(),
    "limit": lambda storage: storage.queues.set_limits(QUEUE, None, 2),
}


@contextmanager
def locked(*tables):
    """Let another session lock tables, and do nothing."""
    is_locked, is_over = Event(), Event()

    def hold():
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                if connection.vendor == "postgresql":
                    cursor.execute("SET LOCAL application_name = 'a report'")
                    for table in tables:
                        cursor.execute(f"LOCK TABLE djqueue_{table} IN ACCESS EXCLUSIVE MODE")
                else:
                    cursor.execute("UPDATE djqueue_job SET id = id")
                is_locked.set()
                assert is_over.wait(PATIENCE)
        finally:
            connections.close_all()

    thread = Thread(target=hold)
    thread.start()
    try:
        assert is_locked.wait(PATIENCE)
        yield
    finally:
        is_over.set()
        thread.join()


def ends(call):
    """Call a function that may find the storage unavailable; return the error."""
    began = time.monotonic()
    try:
        call()
    except StorageUnavailableError as error:
        return error
    finally:
        assert time.monotonic() - began < 20 * SHORT
    return None


def lock_timeout():
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('lock_timeout'), current_setting('statement_timeout')")
        return cursor.fetchone()


@pytest.mark.parametrize("is_connected", [False, True], ids=["producer", "worker"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_call_ends_while_another_session_has_locked_all_tables(make, call, is_connected):
    storage = make(connect=is_connected, timeout=SHORT)
    enqueue(storage, id="a")

    with locked(*TABLES):
        error = ends(lambda: call(storage))

    assert error is not None or connection.vendor == "sqlite"
    call(storage)


def on_postgresql():
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has one writer, and no settings of transactions")


def test_error_names_the_session_that_holds_the_lock(make):
    on_postgresql()
    storage = make(connect=False, timeout=SHORT)

    with locked("job"):
        error = ends(lambda: enqueue(storage))

    assert "(application 'a report', idle in transaction) holds AccessExclusiveLock on djqueue_job" in str(
        error
    )


@pytest.mark.parametrize("notify", [True, False], ids=["session", "pooler"])
def test_limits_do_not_stay_with_the_connection(make, notify):
    on_postgresql()
    storage = make(connect=False, notify=notify, timeout=SHORT)
    before = lock_timeout()

    with within(PATIENCE):
        enqueue(storage)
        storage.reads.counts(QUEUE)
        storage.queues.is_paused(QUEUE)
    with locked("job"):
        ends(lambda: enqueue(storage))

    assert lock_timeout() == before


def test_limits_do_not_stay_with_the_transaction_of_the_caller(make):
    on_postgresql()
    storage = make(timeout=SHORT)
    with connection.cursor() as cursor, transaction.atomic():
        cursor.execute("SET LOCAL lock_timeout = '77s'")
        before = lock_timeout()
        with within(PATIENCE):
            enqueue(storage)
            storage.reads.counts(QUEUE)
            storage.queues.is_paused(QUEUE)
        assert lock_timeout() == before
        with pytest.raises(KeyError):
            storage.database.read(lambda tx: {}["missing"])
        assert lock_timeout() == before


def test_transaction_of_the_caller_goes_on_after_a_lock_that_was_waited_for_in_vain(make):
    on_postgresql()
    storage = make(timeout=SHORT)
    with transaction.atomic():
        before = lock_timeout()
        enqueue(storage, id="first")
        with locked("unique_key"):
            error = ends(lambda: enqueue(storage, unique_key="k"))
        assert "holds AccessExclusiveLock on djqueue_unique_key" in str(error)
        assert lock_timeout() == before
        enqueue(storage, id="second")

    assert storage.reads.counts(QUEUE)[State.WAITING] == 2


def test_shorter_limits_of_the_project_apply(make):
    on_postgresql()
    storage = make(connect=False, timeout=PATIENCE)
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{int(SHORT * 1_000)}ms'")

    with locked("job"):
        assert "holds AccessExclusiveLock" in str(ends(lambda: enqueue(storage)))
    assert lock_timeout()[0] == f"{int(SHORT * 1_000)}ms"


@pytest.mark.parametrize("table", ["job", "job_result", "event"])
def test_caller_that_waits_for_a_result_gets_an_error_in_time(make, table):
    storage = make(connect=False)
    queue = Queue(QUEUE, storage=storage)

    with locked(table):
        began = time.monotonic()
        with pytest.raises((StorageUnavailableError, ResultTimeoutError)):
            queue.enqueue_and_wait("send", wait=SHORT)
        assert time.monotonic() - began < 20 * SHORT


def test_worker_logs_once_whose_lock_holds_up_its_claims(make, monkeypatch, caplog):
    on_postgresql()
    monkeypatch.setattr("djqueue.storage.database.storage.HELD_UP_AFTER", SHORT)
    storage = make()
    enqueue(storage)

    def claims():
        return asyncio.run(storage.afinish([], request(1))).claims.jobs

    with locked("ready"):
        eventually(lambda: claims() == [] and "AccessExclusiveLock on djqueue_ready" in caplog.text)
        for _ in range(3):
            assert claims() == []

    assert len(claims()) == 1
    [record] = [record for record in caplog.records if record.name == "djqueue.storage"]
    assert "(application 'a report', idle in transaction)" in record.getMessage()


def test_worker_logs_nothing_of_locks_that_are_held_for_a_moment(make, monkeypatch, caplog):
    on_postgresql()
    storage = make()
    enqueue_many(storage, 2)
    first, second = claim(storage, 2)

    with transaction.atomic():
        storage.jobs.cancel(QUEUE, [first.id])
        finished = elsewhere(lambda: asyncio.run(storage.afinish([completing(first), completing(second)])))

    assert finished.accepted == [None, True]
    assert caplog.records == []


def test_timeout_also_limits_waits_on_sqlite(make):
    storage = make(connect=False, timeout=SHORT)
    if connection.vendor != "sqlite":
        pytest.skip("a lock of all tables")
    with locked():
        assert "database is locked" in str(ends(lambda: enqueue(storage)))
