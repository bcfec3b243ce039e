"""Storages on the tables, and the marks of their tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from djqueue.storage.database import DatabaseStorage
from tests.storage.thorough import contract_part

HERE = Path(__file__).parent
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
LONG_ON_A_SERVER = (
    "test_busy_groups_get_turns_by_weight",
    "test_group_at_its_rate_does_not_block_other_groups",
    "test_groups_of_equal_weight_get_equal_turns",
)
"""Tests of hundreds of claims, one after the other, that no database decides differently."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or "tables" not in getattr(item, "fixturenames", ()):
            continue
        if contract_part(item) in {"", *LOCKING} and not item.name.startswith(LONG_ON_A_SERVER):
            item.add_marker(pytest.mark.dialect)


@pytest.fixture
def make(tables: None) -> Iterator[Callable[..., DatabaseStorage]]:
    """Make storages, connected ones unless the test says otherwise; they are closed."""
    made: list[DatabaseStorage] = []

    def make(*, connect: bool = True, **options: Any) -> DatabaseStorage:
        storage = DatabaseStorage(**options)
        made.append(storage)
        if connect:
            storage.connect()
        return storage

    yield make
    for storage in made:
        storage.close()
