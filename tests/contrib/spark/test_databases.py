"""Spark writes to databases, from task processes without a project."""

import os
from contextlib import closing

import pytest

from djqueue.contrib.spark import enqueue
from djqueue.contrib.spark.locations import storage_at
from tests.contrib.spark.conftest import failing_once, forget_aliases, leftovers
from tests.contrib.spark.test_writing import numbers

pytest.importorskip("pyspark", reason="Spark is not installed here: see make test-spark")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request):
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def storage(url):
    with closing(storage_at(url)) as storage:
        yield storage


def test_dataframe_is_enqueued_once_although_a_task_fails(spark, storage, url, tmp_path):
    marker = str(tmp_path / "failed")
    # Four tasks, two at a time; all of them write.
    rows = spark.range(0, 6_000, 1, 4).toDF("n").mapInArrow(failing_once(marker), "n long")
    enqueue(rows, "emails", "shop.send", {"url": url})

    assert os.path.exists(marker)
    assert numbers(storage) == [*range(6_000)]
    assert leftovers(storage) == []


def test_python_process_writes_to_several_databases(spark, sqlite_url, postgresql_url):
    for url, first in ((sqlite_url, 0), (postgresql_url, 10), (sqlite_url, 20)):
        rows = spark.range(first, first + 10, 1, 2).toDF("n")
        enqueue(rows, "emails", "shop.send", {"url": url})

    for url, expected in ((sqlite_url, [*range(10), *range(20, 30)]), (postgresql_url, [*range(10, 20)])):
        with closing(storage_at(url)) as storage:
            assert numbers(storage) == expected


@pytest.fixture
def unblocked(django_db_blocker):
    with django_db_blocker.unblock():
        yield
        forget_aliases()


def test_unusable_database_is_rejected_before_tasks_start(spark, unblocked, tmp_path):
    rows = spark.range(0, 10).toDF("n")
    empty = tmp_path / "empty.db"
    empty.touch()

    for url, message in (
        (f"sqlite://{empty}", "Tables of djqueue are missing or out of date: run manage.py migrate"),
        (f"sqlite://{tmp_path}/nowhere.db", "the file .*nowhere.db does not exist"),
        (
            "postgresql://u:hunter2@127.0.0.1:1/shop",
            "postgresql://127.0.0.1:1/shop' cannot be used",
        ),
        ("mysql://u:hunter2@db.example/shop", "mysql:// is not supported"),
    ):
        with pytest.raises(Exception, match=message) as raised:
            enqueue(rows, "emails", "shop.send", {"url": url})
        assert "hunter2" not in str(raised.value)
