"""Where contracts are kept: on one node, behind Sentinel, and on a Cluster of three masters."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.reference import Choices


class OnRedis:
    """Before a contract: its storage, with a clock that the tests move in place of Redis's."""

    choices = Choices(ties_by_id=True, ends_waits_late=True, postpones_retries=True)

    @pytest.fixture
    def storage(self, options):
        self.clock = FakeClock()
        options = {"policies": contract.POLICIES, "clock": self.clock, **options}
        with closing(RedisStorage(**options)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class OnSingle(OnRedis):
    @pytest.fixture
    def options(self, redis_options):
        return redis_options


class OnSentinel(OnRedis):
    @pytest.fixture
    def options(self, sentinel_options):
        return sentinel_options


class OnCluster(OnRedis):
    @pytest.fixture
    def options(self, cluster_options):
        return cluster_options
