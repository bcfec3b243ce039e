"""Diagnostics of Redis servers, as shown to people."""

from contextlib import closing

import pytest

from djqueue.storage.redis import RedisStorage
from djqueue.testing.factories import enqueue


def lines_of(storage: RedisStorage) -> dict:
    return {line.key: line for line in storage.reads.diagnostics().lines}


def test_diagnostics_rate_an_evicting_server_as_bad(redis_options, redis_server):
    redis_server.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with closing(RedisStorage(**redis_options)) as storage:
        enqueue(storage)
        lines = lines_of(storage)
    redis_server.run("CONFIG", "SET", "maxmemory-policy", "noeviction")

    assert (lines["server.policy"].value, lines["server.policy"].level) == ("allkeys-lru", "bad")
    assert (lines["server.evicted"].value, lines["server.evicted"].level) == ("0", "ok")
    for key in ("server.memory", "server.ops", "server.scripts", "server.persistence", "keys.jobs"):
        assert lines[key].value


def test_diagnostics_show_forbidden_values_as_unknown(redis_options, redis_server):
    rules = ["on", ">secret", "~*", "&*", "+@all", "-info", "-config", "-memory"]
    redis_server.run("ACL", "SETUSER", "narrow", *rules)
    with closing(RedisStorage(url=f"redis://narrow:secret@127.0.0.1:{redis_server.port}/0")) as storage:
        enqueue(storage)
        found = storage.reads.diagnostics()
    redis_server.run("ACL", "DELUSER", "narrow")

    lines = {line.key: line for line in found.lines}
    assert lines["server.info"].value == "not permitted"
    assert lines["server.policy"].value == lines["keys.bytes"].value == "unknown"
    assert not any("secret" in part for line in found.lines for part in line)


@pytest.mark.usefixtures("cluster_options")
def test_diagnostics_describe_each_master_of_a_cluster(cluster_options):
    with closing(RedisStorage(**cluster_options)) as storage:
        enqueue(storage)
        lines = lines_of(storage)

    assert {"server.memory", "server.memory:1", "server.memory:2"} <= lines.keys()
    assert len({lines[key].group for key in lines if key.startswith("server.memory:")}) == 2
