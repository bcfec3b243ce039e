"""A Redis of one's own, and how records of its jobs look as a table."""

from contextlib import closing
from importlib.util import find_spec

import pytest

from djqueue.storage.redis import RedisStorage

# Without Spark, `make test-spark` has the command that installs it; what needs it cannot be imported then.
collect_ignore = [] if find_spec("pyspark") else ["test_archive.py", "test_commands.py", "test_rollups.py"]


@pytest.fixture
def url(redis_server):
    redis_server.clean()
    return redis_server.url


@pytest.fixture
def storage(url):
    with closing(RedisStorage(url=url)) as storage:
        yield storage
