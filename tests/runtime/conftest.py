"""A storage in memory and a queue of it, for the workers under test."""

import pytest

from djqueue import Queue
from tests.runtime.storages import RecordingStorage


@pytest.fixture
def storage() -> RecordingStorage:
    return RecordingStorage()


@pytest.fixture
def queue(storage: RecordingStorage) -> Queue:
    return Queue("work", storage=storage)
