"""The SQL storage keeps the contract."""

from contextlib import closing

import pytest
from django.db import connection, transaction

from djqueue.storage.database import DatabaseStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from tests.storage.thorough import ManyExamples


class OnAClock(contract.StorageCase):
    """The storage with a clock that the tests move."""

    wakes_exactly = False

    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(DatabaseStorage(clock=self.clock, policies=contract.POLICIES)) as storage:
            storage.connect()
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


class TestContract(OnAClock, ManyExamples, contract.StorageContract):
    """All of it."""

    def transaction(self):
        return transaction.atomic()

    # `make mutants` shows that they suffice; PostgreSQL takes longer.
    examples = 40 if connection.vendor == "sqlite" else 8
