"""Fixtures for pytest, which finds them by itself where djqueue is installed.

    def test_an_order_sends_a_receipt(djqueue_memory, djqueue_drain):
        place_order(42)
        assert_enqueued(send_receipt, args=(42,))
        assert djqueue_drain().completed == 1

    def test_an_order_has_a_receipt(djqueue_immediate, client, db):
        assert client.get("/orders/42/receipt/").status_code == 200

pytest loads this module before Django's settings are known, so that Django is imported by the fixtures
only.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from djqueue.runtime.events import Counters
    from djqueue.runtime.immediate import ImmediateStorage
    from djqueue.storage.base import Storage

    from .clock import JobClock
    from .environment import JobEnvironment


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test begin without jobs in memory. Django's test cases do so by themselves."""
    if (storages := sys.modules.get("djqueue.client.storages")) is not None:
        storages.forget_test_jobs()


pytest.register_assert_rewrite("djqueue.testing.contract", "djqueue.testing.waiting")


@pytest.fixture
def _djqueue_environment(request: pytest.FixtureRequest) -> "Iterator[JobEnvironment]":
    """Yield the storage and the clock of the test, as its other fixtures need them."""
    from .environment import job_environment

    names = request.fixturenames
    given: dict[str, Any] = {"immediate": "djqueue_immediate" in names, "clock": "djqueue_clock" in names}
    if request.config.pluginmanager.hasplugin("django"):
        # That fixture restores all changes in their order; a change made beside it would come back.
        given["changed"] = partial(_changed, request.getfixturevalue("settings"))
    with job_environment(**given) as environment:
        yield environment


@contextmanager
def _changed(settings: Any, **values: object) -> Iterator[None]:
    """Change settings by pytest-django's fixture, which restores them."""
    for name, value in values.items():
        setattr(settings, name, value)
    yield


@pytest.fixture
def djqueue_memory(_djqueue_environment: "JobEnvironment") -> "Storage":
    """Put a memory storage in place of the settings' one, new for this test; the other settings stay."""
    return _djqueue_environment.storage


@pytest.fixture
def djqueue_immediate(_djqueue_environment: "JobEnvironment") -> "ImmediateStorage":
    """Run jobs when they are enqueued, and raise the exceptions of those that fail.

    See `djqueue.runtime.immediate.ImmediateStorage`.
    """
    return _djqueue_environment.immediate


@pytest.fixture
def djqueue_clock(_djqueue_environment: "JobEnvironment") -> "JobClock":
    """Return the clock of this test's storage, which advances only when the test moves it."""
    return _djqueue_environment.clock


@pytest.fixture
def djqueue_drain() -> "Callable[..., Counters]":
    """Return a function that runs what is waiting now: see `djqueue.testing.draining.drain`."""
    from .draining import drain

    return drain
