"""A task backend of djqueue on every storage."""

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from djqueue.client import registry
from djqueue.client.declarations import declared
from djqueue.testing.draining import drain

pytest.importorskip("djqueue.contrib.tasks", exc_type=ImproperlyConfigured)

from djqueue.contrib.tasks.backend import registered_tasks
from djqueue.contrib.tasks.compat import task_backends
from tests.everywhere.conftest import storage  # noqa: F401 - fixtures

BACKEND = "djqueue.contrib.tasks.DjqueueBackend"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {})
    monkeypatch.setattr(declared, "_entries", {})
    monkeypatch.setattr(registered_tasks, "_tasks", {})
    monkeypatch.setattr(registered_tasks, "_discovered", True)


@pytest.fixture
def backend(storage: Any, settings: Any) -> Any:  # noqa: F811
    """The default task backend, which has every queue."""
    settings.TASKS = {
        "default": {"BACKEND": BACKEND, "QUEUES": []},
        "other": {"BACKEND": BACKEND, "QUEUES": []},
    }
    return task_backends["default"]


@pytest.fixture
def run(storage: Any) -> Any:  # noqa: F811
    """A function that runs what is waiting."""
    return lambda: drain(storage)
