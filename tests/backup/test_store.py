"""The files of backups: what is complete, what is refused, and what is left of a killed process."""

import errno
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage, InMemoryStorage

from djqueue.backup import transfer
from djqueue.backup.archive import Metadata
from djqueue.backup.lease import BackupCancelledError
from djqueue.backup.store import BackupStore, default_folder
from djqueue.backup.transfer import Steps
from djqueue.conf import BackupSettings
from djqueue.core.errors import (
    BackupDamagedError,
    BackupError,
    BackupNotFoundError,
    ConfigurationError,
    SnapshotTargetError,
)
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import factories as f
from tests.clocks import AheadClock

ENDINGS = (".metadata.json", ".msgpack.gz", ".sha256")


@pytest.fixture
def taken(storage: MemoryStorage, store: BackupStore, clock: AheadClock) -> Metadata:
    return transfer.take(storage, store, clock)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".gitignore")


def test_backup_has_data_checksums_and_metadata(taken: Metadata, store: BackupStore, folder: Path) -> None:
    assert names_in(folder) == [taken.name + ending for ending in ENDINGS]
    assert store.names() == [taken.name]
    assert store.metadata(taken.name) == taken
    document = json.loads((folder / f"{taken.name}.metadata.json").read_text())
    assert document["counts"]["jobs"] == {"completed": 1, "failed": 1, "waiting": 3}
    assert document["counts"]["dead"] == 1
    data = (folder / f"{taken.name}.msgpack.gz").read_bytes()
    assert document["sha256"] == hashlib.sha256(data).hexdigest()
    assert document["size"] == len(data)


def test_sha256sum_can_check_backup(taken: Metadata, folder: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--quiet", f"{taken.name}.sha256"], cwd=folder, check=True)


def test_backup_files_are_readable_only_by_their_owner(taken: Metadata, folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in folder.glob("djqueue-*")} == {0}


def test_git_ignores_backup_folder(taken: Metadata, folder: Path) -> None:
    assert (folder / ".gitignore").read_text() == "*\n"


def test_backup_restores_contents_of_storage(taken: Metadata, store: BackupStore) -> None:
    target = MemoryStorage()
    found = transfer.restore(store, taken.name, target)
    assert found.written is not None
    assert (found.written.jobs, found.written.dead) == (5, 1)
    assert {row.name: sum(row.counts.values()) for row in target.reads.overview().queues} == {
        "emails": 3,
        "invoices": 2,
    }


def test_verify_returns_metadata_of_valid_backup(taken: Metadata, store: BackupStore) -> None:
    assert transfer.verify(store, taken.name) == taken


@pytest.mark.parametrize("ending", ENDINGS)
def test_flipped_bit_is_detected_in_every_file(
    taken: Metadata, store: BackupStore, folder: Path, ending: str
) -> None:
    path = folder / (taken.name + ending)
    data = bytearray(path.read_bytes())
    for index in range(0, len(data), max(1, len(data) // 50)):
        damaged = data.copy()
        damaged[index] ^= 1
        path.write_bytes(damaged)
        target = MemoryStorage()
        with pytest.raises(BackupError, match=taken.name):
            transfer.restore(store, taken.name, target)
        assert target.snapshots.is_empty()


@pytest.mark.parametrize("left", [0, 1, 0.5, 0.99])
def test_truncated_backup_is_detected(taken: Metadata, store: BackupStore, folder: Path, left: float) -> None:
    path = folder / f"{taken.name}.msgpack.gz"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * left) if isinstance(left, float) else left])
    with pytest.raises(BackupDamagedError, match="bytes, expected"):
        transfer.verify(store, taken.name)


def test_later_format_is_rejected_with_version_that_reads_it(
    taken: Metadata, store: BackupStore, folder: Path
) -> None:
    path = folder / f"{taken.name}.metadata.json"
    document = json.loads(path.read_text()) | {"format": 2, "djqueue": "9.1"}
    path.write_text(json.dumps(document))
    with pytest.raises(BackupError, match=r"format 2, .* upgrade djqueue to 9\.1 or later"):
        transfer.verify(store, taken.name)


@pytest.mark.parametrize(
    "name",
    ["", "../secret", "/etc/passwd", "djqueue-20261125T180000123Z-3f9a2c41/..", "a\0b", "djqueue-x"],
)
def test_store_rejects_invalid_backup_names(store: BackupStore, name: str) -> None:
    with pytest.raises(BackupNotFoundError, match="is not the name of a backup"):
        store.check(name)


