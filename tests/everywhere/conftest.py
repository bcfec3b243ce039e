"""The storages that the settings can name, each empty and ready."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.client.storages import close_storage, get_storage
from djqueue.storage.base import Storage

HERE = Path(__file__).parent

CLIENT_SIDE = {"test_bad_input", "test_edge_values", "test_sizes"}
"""Modules about checks that the client makes before it calls a storage: one storage shows them."""
DIALECT = {"test_edge_values", "test_enqueue_on_commit", "test_snapshots", "test_transitions"}
"""Modules whose outcome depends on the SQL dialect where they use the database storage."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if item.path.stem in CLIENT_SIDE and params.get("storage") in ("memory", "redis"):
                item.add_marker(pytest.mark.thorough)
            if item.path.stem in DIALECT and "database" in params.values():
                item.add_marker(pytest.mark.dialect)


@pytest.fixture(params=["memory", "database", "redis"])
def storage(request: pytest.FixtureRequest, tables: None, settings: Any) -> Iterator[Storage]:
    """The storage of this process, as the settings name it."""
    options: dict[str, Any] = {}
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.clean()
        options = {"URL": server.url}
    backend = {"memory": "memory.Memory", "database": "database.Database", "redis": "redis.Redis"}
    path = f"djqueue.storage.{backend[request.param]}Storage"
    settings.DJQUEUE = {"STORAGE": {"BACKEND": path, "OPTIONS": options}}
    made = get_storage()
    made.connect()
    yield made
    close_storage()


@pytest.fixture(autouse=True)
def _tables(tables: None) -> None:
    """Every test may use the database."""


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})
    monkeypatch.setattr(declared, "_entries", {})
