"""A task backend of djqueue on every storage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djqueue.client import registry
from djqueue.client.declared import declared
from djqueue.testing.draining import drain

pytest.importorskip("djqueue.contrib.tasks", exc_type=Exception)

from djqueue.contrib.tasks.compat import task_backends
from djqueue.contrib.tasks.registered import registered_tasks
from tests.everywhere.conftest import storage, tables  # noqa: F401 - fixtures

HERE = Path(__file__).parent
BACKEND = "djqueue.contrib.tasks.DjqueueBackend"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.django_db(transaction=True, available_apps=[]))
            item.add_marker(pytest.mark.database)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registered_tasks, "_tasks", {})
    monkeypatch.setattr(registered_tasks, "_discovered", True)


@pytest.fixture
def backend(storage: Any, settings: Any) -> Iterator[Any]:  # noqa: F811
    """The default task backend, which has every queue."""
    settings.TASKS = {
        "default": {"BACKEND": BACKEND, "QUEUES": []},
        "other": {"BACKEND": BACKEND, "QUEUES": []},
    }
    yield task_backends["default"]


@pytest.fixture
def run(storage: Any) -> Any:  # noqa: F811
    """A function that runs what is waiting."""
    return lambda: drain(storage)
