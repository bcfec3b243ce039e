"""Fixtures for every test: real servers, one to a test process, started when first asked for."""

import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from django.db import connection
from django.test.utils import setup_databases, teardown_databases

from tests import servers, settings
from tests.support import eventually
from tests.tables import closing_connections_of_test_threads, empty_tables

# No limits of time: a busy machine is no defect.
hypothesis.settings.register_profile(
    "djqueue", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("djqueue")


def pytest_configure() -> None:
    settings.BASE_DIR.mkdir(mode=0o700, exist_ok=True)  # a worker's run has made it already


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(settings.BASE_DIR, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.PostgresServer]:
    """A PostgreSQL; `create_database()` gives a test an empty database of its own."""
    with servers.PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[servers.RedisServer]:
    """A Redis, shared by the tests of one process: use keys or databases of your own."""
    with servers.RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The Chromium (or Chrome) to drive."""
    return servers.find_chromium()


@pytest.fixture(scope="session")
def django_db_modify_db_settings_xdist_suffix() -> None:
    """tests/settings.py already gives every test process a database of its own."""


@pytest.fixture(scope="session")
def django_db_setup(
    django_test_environment: None, django_db_modify_db_settings: None, django_db_blocker: Any
) -> Iterator[None]:
    """The tests' database, whose tables pytest-django makes only for tests that ask for one of its fixtures.

    Killed children, whose sessions a server has yet to miss, keep no database at the end.
    """
    with django_db_blocker.unblock():
        made = setup_databases(verbosity=0, interactive=False)
    yield
    with django_db_blocker.unblock():
        if connection.vendor == "postgresql":
            eventually(_is_alone, message="the sessions of killed processes have ended")
        teardown_databases(made, verbosity=0)


@pytest.fixture
def tables(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """Django's database with real transactions; afterwards djqueue's tables are emptied.

    The flush of pytest-django's `transactional_db` takes longer than most of the tests that use this.
    """
    with django_db_blocker.unblock():
        with closing_connections_of_test_threads():
            yield
        connection.close()  # a test may have left it in any state
        empty_tables()


def _is_alone() -> bool:
    """End every other session of the tests' database; whether there was none."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return not cursor.fetchall()


LANES = {
    "dashboard": (
        "tests/dashboard/browser/",
        "tests/dashboard/test_database_unavailable.py",
        "tests/dashboard/test_deadlines.py",
        "tests/admin/test_every_page.py",
    ),
    "packaging": (
        *("tests/packaging/", "tests/demo/", "tests/tools/", "tests/test_alone.py"),
        *("tests/testing/test_projects.py", "tests/client/test_typing.py"),
        "tests/client/test_pytest_plugin.py",
    ),
    "sandbox": (
        "tests/runtime/executors/sandbox/",
        "tests/runtime/executors/test_process_faults.py",
        "tests/runtime/executors/test_job_permissions.py",
        "tests/runtime/executors/test_enqueue_permission.py",
    ),
}
"""Markers of the tests that `make test` leaves to lanes of their own, and where these tests are."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses Django's database (`-m database` runs it on another one) or Spark, and LANES."""
    database_fixtures = {"db", "transactional_db", "live_server", "tables"}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.get_closest_marker("django_db") or not database_fixtures.isdisjoint(fixtures):
            item.add_marker(pytest.mark.database)
        if "spark" in fixtures and not item.get_closest_marker("spark_cluster"):
            item.add_marker(pytest.mark.spark)
        for marker, paths in LANES.items():
            if item.nodeid.startswith(paths):
                item.add_marker(marker)
