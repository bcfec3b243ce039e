"""A server that replies, but refuses to work, is unavailable: the error says what to do."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

from djqueue.core.errors import StorageError, StorageUnavailableError
from djqueue.core.states import State
from djqueue.storage.redis import RedisStorage
from djqueue.storage.redis.retries import CONDITIONS, condition, rejection
from djqueue.storage.redis.scripts import NAMES, script
from djqueue.testing.factories import QUEUE, batch, request
from tests import servers
from tests.support import eventually

from .conftest import BUSY

pytestmark = pytest.mark.redis

TIMEOUT = {"TIMEOUT": 1}
SUBSCRIBING = {"TIMEOUT": 4}
"""A subscription waits as long for its connection before it says why there is none."""

CALLS: dict[str, Callable[[RedisStorage], object]] = {
    "enqueue": lambda storage: storage.enqueue([batch()]),
    "aenqueue": lambda storage: asyncio.run(storage.aenqueue([batch()])),
    "enqueue_each": lambda storage: list(storage.enqueue_each([batch() for _ in range(5)])),
    "durable": lambda storage: storage.enqueue([batch(durable=True)]),
    "finish": lambda storage: storage.finish([], request(5, queues=[QUEUE])),
    "afinish": lambda storage: asyncio.run(storage.afinish([], request(5, queues=[QUEUE]))),
    "sweep": lambda storage: storage.sweep(),
    "subscribe": lambda storage: storage.events.subscribe(QUEUE, print),
}
"""Calls that need a server which accepts writes."""


@contextmanager
def opened(server: servers.RedisServer, **options: Any) -> Iterator[RedisStorage]:
    """A storage that has been used."""
    storage = RedisStorage(**{**server.options, **BUSY, **options})
    try:
        storage.connect()
        storage.enqueue([batch()])
        yield storage
    finally:
        storage.close()


@pytest.fixture(scope="module")
def unsaved() -> Iterator[servers.RedisServer]:
    """A server whose last snapshot failed."""
    with servers.RedisServer(config={"save": "1 1", "enable-protected-configs": "yes"}) as server:
        yield server
        server.run("CONFIG", "SET", "save", "")


@pytest.mark.parametrize("call", CALLS)
def test_server_that_cannot_save_is_unavailable(unsaved: servers.RedisServer, call: str) -> None:
    unsaved.run("CONFIG", "SET", "dir", str(unsaved.folder))
    eventually(lambda: snapshot(unsaved) == "ok")
    with opened(unsaved, **SUBSCRIBING) as storage:
        gone = unsaved.folder / "gone"
        gone.mkdir()
        unsaved.run("CONFIG", "SET", "dir", str(gone))
        gone.rmdir()
        eventually(lambda: snapshot(unsaved) == "err")

        with pytest.raises(StorageUnavailableError, match=r"MISCONF .* free disk space\.$"):
            CALLS[call](storage)


def snapshot(server: servers.RedisServer) -> str:
    """Let a server save its data unless it does so already; return the result of the last time."""
    with server.client() as client:
        with suppress(redis.ResponseError):
            client.bgsave()
        return str(client.info("persistence")["rdb_last_bgsave_status"])


@pytest.mark.parametrize("call", CALLS)
def test_replica_is_unavailable(call: str, replica: servers.RedisServer) -> None:
    replica.run("REPLICAOF", "NO", "ONE")
    with opened(replica, **TIMEOUT) as storage:
        replica.run("REPLICAOF", "127.0.0.1", servers.free_port())

        with pytest.raises(
            StorageUnavailableError, match=r"accepts no writes: .* use the address of its master"
        ):
            CALLS[call](storage)


@pytest.fixture(scope="module")
def replica() -> Iterator[servers.RedisServer]:
    with servers.RedisServer() as server:
        yield server


def test_pages_can_be_read_while_a_server_accepts_no_writes(replica: servers.RedisServer) -> None:
    replica.run("REPLICAOF", "NO", "ONE")
    replica.run("FLUSHALL")
    with opened(replica, **TIMEOUT) as storage:
        [[job]] = [storage.enqueue([batch(ids=["a"])])]
        replica.run("CONFIG", "SET", "min-replicas-to-write", 1)
        try:
            reads = storage.reads

            assert reads.counts(QUEUE)[State.WAITING] == 2
            assert [row.name for row in reads.overview(None).queues] == [QUEUE]
            assert "a" in {record.id for record in reads.page(QUEUE, None, 10)}
            assert reads.jobs(QUEUE, [job.id])[0] is not None
            assert reads.dead_letters(QUEUE) == []
            with pytest.raises(StorageUnavailableError, match="accepts no writes"):
                storage.queues.pause(QUEUE)
        finally:
            replica.run("CONFIG", "SET", "min-replicas-to-write", 0)


def test_only_scripts_that_read_run_where_no_writes_are_accepted() -> None:
    writes = re.compile(
        rb"'(?:[SH]SET|[HSZL]REM|[SZ]ADD|HDEL|DEL|UNLINK|[LR]PUSHX?|LTRIM|XADD|P?EXPIRE|SET)'"
    )

    reading = {name for name in NAMES if not writes.search(script(name).text)}

    assert {name for name in NAMES if b"no-writes" in script(name).text} == reading


def test_server_without_free_connections_is_unavailable() -> None:
    with servers.RedisServer() as server, server.client() as client:
        client.config_set("maxclients", 1)
        storage = RedisStorage(url=server.url, timeout=1)

        with pytest.raises(
            StorageUnavailableError, match=r"accepts no more connections: .* Increase maxclients"
        ):
            storage.enqueue([batch()])

        storage.close()


@pytest.mark.parametrize(
    ("rule", "call", "error"),
    [
        ("-zadd", "enqueue", r"refuses access: .*permissions \(ACL\) in the docs"),
        ("-eval", "enqueue", r"refuses access: .*permissions \(ACL\) in the docs"),
        ("-hset", "sweep", r"refuses access: .*permissions \(ACL\) in the docs"),
        ("-subscribe", "subscribe", r"could not subscribe: .*permissions \(ACL\) in the docs"),
        ("resetchannels", "subscribe", r"could not subscribe: .*permissions \(ACL\) in the docs"),
    ],
)
def test_missing_right_is_named_with_its_remedy(rule: str, call: str, error: str) -> None:
    with servers.RedisServer() as server, opened(server) as storage:
        server.run("ACL", "SETUSER", "default", rule)

        with pytest.raises(StorageUnavailableError, match=error):
            storage.enqueue([batch(delay=1_000)]) if call == "enqueue" else CALLS[call](storage)


@pytest.mark.parametrize("code", [code for code in CONDITIONS if code.isupper()])
def test_each_condition_is_known_by_its_code(code: str) -> None:
    server: Any = type("Server", (), {"describe": lambda self: "redis localhost:6379/0"})()
    error = redis.ResponseError(f"{code} some reason.")

    known = condition(error)

    assert known is CONDITIONS[code]
    told = rejection(error, server)
    assert isinstance(told, StorageUnavailableError)
    assert str(told) == f"redis localhost:6379/0 {known.text}: {code} some reason. {known.remedy}"


def test_other_errors_of_the_server_are_faults() -> None:
    server: Any = type("Server", (), {"describe": lambda self: "redis localhost:6379/0"})()

    for text in ("WRONGTYPE Operation against a key", "BUSYGROUP Consumer Group name already exists"):
        told = rejection(redis.ResponseError(text), server)
        assert type(told) is StorageError
