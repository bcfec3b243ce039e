"""Database storages that are closed whatever happens, and child processes that are ended."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from djqueue.storage.database import DatabaseStorage

from .children import Child

MakeStorage = Callable[..., DatabaseStorage]
StartChild = Callable[..., Child]


@pytest.fixture
def make_storage(transactional_db: None) -> Iterator[MakeStorage]:
    """Makes storages on Django's database: clients of it, until they are connected."""
    with ExitStack() as stack:

        def make(**options: Any) -> DatabaseStorage:
            storage = DatabaseStorage(**options)
            stack.callback(storage.close)
            return storage

        yield make


@pytest.fixture
def client(make_storage: MakeStorage) -> DatabaseStorage:
    """A storage that is not the scheduler."""
    return make_storage()


@pytest.fixture
def scheduler(make_storage: MakeStorage) -> DatabaseStorage:
    """A storage that is the scheduler."""
    storage = make_storage()
    storage.connect()
    return storage


@pytest.fixture
def start_child(transactional_db: None) -> Iterator[StartChild]:
    """Starts one of the programs of `programs.py` in a process of its own."""
    with ExitStack() as stack:

        def start(program: str, *arguments: object, **options: Any) -> Child:
            return stack.enter_context(Child(program, *arguments, **options))

        yield start
