"""The probe of the health checks."""

import os
from contextlib import closing

import pytest
from django.db import DatabaseError, connection, transaction

from djqueue import models
from djqueue.core.deadlines import within
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.procfs import lock_holders
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.tables import dberrors
from djqueue.testing.factories import enqueue
from tests.support import elsewhere
from tests.tables import refusing

pytestmark = pytest.mark.dialect
READ_ONLY = {"sqlite": ("PRAGMA query_only = 1", "PRAGMA query_only = 0")}
READ_ONLY["postgresql"] = (
    "SET default_transaction_read_only = on",
    "RESET default_transaction_read_only",
)


def test_probe_of_writable_tables_finds_nothing_and_leaves_no_queue(make):
    storage: DatabaseStorage = make()

    assert list(storage.probe()) == list(storage.probe()) == []
    assert storage.queues.names() == []
    storage.sweep()
    assert storage.reads.overview().queues == []


def test_probe_raises_the_error_of_an_enqueue_with_its_remedy(make):
    storage: DatabaseStorage = make(connect=False)
    begin, end = READ_ONLY[connection.vendor]

    with connection.cursor() as cursor:
        cursor.execute(begin)
        for refused in (storage.probe, lambda: enqueue(storage)):
            with pytest.raises(StorageUnavailableError) as raised:
                refused()
            assert raised.value.remedy
            assert str(raised.value).endswith(raised.value.remedy)
        cursor.execute(end)
    assert list(storage.probe()) == []


@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])
def test_probe_names_the_session_that_has_locked_a_table(make, monkeypatch, mode):
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no locks of tables")
    storage: DatabaseStorage = make()

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE djqueue_job IN {mode} MODE")
            cursor.execute("SELECT pg_backend_pid()")
            [pid] = cursor.fetchone()
        assert elsewhere(lambda: list(storage.probe())) == []  # It is not long ago.
        monkeypatch.setattr(dberrors, "LOCKED_FOR", 0)
        [found] = elsewhere(lambda: list(storage.probe()))
    assert f"the table djqueue_job has been locked for 0 s by the session {pid} (" in found.text
    assert f"pg_terminate_backend({pid})" in found.hint
    assert list(storage.probe()) == []


def test_probe_reports_a_locked_sqlite_database_after_some_seconds_without_writes(make, monkeypatch):
    if connection.vendor != "sqlite":
        pytest.skip("other databases have no lock of everything")
    storage: DatabaseStorage = make(connect=False)

    def probe():
        with within(0.05):
            return list(storage.probe())

    with transaction.atomic():
        enqueue(storage)
        monkeypatch.setattr(dberrors, "LOCKED_FOR", float("inf"))
        assert elsewhere(probe) == []
        monkeypatch.setattr(dberrors, "LOCKED_FOR", 0)
        [found] = elsewhere(probe)
    assert "is locked" in found.text
    assert found.hint
    assert list(storage.probe()) == []


def test_process_that_has_locked_a_file_is_named(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "locked"
    with closing(path.open("w")) as file:
        assert lock_holders(str(path)) == []
        fcntl.lockf(file, fcntl.LOCK_EX, 8, 100)

        [holder] = lock_holders(str(path), 104)
        assert holder.startswith(f"{os.getpid()} (")
        assert lock_holders(str(path)) == [holder]
        assert lock_holders(str(path), 108) == []


@pytest.mark.parametrize("table", ["djqueue_ready", "djqueue_job_result"])
def test_probe_fails_while_a_table_is_missing(make, table):
    storage: DatabaseStorage = make()

    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO elsewhere")
        try:
            with pytest.raises(
                StorageUnavailableError, match=f"{table}.*(exist|such)|no such table.*{table}"
            ):
                storage.probe()
        finally:
            cursor.execute(f"ALTER TABLE elsewhere RENAME TO {table}")
    assert list(storage.probe()) == []


def test_probe_names_a_table_that_the_user_may_not_write_to(make):
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no users")
    storage: DatabaseStorage = make(connect=False)

    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE probing")
        cursor.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO probing")
        cursor.execute("REVOKE DELETE ON djqueue_ready FROM probing")
        try:
            cursor.execute("SET ROLE probing")
            with pytest.raises(StorageUnavailableError, match="may not read and write djqueue_ready: grant "):
                storage.probe()
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY probing")
            cursor.execute("DROP ROLE probing")


def test_lock_whose_age_is_hidden_is_reported_by_how_long_it_was_seen(monkeypatch):
    now = [1_000.0]
    monkeypatch.setattr(dberrors, "monotonic", lambda: now[0])
    monkeypatch.setattr(dberrors, "undated", dberrors.UndatedLocks())

    def found(is_waited_for, pid=7):
        locks = [("djqueue_job", pid, "psql", None, None, is_waited_for)]
        return [finding.text for finding in dberrors.locked_tables(lambda *_: locks)]

    # A process that has just begun cannot know since when the lock is held.
    assert found(False) == []
    assert found(True) == ["the table djqueue_job has been locked by the session 7 (psql)"]
    now[0] += dberrors.LOCKED_FOR
    assert found(True) == ["the table djqueue_job has been locked for 10 s by the session 7 (psql)"]
    # Later, the time since the first look counts, for each session.
    assert found(True, pid=8) == []
    now[0] += dberrors.LOCKED_FOR
    assert found(True, pid=8) == ["the table djqueue_job has been locked for 10 s by the session 8 (psql)"]
    assert found(True) == []


@pytest.mark.parametrize("mode", ["ACCESS EXCLUSIVE", "SHARE"])
def test_ages_of_other_sessions_are_unknown_without_a_right(make, mode):
    if connection.vendor != "postgresql":
        pytest.skip("SQLite has no users")

    def rows(statement, modes):
        with connection.cursor() as cursor:
            cursor.execute("CREATE ROLE probing")
            cursor.execute("SET ROLE probing")
            try:
                cursor.execute(statement.replace("?", "%s"), [modes])
                return cursor.fetchall()
            finally:
                cursor.execute("RESET ROLE")
                cursor.execute("DROP ROLE probing")

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLE djqueue_job IN {mode} MODE")
        [[table, _pid, _application, state, seconds, is_waited_for]] = elsewhere(
            lambda: rows(dberrors.LOCKS, dberrors.WHOLE_TABLE)
        )
    assert (table, state, seconds, is_waited_for) == ("djqueue_job", None, None, False)


def test_probe_raises_what_keeps_jobs_from_being_stored(make):
    storage: DatabaseStorage = make(connect=False)

    with refusing("NEW.priority = 0"), pytest.raises(DatabaseError, match=r"the project refused it|refused"):
        storage.probe()

    assert list(storage.probe()) == []
    assert models.Job.objects.count() == 0
