"""Fixtures for every test of the dashboard."""

from collections.abc import Iterator

import pytest

from djqueue.client.storages import close_storage
from djqueue.dashboard import jobsearch, outages, site
from djqueue.dashboard.reading import read_cache
from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    """Forget the storage and the cached reads of the test before."""
    close_storage()
    read_cache.clear()
    yield
    close_storage()
    read_cache.clear()


@pytest.fixture(autouse=True)
def _long_page_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages take as long as tests may, because a page that a busy machine stops would show an outage."""
    monkeypatch.setattr(site, "DEADLINE", PATIENCE)
    monkeypatch.setattr(outages, "QUERY_TIMEOUT", PATIENCE)
    monkeypatch.setattr(jobsearch, "SCAN_MILLISECONDS", PATIENCE * 1_000)


@pytest.fixture
def memory(settings: object) -> None:
    """Use the in-memory storage."""
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "djqueue.storage.memory.MemoryStorage"}}  # type: ignore[attr-defined]


@pytest.fixture(params=["memory", "database"])
def anywhere(request: pytest.FixtureRequest, settings: object) -> str:
    """Use each storage that needs no server; return its name."""
    backends = {
        "memory": "djqueue.storage.memory.MemoryStorage",
        "database": "djqueue.storage.database.DatabaseStorage",
    }
    settings.DJQUEUE = {"STORAGE": {"BACKEND": backends[request.param]}}  # type: ignore[attr-defined]
    return str(request.param)
