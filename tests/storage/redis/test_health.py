"""Health findings about Redis servers and leases, and server versions that are rejected."""

from contextlib import closing
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from djqueue.core.errors import StorageError
from djqueue.core.job import Batch, ClaimRequest
from djqueue.core.options import JobOptions
from djqueue.core.policies import QueuePolicy
from djqueue.storage.redis import RedisStorage, health
from djqueue.storage.redis.options import RedisOptions
from tests import servers

GOOD = {
    "appendonly": "yes",
    "appendfsync": "everysec",
    "save": "",
    "timeout": 0,
    "maxmemory-policy": "noeviction",
    "busy-reply-threshold": 5_000,
}


@pytest.fixture
def configured(redis_options, redis_server):
    """Puts settings of the single server to other values, and back."""
    before = redis_server.run("CONFIG", "GET", *GOOD)

    def configure(**settings) -> dict[str, object]:
        for name, value in settings.items():
            redis_server.run("CONFIG", "SET", name.replace("_", "-"), value)
        return redis_options

    yield configure
    for at in range(0, len(before), 2):
        redis_server.run("CONFIG", "SET", before[at], before[at + 1])


@pytest.fixture
def found(make_connections):
    """What is told of the servers."""

    def find(options) -> list[health.Finding]:
        return health.findings(make_connections(options))

    return find


def ids(findings) -> list[str]:
    return [finding.id for finding in findings]


# Settings of servers.


def test_well_configured_server_has_no_findings(make_connections):
    with servers.RedisServer(config=GOOD) as server:
        assert health.findings(make_connections(server.options)) == []


def test_server_with_save_points_has_no_findings(make_connections):
    with servers.RedisServer(config={**GOOD, "appendonly": "no", "save": "3600 1"}) as server:
        assert health.findings(make_connections(server.options)) == []


@pytest.mark.parametrize(
    ("settings", "wanted", "words"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "djqueue.W008", "allkeys-lru"),
        ({"maxmemory_policy": "volatile-ttl"}, "djqueue.W008", "volatile-ttl"),
        ({"timeout": 30}, "djqueue.W010", "30 s"),
        ({"busy_reply_threshold": 49}, "djqueue.W011", "49"),
    ],
)
def test_harmful_server_setting_is_a_finding_with_a_hint(configured, found, settings, wanted, words):
    told = found(configured(**settings))

    assert sorted(ids(told)) == sorted([wanted, "djqueue.W009"])
    [finding] = [each for each in told if each.id == wanted]
    assert finding.level == "warning"
    assert words in finding.text
    assert "Set " in finding.hint


@pytest.mark.parametrize("settings", [{"timeout": 31}, {"busy_reply_threshold": 50}, {"timeout": 0}])
def test_sufficient_server_setting_is_no_finding(configured, found, settings):
    assert ids(found(configured(**settings))) == ["djqueue.W009"]


def test_server_without_persistence_is_a_finding(redis_options, redis_server, found):
    [finding] = found(redis_options)

    assert finding.id == "djqueue.W009"
    assert finding.text.startswith(f"redis 127.0.0.1:{redis_server.port}/0: Nothing is written to disk")


def test_append_only_file_without_fsync_is_a_finding(make_connections):
    with servers.RedisServer(config={**GOOD, "appendfsync": "no"}) as server:
        [finding] = health.findings(make_connections(server.options))

    assert (finding.id, finding.level) == ("djqueue.I002", "info")


def test_findings_cover_every_master_of_a_cluster(cluster_options, redis_cluster, found):
    second = redis_cluster.nodes[1]
    second.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        told = {finding.id: finding.text for finding in found(cluster_options)}
    finally:
        second.run("CONFIG", "SET", "maxmemory-policy", "noeviction")

    assert told.keys() == {"djqueue.W008", "djqueue.W009"}
    assert told["djqueue.W008"].startswith(f"redis 127.0.0.1:{second.port}: maxmemory-policy")
    for node in redis_cluster.nodes:
        assert f"redis 127.0.0.1:{node.port}" in told["djqueue.W009"]


