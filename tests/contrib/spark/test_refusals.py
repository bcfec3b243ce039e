"""Servers that reject the password of a URL: the error names what to check."""

import psycopg
import pyarrow
import pytest

from djqueue.contrib.spark.options import ReadOptions, WriteOptions
from djqueue.contrib.spark.reading import Read
from djqueue.contrib.spark.writing import Write
from djqueue.core.errors import StorageUnavailableError
from tests import servers
from tests.contrib.spark.conftest import forget_aliases

GIVEN = {"queue": "emails", "job": "shop.send", "maxRetries": "0"}


@pytest.fixture(scope="module")
def guarded_redis():
    with servers.RedisServer() as server:
        server.run("ACL", "SETUSER", "clerk", "reset", "on", ">right", "~*", "&*", "+@all")
        yield server.url.replace("redis://", "redis://clerk:{}@")


@pytest.fixture
def guarded_postgresql(postgres_server, migrated_postgresql, django_db_blocker):
    rules = postgres_server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE clerk SUPERUSER LOGIN PASSWORD 'right'")
        rules.write_text("host all clerk 127.0.0.1/32 scram-sha-256\n" + before)
        admin.execute("SELECT pg_reload_conf()")
        with django_db_blocker.unblock():
            yield migrated_postgresql.replace(postgres_server.user + "@", "clerk:{}@")
            forget_aliases()
        rules.write_text(before)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("DROP ROLE clerk")


@pytest.fixture(params=["redis", "postgresql"])
def guarded_url(request):
    return request.getfixturevalue(f"guarded_{request.param}")


def check(raised):
    text = str(raised.value)
    assert "Check the user name and the password in the URL" in text
    assert "Is it running" not in text
    assert "DATABASES" not in text
    assert "hunter2" not in text


def test_driver_error_for_a_rejected_password_asks_to_check_the_credentials(guarded_url):
    url = guarded_url.format("hunter2")

    with pytest.raises(StorageUnavailableError) as raised:
        Write(WriteOptions.read({**GIVEN, "url": url}), ["n"])
    check(raised)
    with pytest.raises(StorageUnavailableError) as raised:
        Read(ReadOptions.read({"url": url})).partitions()
    check(raised)


def test_task_error_for_a_rejected_password_asks_to_check_the_credentials(guarded_url):
    write = Write(WriteOptions.read({**GIVEN, "url": guarded_url.format("right")}), ["n"])
    other = WriteOptions.read({**GIVEN, "url": guarded_url.format("hunter2")})
    write.options = other

    with pytest.raises(StorageUnavailableError) as raised:
        write.run_task("0.0", pyarrow.table({"n": [1]}).to_batches())
    check(raised)
