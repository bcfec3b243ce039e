"""An empty Redis, tables that are empty, and a clock for both that a test moves on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.operations.mirror import Mirror
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from tests import servers
from tests.support import PATIENCE
from tests.tables import empty_tables, every_app

MakeStorage = Callable[..., RedisStorage]
MakeMirror = Callable[..., Mirror]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "tables" in getattr(item, "fixturenames", ()):
            # Real transactions, and nothing that is emptied by pytest-django: see `tables`.
            item.add_marker(pytest.mark.django_db(transaction=True, available_apps=[]))
            item.add_marker(pytest.mark.database)


@pytest.fixture
def tables() -> Iterator[None]:
    """Django's database; afterwards djqueue's tables are emptied."""
    opened: list[BaseDatabaseWrapper] = []

    def note(connection: BaseDatabaseWrapper, **_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            opened.append(connection)

    connection_created.connect(note)
    with every_app():
        yield
        connection_created.disconnect(note)
        for found in opened:  # by a test's own threads
            found.inc_thread_sharing()
            found.close()
        connection.close()
        empty_tables()


@pytest.fixture
def clock() -> FakeClock:
    """A clock that starts now and stands still: no lease expires on a busy machine."""
    return FakeClock(SYSTEM_CLOCK.now(), SYSTEM_CLOCK.monotonic())


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[servers.RedisCluster]:
    """Three masters."""
    with servers.RedisCluster() as group:
        yield group


@pytest.fixture
def redis_url(redis_server: servers.RedisServer) -> str:
    """The URL of a server that runs and is empty."""
    redis_server.clean()
    return redis_server.url


@pytest.fixture
def make_storage(redis_url: str, clock: FakeClock) -> Iterator[MakeStorage]:
    """Makes storages on that server, and closes them."""
    with ExitStack() as stack:

        def make(**options: Any) -> RedisStorage:
            storage = RedisStorage(clock=clock, **{"url": redis_url, "timeout": PATIENCE, **options})
            stack.callback(storage.close)
            return storage

        yield make


@pytest.fixture
def make_mirror(tables: None, clock: FakeClock) -> MakeMirror:
    """Makes mirrors of storages in Django's database."""
    return lambda storage: Mirror(storage, "default", clock=clock)


@pytest.fixture
def storage(make_storage: MakeStorage) -> RedisStorage:
    return make_storage()


@pytest.fixture
def mirror(make_mirror: MakeMirror, storage: RedisStorage) -> Mirror:
    return make_mirror(storage)
