"""`manage.py djqueue backup`: from one storage to another, through the command line."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from djqueue.backup.store import BackupStore
from djqueue.client import get_storage
from djqueue.client.storages import close_storage
from djqueue.core.states import State
from djqueue.management.commands import djqueue
from djqueue.models import AuditEvent, BackupState, CronJob
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage
from djqueue.storage.tables.clock import DatabaseClock
from djqueue.storage.tables.leaderlease import LeaderLease
from djqueue.testing import factories as f

pytestmark = pytest.mark.django_db(transaction=True)

DATABASE = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
KINDS = ("database", "redis")


@pytest.fixture
def use(settings: Any, folder: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Chooses the storage of the project."""

    def use(kind: str, **backup: Any) -> Storage:
        close_storage()
        chosen: dict[str, Any] = DATABASE
        if kind == "redis":
            url = request.getfixturevalue("redis_server").url
            chosen = {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {"URL": url}}
        elif kind == "memory":
            chosen = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
        settings.DJQUEUE = {"STORAGE": chosen, "BACKUP": {"FOLDER": folder, "KEEP": 2, **backup}}
        return get_storage()

    yield use
    close_storage()


@pytest.fixture(params=KINDS)
def filled(request: pytest.FixtureRequest, use: Any) -> Storage:
    """A storage with jobs in some states, which no worker uses any more."""
    if request.param == "redis":
        request.getfixturevalue("redis_server").run("FLUSHALL")
    storage: Storage = use(request.param)
    fill(storage)
    return storage


def fill(storage: Storage) -> None:
    storage.connect()
    f.enqueue_many(storage, 3, queue="emails")
    f.enqueue(storage, queue="emails", delay=f.DELAY)
    f.a_failed_job(storage, queue="invoices")
    f.a_completed_job(storage, queue="invoices", result_ttl=f.DELAY)
    storage.queues.pause("invoices")
    close_storage()


def run(*arguments: str) -> str:
    output = StringIO()
    call_command(djqueue.Command(stderr=StringIO()), "backup", *arguments, stdout=output)
    return output.getvalue()


def document(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


def held() -> dict[str, dict[str, int]]:
    """What the project's storage holds: numbers of jobs by queue and state."""
    return {
        row.name: {state.value: number for state, number in row.counts.items() if number}
        for row in get_storage().reads.overview().queues
    }


HELD = {"emails": {"waiting": 3, "delayed": 1}, "invoices": {"failed": 1, "completed": 1}}


def test_backup_is_taken_listed_and_verified(filled: Storage, folder: Path) -> None:
    taken = document("now")
    assert taken["counts"]["jobs"] == {"completed": 1, "delayed": 1, "failed": 1, "waiting": 3}
    assert [one["name"] for one in document("list")["backups"]] == [taken["name"]]
    assert taken["name"] in run("list")
    assert document("verify", "--latest")["verified"]
    assert run("verify", taken["name"]) == (
        f"Backup {taken['name']} is intact: 6 jobs, 1 dead letter and 0 schedules.\n"
    )
    assert document("status")["latest"] == taken["name"]
    assert BackupState.objects.get().name == taken["name"]


@pytest.mark.parametrize("target", KINDS)
def test_backup_of_one_storage_is_restored_to_another(
    filled: Storage, use: Any, target: str, request: pytest.FixtureRequest
) -> None:
    run("now")
    if target == "redis":
        request.getfixturevalue("redis_server").run("FLUSHALL")
    use(target)
    force = ["--force"] if held() else []
    restored = document("restore", "--latest", "--no-input", *force)
    assert restored["written"]["jobs"] == 6
    assert held() == HELD
    assert get_storage().reads.overview(["invoices"]).queues[0].paused
    [event] = AuditEvent.objects.filter(action="backup_restore")
    assert (event.count, event.detail["backup"]) == (6, restored["name"])


def test_target_that_is_not_empty_is_rejected_and_named(filled: Storage) -> None:
    run("now")
    with pytest.raises(CommandError, match=r"is not empty: 6 jobs \(emails 4, invoices 2\).*--force"):
        run("restore", "--latest", "--no-input")
    assert held() == HELD
    assert not AuditEvent.objects.exists()


def test_force_replaces_contents_of_storage(filled: Storage) -> None:
    run("now")
    get_storage().connect()
    f.enqueue(get_storage(), queue="later")
    close_storage()
    assert "later" in held()
    run("restore", "--latest", "--no-input", "--force")
    assert held() == HELD


def test_dry_run_changes_nothing(filled: Storage) -> None:
    run("now")
    planned = document("restore", "--latest", "--dry-run")
    assert (planned["written"], planned["target_holds"]) == (None, "6 jobs (emails 4, invoices 2)")
    assert held() == HELD
    assert "this needs --force" in run("restore", "--latest", "--dry-run")


def test_without_terminal_restore_needs_no_input(filled: Storage) -> None:
    run("now")
    with pytest.raises(CommandError, match="--no-input") as caught:
        run("restore", "--latest", "--force")
    assert caught.value.returncode == MISUSED
    assert held() == HELD


def test_damaged_backup_is_rejected_before_anything_is_deleted(filled: Storage, folder: Path) -> None:
    taken = document("now")["name"]
    path = folder / f"{taken}.msgpack.gz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CommandError, match="SHA-256"):
        run("restore", taken, "--force", "--no-input")
    with pytest.raises(CommandError, match="SHA-256"):
        run("verify", taken)
    assert held() == HELD


# The rest is the same for every storage.


@pytest.fixture
def database(use: Any) -> Storage:
    storage: Storage = use("database")
    fill(storage)
    return storage


def test_oldest_backups_are_deleted(database: Storage) -> None:
    names = [document("now")["name"] for _ in range(3)]
    assert [one["name"] for one in document("list")["backups"]] == [names[2], names[1]]


def test_schedules_are_in_backup(database: Storage) -> None:
    CronJob.objects.create(name="nightly", job_name="shop.jobs.report", schedule="0 3 * * *", queue="emails")
    run("now")
    CronJob.objects.all().delete()
    run("restore", "--latest", "--no-input", "--force")
    assert [(row.name, row.schedule) for row in CronJob.objects.all()] == [("nightly", "0 3 * * *")]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "nightly"])
