"""A storage in memory and a queue of it, for the workers under test."""

import pytest

from djqueue import Queue
from djqueue.client import registry
from djqueue.runtime import problems
from djqueue.storage import chores
from tests.runtime.storages import RecordingStorage


@pytest.fixture
def storage() -> RecordingStorage:
    return RecordingStorage()


@pytest.fixture
def queue(storage: RecordingStorage) -> Queue:
    return Queue("work", storage=storage)


@pytest.fixture(autouse=True)
def _registry_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job types that a test defines are gone afterwards: the system checks look at all."""
    monkeypatch.setattr(registry, "_types", registry.all())


@pytest.fixture(autouse=True)
def _no_bulk_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read no bulk operations from Django's database, which most of these tests may not use."""
    monkeypatch.delitem(chores.makers, "bulk operations")


@pytest.fixture(autouse=True)
def _no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems that other tests have noted are not those of this test."""
    monkeypatch.setattr(problems, "_noted", {})
