from collections.abc import Iterator
from typing import Any

import pytest

from djqueue.client.storages import close_storage
from tests.admin.storages import Recorder


@pytest.fixture(autouse=True)
def _fresh_storage() -> Iterator[None]:
    """The process's storage lives as long as one test."""
    close_storage()
    yield
    close_storage()


@pytest.fixture
def recorder(settings: Any) -> type[Recorder]:
    """A storage that does nothing but note what it is told to do."""
    Recorder.calls = []
    Recorder.failing = None
    settings.DJQUEUE = {"STORAGE": {"BACKEND": "tests.admin.storages.Recorder"}}
    return Recorder
