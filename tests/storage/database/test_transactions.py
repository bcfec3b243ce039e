"""Transactions and connections: the caller's, and those of the storage."""

import asyncio
import logging
import os
import sqlite3
import threading
from contextlib import closing, contextmanager

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, connections, transaction

from djqueue import models
from djqueue.client import Queue
from djqueue.core.deadlines import within
from djqueue.core.errors import (
    ConfigurationError,
    OptionError,
    QueueFullError,
    StorageReplacedError,
    StorageUnavailableError,
    WaitInTransactionError,
)
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import State
from djqueue.fields import NAME_LENGTH
from djqueue.storage.database import DatabaseStorage, dialects, reads, writebuffer
from djqueue.storage.database.dialects import LockFile, SqliteSql
from djqueue.storage.database.transaction import Tx
from djqueue.testing.factories import (
    QUEUE,
    batch,
    claim_ids,
    counts,
    enqueue,
    enqueue_many,
    request,
    state,
    worker,
)
from djqueue.testing.waiting import Recorder, Wakes
from tests.statements import recorded
from tests.support import PATIENCE, eventually

from .programs import Child

on_postgresql = pytest.mark.skipif("connection.vendor != 'postgresql'", reason="of PostgreSQL")
on_sqlite = pytest.mark.skipif("connection.vendor != 'sqlite'", reason="of SQLite")


@contextmanager
def undone():
    """A transaction that is rolled back."""
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def own(storage, statement):
    """Return the first value of a statement on a connection of the storage."""
    return storage.database.read(lambda tx: tx.value(statement))


# The caller's transaction.


@on_postgresql
def test_enqueue_takes_few_exchanges_with_the_server(make):
    storage = make(connect=False)
    enqueue(storage)

    with recorded() as alone:
        enqueue(storage)
    with transaction.atomic(), recorded() as joined:
        enqueue(storage)

    # Without what begins and ends a transaction: the key, the rows, and what was counted of them, which may
    # go with the rows. A notification may follow, if the last one is a while ago.
    alone, joined = ([one for one in all_ if "pg_notify" not in one] for all_ in (alone, joined))
    assert len(alone) <= 3
    assert [statement for statement in joined if "SAVEPOINT" in statement] == joined[:1]
    assert len(joined[1:]) <= 3


@pytest.mark.parametrize("connect", [True, False])
def test_rolled_back_transaction_leaves_nothing(make, connect):
    storage, wakes, recorder = make(connect=connect), Wakes(), Recorder()
    storage.listen(None, wakes)
    storage.events.subscribe(QUEUE, recorder)
    wakes.forget()

    with undone():
        enqueue(storage, id="undone")
        assert state(storage, "undone") is State.WAITING

    enqueue(storage, id="done")
    assert wakes.arrived()
    recorder.until("enqueued", "done")
    assert recorder.words() == ["enqueued"]
    assert claim_ids(storage, 5) == ["done"]
    assert counts(storage)[State.ACTIVE] == 1


@pytest.mark.parametrize("connect", [True, False])
def test_committed_transaction_wakes_and_publishes_then(make, connect):
    storage, wakes, recorder = make(connect=connect), Wakes(), Recorder()
    storage.listen(None, wakes)
    storage.events.subscribe(QUEUE, recorder)
    wakes.forget()

    with transaction.atomic():
        job_id = enqueue(storage)
        assert wakes.count == 0
        assert recorder.words() == []

    assert wakes.arrived()
    recorder.until("enqueued", job_id)


def test_rolled_back_savepoint_leaves_nothing(make):
    storage, recorder = make(), Recorder()
    storage.events.subscribe(QUEUE, recorder, "inner")
    with transaction.atomic():
        enqueue(storage, id="outer")
        with undone():
            enqueue(storage, id="inner")

    assert claim_ids(storage, 5) == ["outer"]
    # A job that was about to be published does not stay unnoticed.
    enqueue(storage, id="inner")
    recorder.until("enqueued")
    eventually(lambda: not storage.events._unpublished)


def test_coroutine_of_a_synchronous_caller_joins_its_transaction(make):
    storage = make()
    with undone():
        async_to_sync(storage.aenqueue)([batch(ids=["a"])])
        assert state(storage, "a") is State.WAITING

    assert state(storage, "a") is None


