"""The probe of the health checks."""

import os
from contextlib import closing

import pytest
from django.db import connection, transaction

from djqueue.core.deadlines import within
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.procfs import lock_holders
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.tables import dberrors
from djqueue.testing.factories import enqueue
from tests.support import elsewhere

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
