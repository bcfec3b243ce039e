"""What every test of the dashboard begins with."""

from collections.abc import Iterator

import pytest

from djqueue.client.storages import close_storage
from djqueue.dashboard.snapshot import snapshots


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Nothing is remembered of the test before: no storage, nothing that was read."""
    close_storage()
    snapshots.clear()
    yield
    close_storage()
    snapshots.clear()


@pytest.fixture
def memory(settings: object) -> None:
    """The storage is this process's memory."""
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "database"])
def anywhere(request: pytest.FixtureRequest, settings: object) -> str:
    """Each storage that a process has by itself; which one it is."""
    backends = {
        "memory": "djqueue.storage.memory.MemoryStorage",
        "database": "djqueue.storage.database.DatabaseStorage",
    }
    settings.DJQUEUE = {"STORAGE": {"BACKEND": backends[request.param]}}  # type: ignore[attr-defined]
    return str(request.param)