def test_store_rejects_unknown_backup_name(store: BackupStore, folder: Path) -> None:
    with pytest.raises(BackupNotFoundError, match=f"no complete backup .* the folder {folder}"):
        store.check("djqueue-20261125T180000123Z-3f9a2c41")
    with pytest.raises(BackupNotFoundError, match="there is no backup in the folder"):
        store.latest()


@pytest.mark.parametrize("missing", ENDINGS)
def test_backup_without_one_of_its_files_is_not_listed(
    taken: Metadata, store: BackupStore, folder: Path, missing: str
) -> None:
    (folder / (taken.name + missing)).unlink()
    assert store.names() == []
    rest = [taken.name + ending for ending in ENDINGS if ending != missing]
    assert {name: sorted(files) for name, files in store.leftovers().items()} == {taken.name: rest}


def test_full_disk_leaves_no_file(
    storage: MemoryStorage, store: BackupStore, folder: Path, clock: AheadClock, monkeypatch: Any
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("djqueue.backup.archive.ArchiveWriter._write", full)
    with pytest.raises(OSError, match="No space left"):
        transfer.take(storage, store, clock)
    assert names_in(folder) == []


class Failing(FileSystemStorage):
    """A storage whose n-th save raises an error."""

    fails_at = 0
    saves = 0

    def _save(self, name: str, content: Any) -> str:
        self.saves += 1
        if self.saves == self.fails_at:
            raise OSError(errno.EROFS, "Read-only file system")
        return str(super()._save(name, content))  # type: ignore[misc]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_failed_save_leaves_no_file(
    storage: MemoryStorage, folder: Path, clock: AheadClock, fails_at: int
) -> None:
    files = Failing(folder)
    files.fails_at = fails_at
    store = BackupStore(files)
    with pytest.raises(BackupError, match=f"the folder {folder} cannot be used: OSError.*Read-only"):
        transfer.take(storage, store, clock)
    assert names_in(folder) == []
    assert transfer.take(storage, store, clock).name in store.names()


class Remote(InMemoryStorage):
    """A storage without paths, such as an object store: it reads uploads in chunks, once."""

    def _save(self, name: str, content: "File[bytes]") -> str:
        assert not hasattr(content, "temporary_file_path")
        return str(super()._save(name, content))  # type: ignore[misc]


def test_storage_without_paths_keeps_backups(storage: MemoryStorage, clock: AheadClock) -> None:
    store = BackupStore(Remote())
    taken = transfer.take(storage, store, clock)
    assert store.names() == [taken.name]
    assert transfer.verify(store, taken.name) == taken


def test_upload_stops_on_request(storage: MemoryStorage, clock: AheadClock) -> None:
    store = BackupStore(Remote())
    parts = 0

    def check() -> None:
        nonlocal parts
        parts += 1
        if parts == checks_before_upload + 1:
            raise BackupCancelledError

    checks_before_upload = 10**9
    transfer.take(storage, store, clock, Steps(check))
    # The last four: two files, the announcement, and its upload.
    checks_before_upload, parts = parts - 5, 0
    known = store.names()
    with pytest.raises(BackupCancelledError):
        transfer.take(storage, store, clock, Steps(check))
    assert store.names() == known
    assert store.leftovers() == {}


class Renaming(InMemoryStorage):
    """A storage that gives every file a name of its own."""

    def get_available_name(self, name: str, max_length: int | None = None) -> str:
        return f"renamed-{name}"


def test_storage_that_renames_files_is_rejected(storage: MemoryStorage, clock: AheadClock) -> None:
    files = Renaming()
    with pytest.raises(BackupError, match="keeps the names of new files"):
        transfer.take(storage, BackupStore(files), clock)
    assert files.listdir("") == ([], [])


# Keeping.


def test_newest_backups_are_kept(storage: MemoryStorage, store: BackupStore, clock: AheadClock) -> None:
    names = []
    for _ in range(5):
        clock.advance(1_000)
        names.append(transfer.take(storage, store, clock).name)
    deleted = transfer.prune(store, 2, names[-1], clock, is_alone=True)
    assert store.names() == [names[4], names[3]]
    assert sorted(deleted) == names[:3]


