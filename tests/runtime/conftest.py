"""A storage in memory and a queue of it, for the workers under test."""

import pytest

from djqueue import Queue
from djqueue.storage.memory import MemoryStorage


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def queue(storage: MemoryStorage) -> Queue:
    return Queue("work", storage=storage)
