"""Tables that are empty, and the marks of tests that use them."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from djqueue.storage.sql import SqlStorage
from tests.storage.thorough import contract_part
from tests.tables import empty_tables, every_app

LOCKING = {
    "belongings",
    "claims",
    "concurrency",
    "dependencies",
    "groups",
    "ids_and_bytes",
    "insight",
    "leases",
    "limiters",
    "limits",
    "moving",
    "outcomes",
    "pinned_bounds",
    "reads",
    "retention",
    "snapshots",
    "unique_keys",
}
"""Parts of the contract in which databases may differ: locks, constraints, order, bytes, sums."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tables" in getattr(item, "fixturenames", ()):
            # Real transactions, and nothing that is emptied by pytest-django: see `tables`.
            item.add_marker(pytest.mark.django_db(transaction=True, available_apps=[]))
            item.add_marker(pytest.mark.database)
            if contract_part(item) in {"", *LOCKING}:
                item.add_marker(pytest.mark.dialect)


@pytest.fixture
def tables() -> Iterator[None]:
    """Django's database; afterwards djqueue's tables are emptied."""
    with every_app():
        yield
        connection.close()  # a test may have left it in any state
        empty_tables()


@pytest.fixture
def make(tables: None) -> Iterator[Callable[..., SqlStorage]]:
    """Make storages, connected ones unless the test says otherwise; they are closed."""
    made: list[SqlStorage] = []

    def make(*, connect: bool = True, **options: Any) -> SqlStorage:
        storage = SqlStorage(**options)
        made.append(storage)
        if connect:
            storage.connect()
        return storage

    yield make
    for storage in made:
        storage.close()


@pytest.fixture(autouse=True)
def _connections_of_test_threads() -> Iterator[None]:
    """Connections that a test's own threads have left open are closed; djqueue's threads close theirs."""
    opened: list[BaseDatabaseWrapper] = []

    def note(connection: BaseDatabaseWrapper, **_: Any) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.startswith("djqueue-"):
            opened.append(connection)

    connection_created.connect(note)
    yield
    connection_created.disconnect(note)
    for found in opened:
        found.inc_thread_sharing()
        found.close()
