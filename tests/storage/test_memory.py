"""The memory storage keeps the contract, with few shards and with many."""

from contextlib import closing

import pytest

from djqueue.storage.memory import MemoryStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES, StorageContract


class MemoryContract(StorageContract):
    """The contract over an engine with a clock that the tests move."""

    cores: int

    @pytest.fixture
    def storage(self):
        self.clock = FakeClock()
        with closing(MemoryStorage(clock=self.clock, policies=POLICIES, cores=self.cores)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestOnFourShards(MemoryContract):
    cores = 1


class TestOnSixtyFourShards(MemoryContract):
    cores = 64
    sequences = 20
