"""Producers on a memory storage of their own, with a registry of their own."""

import asyncio

import pytest

from djqueue.client import registry
from djqueue.testing.plugin import (  # noqa: F401 - where it is not installed
    _djqueue_environment,
    djqueue_drain,
    djqueue_memory,
)


@pytest.fixture(autouse=True)
def storage(djqueue_memory):  # noqa: F811
    return djqueue_memory


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_types", {})


@pytest.fixture(params=["sync", "async"])
def do(request):
    """Calls a method, or its async twin: `do(queue, "cancel", "an id")`."""

    def call(thing, method, *args, **kwargs):
        if request.param == "sync":
            return getattr(thing, method)(*args, **kwargs)

        async def twin():
            return await getattr(thing, f"a{method}")(*args, **kwargs)

        return asyncio.run(twin())

    return call
