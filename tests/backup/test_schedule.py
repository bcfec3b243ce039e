"""Backups that are taken regularly: when, by whom, and what happens when they fail."""

import errno
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from djqueue.backup import schedule as schedules
from djqueue.backup import transfer
from djqueue.backup.lease import BackupLease, BackupRunningError, HeldBackupLease
from djqueue.backup.schedule import BackupSchedule, backing_up, is_scheduled
from djqueue.backup.store import BackupStore
from djqueue.conf import BackupSettings, get_settings
from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.models import BackupState, LeaderLeaseRow
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.storage.tables.leaderlease import LeaderLease
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = 3_600_000


@pytest.fixture(autouse=True)
def configured(settings: Any, folder: Path) -> None:
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"},
        "BACKUP": {"EVERY": timedelta(hours=6), "FOLDER": folder, "KEEP": 2},
    }


@pytest.fixture
def schedule(storage: MemoryStorage, clock: Any) -> BackupSchedule:
    found = BackupSchedule(storage, get_settings().backup)
    found._clock = found._lease.clock = clock
    return found


def stop() -> threading.Event:
    return threading.Event()


def test_first_check_creates_backup_and_next_check_does_not(
    schedule: BackupSchedule, store: BackupStore
) -> None:
    schedule.look(stop())
    [name] = store.names()
    assert schedule.look(stop()) == schedules.LOOK_EVERY
    assert store.names() == [name]
    state = BackupState.objects.get()
    assert (state.name, state.error) == (name, "")
    assert state.ended_at is not None


def test_restart_neither_skips_backup_nor_takes_one_more(
    storage: MemoryStorage, store: BackupStore, clock: Any
) -> None:
    def restarted() -> int:
        found = BackupSchedule(storage, get_settings().backup)
        found._clock = found._lease.clock = clock
        return found.look(stop())

    restarted()
    clock.advance(6 * HOUR - 60_000)
    assert 0 < restarted() <= 60_000
    assert len(store.names()) == 1
    clock.advance(60_000)
    restarted()
    assert len(store.names()) == 2


def test_keep_setting_limits_number_of_backups(
    schedule: BackupSchedule, store: BackupStore, clock: Any
) -> None:
    for _ in range(4):
        schedule.look(stop())
        clock.advance(6 * HOUR)
    assert len(store.names()) == 2


def test_backup_from_future_does_not_delay_next_one(
    schedule: BackupSchedule, store: BackupStore, clock: Any
) -> None:
    clock.advance(1_000 * HOUR)
    schedule.look(stop())
    clock.advance(-1_000 * HOUR)
    schedule.look(stop())
    assert len(store.names()) == 2


def test_two_processes_create_one_backup(
    storage: MemoryStorage, store: BackupStore, monkeypatch: Any
) -> None:
    both = threading.Barrier(2)
    due_in = BackupSchedule._due_in
    looked = threading.local()

    def together(self: BackupSchedule, found: BackupStore) -> int:
        wait = due_in(self, found)
        if not getattr(looked, "once", False):
            looked.once = True
            both.wait(PATIENCE)
        return wait

    monkeypatch.setattr(BackupSchedule, "_due_in", together)
    threads = [
        threading.Thread(target=BackupSchedule(storage, get_settings().backup).look, args=(stop(),))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.names()) == 1


def test_no_backup_starts_while_another_process_creates_one(
    schedule: BackupSchedule, store: BackupStore
) -> None:
    other = LeaderLease("default", SYSTEM_CLOCK, "backup")
    assert other.acquire()
    assert schedule.look(stop()) == schedules.LOOK_WHILE_BUSY
    assert store.names() == []
    with (
        pytest.raises(BackupRunningError, match="a backup is being taken by process"),
        schedule._lease.acquire(1_000, stop()),
    ):
        raise AssertionError("unreachable")


def test_files_of_killed_process_are_deleted(
    schedule: BackupSchedule, store: BackupStore, folder: Path
) -> None:
    folder.mkdir()
    (folder / "djqueue-20200101T000000000Z-0123abcd.msgpack.gz").write_text("x")
    schedule.look(stop())
    assert store.leftovers() == {}


