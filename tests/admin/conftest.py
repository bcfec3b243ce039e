from collections.abc import Iterator

import pytest

from djqueue.client.storages import close_storage


@pytest.fixture(autouse=True)
def _fresh_storage() -> Iterator[None]:
    """Close the process's storage around each test."""
    close_storage()
    yield
    close_storage()
