"""The Redis storage keeps the contract: on one node, behind Sentinel, and on a Cluster of three masters."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract


class RedisContract(contract.StorageContract):
    """The contract on Redis's own clock, which the tests move on for the storage alone."""

    @pytest.fixture
    def storage(self, options):
        self.skew = 0
        with closing(RedisStorage(policies=contract.POLICIES, skew=lambda: self.skew, **options)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.skew += milliseconds


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
