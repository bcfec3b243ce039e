"""Errors for a wrong user or password say what to check."""

import re
import time

import pytest

from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import batch, enqueue
from tests import servers
from tests.support import PATIENCE

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def guarded_server():
    with servers.RedisServer() as server:
        server.run(
            "ACL", "SETUSER", "clerk", "reset", "on", ">right", "~*", "&*", "+ping", "+hello", "+client"
        )
        yield server


@pytest.mark.parametrize("user", ["clerk:wrong@", "nobody:right@", ":wrong@", "clerk:right@"])
def test_wrong_user_or_password_fails_at_once_with_a_clear_error(guarded_server, user):
    url = guarded_server.url.replace("redis://", f"redis://{user}")
    storage = RedisStorage(url=url, timeout=PATIENCE)
    begun = time.monotonic()

    try:
        with pytest.raises(StorageUnavailableError, match="refuses access") as refused:
            enqueue(storage)
    finally:
        storage.close()

    assert time.monotonic() - begun < PATIENCE / 2
    text = str(refused.value)
    assert "Check the user name and the password" in text
    assert "Is it running" not in text
    assert "wrong" not in text.replace("wrong number", "")


def test_wrong_password_of_a_cluster_fails_with_a_clear_error():
    with servers.RedisCluster() as cluster:
        for node in cluster.nodes:
            node.run("ACL", "SETUSER", "default", "resetpass", ">right")
        url = cluster.url.replace("redis+cluster://", "redis+cluster://:wrong@")

        with pytest.raises(StorageUnavailableError, match="refuses access") as refused:
            enqueue(RedisStorage(url=url, timeout=25))

        assert "Check the user name and the password in the URL" in str(refused.value)


def guarded_by(*ports, **kwargs):
    """Return a storage with sentinels on these ports, and a password for them."""
    return RedisStorage(
        sentinels=[("127.0.0.1", port) for port in ports],
        master_name="djqueue",
        sentinel_kwargs={"password": "hunter2", **kwargs},
        timeout=3,
    )


def test_sentinel_error_contains_addresses_and_no_secrets():
    port = servers.free_port()
    storage = guarded_by(port)
    try:
        with pytest.raises(StorageUnavailableError) as raised:
            enqueue(storage)
    finally:
        storage.close()

    text = str(raised.value)
    # Versions of redis-py differ in how they show the error itself.
    assert re.search(rf"No master found for 'djqueue' : 127\.0\.0\.1:{port} - \S*ConnectionError", text)
    assert "password" not in text
    assert "hunter2" not in text


async def test_async_sentinel_error_contains_addresses_and_no_secrets():
    port = servers.free_port()
    storage = guarded_by(port)
    try:
        with pytest.raises(StorageUnavailableError) as raised:
            await storage.aenqueue([batch()])
    finally:
        storage.close()

    text = str(raised.value)
    # Versions of redis-py differ in how they show the error itself.
    assert re.search(rf"No master found for 'djqueue' : 127\.0\.0\.1:{port} - \S*ConnectionError", text)
    assert "password" not in text
    assert "hunter2" not in text


def test_wrong_password_of_sentinels_fails_with_a_clear_error(guarded_server):
    storage = guarded_by(guarded_server.port, username="clerk")
    try:
        with pytest.raises(StorageUnavailableError, match="refuses access") as refused:
            enqueue(storage)
    finally:
        storage.close()

    assert "Is it running" not in str(refused.value)
