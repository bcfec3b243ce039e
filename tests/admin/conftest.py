from collections.abc import Iterator

import pytest

from djqueue.client.storages import close_storage
from djqueue.dashboard import outages, site
from tests.support import PATIENCE


@pytest.fixture(autouse=True)
def _fresh_storage() -> Iterator[None]:
    """Close the process's storage around each test."""
    close_storage()
    yield
    close_storage()


@pytest.fixture(autouse=True)
def _long_page_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages take as long as tests may, because a page that a busy machine stops would show an outage."""
    monkeypatch.setattr(site, "DEADLINE", PATIENCE)
    monkeypatch.setattr(outages, "QUERY_TIMEOUT", PATIENCE)
