"""Reports of bulk writes in Redis."""

from contextlib import closing

import pytest

from djqueue.storage.imports import AGE
from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.imports import kept, report


class RedisImportsContract(contract.ImportsContract):
    @pytest.fixture
    def storage(self, options):
        self.clock = FakeClock()
        with closing(RedisStorage(policies=contract.POLICIES, clock=self.clock, **options)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestSingle(RedisImportsContract):
    @pytest.fixture
    def options(self, redis_options):
        return redis_options


class TestCluster(RedisImportsContract):
    @pytest.fixture
    def options(self, cluster_options):
        return cluster_options


def test_all_of_it_expires(redis_options, redis_server):
    with closing(RedisStorage(**redis_options)) as storage:
        kept(storage).keep(report())
        with redis_server.client() as redis:
            lifetimes = [redis.pttl(key) for key in redis.keys("*import*")]

    assert len(lifetimes) == 2
    assert all(AGE - 60_000 < lifetime <= AGE for lifetime in lifetimes)
