"""A server that refuses the user or the password is running, and errors say what to check."""

import time

import pytest

from djqueue.core.errors import StorageUnavailableError
from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import enqueue
from tests import servers


@pytest.fixture(scope="module")
def guarded_server():
    with servers.RedisServer() as server:
        server.run(
            "ACL", "SETUSER", "clerk", "reset", "on", ">right", "~*", "&*", "+ping", "+hello", "+client"
        )
        yield server


@pytest.mark.parametrize("user", ["clerk:wrong@", "nobody:right@", ":wrong@", "clerk:right@"])
def test_a_refused_user_or_password_is_named_at_once(guarded_server, user):
    url = guarded_server.url.replace("redis://", f"redis://{user}")
    storage = RedisStorage(url=url, timeout=20)
    begun = time.monotonic()

    try:
        with pytest.raises(StorageUnavailableError, match="refuses access") as refused:
            enqueue(storage)
    finally:
        storage.close()

    assert time.monotonic() - begun < 10
    text = str(refused.value)
    assert "Check the user name and the password" in text
    assert "Is it running" not in text
    assert "wrong" not in text.replace("wrong number", "")


def test_a_cluster_that_refuses_the_password_says_so():
    with servers.RedisCluster() as cluster:
        for node in cluster.nodes:
            node.run("ACL", "SETUSER", "default", "resetpass", ">right")
        url = cluster.url.replace("redis+cluster://", "redis+cluster://:wrong@")

        with pytest.raises(StorageUnavailableError, match="refuses access") as refused:
            enqueue(RedisStorage(url=url))

        assert "Check the user name and the password in the URL" in str(refused.value)
