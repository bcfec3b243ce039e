"""Storages to write to and read from: Redis, and databases without a project."""

import os
import shutil
from contextlib import closing

import pytest
from django.core.management import call_command
from django.db import connections

from djqueue.contrib.spark import aliases
from djqueue.contrib.spark import models as spark_models
from djqueue.contrib.spark.aliases import alias_of
from djqueue.storage.database import DatabaseStorage
from djqueue.storage.redis import RedisStorage
from tests.contrib.spark.sessions import LOCAL, session
from tests.tables import empty_tables

PLACES = ("redis", "sqlite", pytest.param("postgresql", marks=pytest.mark.thorough))


@pytest.fixture(scope="session")
def spark(tmp_path_factory):
    """Return a session with two threads that retries failed tasks. Tests share it, as it starts slowly."""
    pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
    with session(LOCAL, tmp_path_factory.mktemp("spark")) as found:
        yield found


@pytest.fixture
def redis_url(redis_server):
    redis_server.clean()
    return redis_server.url


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory, django_db_blocker):
    """Return a database file with tables, to be copied."""
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    path.touch()
    with django_db_blocker.unblock():
        alias = alias_of(f"sqlite://{path}")
        call_command("migrate", database=alias, verbosity=0)
        forget_aliases()
    return path


@pytest.fixture
def sqlite_url(migrated_sqlite, tmp_path, django_db_blocker):
    path = shutil.copy(migrated_sqlite, tmp_path / "djqueue.db")
    with django_db_blocker.unblock():
        yield f"sqlite://{path}"
        forget_aliases()


@pytest.fixture(scope="session")
def migrated_postgresql(postgres_server, django_db_blocker):
    url = postgres_server.create_database()
    with django_db_blocker.unblock():
        call_command("migrate", database=alias_of(url), verbosity=0)
        forget_aliases()
    return url


@pytest.fixture
def postgresql_url(migrated_postgresql, django_db_blocker):
    with django_db_blocker.unblock():
        yield migrated_postgresql
        alias = alias_of(migrated_postgresql)
        connections[alias].close()  # A test may have left it in any state.
        empty_tables(alias)
        forget_aliases()


@pytest.fixture(params=PLACES)
def url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def storage(url):
    with closing(open_storage(url)) as storage:
        yield storage


def open_storage(url, **options):
    """Return a connected storage."""
    if url.startswith("redis"):
        return RedisStorage(url=url, **options)
    storage = DatabaseStorage(database=alias_of(url), **options)
    storage.connect()
    return storage


def leftovers(storage):
    """Return the staged rows."""
    if isinstance(storage, RedisStorage):
        return storage._connections.sync().keys("*:stage:*")
    parts = spark_models.StagedPart.objects.using(storage.alias).values_list("write", "part")
    chunks = spark_models.StagedChunk.objects.using(storage.alias).values_list("part_id", "number")
    return [*parts, *chunks]


def failing_once(marker):
    """Return a function for `mapInArrow` that fails once in a task, and then creates this directory."""

    def once(batches):
        for batch in batches:
            yield batch
            try:
                os.mkdir(marker)
            except FileExistsError:
                continue
            raise RuntimeError("a task fails once")

    return once


def forget_aliases():
    for alias in list(aliases._added):
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]
        del aliases._added[alias]
