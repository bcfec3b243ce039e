import pytest

from djqueue.client import registry
from djqueue.client.declarations import declared


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_types", {})
    monkeypatch.setattr(declared, "_entries", {})
