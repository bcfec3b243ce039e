"""Reports of bulk writes in the tables."""

from django.db import transaction

from djqueue.storage.database import DatabaseStorage
from djqueue.testing import contract
from djqueue.testing.contract.bulk_writes import kept, report

from .test_conformance import OnAClock


class TestBulkWrites(OnAClock, contract.BulkWritesContract):
    """The part of the contract."""


def test_caller_transaction_survives_duplicate_report(tables):
    storage = DatabaseStorage()
    kept(storage).keep(report())

    with transaction.atomic():
        assert not kept(storage)._swap(report(rows=7))
        kept(storage).keep(report(rows=8))

    assert kept(storage).get(report().write).rows == 8
