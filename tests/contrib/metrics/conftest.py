"""The URLs of monitoring on every storage."""

import pytest

from djqueue.contrib.metrics.views import TOKEN_VARIABLE
from tests.contrib.metrics.scraping import TOKEN
from tests.everywhere.conftest import _own_registry, storage  # noqa: F401 - fixtures


@pytest.fixture
def monitored(storage, settings, monkeypatch):  # noqa: F811
    """A storage, with URLs that need the token."""
    settings.ROOT_URLCONF = "tests.contrib.metrics.urls"
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    return storage
