"""An empty Redis, and a clock for it and for the tables, which a test moves on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.operations.mirror import Mirror
from djqueue.storage.redis import RedisStorage
from djqueue.testing.clock import FakeClock
from tests import servers
from tests.support import PATIENCE

MakeStorage = Callable[..., RedisStorage]
MakeMirror = Callable[..., Mirror]


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
