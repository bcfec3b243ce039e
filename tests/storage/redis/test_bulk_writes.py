"""Reports of bulk writes in Redis."""

from contextlib import closing

import pytest

from djqueue.storage.bulkwrites import MAX_REPORT_AGE
from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract
from djqueue.testing.contract.bulk_writes import kept, report

from .cases import OnCluster, OnSingle


class TestSingle(OnSingle, contract.BulkWritesContract):
    pass


@pytest.mark.thorough
class TestCluster(OnCluster, contract.BulkWritesContract):
    pass


def test_bulk_write_reports_expire(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        kept(storage).keep(report())
        with redis_server.client() as redis:
            lifetimes = [redis.pttl(key) for key in redis.keys("*bulk_write*")]

    assert len(lifetimes) == 2
    assert all(MAX_REPORT_AGE - 60_000 < lifetime <= MAX_REPORT_AGE for lifetime in lifetimes)