def test_findings_cover_the_master_behind_sentinels(sentinel_options, redis_sentinel, found):
    master = redis_sentinel.master
    master.run("CONFIG", "SET", "timeout", 5)
    try:
        assert ids(found(sentinel_options)) == ["djqueue.W009", "djqueue.W010", "djqueue.W014"]
    finally:
        master.run("CONFIG", "SET", "timeout", 0)


def test_master_that_accepts_writes_without_replicas_is_a_finding(sentinel_options, redis_sentinel, found):
    master = redis_sentinel.master
    master.run("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        assert "djqueue.W014" not in ids(found(sentinel_options))
    finally:
        master.run("CONFIG", "SET", "min-replicas-to-write", 0)
    assert "djqueue.W014" in ids(found(sentinel_options))


def test_info_command_shows_whether_a_master_needs_replicas(redis_sentinel, found):
    redis_sentinel.settle()
    master = redis_sentinel.master
    master.run("ACL", "SETUSER", "clerk", "reset", "on", ">secret", "~*", "&*", "+@all", "-config")
    options = {"URL": f"redis://clerk:secret@127.0.0.1:{master.port}/0"}
    master.run("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        assert "djqueue.W014" not in ids(found(options))
        master.run("CONFIG", "SET", "min-replicas-to-write", 0)
        assert "djqueue.W014" in ids(found(options))
    finally:
        master.run("CONFIG", "SET", "min-replicas-to-write", 0)
        master.run("ACL", "DELUSER", "clerk")


# Servers that do not tell.


@pytest.fixture
def restricted(redis_options, redis_server):
    """Makes a user who may do everything but some commands."""

    def make(*forbidden: str) -> dict[str, object]:
        rules = [f"-{command}" for command in forbidden]
        redis_server.run("ACL", "SETUSER", "clerk", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
        return {"URL": f"redis://clerk:secret@127.0.0.1:{redis_server.port}/0"}

    yield make
    redis_server.run("ACL", "DELUSER", "clerk")


def test_forbidden_info_and_config_commands_are_findings(restricted, found):
    told = found(restricted("info", "config"))

    assert [(finding.id, finding.level) for finding in told] == [("djqueue.I001", "info")] * 2
    assert "the user may not run INFO, so its version could not be checked" in told[0].text
    assert "the user may not run CONFIG GET" in told[1].text
    assert "save" in told[1].text


def test_info_command_gives_findings_without_the_config_command(restricted, configured, found):
    configured(maxmemory_policy="allkeys-lru")

    told = found(restricted("config"))

    assert ids(told) == ["djqueue.I001", "djqueue.W008"]
    assert "maxmemory-policy" not in told[0].text
    assert "busy-reply-threshold" in told[0].text


def test_worker_connects_to_a_server_that_hides_its_version(restricted):
    with closing(RedisStorage(**restricted("info", "config"))) as storage:
        storage.connect()
        assert storage.queues.names() == []


def test_unavailable_server_is_a_finding(found):
    [finding] = found({"URL": f"redis://127.0.0.1:{servers.free_port()}/0"})

    assert (finding.id, finding.level) == ("djqueue.W007", "warning")
    assert "could not be read" in finding.text


def test_unavailable_cluster_is_a_finding(found):
    [finding] = found({"URL": f"redis+cluster://127.0.0.1:{servers.free_port()}"})

    assert finding.id == "djqueue.W007"
    assert finding.text.startswith("redis cluster at 127.0.0.1:")


def test_finding_of_a_wrong_password_does_not_contain_the_password(restricted, found):
    url = restricted()["URL"].replace("secret", "wrong-word")

    [finding] = found({"URL": url})

    assert finding.id == "djqueue.W007"
    assert "wrong-word" not in finding.text


# Versions.


@pytest.fixture
def all_too_old(monkeypatch):
    monkeypatch.setattr(health, "OLDEST", {"Redis": (99, 0), "Valkey": (99, 0)})


@pytest.mark.usefixtures("all_too_old")
def test_connect_to_a_server_that_is_too_old_fails(redis_options, redis_server):
    told = redis_server.run("INFO", "server")
    version = told.get("valkey_version", told["redis_version"])
    with (
        closing(RedisStorage(**redis_options)) as storage,
        pytest.raises(StorageError, match=rf" {version}, but djqueue requires Redis 99\.0 .* Upgrade"),
    ):
        storage.connect()


@pytest.mark.usefixtures("all_too_old")
def test_server_that_is_too_old_has_a_single_finding(redis_options, found):
    [finding] = found(redis_options)

    assert (finding.id, finding.level) == ("djqueue.E006", "error")


@pytest.mark.usefixtures("all_too_old")
def test_connect_to_a_cluster_that_is_too_old_fails(cluster_options):
    with closing(RedisStorage(**cluster_options)) as storage, pytest.raises(StorageError, match="Upgrade"):
        storage.connect()


@pytest.mark.parametrize(
    ("info", "is_old"),
    [
        ({"redis_version": "6.2.14"}, True),
        ({"redis_version": "7.0.0"}, False),
        ({"redis_version": "7.0.0-rc1"}, False),
        ({"redis_version": "8.2.1"}, False),
        ({"redis_version": "10.0.0"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.2.5"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.0"}, False),
        ({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "7.1.0"}, True),
        ({"redis_version": "unstable"}, False),
        ({}, False),
    ],
)
def test_versions_are_compared_as_numbers(info, is_old):
    assert health._is_old(info) == is_old


# Leases.


@pytest.mark.parametrize(("lease", "timeout", "named"), [(5, 5, True), (6, 5, False), (30, 60, True)])
def test_lease_that_is_not_longer_than_the_timeout_is_a_finding(lease, timeout, named):
    options = RedisOptions.read({"LEASE": lease, "TIMEOUT": timeout})

    told = health.lease_findings(options, {})

    assert ids(told) == ["djqueue.W006"] * named
    assert all("every other queue" in finding.text for finding in told)


def test_findings_cover_the_lease_of_each_queue():
    policies = {"slow": QueuePolicy(lease=60_000), "quick": QueuePolicy(lease=2_000)}

    [finding] = health.lease_findings(RedisOptions(), policies)

    assert "the lease of quick (2 s) is not longer than TIMEOUT (2 s)" in finding.text


# Where it is told.


def test_storage_reports_findings_of_its_servers(redis_options):
    with closing(RedisStorage(**redis_options)) as storage:
        assert ids(storage.reads.findings()) == ["djqueue.W009"]


def test_runworkers_prints_findings_at_startup(redis_options, redis_server, settings):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": redis_options}
    }
    said = StringIO()

    call_command("runworkers", "--until-empty", stdout=said, stderr=said)

    assert f"redis 127.0.0.1:{redis_server.port}/0: Nothing is written to disk" in said.getvalue()
    assert "(djqueue.W009)" in said.getvalue()


@pytest.mark.usefixtures("all_too_old")
def test_runworkers_fails_on_a_server_that_is_too_old(redis_options, settings):
    settings.DJQUEUE = {
        "STORAGE": {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": redis_options}
    }

    with pytest.raises(CommandError, match="Upgrade the server"):
        call_command("runworkers", "--until-empty")


def test_user_without_dangerous_commands_can_run_jobs(restricted):
    with closing(RedisStorage(**restricted("@dangerous"))) as storage:
        storage.connect()
        [queued] = storage.enqueue([Batch("sums", "add", JobOptions(), [b"1"])])
        request = ClaimRequest("worker", 1, frozenset({"add"}))
        [claimed] = storage.claim(request).jobs
        storage.sweep()
        storage.listen(["sums"], lambda: None)()

    assert claimed.id == queued.id
