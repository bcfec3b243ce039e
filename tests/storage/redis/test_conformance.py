"""The Redis storage keeps the contract: on one node, behind Sentinel, and on a Cluster of three masters."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock


class RedisContract(contract.StorageContract):
    """The contract with a clock that the tests move in place of Redis's."""

    @pytest.fixture
    def storage(self, options):
        self.clock = FakeClock()
        with closing(RedisStorage(policies=contract.POLICIES, clock=self.clock, **options)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestSingle(RedisContract):
    @pytest.fixture
    def options(self, redis_options):
        return redis_options


class TestSentinel(RedisContract):
    @pytest.fixture
    def options(self, sentinel_options):
        return sentinel_options


class TestCluster(RedisContract):
    @pytest.fixture
    def options(self, cluster_options):
        return cluster_options
