"""A Redis of one's own, and how records of its jobs look as a table."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage


@pytest.fixture
def url(redis_server):
    redis_server.clean()
    return redis_server.url


@pytest.fixture
def storage(url):
    with closing(RedisStorage(url=url)) as storage:
        yield storage