@pytest.fixture
def failing(monkeypatch: Any) -> list[Exception]:
    """Errors with which the next backups fail."""
    errors: list[Exception] = []
    take = transfer.take

    def failing(*args: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return take(*args)

    monkeypatch.setattr(schedules, "take", failing)
    return errors


def test_error_is_logged_once_and_shown_in_status(
    schedule: BackupSchedule, store: BackupStore, failing: list[Exception], caplog: Any
) -> None:
    failing += [OSError(errno.ENOSPC, "No space left on device")] * 2
    caplog.set_level(logging.WARNING, "djqueue.backup")
    assert schedule.look(stop()) == 60_000
    assert schedule.look(stop()) == 120_000
    [line] = caplog.messages
    assert "No space left on device" in line
    assert "No space left on device" in BackupState.objects.get().error
    schedule.look(stop())
    assert caplog.messages[1:] == ["Backups are taken again."]
    assert len(store.names()) == 1
    assert BackupState.objects.get().error == ""


def test_unexpected_error_is_logged_with_traceback(
    schedule: BackupSchedule, failing: list[Exception], caplog: Any
) -> None:
    failing.append(RuntimeError("a defect"))
    schedule.look(stop())
    [record] = caplog.records
    assert record.exc_info[1].args == ("a defect",)


def test_unwritable_backup_folder_is_reported_with_reason(
    schedule: BackupSchedule, folder: Path, caplog: Any
) -> None:
    folder.write_text("not a folder")
    schedule.look(stop())
    assert "The backup failed, and is tried again: the folder" in caplog.text


def test_stop_request_aborts_backup_without_error(
    schedule: BackupSchedule, store: BackupStore, caplog: Any, monkeypatch: Any
) -> None:
    stopping = stop()

    def stopped(storage: Any, store: Any, clock: Any, steps: Any) -> Any:
        stopping.set()
        return transfer.take(storage, store, clock, steps)

    monkeypatch.setattr(schedules, "take", stopped)
    caplog.set_level(logging.WARNING, "djqueue.backup")
    schedule.look(stopping)
    assert caplog.messages == []
    assert store.names() == []
    assert not LeaderLease("default", SYSTEM_CLOCK, "backup").number
    assert BackupLease(MemoryStorage()).holder() == ""


def test_backup_is_aborted_after_timeout(
    schedule: BackupSchedule, store: BackupStore, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("djqueue.backup.lease.RENEW_EVERY", 10)
    schedule._settings = BackupSettings(timeout=1, folder=get_settings().backup.folder)

    def slow(storage: Any, store: Any, clock: Any, steps: Any) -> Any:
        held: HeldBackupLease = steps.check.__self__
        eventually(lambda: held._over)
        return transfer.take(storage, store, clock, steps)

    monkeypatch.setattr(schedules, "take", slow)
    schedule.look(stop())
    assert "took longer than 0.001 s" in caplog.text
    assert store.names() == []


def test_process_that_lost_its_lease_publishes_no_backup(
    schedule: BackupSchedule, store: BackupStore, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("djqueue.backup.lease.RENEW_EVERY", 10)

    def frozen(storage: Any, store: Any, clock: Any, steps: Any) -> Any:
        LeaderLeaseRow.objects.filter(name="backup").update(generation=99, holder="another")
        held: HeldBackupLease = steps.check.__self__
        eventually(lambda: held._over)
        return transfer.take(storage, store, clock, steps)

    monkeypatch.setattr(schedules, "take", frozen)
    schedule.look(stop())
    assert "another process took over" in caplog.text
    assert store.names() == []
    assert LeaderLeaseRow.objects.get(name="backup").holder == "another"


def test_hanging_backup_thread_is_reported(schedule: BackupSchedule, clock: Any) -> None:
    assert not schedule.is_stuck
    schedule._begun = clock.monotonic()
    clock.advance(schedule._settings.timeout)
    assert not schedule.is_stuck
    clock.advance(schedules.STUCK_AFTER + 1)
    assert schedule.is_stuck


# The settings.


@pytest.fixture
def database() -> Iterator[DatabaseStorage]:
    found = DatabaseStorage()
    yield found
    found.close()


def test_by_default_database_is_backed_up_and_memory_is_not(
    settings: Any, storage: MemoryStorage, database: DatabaseStorage
) -> None:
    settings.DJQUEUE = {}
    assert is_scheduled(database, get_settings().backup)
    assert get_settings().backup.every == 6 * HOUR
    assert not is_scheduled(storage, get_settings().backup)


@pytest.mark.parametrize("backup", [None, {"EVERY": None}])
def test_backup_settings_disable_backups(settings: Any, database: DatabaseStorage, backup: Any) -> None:
    settings.DJQUEUE = {"BACKUP": backup}
    assert not is_scheduled(database, get_settings().backup)


def test_every_enables_backups_of_memory_storage(storage: MemoryStorage) -> None:
    assert is_scheduled(storage, get_settings().backup)


def test_worker_takes_backups_on_thread(settings: Any, storage: MemoryStorage, store: BackupStore) -> None:
    settings.DJQUEUE["BACKUP"]["EVERY"] = 0.01
    settings.DJQUEUE = dict(settings.DJQUEUE)
    with backing_up(storage):
        eventually(lambda: len(store.names()) == 2)


def test_error_for_missing_tables_names_migrate_command(
    schedule: BackupSchedule, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(BackupLease, "has_tables", lambda _: False)
    schedule.look(stop())
    assert "run manage.py migrate, or set DJQUEUE['BACKUP'] to None" in caplog.text
