"""Storages that are closed whatever happens."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from djqueue.storage.scheduler import SchedulerStorage
from tests.support import PATIENCE

MakeStorage = Callable[..., SchedulerStorage]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a scheduler that a busy machine suspends from being taken for one that is away."""
    monkeypatch.setattr("djqueue.storage.scheduler.storage.REPLY_TIMEOUT", PATIENCE)


@pytest.fixture
def make_storage(tables: None, tmp_path: Path) -> Iterator[MakeStorage]:
    """Makes storages on Django's database: clients of it, until they are connected as `here`."""
    with ExitStack() as stack:

        def make(*, here: bool = False, **options: Any) -> SchedulerStorage:
            storage = SchedulerStorage(**{"folder": tmp_path / "s", "timeout": PATIENCE, **options})
            stack.callback(storage.close)
            if here:
                storage.role.starts_here = True
                storage.connect()
            return storage

        yield make


@pytest.fixture
def scheduler(make_storage: MakeStorage) -> SchedulerStorage:
    """A storage that is the scheduler."""
    return make_storage(here=True)


@pytest.fixture
def client(scheduler: SchedulerStorage, make_storage: MakeStorage) -> SchedulerStorage:
    """A storage that asks the scheduler."""
    return make_storage()
