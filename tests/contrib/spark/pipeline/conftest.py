"""Fixtures with a private Redis, and its jobs as a table."""

from contextlib import closing
from importlib.util import find_spec

import pytest

from djqueue.storage.redis import RedisStorage

# Without Spark, these modules can't be imported; `make test-spark` installs it.
collect_ignore = [] if find_spec("pyspark") else ["test_archive.py", "test_commands.py", "test_rollups.py"]


@pytest.fixture
def url(redis_server):
    redis_server.clean()
    return redis_server.url


@pytest.fixture
def storage(url):
    with closing(RedisStorage(url=url)) as storage:
        yield storage
