"""Fixtures for pytest, which finds them by itself where djqueue is installed.

    def test_an_order_sends_a_receipt(djqueue_memory, djqueue_drain):
        place_order(42)
        assert_enqueued(send_receipt, args=(42,))
        assert djqueue_drain().completed == 1

pytest loads this module before Django's settings are known, so that Django is imported by the fixtures
only.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from djqueue.runtime.events import Counters
    from djqueue.storage.base import Storage

pytest.register_assert_rewrite("djqueue.testing.contract", "djqueue.testing.waiting")


@pytest.fixture
def djqueue_memory() -> "Iterator[Storage]":
    """Yield a memory storage in place of the settings' one, new for this test; the other settings stay."""
    from django.conf import settings
    from django.test import override_settings

    from djqueue.client import get_storage

    memory = {"BACKEND": "djqueue.storage.memory.MemoryStorage"}
    with override_settings(DJQUEUE={**getattr(settings, "DJQUEUE", {}), "STORAGE": memory}):
        yield get_storage()


@pytest.fixture
def djqueue_drain() -> "Callable[..., Counters]":
    """Return a function that runs what is waiting now: see `djqueue.testing.draining.drain`."""
    from .draining import drain

    return drain