def test_newest_backup_is_kept_after_clock_was_set_back(
    storage: MemoryStorage, store: BackupStore, clock: AheadClock
) -> None:
    clock.advance(86_400_000)
    later = transfer.take(storage, store, clock).name
    clock.advance(-86_400_000)
    taken = transfer.take(storage, store, clock).name
    assert transfer.prune(store, 1, taken, clock, is_alone=True) == [later]
    assert store.names() == [taken]


def test_leftovers_are_deleted_and_other_files_are_not(
    storage: MemoryStorage, store: BackupStore, folder: Path, clock: AheadClock
) -> None:
    taken = transfer.take(storage, store, clock).name
    killed = "djqueue-20200101T000000000Z-0123abcd"
    for file in (f"{killed}.msgpack.gz", f"{killed}.xyz.partial", f"{killed}x", "notes.txt"):
        (folder / file).write_text("x")
    transfer.prune(store, 3, taken, clock, is_alone=True)
    kept = [taken + ending for ending in ENDINGS]
    assert names_in(folder) == sorted([*kept, f"{killed}x", "notes.txt"])


def test_recent_files_may_belong_to_another_process_without_lease(
    storage: MemoryStorage, store: BackupStore, folder: Path, clock: AheadClock
) -> None:
    other = transfer.take(storage, store, clock).name
    (folder / f"{other}.metadata.json").unlink()
    clock.advance(3_600_000)
    taken = transfer.take(storage, store, clock).name
    transfer.prune(store, 3, taken, clock, is_alone=False)
    assert f"{other}.msgpack.gz" in names_in(folder)
    clock.advance(86_400_000)
    transfer.prune(store, 3, taken, clock, is_alone=False)
    assert f"{other}.msgpack.gz" not in names_in(folder)


# Restoring.


def test_storage_that_is_not_empty_is_rejected(
    taken: Metadata, storage: MemoryStorage, store: BackupStore
) -> None:
    with pytest.raises(SnapshotTargetError, match="not empty"):
        transfer.restore(store, taken.name, storage)
    f.enqueue(storage, queue="later")
    transfer.restore(store, taken.name, storage, replace=True)
    assert storage.queues.names() == ["emails", "invoices"]


def test_restore_writes_nothing_if_caller_declines(taken: Metadata, store: BackupStore) -> None:
    target = MemoryStorage()
    found = transfer.restore(store, taken.name, target, before=lambda _: False)
    assert found.written is None
    assert target.snapshots.is_empty()


# Where they are.


def test_default_backup_folder_is_in_project(settings: Any) -> None:
    settings.BASE_DIR = Path("/srv/shop")
    assert default_folder(BackupSettings()) == Path("/srv/shop/djqueue_backups")
    assert default_folder(BackupSettings(folder="/backups")) == Path("/backups")


def test_error_for_missing_backup_folder_names_setting(settings: Any) -> None:
    del settings.BASE_DIR
    with pytest.raises(ConfigurationError, match=r"STORAGES\['djqueue_backups'\], or DJQUEUE\['BACKUP'\]"):
        BackupStore.configured(BackupSettings())


def test_backups_use_storage_configured_by_project(settings: Any, tmp_path: Path) -> None:
    settings.STORAGES = {
        "djqueue_backups": {
            "BACKEND": "django.core.files.storage.FileSystemStorage",
            "OPTIONS": {"location": tmp_path / "chosen"},
        }
    }
    assert BackupStore.configured(BackupSettings()).describe() == f"the folder {tmp_path / 'chosen'}"


def test_error_names_misconfigured_storage(settings: Any) -> None:
    settings.STORAGES = {"djqueue_backups": {"BACKEND": "shop.Missing"}}
    with pytest.raises(ConfigurationError, match=r"STORAGES\['djqueue_backups'\].*shop\.Missing"):
        BackupStore.configured(BackupSettings())


@pytest.mark.parametrize(
    "document", ["[" * 200_000, '{"format": 1, "name": ' + "9" * 10_000 + "}", "[]", "{}"]
)
def test_malformed_metadata_marks_backup_as_damaged(
    taken: Metadata, store: BackupStore, folder: Path, document: str
) -> None:
    (folder / f"{taken.name}.metadata.json").write_text(document)
    with pytest.raises(BackupDamagedError, match="is damaged"):
        store.metadata(taken.name)
