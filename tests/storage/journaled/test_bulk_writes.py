"""Reports of bulk writes in the tables."""

from contextlib import closing

import pytest
from django.db import transaction

from djqueue.storage.journaled import JournaledStorage
from djqueue.storage.memory import MemoryStorage
from djqueue.testing import contract
from djqueue.testing.clock import FakeClock
from djqueue.testing.contract.bulk_writes import kept, report

pytestmark = pytest.mark.dialect


class TestClientBulkWrites(contract.BulkWritesContract):
    @pytest.fixture
    def storage(self, tables):
        self.clock = FakeClock()
        with closing(JournaledStorage(clock=self.clock, policies=contract.POLICIES)) as storage:
            yield storage

    def advance(self, milliseconds):
        self.clock.advance(milliseconds)


def test_caller_transaction_survives_duplicate_report(make_storage):
    storage = make_storage()
    kept(storage).keep(report())

    with transaction.atomic():
        assert not kept(storage)._swap(report(rows=7))
        kept(storage).keep(report(rows=8))

    assert kept(storage).get(report().write).rows == 8


def test_memory_storage_keeps_no_bulk_write_reports():
    with closing(MemoryStorage()) as storage:
        assert storage.capabilities.bulk_writes is None