# Connections.


def test_connected_storage_leaves_the_connections_of_threads_alone(make):
    storage = make()
    connection.close()

    enqueue(storage)
    claim_ids(storage)

    assert connection.connection is None


def test_storage_without_connections_of_its_own_uses_those_of_threads(make):
    storage = make(connect=False)
    connection.close()

    enqueue(storage)

    assert connection.connection is not None
    assert storage.database.connections._idle == []


def test_orm_uses_the_connection_of_the_transaction(make):
    storage = make()

    def work(tx):
        tx.run("UPDATE djqueue_job SET name = 'changed'")
        return models.Job.objects.get().name

    enqueue(storage)
    assert storage.database.write(work) == "changed"


def test_threads_share_a_small_number_of_connections(make):
    storage = make()
    threads = [threading.Thread(target=lambda: enqueue_many(storage, 5)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counts(storage)[State.WAITING] == 100
    assert 1 <= len(storage.database.connections._idle) <= 8


def test_waiting_for_a_connection_ends_with_the_call(make):
    storage = make()
    for _ in range(8):
        assert storage.database.connections._slots.acquire()
    try:
        with within(0.05), pytest.raises(StorageUnavailableError, match="in use"):
            enqueue(storage)
    finally:
        storage.database.connections._slots.release(8)


def test_closed_storage_has_no_connections(make):
    storage = make()
    enqueue(storage)
    [idle] = storage.database.connections._idle
    storage.close()

    assert idle.wrapper.connection is None
    assert enqueue(storage)  # On the thread's connection.


def test_coroutines_run_in_the_thread_of_a_connected_storage(make):
    storage = make()

    async def names():
        return {await storage.acall(lambda: threading.current_thread().name) for _ in range(3)}

    [name] = asyncio.run(names())
    assert name.startswith("djqueue-storage")


def test_deadline_of_a_coroutine_reaches_the_thread(make):
    storage = make()
    for _ in range(8):
        storage.database.connections._slots.acquire()

    async def call():
        with within(0.05):
            await storage.aenqueue([batch()])

    try:
        with pytest.raises(StorageUnavailableError, match="in use"):
            asyncio.run(call())
    finally:
        storage.database.connections._slots.release(8)


@on_postgresql
def test_connections_that_the_server_has_ended_are_replaced(make, monkeypatch):
    monkeypatch.setattr("djqueue.storage.database.connections.TEST_AFTER_IDLE", 0.0)
    storage = make()
    enqueue(storage)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'djqueue' AND datname = current_database()"
        )
        assert cursor.fetchall()

    enqueue(storage)

    assert counts(storage)[State.WAITING] == 2


@on_postgresql
def test_connection_that_breaks_in_a_call_is_not_used_again(make):
    storage = make()

    def work(tx):
        tx.run("SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(StorageUnavailableError):
        storage.database.write(work)

    assert enqueue(storage)


@on_postgresql
def test_plans_that_a_migration_has_outdated_are_replaced(make):
    storage = make()
    enqueue_many(storage, dialects.PREPARED + 3)
    for _ in range(dialects.PREPARED + 1):
        assert len(claim_ids(storage)) == 1
    change = "ALTER TABLE djqueue_job ALTER COLUMN job_id TYPE varchar({})"
    with connection.cursor() as cursor:
        cursor.execute(change.format(300))
        try:
            assert len(claim_ids(storage)) == 1
        finally:
            cursor.execute(change.format(NAME_LENGTH))


@on_postgresql
def test_own_connections_limit_their_statements(make):
    storage = make()

    assert own(storage, "SELECT current_setting('statement_timeout')") == "30s"
    assert own(storage, "SELECT current_setting('lock_timeout')") == "5s"
    assert own(storage, "SELECT current_setting('idle_in_transaction_session_timeout')") == "1min"
    assert own(storage, "SELECT current_setting('application_name')") == "djqueue"
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('statement_timeout')")
        assert cursor.fetchone() == ("0",)


@on_postgresql
def test_settings_of_the_project_stay(make):
    options = connections.settings["default"]["OPTIONS"]
    options["options"] = "-c statement_timeout=7s"
    try:
        assert own(make(), "SELECT current_setting('statement_timeout')") == "7s"
    finally:
        del options["options"]


@on_postgresql
def test_each_transaction_is_limited_behind_a_pooler(make):
    storage = make(notify=False)

    assert storage.database.write(lambda tx: tx.value("SELECT current_setting('lock_timeout')")) == "5s"
    assert own(storage, "SELECT current_setting('lock_timeout')") == "5s"
    with storage.database.connections.borrow() as wrapper, wrapper.cursor() as cursor:
        assert cursor.execute("SELECT current_setting('lock_timeout')").fetchone() == ("0",)


@on_sqlite
def test_own_connections_are_tuned(make):
    storage = make()

    assert own(storage, "PRAGMA synchronous") == 1
    assert own(storage, "PRAGMA temp_store") == 2
    assert own(storage, "PRAGMA cache_size") == -64_000
    assert own(storage, "PRAGMA journal_mode") == "wal"


@on_sqlite
@pytest.mark.parametrize(("chosen", "kept"), [("delete", "wal"), ("persist", "persist"), ("wal", "wal")])
def test_chosen_journal_mode_stays(tables, tmp_path, chosen, kept):
    wrapper = connections.create_connection("default")
    wrapper.settings_dict = {**wrapper.settings_dict, "NAME": str(tmp_path / "db")}
    with closing(wrapper), wrapper.cursor() as cursor:
        cursor.execute(f"PRAGMA journal_mode={chosen}")
        cursor.fetchall()
        SqliteSql().prepare(wrapper)
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == (kept,)


@pytest.mark.parametrize(
    ("mode", "has_workers", "level"),
    [("delete", False, "ok"), ("delete", True, "warn"), ("persist", False, "warn"), ("wal", True, "ok")],
)
def test_journal_mode_is_a_warning_unless_the_first_worker_will_change_it(mode, has_workers, level):
    assert reads.journal_mode(mode, has_workers=has_workers).level == level


@on_sqlite
def test_database_in_memory_is_used_by_its_thread(tables):
    with Child("memory") as child:
        assert child.line() == "['a'] ['enqueued', 'started'] 1"
        assert child.finish() == 0


# Writers of SQLite.


@contextmanager
def locked_by_another_program():
    """The write lock of SQLite, held by a connection that knows nothing of djqueue."""
    other = sqlite3.connect(connection.settings_dict["NAME"], isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield other
    finally:
        other.close()


@on_sqlite
@pytest.mark.parametrize("connect", [True, False])
def test_busy_database_is_an_error_with_a_remedy(make, connect):
    storage = make(connect=connect)
    with locked_by_another_program(), within(0.2), pytest.raises(StorageUnavailableError) as caught:
        enqueue(storage)

    assert "database is locked" in str(caught.value)
    assert "raise 'timeout' in OPTIONS of DATABASES['default']" in str(caught.value)
    assert enqueue(storage)


@on_sqlite
def test_held_lock_file_ends_the_wait_with_the_call(make):
    storage, other = make(), LockFile(str(connection.settings_dict["NAME"]))
    assert other.acquire(1)
    try:
        with within(0.05), pytest.raises(StorageUnavailableError, match="database is locked"):
            enqueue(storage)
    finally:
        other.release()
        other.close()
    assert enqueue(storage)


@on_sqlite
def test_wait_limit_does_not_outlive_its_call(make):
    storage = make()
    with within(0.5):
        enqueue(storage)

    assert own(storage, "PRAGMA busy_timeout") == 5_000


class ThreadOfWork:
    """Records the threads that publish events: each does so after its own transaction."""

    def __init__(self, storage):
        self.threads = []
        storage.events.subscribe(QUEUE, lambda event: self.threads.append(threading.current_thread()))


@on_sqlite
async def test_coroutine_claims_on_its_own_thread_if_nobody_else_writes(make):
    storage = await asyncio.to_thread(make)
    await asyncio.to_thread(enqueue, storage)
    seen = ThreadOfWork(storage)

    done = await storage.afinish([], request())

    assert len(done.claims.jobs) == 1
    assert seen.threads == [threading.current_thread()]
    await asyncio.to_thread(storage.close)


@on_sqlite
@pytest.mark.parametrize("holder", ["another program", "another writer of djqueue"])
async def test_coroutine_that_has_to_wait_does_not_block_its_thread(make, holder):
    storage = await asyncio.to_thread(make)
    await asyncio.to_thread(enqueue, storage)
    seen = ThreadOfWork(storage)
    turns = LockFile(str(connection.settings_dict["NAME"]))
    if holder == "another program":
        with locked_by_another_program():
            waiting = asyncio.ensure_future(storage.afinish([], request()))
            await asyncio.sleep(0)  # It has begun to wait, or would block this thread now.
            assert not waiting.done()
    else:
        assert turns.acquire(1)
        waiting = asyncio.ensure_future(storage.afinish([], request()))
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.release()

    assert len((await waiting).claims.jobs) == 1
    assert threading.current_thread() not in seen.threads
    turns.close()
    await asyncio.to_thread(storage.close)


@on_sqlite
async def test_coroutine_sees_what_its_process_has_enqueued_in_its_buffer(make):
    storage = await asyncio.to_thread(make)
    await asyncio.to_thread(enqueue, storage, id="buffered", durable=False)

    assert [job.id for job in (await storage.afinish([], request())).claims.jobs] == ["buffered"]
    await asyncio.to_thread(storage.close)


@on_sqlite
async def test_step_that_fails_on_the_thread_of_a_loop_leaves_nothing(make, monkeypatch):
    storage = await asyncio.to_thread(make)
    await asyncio.to_thread(enqueue, storage)

    def fail(tx):
        raise RuntimeError("after the claim")

    with monkeypatch.context() as patched:
        patched.setattr(Tx, "flush", fail)
        with pytest.raises(RuntimeError, match="after the claim"):
            await storage.afinish([], request())

    assert len((await storage.afinish([], request())).claims.jobs) == 1
    await asyncio.to_thread(storage.close)


def test_lock_file_is_held_by_one_at_a_time(tmp_path):
    database = tmp_path / "db"
    database.touch(0o640)
    one, two = LockFile(str(database)), LockFile(str(database))

    assert one.acquire(0)
    assert not two.acquire(0.01)
    assert not one.acquire(0.01)
    one.release()
    assert two.acquire(0)
    two.release()

    assert os.stat(f"{database}{dialects.SUFFIX}").st_mode & 0o777 == 0o640
    one.close()
    two.close()


def test_database_whose_folder_is_read_only_has_no_lock_file(tmp_path, caplog):
    lock = LockFile(str(tmp_path / "missing" / "db"))

    assert lock.acquire(0)
    lock.release()
    assert lock.acquire(0)
    lock.release()

    assert caplog.text.count("Could not open the lock file") == 1


@on_sqlite
def test_heartbeat_fails_after_the_file_of_the_database_was_removed_or_replaced(make, tmp_path):
    storage = make()
    path = connection.settings_dict["NAME"]
    storage.workers.register(worker())

    os.rename(path, tmp_path / "aside")
    try:
        with pytest.raises(StorageReplacedError, match="removed or replaced while this process had it open"):
            storage.workers.register(worker())
        (tmp_path / "other").touch()
        os.rename(tmp_path / "other", path)
        with pytest.raises(StorageReplacedError):
            storage.workers.register(worker())
    finally:
        os.rename(tmp_path / "aside", path)

    assert storage.workers.register(worker()) == ()


# Durability.


@on_sqlite
def test_durable_enqueue_is_synced(make):
    storage = make()
    with storage.database.connections.borrow() as wrapper:
        statements = []
        wrapper.connection.set_trace_callback(statements.append)

    enqueue(storage, durable=True)
    enqueue(storage)

    about = [text for text in statements if text.startswith(("PRAGMA synchronous=", "BEGIN", "COMMIT"))]
    assert about == [
        "PRAGMA synchronous=FULL",
        "BEGIN IMMEDIATE",
        "COMMIT",
        "PRAGMA synchronous=1",
        "BEGIN IMMEDIATE",
        "COMMIT",
    ]


@on_postgresql
def test_durable_transaction_is_synced(make):
    storage = make()
    with storage.database.connections.borrow() as wrapper, wrapper.cursor() as cursor:
        cursor.execute("SET synchronous_commit = off")
    shown = "SELECT current_setting('synchronous_commit')"

    assert storage.database.write(lambda tx: tx.value(shown), durable=True) == "on"
    assert storage.database.write(lambda tx: tx.value(shown)) == "off"
    with transaction.atomic():
        connection.cursor().execute("SET LOCAL synchronous_commit = off")
        assert storage.database.write(lambda tx: tx.value(shown), durable=True) == "on"


# Jobs that are written a moment later.


def test_job_that_is_not_durable_does_not_join_the_transaction(make):
    storage = make(connect=False)
    with undone():
        assert enqueue(storage, id="a", durable=False) == "a"

    eventually(lambda: models.Job.objects.exists())
    assert claim_ids(storage) == ["a"]


@pytest.mark.parametrize("durable", [None, False])
def test_waiting_in_a_transaction_is_refused_if_the_job_cannot_start(make, durable):
    queue = Queue("default", storage=make(connect=False), durable=durable)
    can_leave = connection.vendor == "postgresql"
    if durable is False and can_leave:
        pytest.skip("the job starts")
    with undone():
        result = queue.enqueue(1)
        for wait in (lambda: queue.enqueue_and_wait(1, wait=600), lambda: result.wait(600)):
            with pytest.raises(WaitInTransactionError) as refused:
                wait()
            assert ("durable=False" in str(refused.value)) is can_leave


def test_interrupted_write_of_jobs_that_are_not_durable_is_repeated(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make()
    job_id = enqueue(storage, durable=False)
    write = storage.database.transactions.write_apart

    def interrupted(work):
        write(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(storage.database.transactions, "write_apart", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.buffer.flush()

    storage.buffer.flush()
    assert [claim_ids(storage), storage.buffer.lost] == [[job_id], 0]


def test_call_that_has_waited_for_a_write_that_fails_does_not_try_it_again(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "RETRY_INTERVAL", 3_600.0)
    storage, begun, waits, goes_on, tries = (
        make(),
        threading.Event(),
        threading.Event(),
        threading.Event(),
        [],
    )
    lock, errors = storage.buffer._writing, []

    class Announced:
        def __enter__(self):
            waits.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def fail(work):
        tries.append(work)
        begun.set()
        assert goes_on.wait(PATIENCE)
        raise StorageUnavailableError("a lock")

    def read():
        try:
            storage.queues.names()
        except StorageUnavailableError as error:
            errors.append(str(error))

    with monkeypatch.context() as patch:
        patch.setattr(storage.database.transactions, "write_apart", fail)
        job_id = enqueue(storage, durable=False)
        assert begun.wait(PATIENCE)
        patch.setattr(storage.buffer, "_writing", Announced())
        caller = threading.Thread(target=read)
        caller.start()
        assert waits.wait(PATIENCE)
        goes_on.set()
        caller.join(PATIENCE)

    assert (len(tries), errors) == (1, ["a lock"])
    assert state(storage, job_id) is State.WAITING


def test_read_waits_for_jobs_that_are_being_written(make, monkeypatch):
    storage = make()
    begun, goes_on = threading.Event(), threading.Event()
    write = storage.database.transactions.write_apart

    def slowly(work):
        begun.set()
        assert goes_on.wait(PATIENCE)
        return write(work)

    monkeypatch.setattr(storage.database.transactions, "write_apart", slowly)
    job_id = enqueue(storage, durable=False)
    assert begun.wait(PATIENCE)
    assert storage.buffer

    goes_on.set()

    assert state(storage, job_id) is State.WAITING
    assert not storage.buffer


def test_process_sees_the_jobs_that_it_has_enqueued_before(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make()
    job_id = enqueue(storage, durable=False)
    assert not models.Job.objects.exists()

    assert state(storage, job_id) is State.WAITING


def test_many_jobs_are_written_together(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make()
    for _ in range(100):
        enqueue(storage, durable=False)

    eventually(lambda: models.Job.objects.count() == 100)


def test_closing_writes_what_waits(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make(connect=False)
    enqueue(storage, durable=False)

    storage.close()

    assert models.Job.objects.count() == 1


def test_duplicate_of_a_job_that_is_not_durable_is_known(make):
    storage = make()
    enqueue(storage, id="a", unique_key="k")

    [result] = storage.enqueue([batch(unique_key="k", durable=False)])

    assert (result.status, result.id) == ("duplicate", "a")


def test_full_queue_is_refused_at_once(make):
    storage = make(policies={QUEUE: QueuePolicy(max_size=1)})
    enqueue(storage, durable=False)

    with pytest.raises(QueueFullError):
        enqueue(storage, durable=False)
    with transaction.atomic(), pytest.raises(QueueFullError):
        enqueue(storage, durable=False)


def test_wrong_options_are_refused_at_once(make):
    storage = make(policies={QUEUE: QueuePolicy(key_mode="keyed")})

    with pytest.raises(OptionError):
        enqueue(storage, durable=False)


def test_jobs_wait_for_a_database_that_is_away(make, monkeypatch, caplog):
    monkeypatch.setattr(writebuffer, "RETRY_INTERVAL", 0.01)
    storage = make(connect=False)
    write, failures = storage.database.transactions.write_apart, []

    def fail_twice(work):
        if len(failures) < 2:
            failures.append(True)
            raise StorageUnavailableError("away")
        return write(work)

    monkeypatch.setattr(storage.database.transactions, "write_apart", fail_twice)
    enqueue(storage, durable=False)

    eventually(lambda: models.Job.objects.count() == 1)
    assert "retrying: away" in caplog.text
    assert storage.buffer.lost == 0


def test_full_buffer_refuses_jobs(make, monkeypatch):
    monkeypatch.setattr(writebuffer, "MAX_JOBS", 2)
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make(connect=False)
    for _ in range(2):
        enqueue(storage, durable=False)

    with pytest.raises(StorageUnavailableError, match="2 jobs with durable=False wait"):
        enqueue(storage, durable=False)


def test_job_that_cannot_be_written_is_counted_and_takes_no_others_with_it(make, monkeypatch, caplog):
    monkeypatch.setattr(writebuffer, "WRITE_DELAY", 3_600.0)
    storage = make(connect=False)
    write = storage.database.transactions.write_apart

    def refuse_one(work):
        def refusing(tx):
            work(tx)
            if any(result.id == "bad" for result in tx.results):
                raise OptionError("bad job")

        return write(refusing)

    monkeypatch.setattr(storage.database.transactions, "write_apart", refuse_one)
    for job_id in ("good", "bad", "other"):
        storage.enqueue([batch(ids=[job_id], durable=False)._replace(fresh=True)])
    with caplog.at_level(logging.ERROR):
        storage.buffer.flush()

    assert sorted(models.Job.objects.values_list("job_id", flat=True)) == ["good", "other"]
    assert storage.buffer.lost == 1
    assert "1 job of queue 'default' with durable=False could not be enqueued" in caplog.text


def test_subscriber_to_buffered_jobs_may_use_the_storage(make):
    storage, recorder = make(), Recorder()

    def follow_up(event):
        if event.id == "a" and event.event == "enqueued":
            enqueue(storage, id="b")

    storage.events.subscribe(QUEUE, follow_up)
    storage.events.subscribe(QUEUE, recorder)
    storage.enqueue([batch(ids=["a"], durable=False)._replace(fresh=True)])

    recorder.until("enqueued", "b")
    assert claim_ids(storage, 5) == ["a", "b"]


@on_sqlite
def test_old_version_of_sqlite_is_refused(tables, monkeypatch):
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr("sqlite3.sqlite_version", "3.34.1")

    with pytest.raises(
        ConfigurationError, match=r"Python has SQLite 3\.34\.1, and djqueue needs 3\.35 or newer"
    ):
        DatabaseStorage()


@pytest.mark.parametrize("call", ["sync", "async"])
def test_full_queue_refuses_at_once_inside_a_transaction(make, call):
    # It would keep its locks while it waits, and on SQLite, nobody could make room.
    hours = 10_000_000
    storage = make(policies={QUEUE: QueuePolicy(max_size=1, when_full="block", block_timeout=hours)})
    enqueue(storage)

    send = storage.enqueue if call == "sync" else async_to_sync(storage.aenqueue)
    with transaction.atomic(), pytest.raises(QueueFullError):
        send([batch()])
