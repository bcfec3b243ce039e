"""Fixtures for every test: real servers, one to a test process, started when first asked for."""

import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from django.db import connection

from tests import servers, settings
from tests.support import eventually

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
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """As pytest-django's; but killed children, whose sessions a server has yet to miss, keep no database."""
    yield
    with django_db_blocker.unblock():
        if connection.vendor == "postgresql":
            eventually(_is_alone, message="the sessions of killed processes have ended")


def _is_alone() -> bool:
    """End every other session of the tests' database; whether there was none."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return not cursor.fetchall()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses Django's database, so that `-m database` can run it on another one; and Spark's."""
    database_fixtures = {"db", "transactional_db", "live_server"}
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if item.get_closest_marker("django_db") or not database_fixtures.isdisjoint(fixtures):
            item.add_marker(pytest.mark.database)
        if "spark" in fixtures and not item.get_closest_marker("spark_cluster"):
            item.add_marker(pytest.mark.spark)
