"""Time limits of calls, as options and in URLs."""

from contextlib import closing

import pytest

from djqueue.contrib.spark.aliases import alias_of, is_added, parse
from djqueue.contrib.spark.locations import storage_at
from djqueue.contrib.spark.options import ReadOptions, WriteOptions
from djqueue.contrib.spark.reading import Read
from djqueue.contrib.spark.timeouts import Timeouts
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import OptionError

REDIS = "redis://:secret@h:6380/1"


@pytest.mark.parametrize(
    ("parameters", "given", "expected"),
    [
        ("", Timeouts(), (2, 2)),
        ("?timeout=30", Timeouts(), (30, 30)),
        ("?socket_timeout=5&timeout=30", Timeouts(), (30, 5)),
        ("?socketTimeout=1.5&client_name=etl", Timeouts(), (2, 1.5)),
        ("?timeout=30&socketTimeout=5", Timeouts(20, 4), (20, 4)),
        ("?timeout=30", Timeouts(None, 40), (30, 30)),
    ],
)
def test_time_limits_of_redis_come_from_options_and_the_url(parameters, given, expected):
    with closing(storage_at(f"{REDIS}{parameters}", timeouts=given)) as storage:
        assert (storage.options.timeout, storage._connections.timeout) == expected
        assert storage.describe() == "redis h:6380/1"


@pytest.mark.parametrize(
    ("parameters", "given", "message"),
    [
        ("?timeout=0", Timeouts(), "^url: timeout: must be a number of at least 0.001; got 0"),
        ("?socketTimeout=soon", Timeouts(), "^url: socketTimeout: 'soon' is not a number"),
        ("?timeout=61", Timeouts(), "^timeout: must be greater than 0 and at most 60 seconds; got 61"),
        ("", Timeouts(1, 90), "^socketTimeout: must be greater than 0 and at most 60 seconds; got 90"),
    ],
)
def test_invalid_time_limit_is_rejected_with_its_name(parameters, given, message):
    with pytest.raises(OptionError, match=message) as raised:
        storage_at(f"{REDIS}{parameters}", timeouts=given)

    assert "secret" not in str(raised.value)


def test_time_limits_of_postgresql_become_parameters_of_its_client():
    url = "postgresql://ann:p%40ss@db.example/shop?sslmode=require&timeout=20&options=-c%20geqo%3Doff"

    options = parse(url, Timeouts(None, 2.5))["OPTIONS"]

    assert options == {
        "sslmode": "require",
        "options": "-c geqo=off -c statement_timeout=20000",
        "connect_timeout": 3,
        "tcp_user_timeout": 2_500,
    }


def test_time_limit_of_sqlite_is_that_of_its_locks(tmp_path):
    path = tmp_path / "shop.db"
    path.touch()

    assert parse(f"sqlite://{path}?timeout=7")["OPTIONS"]["timeout"] == 7
    assert parse(f"sqlite://{path}?timeout=7", Timeouts(0.5))["OPTIONS"]["timeout"] == 0.5
    with pytest.raises(OptionError, match=r"^socketTimeout: SQLite uses no connections to a server"):
        parse(f"sqlite://{path}?socket_timeout=5")


def test_connection_of_the_project_is_not_used_with_other_time_limits(sqlite_url):
    plain, limited = alias_of(sqlite_url), alias_of(sqlite_url, Timeouts(0.5))

    assert plain != limited
    assert is_added(limited)


def test_tasks_of_reads_and_writes_have_the_time_limits(redis_url):
    read = Read(ReadOptions.read({"url": redis_url, "timeout": "30", "socketTimeout": "5"}))
    write = Write(WriteOptions.read({"url": f"{redis_url}?timeout=40", "queue": "q", "job": "j"}), ["n"])

    for one, expected in ((read, (30, 5)), (write, (40, 40))):
        with closing(one.storage()) as storage:
            assert (storage.options.timeout, storage._connections.timeout) == expected
