"""The database storage keeps the contract: with its own statements, and with the ORM's alone."""

from contextlib import closing

import pytest

from djqueue.storage.database import DatabaseStorage
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract import POLICIES, StorageContract


class DatabaseContract(StorageContract):
    """The contract over the scheduler's storage, with a clock that the tests move."""

    sql = "auto"

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(DatabaseStorage(clock=self.clock, policies=POLICIES, sql=self.sql)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestWithItsOwnStatements(DatabaseContract):
    pass


class TestWithTheOrmAlone(DatabaseContract):
    sql = "orm"
