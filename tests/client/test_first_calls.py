"""Mistakes of the first day are answered at the first call."""

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.test import override_settings

from djqueue import Queue
from djqueue.errors import ConfigurationError


@pytest.fixture
def database(settings, storage, tables):
    """The storage of a project without settings."""
    settings.DJQUEUE = {}


@pytest.mark.usefixtures("database")
def test_app_that_is_not_installed_is_named(settings):
    others = [name for name in settings.INSTALLED_APPS if not name.startswith("djqueue")]

    with (
        override_settings(INSTALLED_APPS=others),
        pytest.raises(ConfigurationError, match="'djqueue' is not in INSTALLED_APPS: add it, and run"),
    ):
        Queue("orders").enqueue(1)


@pytest.mark.usefixtures("database")
async def test_call_in_async_code_names_the_async_method():
    queue = Queue("orders")

    for call in (lambda: queue.enqueue(1), lambda: queue.enqueue_and_wait(1, wait=1), queue.counts):
        with pytest.raises(SynchronousOnlyOperation, match=r"await the async method, .* such as aenqueue\("):
            call()
    assert (await queue.aenqueue(1)).status == "queued"
