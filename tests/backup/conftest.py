"""A memory storage with a few jobs, and a folder for backups."""

from pathlib import Path

import pytest
from django.core.files.storage import FileSystemStorage

from djqueue.backup.store import BackupStore
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import factories as f
from tests.clocks import AheadClock


@pytest.fixture
def clock() -> AheadClock:
    return AheadClock()


@pytest.fixture
def storage() -> MemoryStorage:
    found = MemoryStorage()
    f.enqueue_many(found, 3, queue="emails")
    f.a_failed_job(found, queue="invoices")
    f.a_completed_job(found, queue="invoices")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "backups"


@pytest.fixture
def store(folder: Path) -> BackupStore:
    return BackupStore(
        FileSystemStorage(folder, file_permissions_mode=0o600, directory_permissions_mode=0o700)
    )