def test_backup_commands_reject_paths_as_names(database: Storage, name: str) -> None:
    with pytest.raises(CommandError, match="is not the name of a backup"):
        run("restore", name, "--no-input")


def test_backup_commands_require_name(database: Storage) -> None:
    with pytest.raises(CommandError, match="required"):
        run("restore")
    with pytest.raises(CommandError, match="there is no backup in the folder"):
        run("verify", "--latest")


def test_second_concurrent_backup_is_rejected(database: Storage) -> None:
    other = LeaderLease("default", DatabaseClock("default"), "backup")
    assert other.acquire()
    with pytest.raises(CommandError, match="a backup is being taken by process"):
        run("now")
    assert document("status")["running"].startswith("process")
    other.release()
    run("now")


def test_failed_backup_fails_command_and_is_shown_in_status(database: Storage, folder: Path) -> None:
    folder.write_text("not a folder")
    with pytest.raises(CommandError, match=r"the backup failed: .*(Not a directory|File exists)"):
        run("now")
    with pytest.raises(CommandError, match="cannot be used: NotADirectoryError"):
        run("status")


def test_status_of_project_without_backups_is_shown(database: Storage) -> None:
    shown = run("status")
    assert "Schedule:       every 6 h" in shown
    assert "Last backup:    none" in shown


def test_error_of_last_attempt_fails_status(database: Storage, monkeypatch: Any) -> None:
    def failing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(BackupStore, "save", failing)
        with pytest.raises(CommandError, match="No space left"):
            run("now")
    with pytest.raises(CommandError, match=r"the last attempt failed: .*No space left") as caught:
        run("status")
    assert caught.value.returncode == 1
    run("now")
    assert document("status")["problem"] is None


def test_overdue_backup_fails_status(database: Storage, use: Any, monkeypatch: Any) -> None:
    run("now")
    now = DatabaseClock.now
    monkeypatch.setattr(DatabaseClock, "now", lambda self: now(self) + 13 * 3_600_000)
    with pytest.raises(CommandError, match="the next backup is overdue"):
        run("status")
    use("database", EVERY=None)
    assert document("status")["scheduled"] is False


@pytest.mark.parametrize("verb", [["now"], ["restore", "--latest"]])
def test_backup_of_memory_storage_is_rejected(use: Any, verb: list[str]) -> None:
    use("memory")
    with pytest.raises(CommandError, match="only in the process that runs them") as caught:
        run(*verb)
    assert caught.value.returncode == MISUSED


def test_restored_jobs_run(database: Storage) -> None:
    run("now")
    run("restore", "--latest", "--no-input", "--force")
    storage = get_storage()
    storage.connect()
    assert len(f.claim_ids(storage, 10, queues=["emails"])) == 3
    assert storage.reads.page("invoices", State.FAILED, 1)[0].reason == "explicit_fail"
