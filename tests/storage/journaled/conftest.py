"""Tables that are empty, storages that are closed whatever happens, and child processes that are ended."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connection, connections

from djqueue.storage.journaled import JournaledStorage, lease
from tests.storage.journaled import programs
from tests.tables import closing_connections_of_test_threads, empty_tables, every_app

from .children import Child

MakeStorage = Callable[..., JournaledStorage]
StartChild = Callable[..., Child]


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.scheduler)
            if "tables" in getattr(item, "fixturenames", ()):
                # Real transactions, and nothing that is emptied by pytest-django: see `tables`.
                item.add_marker(pytest.mark.django_db(transaction=True, available_apps=[]))
                item.add_marker(pytest.mark.database)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for a scheduler that a busy machine stops for seconds; tests of deadlines override this."""
    programs.be_patient(monkeypatch.setattr)


@pytest.fixture
def tables() -> Iterator[None]:
    """Django's database; afterwards djqueue's tables are emptied."""
    with every_app():
        yield
        lease._failed_at.clear()  # A test's own clock may be behind that of the one before.
        connection.close()  # a test may have left it in any state
        empty_tables()


@pytest.fixture(autouse=True)
def _connections_of_test_threads() -> Iterator[None]:
    with closing_connections_of_test_threads():
        yield


@pytest.fixture
def make_storage(tables: None, make_any_storage: MakeStorage) -> MakeStorage:
    """Makes storages on Django's database: clients of it, until they are connected."""
    return make_any_storage


@pytest.fixture
def make_any_storage() -> Iterator[MakeStorage]:
    """The same on any database."""
    with ExitStack() as stack:

        def make(**options: Any) -> JournaledStorage:
            storage = JournaledStorage(**options)
            stack.callback(storage.close)
            return storage

        yield make


@pytest.fixture
def client(make_storage: MakeStorage) -> JournaledStorage:
    """A storage that is not the scheduler."""
    return make_storage()


@pytest.fixture
def scheduler(make_storage: MakeStorage) -> JournaledStorage:
    """A storage that is the scheduler."""
    storage = make_storage()
    storage.connect()
    return storage


@pytest.fixture
def start_child(tables: None) -> Iterator[StartChild]:
    """Starts one of the programs of `programs.py` in a process of its own."""
    with ExitStack() as stack:

        def start(program: str, *arguments: object, **options: Any) -> Child:
            return stack.enter_context(Child(program, *arguments, **options))

        yield start


@pytest.fixture
def other_database(django_db_blocker: Any) -> Iterator[Callable[[str], str]]:
    """Makes Django know another database by its URL; returns its alias."""
    aliases: list[str] = []

    def add(url: str) -> str:
        alias = f"other_{len(aliases)}"
        aliases.append(alias)
        connections.databases[alias] = connections.configure_settings(
            {"default": {}, alias: settings_of(url)}
        )[alias]
        return alias

    with django_db_blocker.unblock():
        yield add
    for alias in aliases:
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]


def settings_of(url: str) -> dict[str, Any]:
    """`DATABASES` of `sqlite:///path` or `postgresql://user@host:port/name`."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": parts.path}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": parts.hostname,
        "PORT": parts.port,
        "USER": parts.username,
        "NAME": parts.path.removeprefix("/"),
    }


@pytest.fixture
def analyze():
    """Lets the database learn what the table of jobs has; other tests plan without."""

    def run():
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE djqueue_job")
            if connection.vendor == "postgresql":
                # It would sort so few rows rather than read them in order.
                cursor.execute("SET enable_seqscan = off; SET enable_bitmapscan = off")

    yield run
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM sqlite_schema WHERE name = 'sqlite_stat1'")
            if cursor.fetchone():
                cursor.execute("DELETE FROM sqlite_stat1")
                cursor.execute("ANALYZE sqlite_schema")
    connection.close()
