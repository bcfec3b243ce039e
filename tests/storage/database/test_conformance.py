"""The database storage keeps the contract: with its own statements, and with the ORM's alone."""

from contextlib import closing

import pytest

from djqueue.storage.database import DatabaseStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock


class SchedulerCase(contract.StorageCase):
    """The scheduler's storage, with a clock that the tests move."""

    sql: str

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        options = {"clock": self.clock, "policies": contract.POLICIES, "sql": self.sql}
        with closing(DatabaseStorage(**options)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestWithItsOwnStatements(SchedulerCase, contract.StorageContract):
    sql = "auto"


class TestWithTheOrmAlone(
    SchedulerCase,
    contract.EnqueueContract,
    contract.ClaimsContract,
    contract.OutcomesContract,
    contract.ResultsContract,
    contract.CancellingContract,
    contract.DeadLettersContract,
    contract.UniqueKeysContract,
    contract.UpdatesContract,
    contract.DependenciesContract,
    contract.FlowsContract,
    contract.QueueControlsContract,
    contract.ReadsContract,
    contract.WorkersContract,
):
    """What writes and reads tables."""

    sql = "orm"
